"""A checkpoint's files, apart from weights: the worker reads and sends them, and the gateway parses them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from saccade.errors import StartupError
from saccade.models.family import Family
from saccade.models.spec import DRAFTS, MAX_MODEL_LEN, MODEL_IMPL, PLACEHOLDER_TOKEN_ID
from saccade.protocol.description import ModelFiles
from saccade.protocol.model_files import (
    CHAT_TEMPLATE_JINJA,
    CONFIG,
    GATEWAY_FILES,
    GENERATION_CONFIG,
    MAX_FILES_BYTES,
    PREPROCESSOR_CONFIG,
    PROCESSOR_CONFIG,
    TIKTOKEN,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VIDEO_PREPROCESSOR_CONFIG,
    check_config,
)
from saccade.whole_numbers import read_whole_number

MAX_ID = 2**31 - 1
"""Of a token."""

ROPE_KEYS = ("rope_scaling", "rope_theta")

AUTO = "auto"
"""The value of --model-impl for a family of the architecture's own."""


def read_model_files(folder: Path) -> ModelFiles:
    """Return the files of GATEWAY_FILES in *folder*.

    Raises StartupError if config.json is missing, or if the files have more than MAX_FILES_BYTES together.
    """
    check_config(folder, str(folder))
    num_left = MAX_FILES_BYTES
    for name in filter(lambda name: (folder / name).is_file(), GATEWAY_FILES):
        num_bytes = (folder / name).stat().st_size
        if num_bytes > num_left:
            raise StartupError(
                f"{folder / name} has {num_bytes} bytes; at most {MAX_FILES_BYTES} are read, of all files together."
            )
        num_left -= num_bytes
    return ModelFiles(files={name: (folder / name).read_bytes() for name in GATEWAY_FILES if (folder / name).is_file()})


def read_chat_template(template: str | None) -> bytes | None:
    """Return --chat-template's template: *template* itself if it looks like one, or else that file, as in vLLM.

    Raises StartupError.
    """
    if template is None or any(character in template for character in "{}\n"):
        return None if template is None else template.encode()
    try:
        return Path(template).expanduser().read_bytes()
    except OSError as error:
        raise StartupError(f"--chat-template: cannot read {template}: {error.strerror}.") from error


def with_chat_template(files: ModelFiles, template: bytes | None) -> ModelFiles:
    """Return *files* with *template* instead of the model's own; None keeps the model's."""
    return files if template is None else ModelFiles(files={**files.files, CHAT_TEMPLATE_JINJA: template})


def with_overrides(
    files: ModelFiles,
    config: str | None,
    generation: str | None,
    defaults: Literal["auto", "vllm"] = "auto",
    implementation: str = AUTO,
) -> ModelFiles:
    """Return *files* with --hf-overrides in config.json and --override-generation-config in generation_config.json.

    With *defaults* "vllm" (--generation-config), the latter first loses all values but token ids, such as the end
    token's. Both overrides are JSON objects. A nested object changes only the values that it names. `rope_scaling` and
    `rope_theta` go to where the text network has them. *implementation* (--model-impl) goes into config.json, too,
    unless it is AUTO. Raises StartupError.
    """
    if defaults == "vllm" and GENERATION_CONFIG in files.files:
        values = parse_json(files, GENERATION_CONFIG)
        ids = json.dumps({key: value for key, value in values.items() if key.endswith("_token_id")})
        files = ModelFiles(files={**files.files, GENERATION_CONFIG: ids.encode()})
    changed = dict(files.files)
    for name, override in ((CONFIG, config), (GENERATION_CONFIG, generation)):
        if override is not None:
            values = parse_json(files, name)
            changed[name] = json.dumps(_merged(values, _with_rope_in_place(values, json.loads(override)))).encode()
    files = ModelFiles(files=changed)
    if implementation == AUTO:
        return files
    chosen = {**parse_json(files, CONFIG), MODEL_IMPL: implementation}
    return ModelFiles(files={**files.files, CONFIG: json.dumps(chosen).encode()})


