"""Names and limits for a checkpoint's small files, and a check that a folder holds a model, not an adapter."""

from pathlib import Path

from saccade.errors import StartupError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
PREPROCESSOR_CONFIG = "preprocessor_config.json"
PROCESSOR_CONFIG = "processor_config.json"
VIDEO_PREPROCESSOR_CONFIG = "video_preprocessor_config.json"
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
    VIDEO_PREPROCESSOR_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TIKTOKEN,
    CHAT_TEMPLATE_JINJA,
    CHAT_TEMPLATE_JSON,
)
"""The files of a checkpoint that a gateway may need; only config.json is required."""

MAX_FILES_BYTES = 128 << 20
"""Of all together: three times the largest tokenizer of a release."""

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
"""PEFT's files of an adapter, such as LoRA's matrices."""


def check_config(folder: Path, name: str) -> None:
    """Raise StartupError if *folder*, which the error calls *name*, has no config.json."""
    if (folder / CONFIG).is_file():
        return
    adapter = adapter_in(folder)
    if adapter is None:
        raise StartupError(f"{name} has no {CONFIG}: it is not a model folder in hub layout.")
    raise StartupError(
        f"{name} has {adapter} but no {CONFIG}: it is an adapter, and Saccade serves whole models. Merge it into its "
        "model (with PEFT: merge_and_unload, then save_pretrained), and serve the folder with the result."
    )


def adapter_in(folder: Path) -> str | None:
    """Return the name of a PEFT adapter's file in *folder*, or None if there is none."""
    return next((name for name in ADAPTER_FILES if (folder / name).is_file()), None)
