"""A checkpoint's small files: read once, sent by the worker, parsed by the gateway."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.errors import StartupError
from saccade.models.family import Family
from saccade.protocol.description import ModelFiles

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
PREPROCESSOR_CONFIG = "preprocessor_config.json"
PROCESSOR_CONFIG = "processor_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TIKTOKEN = "tiktoken.model"
CHAT_TEMPLATE_JINJA = "chat_template.jinja"
CHAT_TEMPLATE_JSON = "chat_template.json"
GATEWAY_FILES = (
    CONFIG,
    GENERATION_CONFIG,
    PREPROCESSOR_CONFIG,
    PROCESSOR_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TIKTOKEN,
    CHAT_TEMPLATE_JINJA,
    CHAT_TEMPLATE_JSON,
)
"""All that a gateway may need of a checkpoint; only config.json must be there."""

MAX_FILE_BYTES = 128 << 20
"""The largest tokenizers of releases have a third of it."""


def read_model_files(folder: Path) -> ModelFiles:
    """Return the files of GATEWAY_FILES that lie in *folder*.

    Raises StartupError where config.json is missing, or a file has more than MAX_FILE_BYTES.
    """
    if not (folder / CONFIG).is_file():
        raise StartupError(f"{folder} has no {CONFIG}: it is not a model folder in hub layout.")
    for name in GATEWAY_FILES:
        num_bytes = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if num_bytes > MAX_FILE_BYTES:
            raise StartupError(f"{folder / name} has {num_bytes} bytes; at most {MAX_FILE_BYTES} are read.")
    return ModelFiles(files={name: (folder / name).read_bytes() for name in GATEWAY_FILES if (folder / name).is_file()})


def parse_json(files: ModelFiles, name: str) -> Mapping[str, Any]:
    """Return the object in the JSON file *name*, {} where there is none. Raises StartupError if it is malformed."""
    content = files.files.get(name)
    if content is None:
        return {}
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise StartupError(f"{name} is not valid JSON.") from error
    except RecursionError as error:
        raise StartupError(f"{name} is nested too deeply.") from error
    if not isinstance(parsed, dict):
        raise StartupError(f"{name} must hold a JSON object.")
    return parsed


def image_processor(files: ModelFiles, family: Family) -> Mapping[str, Any]:
    """Return the settings of the image processor: preprocessor_config.json, or that part of processor_config.json.

    transformers 5 writes the latter only. Raises StartupError where a file is malformed, and where there is none
    although the releases of *family* have one: with other settings than it was trained on, a model answers wrongly.
    """
    if PREPROCESSOR_CONFIG in files.files:
        return parse_json(files, PREPROCESSOR_CONFIG)
    nested = parse_json(files, PROCESSOR_CONFIG).get("image_processor")
    if nested is None and family.ships_image_settings:
        raise StartupError(
            f"The model has no {PREPROCESSOR_CONFIG}, which says how pictures are prepared for it; copy the file from "
            "the model's release into its folder."
        )
    if not isinstance(nested, dict | None):
        raise StartupError(f"{PROCESSOR_CONFIG}: image_processor must hold an object, not {nested!r}.")
    return nested or {}
