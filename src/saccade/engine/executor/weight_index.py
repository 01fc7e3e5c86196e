"""Finds a checkpoint's weight files. Does not import torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from saccade.errors import StartupError
from saccade.protocol.model_files import adapter_in

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"
HF_QUANT_CONFIG = "hf_quant_config.json"


def weight_map(folder: Path) -> Mapping[str, str]:
    """Return the file that the index names for each tensor, or {} if there is no index. Raises StartupError."""
    index = folder / INDEX
    if not index.is_file():
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

    Only the files that the index names count; without an index, the whole file or all shards do. Raises StartupError if
    a file is missing, if there is an adapter, or if there is a whole file as well as shards.
    """
    if (adapter := adapter_in(folder)) is not None:
        raise StartupError(
            f"{folder} holds {adapter}, an adapter that Saccade does not apply to the weights. Merge it into them "
            "(with PEFT: merge_and_unload, then save_pretrained), or serve a folder without the adapter's files."
        )
    names = sorted({Path(name).name for name in weight_map(folder).values()})
    shards = [folder / name for name in names] or sorted(folder.glob(SHARDS))
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
            raise StartupError(f"{INDEX} names {file.name}, which is not in {folder}.")
