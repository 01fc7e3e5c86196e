"""The names of the files of a checkpoint's weights. No torch."""

import json
from collections.abc import Mapping
from pathlib import Path

from saccade.errors import StartupError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"
HF_QUANT_CONFIG = "hf_quant_config.json"


def weight_map(folder: Path) -> Mapping[str, str]:
    """Return the file of each tensor by the index, {} without an index. Raises StartupError."""
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
    """Return the checkpoint's safetensors files, in name order. Raises StartupError if one is missing.

    Others than those that the index names do not count. Without it, one file counts, or all shards.
    """
    names = sorted({Path(name).name for name in weight_map(folder).values()})
    if not names:
        files = [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else sorted(folder.glob(SHARDS))
        if not files:
            raise StartupError(f"{folder} holds neither {WEIGHTS} nor {INDEX}.")
        return files
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            raise StartupError(f"{INDEX} names {file.name}, which is not in {folder}.")
    return files
