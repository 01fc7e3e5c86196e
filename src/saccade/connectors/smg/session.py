"""What a client for one of SMG's scheduler wires knows about a registered worker."""

from dataclasses import dataclass
from typing import Any

from saccade.connectors.context import Traits
from saccade.connectors.events.event_source import EventSource
from saccade.protocol.description import Description
from saccade.protocol.exactness import Exactness


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
