"""Check where a copy of a model shall be, and create it so that it appears only when it is complete."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from saccade.errors import StartupError
from saccade.protocol.model_files import CONFIG

WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".pkl",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)
"""The ends of names of weights and their indexes, in any format: the copy has its own."""


def check_place(model: Path, target: Path) -> None:
    """Raise StartupError unless a copy of the folder *model* can be created at *target*."""
    if target.resolve().is_relative_to(model.resolve()):
        raise StartupError(f"{target} is in {model} itself. Name a folder outside of it.")
    if target.exists() and not target.is_dir():
        raise StartupError(f"{target} is a file. Name a folder that does not exist, or that is empty.")
    if target.is_dir() and any(target.iterdir()):
        raise StartupError(f"{target} is not empty. Name a folder that does not exist, or that is empty.")


def check_space(target: Path, num_bytes: int) -> None:
    """Raise StartupError unless *num_bytes* are free where *target* shall be."""
    place = next(folder for folder in (target, *target.resolve().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise StartupError(
            f"The copy takes {num_bytes / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free at {place}. Name a folder on "
            "another disk, or free some space."
        )


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder next to *target*. It becomes *target* after the block, or is removed if the block fails.

    Raises StartupError for an error of the file system.
    """
    target = target.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise StartupError(f"No folder can be created at {target}: {error.strerror}.") from error
    try:
        yield folder
        _open_to_others(folder)
        folder.rename(target)
    except (OSError, SafetensorError) as error:
        raise StartupError(f"{target} could not be written, and nothing is left of it: {error}.") from error
    finally:
        # After the renaming, there is nothing to remove.
        shutil.rmtree(folder, ignore_errors=True)


def _open_to_others(folder: Path) -> None:
    """Give *folder* and its files, some of which are private so far, the permissions that new ones usually have."""
    # The mask can only be read by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def files_beside_weights(model: Path) -> list[Path]:
    """Return the files of the folder *model* and its subfolders, except weights, config.json and hidden ones."""
    return [
        path
        for path in sorted(model.rglob("*"))
        if path.is_file()
        and path != model / CONFIG
        and not path.name.endswith(WEIGHT_SUFFIXES)
        and not any(part.startswith(".") for part in path.relative_to(model).parts)
    ]
