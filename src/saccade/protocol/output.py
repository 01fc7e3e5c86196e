"""TokenDelta and FinishReason: what comes back, one frame per engine step."""

import enum

import msgspec

from saccade.protocol.load import Load


class FinishReason(enum.StrEnum):
    """Why a sequence ended. STOP covers stop ids; LENGTH max_tokens and the context; ABORT a client that went away."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error on its way to the client: a code of saccade.errors, a sentence, the request's field."""

    code: str
    message: str
    param: str | None = None


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one step added to one request. The last delta of a request, and only that, has *finish_reason*.

    A stop id that ended the sequence is the last of *token_ids* (it counts as generated; the gateway does not show it).
    *num_cached_tokens* counts prompt tokens whose KV was reused; it is set on the delta that carries the first token.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    failure: Failure | None = None


class StepFrame(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One frame to one gateway: every delta of the step, slots whose pixels were copied or never will be, and load.

    *released* names shared-memory segments (SlotRef.name) that the gateway may use again.
    """

    deltas: list[TokenDelta]
    released: list[str] = []
    load: Load | None = None
