"""Finds a checkpoint's weight files. Does not import torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from saccade.errors import StartupError
from saccade.protocol.model_files import CONFIG, adapter_in

WEIGHTS = "model.safetensors"
SUFFIXES = (".safetensors", ".safetensors.index.json")
INDEX = "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"
HF_QUANT_CONFIG = "hf_quant_config.json"
NAMED_WEIGHTS = "transformers_weights"
"""The key of config.json for weights under another name, which transformers then reads instead of the usual files."""


def named_weights(folder: Path) -> str | None:
    """Return the name of the weights file, or of its index, in config.json; None if it names none. Raises StartupError.

    Source of the rule: transformers 5.15, modeling_utils.py, _get_resolved_checkpoint_files.
    """
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        # The reader of the configuration says what is wrong.
        return None
    name = config.get(NAMED_WEIGHTS) if isinstance(config, dict) else None
    if name is not None and not (isinstance(name, str) and Path(name).name == name and name.endswith(SUFFIXES)):
        raise StartupError(
            f"{CONFIG} of {folder}: `{NAMED_WEIGHTS}` must name a .safetensors file of the folder, or a "
            f".safetensors.index.json, not {name!r}."
        )
    return name


def weight_map(folder: Path) -> Mapping[str, str]:
    """Return the file that the index names for each tensor, or {} if there is no index. Raises StartupError."""
    index = folder / (named_weights(folder) or INDEX)
    if not index.name.endswith(SUFFIXES[1]) or not index.is_file():
        return {}
    try:
        files = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StartupError(f"{index} has no readable `weight_map`.") from error
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise StartupError(f"{index}: `weight_map` must name a file for each tensor.")
    return files


def weight_files(folder: Path) -> list[Path]:
    """Return the checkpoint's safetensors files, in name order.

    Only the files that the index names count; without an index, the whole file or all shards do. If config.json names
    the file or the index, only that counts. Raises StartupError if a file is missing, if there is an adapter, or if
    there is a whole file as well as shards.
    """
    if (adapter := adapter_in(folder)) is not None:
        raise StartupError(
            f"{folder} holds {adapter}, an adapter that Saccade does not apply to the weights. Merge it into them "
            "(with PEFT: merge_and_unload, then save_pretrained), or serve a folder without the adapter's files."
        )
    indexed = [folder / name for name in sorted({Path(file).name for file in weight_map(folder).values()})]
    if (named := named_weights(folder)) is not None:
        files = indexed if named.endswith(SUFFIXES[1]) else [folder / named]
        _check_present(folder, [folder / named])
        _check_present(folder, files)
        return files
    shards = indexed or sorted(folder.glob(SHARDS))
    whole = folder / WEIGHTS
    if whole in shards or not whole.is_file():
        _check_present(folder, shards)
        return shards
    if shards and not any(shard.is_file() for shard in shards):
        raise StartupError(
            f"{INDEX} names {shards[0].name}, which is not in {folder}. If {WEIGHTS} there is the whole model, remove "
            f"{INDEX}."
        )
    if shards:
        raise StartupError(
            f"{folder} holds {WEIGHTS} and also {shards[0].name} and its like. Which of them count is not known: "
            f"transformers reads the first, vLLM the others. Remove {WEIGHTS}, or the others with {INDEX}."
        )
    return [whole]


def _check_present(folder: Path, files: Sequence[Path]) -> None:
    if not files:
        raise StartupError(f"{folder} holds neither {WEIGHTS} nor {INDEX}.")
    for file in files:
        if not file.is_file():
            raise StartupError(f"{CONFIG} or {INDEX} names {file.name}, which is not in {folder}.")
