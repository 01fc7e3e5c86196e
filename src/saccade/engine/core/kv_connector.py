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
    """The connector for an engine that serves whole requests: it moves no state, and refuses split requests.

    KvSender serves prefill legs over *transfers*, and KvReceiver serves decode legs.
    """

    transfers: KvTransfers | None = None

    @property
    def has_work(self) -> bool:
        """Whether a step would move state or a transfer has events."""
        return False

    def open(self, sequence: Sequence) -> None:
        """Register a new request, given its sample 0. Raises InvalidValue if this engine cannot take part in it."""
        if sequence.request.kv_transfer is not None:
            raise InvalidValue("This worker takes no part in a prefill/decode split; start it with --role.", "role")

    def settle(self) -> None:
        """Handle transfers' events, and end the transfers of ended requests. Call this before a step is planned."""

    def plan_copies(self, schedule: Schedule) -> KvCopies:
        """Return a step's copies, and begin the transfers of the sequences that it admits. Call this once per step."""
        return NO_COPIES

    def executed(self, contents: tuple[bytes, ...] | None) -> None:
        """Handle the end of the oldest planned step. *contents* are its copies, or None if the step failed."""

    def keep(self, sequence: Sequence, logprob: TokenLogprob | None, reason: FinishReason | None, now: float) -> bool:
        """Handle a drawn token. Return whether the sequence keeps its state and reports the token later."""
        return False


def check_key(key: bytes, keys: Container[bytes]) -> None:
    """Raise InvalidValue if a transfer's key has the wrong length or is already one of *keys*."""
    if len(key) != KEY_BYTES or key in keys:
        raise InvalidValue(
            f"The key of a transfer must be {KEY_BYTES} bytes that no other transfer has.", "kv_transfer.key"
        )
