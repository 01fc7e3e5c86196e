"""The files of a checkpoint's weights: safetensors, memory-mapped, one file or several with an index."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from saccade.errors import StartupError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LISTED = 12
"""The most names that an error lists; it counts the others."""

STORED_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
"""The torch dtypes of safetensors' names that Saccade reads."""


class StoredTensor(NamedTuple):
    """A tensor as its file's header describes it. *dtype* is safetensors' name."""

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size of the values; 0 for a dtype that Saccade does not read."""
        return prod(self.shape) * STORED_DTYPES[self.dtype].itemsize if self.dtype in STORED_DTYPES else 0


class Checkpoint:
    """All tensors of open files, by name in the order of the files. Tensors that are read map the file's memory."""

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._files = files
        self.tensors = {tensor.name: tensor for file in files for tensor in self._headers(file)}

    def _headers(self, file: str) -> Iterator[StoredTensor]:
        opened = self._files[file]
        for name in opened.offset_keys():
            header = opened.get_slice(name)
            yield StoredTensor(name, file, tuple(header.get_shape()), header.get_dtype())

    def read(self, name: str, slices: Sequence[slice] = ()) -> torch.Tensor:
        """Return the part of a tensor in *slices* of its first dimensions. Its values are read at their first use."""
        tensor = self.tensors[name]
        opened = self._files[tensor.file]
        if not tensor.shape:
            return opened.get_tensor(name)  # type: ignore[no-any-return]
        return opened.get_slice(name)[(*slices, *(slice(None),) * (len(tensor.shape) - len(slices)))]  # type: ignore[no-any-return]


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """Open the checkpoint in *folder*. Raises StartupError for a missing or damaged file, or an index that is wrong."""
    with open_files(weight_files(folder)) as checkpoint:
        _check_index(folder, checkpoint)
        yield checkpoint


@contextmanager
def open_files(paths: Iterable[Path]) -> Iterator[Checkpoint]:
    """Open safetensors files. Raises StartupError for a damaged one."""
    with ExitStack() as stack:
        opened = {}
        for path in paths:
            try:
                opened[path.name] = stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise StartupError(
                    f"{path} is not a readable safetensors file; it may be damaged or truncated."
                ) from error
        yield Checkpoint(opened)


def _check_index(folder: Path, checkpoint: Checkpoint) -> None:
    """Raise StartupError if the index names tensors that are not in their file."""
    wrong = [
        f"{name} in {file}"
        for name, file in _weight_map(folder).items()
        if name not in checkpoint.tensors or checkpoint.tensors[name].file != Path(file).name
    ]
    if wrong:
        raise StartupError(f"{INDEX} names {len(wrong)} tensors that its files do not have: {listed(wrong)}.")


def _weight_map(folder: Path) -> Mapping[str, str]:
    """Return the file of each tensor by the index, {} without an index. Raises StartupError."""
    index = folder / INDEX
    if not index.is_file():
        return {}
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StartupError(f"{index} has no readable `weight_map`.") from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise StartupError(f"{index}: `weight_map` must name a file for each tensor.")
    return weight_map


def weight_files(folder: Path) -> list[Path]:
    """Return the checkpoint's safetensors files, in name order. Raises StartupError if one is missing."""
    names = sorted({Path(name).name for name in _weight_map(folder).values()})
    if not names:
        if not (folder / WEIGHTS).is_file():
            raise StartupError(f"{folder} holds neither {WEIGHTS} nor {INDEX}.")
        return [folder / WEIGHTS]
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            raise StartupError(f"{INDEX} names {file.name}, which is not in {folder}.")
    return files


def listed(names: Sequence[str]) -> str:
    """Return *names* for an error: the first of many."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
