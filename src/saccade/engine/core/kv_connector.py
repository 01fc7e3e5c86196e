"""An engine's part in requests that two workers serve."""

from collections.abc import Container
from typing import Protocol

from saccade.engine.core.schedule import Schedule
from saccade.engine.core.sequence import Sequence
from saccade.errors import InvalidValue
from saccade.protocol.kv_transfer import KEY_BYTES
from saccade.protocol.output import FinishReason, TokenLogprob
from saccade.protocol.request import EngineRequest


class KvConnector(Protocol):
    """The prefill legs, or the decode legs, of an engine (KvSender, KvReceiver)."""

    @property
    def has_work(self) -> bool:
        """Whether a step would move state, or a transfer has events."""

    @property
    def wake_fds(self) -> tuple[int, ...]:
        """File descriptors that are readable while there are events."""

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidValue for a request that this engine cannot take part in."""

    def open(self, sequence: Sequence) -> None:
        """Note a new request by its sample 0."""

    def poll(self) -> None:
        """Handle the events of transfers."""

    def plan(self, schedule: Schedule) -> None:
        """Add the copies of this step to *schedule*."""

    def keep(self, sequence: Sequence, logprob: TokenLogprob | None, reason: FinishReason | None, now: float) -> bool:
        """Note a drawn token. Return whether the sequence keeps its state, and its token is reported later."""

    def on_executed(self, contents: tuple[bytes, ...]) -> None:
        """Note that the planned step was executed; *contents* are its copies."""

    def take_planned(self) -> list[Sequence]:
        """Return the sequences whose state the failed step did not copy."""

    def on_end(self, sequence: Sequence) -> None:
        """Note that a sequence has ended, for any reason."""

    def close(self) -> None:
        """End every transfer."""


class NoKvConnector:
    """The KvConnector of an engine that serves requests alone."""

    has_work = False
    wake_fds: tuple[int, ...] = ()

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidValue for a request that two workers serve."""
        if request.kv_transfer is not None:
            raise InvalidValue("This worker takes no part in a prefill/decode split; start it with --role.", "role")

    def open(self, sequence: Sequence) -> None:
        pass

    def poll(self) -> None:
        pass

    def plan(self, schedule: Schedule) -> None:
        pass

    def keep(self, sequence: Sequence, logprob: TokenLogprob | None, reason: FinishReason | None, now: float) -> bool:
        """Return False."""
        return False

    def on_executed(self, contents: tuple[bytes, ...]) -> None:
        pass

    def take_planned(self) -> list[Sequence]:
        """Return no sequence."""
        return []

    def on_end(self, sequence: Sequence) -> None:
        pass

    def close(self) -> None:
        pass


def check_key(key: bytes, keys: Container[bytes]) -> None:
    """Raise InvalidValue for a transfer's key of another length, or one of *keys*."""
    if len(key) != KEY_BYTES or key in keys:
        raise InvalidValue(
            f"The key of a transfer must be {KEY_BYTES} bytes that no other transfer has.", "kv_transfer.key"
        )
