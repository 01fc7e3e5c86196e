"""EngineRequest: a prompt as exact token ids and media, and how to sample its answer."""

import msgspec

from saccade.protocol.media import MediaItem


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the answer is drawn. Stop strings are text, so the gateway looks for them; the engine knows ids only.

    temperature 0 is greedy. top_k 0 means no limit. *seed* None draws a fresh one.
    *stop_token_ids* holds the model's end-of-sequence ids too, unless the client asked to ignore them.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """A prompt for the engine. *salt* separates tenants in every cache of blocks and encodings."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    media: tuple[MediaItem, ...] = ()
    salt: bytes = b""


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Stop working on a request; an unknown id is no error."""

    request_id: str


GatewayCommand = EngineRequest | Abort
"""What a gateway sends to a worker over the native stream, one msgpack message a frame."""
