"""How an engine takes part in a request that one worker prefills and another decodes."""

from collections.abc import Container

from saccade.engine.core.schedule import NO_COPIES, KvCopies, Schedule
from saccade.engine.core.sequence import Sequence
from saccade.errors import InvalidValue
from saccade.protocol.kv_transfer import KEY_BYTES
from saccade.protocol.output import FinishReason, TokenLogprob
from saccade.transport.kv_transfer.service import KvTransfers

STEP_FAILED = "The model failed on this request's step."


class KvConnector:
    """The connector of an engine that serves whole requests; it does nothing.

    KvSender and KvReceiver serve the prefill legs, or the decode legs, of requests over *transfers*.
    """

    transfers: KvTransfers | None = None

    @property
    def has_work(self) -> bool:
        """Whether a step would move state, or a transfer has events."""
        return False

    def open(self, sequence: Sequence) -> None:
        """Note a new request by its sample 0. Raises InvalidValue if this engine cannot take part in it."""
        if sequence.request.kv_transfer is not None:
            raise InvalidValue("This worker takes no part in a prefill/decode split; start it with --role.", "role")

    def settle(self) -> None:
        """Before a step is planned: handle the events of transfers, and end those of requests that have ended."""

    def plan_copies(self, schedule: Schedule) -> KvCopies:
        """Return the copies of a step, and begin the transfers of sequences that it admits. Call once a step."""
        return NO_COPIES

    def executed(self, contents: tuple[bytes, ...] | None) -> None:
        """Note that the oldest planned step was executed; *contents* are its copies. None: it failed."""

    def keep(self, sequence: Sequence, logprob: TokenLogprob | None, reason: FinishReason | None, now: float) -> bool:
        """Note a drawn token. Return whether the sequence keeps its state, and its token is reported later."""
        return False


def check_key(key: bytes, keys: Container[bytes]) -> None:
    """Raise InvalidValue for a transfer's key of another length, or one of *keys*."""
    if len(key) != KEY_BYTES or key in keys:
        raise InvalidValue(
            f"The key of a transfer must be {KEY_BYTES} bytes that no other transfer has.", "kv_transfer.key"
        )
