"""What prefill legs and decode legs have in common: one transfer for each request."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from saccade.engine.core.kv_connector import KvConnector
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.sequence import Sequence
from saccade.protocol.kv_transfer import KvForm
from saccade.transport.kv_transfer.events import Event
from saccade.transport.kv_transfer.service import MAX_PIECE_BYTES, KvTransfers

STEP_BYTES = 2 * MAX_PIECE_BYTES
"""The most state that one step copies; the step's requests wait for it."""


@dataclass(slots=True, eq=False)
class Leg:
    """One leg of a split request: the key of its transfer, and the request's sample 0."""

    key: bytes
    sequence: Sequence


L = TypeVar("L", bound=Leg)


class KvLegs(KvConnector, Generic[L]):
    """All prefill legs or all decode legs of an engine, by transfer key."""

    def __init__(self, transfers: KvTransfers, form: KvForm, scheduler: Scheduler) -> None:
        self.transfers: KvTransfers = transfers
        self._form = form
        self._scheduler = scheduler
        self._legs: dict[bytes, L] = {}

    def settle(self) -> None:
        for event in self.transfers.events():
            leg = self._legs.get(event.key)
            if leg is not None and leg.sequence.finish_reason is None:
                self._take_event(leg, event)
        for leg in [one for one in self._legs.values() if one.sequence.finish_reason is not None]:
            del self._legs[leg.key]
            self._give_up(leg)

    @abstractmethod
    def _take_event(self, leg: L, event: Event) -> None:
        """Handle *event*. If this fails the request, `settle` gives up its leg."""

    @abstractmethod
    def _give_up(self, leg: L) -> None:
        """End the transfer of *leg*, whose request has ended."""
