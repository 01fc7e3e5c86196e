"""Reads a checkpoint's weight files: safetensors, memory-mapped, in one file or several."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from saccade.engine.executor.weight_index import INDEX, weight_files, weight_map
from saccade.errors import StartupError

LISTED = 12
"""The most names that an error lists; it counts the others."""

COMPARED_AT_ONCE = 1 << 22
"""Values that are compared at a time, so that no whole tensor is held."""

STORED_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8, "I8": torch.int8,
    "I32": torch.int32, "I64": torch.int64,
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
        """The size of the values in bytes; 0 for a dtype that Saccade does not read."""
        return prod(self.shape) * STORED_DTYPES[self.dtype].itemsize if self.dtype in STORED_DTYPES else 0


class Checkpoint:
    """All tensors in open files, by name, in the order of the files. Tensors that are read map the file's memory.

    Several files may have the same tensor if its dtype, shape and bytes agree. Raises StartupError if they do not.
    """

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._files = files
        self.tensors: dict[str, StoredTensor] = {}
        self._copies: list[StoredTensor] = []
        for tensor in (tensor for file in files for tensor in self._headers(file)):
            if self.tensors.setdefault(tensor.name, tensor) is not tensor:
                self._copies.append(tensor)
        self._check_copies()

    def has(self, name: str, file: str) -> bool:
        """Return whether *file* has the tensor *name*."""
        first = self.tensors.get(name)
        return first is not None and (first.file == file or any(one[:2] == (name, file) for one in self._copies))

    def _check_copies(self) -> None:
        differences = [
            f"{copy.name} in {self.tensors[copy.name].file} and {copy.file}"
            for copy in self._copies
            if not self._is_same(copy)
        ]
        if differences:
            raise StartupError(
                f"{len(differences)} tensors stand in two files that do not agree about them: {listed(differences)}. "
                "Which one counts is not known: remove the wrong file, or take the tensor out of it."
            )

    def _is_same(self, copy: StoredTensor) -> bool:
        """Return whether *copy* equals the tensor of its name in an earlier file."""
        first = self.tensors[copy.name]
        if copy.dtype not in STORED_DTYPES or copy[2:] != first[2:]:
            return False
        tensors = (self._files[one.file].get_tensor(one.name).reshape(-1).view(torch.uint8) for one in (first, copy))
        return torch.equal(*tensors)

    def _headers(self, file: str) -> Iterator[StoredTensor]:
        opened = self._files[file]
        for name in opened.offset_keys():
            header = opened.get_slice(name)
            yield StoredTensor(name, file, tuple(header.get_shape()), header.get_dtype())

    def read(self, name: str, slices: Sequence[slice] = ()) -> torch.Tensor:
        """Return the part of a tensor that *slices* of its first dimensions select.

        Values are read at their first use.
        """
        tensor = self.tensors[name]
        opened = self._files[tensor.file]
        if not tensor.shape:
            return opened.get_tensor(name)  # type: ignore[no-any-return]
        return opened.get_slice(name)[(*slices, *(slice(None),) * (len(tensor.shape) - len(slices)))]  # type: ignore[no-any-return]

    def agree(self, first: StoredTensor, second: StoredTensor, dtype: torch.dtype) -> bool:
        """Return whether two plain tensors have equal values once they are rounded to *dtype*."""
        if first.shape != second.shape:
            return False
        step = max(1, COMPARED_AT_ONCE // max(1, prod(first.shape[1:])))
        parts = [(slice(start, start + step),) for start in range(0, first.shape[0], step)] if first.shape else [()]
        return all(torch.equal(*(self.read(one.name, part).to(dtype) for one in (first, second))) for part in parts)


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """Open the checkpoint in *folder*. Raises StartupError for files that are missing, damaged or contradictory."""
    with open_files(weight_files(folder)) as checkpoint:
        _check_index(folder, checkpoint)
        yield checkpoint


@contextmanager
def open_files(paths: Iterable[Path]) -> Iterator[Checkpoint]:
    """Open safetensors files. Raises StartupError for a damaged one, and if two disagree about a tensor."""
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
        f"{name} in {file}" for name, file in weight_map(folder).items() if not checkpoint.has(name, Path(file).name)
    ]
    if wrong:
        raise StartupError(f"{INDEX} names {len(wrong)} tensors that its files do not have: {listed(wrong)}.")


def listed(names: Sequence[str]) -> str:
    """Return *names* as text for an error message: the first LISTED of them, and how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
