"""What a client for one of SMG's scheduler wires gets from its gateway, and what it knows about a registered worker."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.connectors.events.event_source import EventSource
from saccade.connectors.session import ignore_load
from saccade.protocol.description import Description, ModelFiles
from saccade.protocol.exactness import Exactness


@dataclass(frozen=True)
class Traits:
    """What a wire must know about a model in addition to its files.

    *grid_name* is the model's name for an image's grid. *plain_positions*: a token's position is its place in the
    prompt, so it does not follow from grids. *keeps_every_token*: all its layers attend to all tokens.
    """

    grid_name: str | None = None
    plain_positions: bool = False
    keeps_every_token: bool = True


@dataclass(frozen=True)
class ClientContext:
    """What a client calls and reads in its gateway.

    Every slot of a request passed to generate() comes back once for each image in it. It comes through *on_released* if
    the worker has copied it or will never read it, and through *on_discarded* if the worker may still be reading.
    *on_change* is called with a client that has become ready or is no longer ready, *on_load* with one that has
    reported its load. The model's files come from *model_files* by its name, otherwise from the worker's own folder
    with *read_files*, otherwise from the worker.
    """

    on_released: Callable[[Sequence[str]], None]
    on_change: Callable[[Any], None]
    on_discarded: Callable[[Sequence[str]], None]
    model_files: Mapping[str, ModelFiles]
    read_files: Callable[[Path], ModelFiles]
    traits: Callable[[ModelFiles], Traits]
    on_load: Callable[[Any], None] = ignore_load


@dataclass(frozen=True)
class SmgSession:
    """A worker that has registered.

    *exactness* is how exactly its events report what it holds; *publisher* is where the engine itself publishes them.
    """

    stub: Any
    description: Description
    eos_token_ids: tuple[int, ...]
    traits: Traits
    shares_memory: bool
    exactness: Exactness
    page_size: int
    publisher: EventSource | None
