"""What the clients of all workers of a gateway share."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from saccade.errors import StartupError
from saccade.identity.content import files_digest
from saccade.protocol.description import ModelFiles
from saccade.transport.credentials import NO_CREDENTIALS, WorkerCredentials


class KnownFiles:
    """The model files of all workers, by digest: a gateway gets and keeps equal ones once."""

    def __init__(self) -> None:
        self._files: WeakValueDictionary[bytes, ModelFiles] = WeakValueDictionary()
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    def find(self, digest: bytes) -> ModelFiles | None:
        """Return the files with this *digest*, or None if no worker has sent them."""
        return self._files.get(digest)

    def turn(self, digest: bytes) -> asyncio.Lock:
        """Return the lock to hold while files are requested: of the workers that have them, one is asked at a time."""
        return self._turns.setdefault(digest, asyncio.Lock())

    def same_as(self, files: ModelFiles) -> ModelFiles:
        """Return the known files that equal *files*; these are known from now on."""
        return self._files.setdefault(files_digest(files.files), files)


@dataclass(frozen=True)
class Traits:
    """What a wire must know about a model in addition to its files.

    *grid_name* is the model's name for an image's grid. *plain_positions*: a token's position is its place in the
    prompt, so it does not follow from grids. *keeps_every_token*: all its layers attend to all tokens.
    """

    grid_name: str | None = None
    plain_positions: bool = False
    keeps_every_token: bool = True


def ignore(_: object) -> None:
    """Do nothing with what a client reports."""


def read_no_files(folder: Path) -> ModelFiles:
    """Raise StartupError: no folder is read."""
    raise StartupError(f"{folder} is not read here.")


@dataclass(frozen=True)
class ClientContext:
    """What a client of a worker calls and reads in its gateway."""

    on_released: Callable[[Sequence[str]], None] = ignore
    """Gets the names of a request's slots once the worker has copied them or never will, once for each image in it."""
    on_change: Callable[[Any], None] = ignore
    """Called with a client whenever its readiness, its description or both have changed."""
    on_load: Callable[[Any], None] = ignore
    """Called with a client whenever its worker has reported its load."""
    on_discarded: Callable[[Sequence[str]], None] = ignore
    """Gets those slots instead that the worker may still be reading."""
    credentials: WorkerCredentials = NO_CREDENTIALS
    """For Saccade's and vLLM's workers."""
    known_files: KnownFiles = field(default_factory=KnownFiles)
    """Of Saccade's workers."""
    model_files: Mapping[str, ModelFiles] = field(default_factory=dict)
    """Those of other workers' models, by name; they win over what the worker has."""
    read_files: Callable[[Path], ModelFiles] = read_no_files
    """Reads a model's files from the worker's own folder. Raises StartupError."""
    traits: Callable[[ModelFiles], Traits] = lambda _: Traits()
    """Returns the traits of the model with these files."""
    placeholder_id: Callable[[ModelFiles], int | None] = lambda _: None
    """Returns the token id that stands for images, or None if nothing does."""