def _with_rope_in_place(config: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Return *override* with its top-level RoPE keys moved to where *config* has them: rope_parameters, text_config."""
    placed = dict(override)
    rope = {key: placed.pop(key) for key in ROPE_KEYS if key in override and key not in config}
    text = config.get("text_config")
    if not rope:
        return placed
    if (text if isinstance(text, dict) else config).get("rope_parameters"):
        theta = {key: rope[key] for key in rope if key == "rope_theta"}
        rope = {"rope_parameters": {**theta, **(rope.get("rope_scaling") or {})}}
    return _merged(placed, {"text_config": rope} if isinstance(text, dict) else rope)


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, change in changes.items():
        own = merged.get(key)
        merged[key] = _merged(own, change) if isinstance(own, dict) and isinstance(change, dict) else change
    return merged


def parse_json(files: ModelFiles, name: str) -> Mapping[str, Any]:
    """Return the object in the JSON file *name*, or {} if there is no file. Raises StartupError if it is malformed."""
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
    """Return the image processor's settings, from processor_config.json or else preprocessor_config.json.

    transformers 5 writes only the former, and reads it first. Raises StartupError if a file is malformed, or if there
    is none although the releases of *family* have one: with default settings the model would get other pixels than it
    was trained on. For a family of a library, return all files of the processor.
    """
    if family.library is not None:
        return _processor_files(files)
    if (nested := _nested_processor(files, "image_processor")) is not None:
        return nested
    if PREPROCESSOR_CONFIG not in files.files and family.ships_image_settings:
        raise StartupError(
            f"The model has no {PREPROCESSOR_CONFIG}, which has the settings of its image processor; copy the file "
            "from the model's release into its folder."
        )
    return parse_json(files, PREPROCESSOR_CONFIG)


def _processor_files(files: ModelFiles) -> Mapping[str, Any]:
    """Return what a checkpoint's own processor is made from. Raises StartupError if a file is malformed.

    `processor` and `image_processor` are its settings, `named_tokens` the special tokens that the tokenizer's files
    name, and `added_tokens` all added tokens with their ids.
    """
    processor, tokenizer = parse_json(files, PROCESSOR_CONFIG), parse_json(files, TOKENIZER_CONFIG)
    extra = tokenizer.get("extra_special_tokens")
    entries = {**tokenizer, **(extra if isinstance(extra, dict) else {})}
    contents = {name: entry.get("content") if isinstance(entry, dict) else entry for name, entry in entries.items()}
    return {
        "processor": {"processor_class": tokenizer.get("processor_class"), **processor},
        "image_processor": _nested_processor(files, "image_processor") or parse_json(files, PREPROCESSOR_CONFIG),
        "named_tokens": {
            name: content for name, content in contents.items() if name.endswith("_token") and isinstance(content, str)
        },
        "added_tokens": dict(_added_tokens(files)),
    }


def video_processor(files: ModelFiles) -> Mapping[str, Any]:
    """Return the video processor's settings, or {} if the checkpoint has none.

    They are a part of processor_config.json, or else video_preprocessor_config.json. Raises StartupError.
    """
    nested = _nested_processor(files, "video_processor")
    return parse_json(files, VIDEO_PREPROCESSOR_CONFIG) if nested is None else nested


def _nested_processor(files: ModelFiles, key: str) -> Mapping[str, Any] | None:
    """Return the part *key* of processor_config.json, or None if there is none. Raises StartupError."""
    nested = parse_json(files, PROCESSOR_CONFIG).get(key)
    if not isinstance(nested, dict | None):
        raise StartupError(f"{PROCESSOR_CONFIG}: {key} must hold an object, not {nested!r}.")
    return nested


def engine_config(
    files: ModelFiles, family: Family, max_model_len: int | None = None, *, drafts: bool = False
) -> Mapping[str, Any]:
    """Return config.json with three more keys for the engine, which some networks need. Raises StartupError.

    `placeholder_token_id` is the id of the family's placeholder, from config.json or else the tokenizer's files, or
    None. `max_model_len` is the length of the longest sequence to serve, or None for the model's own. With `drafts`,
    the network has the model's own draft layer.
    """
    config = parse_json(files, CONFIG)
    token_id = family.placeholder_token_id(config)
    if token_id is None:
        token_id = _added_token_id(files, family.placeholder)
    return {**config, PLACEHOLDER_TOKEN_ID: token_id, MAX_MODEL_LEN: max_model_len, DRAFTS: drafts}


def token_id(files: ModelFiles, family: Family, token: str) -> int | None:
    """Return the id of *token*, added or not, in the tokenizer's files, or None if they have none. Raises StartupError.

    If *family* uses a tiktoken.model, the tokenizer.json of its release is a conversion, and does not count.
    """
    if TIKTOKEN in files.files and family.tiktoken_pattern is not None:
        files = ModelFiles(files={name: content for name, content in files.files.items() if name != TOKENIZER})
    if (added := _added_token_id(files, token)) is not None:
        return added
    model = parse_json(files, TOKENIZER).get("model")
    match model.get("vocab") if isinstance(model, dict) else None:
        case dict(vocabulary) if type(vocabulary.get(token)) is int:
            return int(vocabulary[token])
        case list(pieces):
            return next(
                (place for place, piece in enumerate(pieces) if isinstance(piece, list) and piece[:1] == [token]), None
            )
    return None


def _added_token_id(files: ModelFiles, token: str) -> int | None:
    """Return the id of an added *token* in tokenizer.json or tokenizer_config.json, or None if neither has it."""
    return next((token_id for content, token_id in _added_tokens(files) if content == token), None)


def _added_tokens(files: ModelFiles) -> Iterator[tuple[str, int]]:
    """Yield the added tokens of tokenizer.json, then those of tokenizer_config.json, with their ids."""
    listed = parse_json(files, TOKENIZER).get("added_tokens")
    declared = parse_json(files, TOKENIZER_CONFIG).get("added_tokens_decoder")
    entries: list[Any] = [*listed] if isinstance(listed, list) else []
    if isinstance(declared, dict):
        numbered = ((key, entry) for key, entry in declared.items() if isinstance(entry, dict))
        entries += [{**entry, "id": read_whole_number(key, MAX_ID)} for key, entry in numbered]
    for entry in entries:
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and type(entry.get("id")) is int:
            yield entry["content"], entry["id"]
