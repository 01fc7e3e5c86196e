"""TokenDelta and FinishReason: the engine's output, one frame per step."""

import enum

import msgspec

from saccade.protocol.engine_load import Load


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


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log probability of a token under the model's own distribution, before any sampling parameter.

    *rank* is 1 for the likeliest token. top_logprobs[i] is that of top_ids[i], likeliest first.
    """

    logprob: float
    rank: int
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class SampleTimes(msgspec.Struct, frozen=True, array_like=True):
    """A sample's time in the engine: waiting for its first step, computing the prompt, decoding.

    *encode_seconds*, a part of the prompt's time, is the time of vision encoding that the sample waited for.
    """

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    encode_seconds: float = 0.0

    @property
    def by_stage(self) -> dict[str, float]:
        """The same by the names of the stages."""
        return {
            "queue": self.queue_seconds,
            "encode": self.encode_seconds,
            "prefill": self.prefill_seconds,
            "decode": self.decode_seconds,
        }


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The tokens that one step added to sample *index* of a request. Only the sample's last delta has *finish_reason*.

    A stop id that ended the sequence is the last of *token_ids* (it counts as generated; the gateway does not show it).
    *num_cached_tokens* counts prompt tokens whose KV was reused; it is set on the delta that carries the first token.
    A delta with *failure* ends the whole request. *logprobs*, if requested, has one entry for each of *token_ids*;
    *prompt_logprobs* one for each prompt token but the first, on the first delta of sample 0.
    *times* is on the last delta of a sample that was computed.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    failure: Failure | None = None
    index: int = 0
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    times: SampleTimes | None = None


class PixelsWanted(msgspec.Struct, frozen=True, array_like=True):
    """The engine does not hold media[i] for i in *media* after all; the request waits for SupplyPixels."""

    request_id: str
    media: list[int]


class StepFrame(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One frame to one gateway: every delta of the step, slots that the engine will not read again, and load.

    *released* names shared-memory segments (SlotRef.name) that the gateway may use again.
    """

    deltas: list[TokenDelta]
    released: list[str] = []
    load: Load | None = None
    pixels_wanted: list[PixelsWanted] = []
