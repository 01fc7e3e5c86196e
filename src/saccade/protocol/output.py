"""The engine's output: a StepFrame per step for each gateway, with TokenDeltas."""

import enum

import msgspec

from saccade.protocol.engine_load import Load


class FinishReason(enum.StrEnum):
    """Why a sequence ended.

    It is STOP for stop ids, LENGTH for max_tokens and the context, ABORT if the client left, and ERROR if it failed.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error on its way to the client."""

    code: str
    """One of saccade.errors."""
    message: str
    """A sentence."""
    param: str | None = None
    """The request's field."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log probability of a token under the model's own distribution, before any sampling parameter."""

    logprob: float
    rank: int
    """1 for the likeliest token."""
    top_ids: list[int] = []
    """The likeliest tokens, likeliest first."""
    top_logprobs: list[float] = []
    """Theirs, in the same order."""


class SampleTimes(msgspec.Struct, frozen=True, array_like=True):
    """A sample's time in the engine."""

    queue_seconds: float
    """Waiting for its first step."""
    prefill_seconds: float
    """Computing the prompt."""
    decode_seconds: float
    encode_seconds: float = 0.0
    """Vision encoding that the sample waited for, a part of *prefill_seconds*."""

    @property
    def by_stage(self) -> dict[str, float]:
        """The times by stage name."""
        return {
            "queue": self.queue_seconds,
            "encode": self.encode_seconds,
            "prefill": self.prefill_seconds,
            "decode": self.decode_seconds,
        }


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The tokens that one step added to a sample of a request."""

    request_id: str
    token_ids: list[int]
    """A stop id that ended the sequence is the last of them. It counts as generated; the gateway does not show it."""
    finish_reason: FinishReason | None = None
    """On the sample's last delta only."""
    num_cached_tokens: int = 0
    """Tokens of the prompt whose KV was reused, on the delta with the first token."""
    failure: Failure | None = None
    """Ends the whole request."""
    index: int = 0
    """The sample's."""
    logprobs: list[TokenLogprob] = []
    """If they are wanted, one for each of *token_ids*."""
    prompt_logprobs: list[TokenLogprob] = []
    """If they are wanted, one for each token of the prompt but the first, on the first delta of sample 0."""
    times: SampleTimes | None = None
    """On the last delta of a sample that was computed."""


class PixelsWanted(msgspec.Struct, frozen=True, array_like=True):
    """Media whose encoder outputs the engine lacks after all; the request waits for SupplyPixels."""

    request_id: str
    media: list[int]
    """Their places in EngineRequest.media."""


class StepFrame(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one step sends to one gateway."""

    deltas: list[TokenDelta]
    released: list[str] = []
    """Names of shared-memory segments (SlotRef.name) that the engine will not read again."""
    load: Load | None = None
    pixels_wanted: list[PixelsWanted] = []
