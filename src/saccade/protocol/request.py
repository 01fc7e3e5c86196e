"""EngineRequest: a prompt as exact token ids and media, and how to sample its answers."""

from typing import Literal

import msgspec

from saccade.protocol.kv_transfer import ReceiveKv, SendKv
from saccade.protocol.media import MediaItem, SlotRef

MAX_NUM_SAMPLES = 128
"""The most samples of one request; readers of strangers' requests check it before they keep anything per sample."""


MAX_PRIORITY = 2**63 - 1
"""The bound of vLLM's field, in both directions."""


class Grammar(msgspec.Struct, frozen=True):
    """The whole answer must match it: a JSON schema, a regular expression or a Lark grammar of llguidance's.

    A structural tag is xgrammar's form, for the workers of other engines, and covers the reasoning, too. Of the others:
    if the prompt ends within reasoning, the grammar begins after the token *reasoning_end_id*. An answer cut by
    max_tokens, or by stop ids of the client, is the beginning of a match.
    """

    kind: Literal["json_schema", "regex", "lark", "structural_tag"]
    text: str
    reasoning_end_id: int | None = None


class ThinkingBudget(msgspec.Struct, frozen=True):
    """An answer's reasoning has at most *num_tokens* tokens; then the token *end_id* ends it, whatever is likelier.

    *start_id* is the token that begins the reasoning as the answer's first; None if the prompt ends within it.
    """

    num_tokens: int
    end_id: int
    start_id: int | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the answer is drawn. Stop strings are text, so the gateway looks for them; the engine knows ids only.

    temperature 0 is greedy. top_k 0 means no limit. *seed* None draws a fresh one.
    *stop_token_ids* holds the model's end-of-sequence ids too, unless the client asked to ignore them; none of them is
    drawn before *min_tokens* tokens. *presence_penalty* and *frequency_penalty* count the answer only,
    *repetition_penalty* prompt and answer. *logit_bias* is added to the logits of its ids; with *allowed_token_ids*, no
    others are drawn. *num_logprobs* None asks for no log probabilities, 0 for those of the answer's tokens, k also for
    the k most likely tokens at each place; *num_prompt_logprobs* does the same for the prompt's tokens.
    *grammar* comes before min_tokens, logit_bias and a request to ignore the end-of-sequence ids; send it only to
    workers whose Description has *takes_grammars*, because another worker would not see it.
    *thinking_budget* comes before all of them, and before stop ids; its condition is *takes_thinking_budgets*.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    thinking_budget: ThinkingBudget | None = None

    @property
    def penalises(self) -> bool:
        """Whether penalties change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """A prompt for the engine. *salt* separates tenants in every cache of blocks and encoder outputs.

    *num_samples* answers are drawn, each with deltas under its index; prompt and images are computed once. At most
    *num_at_once* of them are computed at a time, however many rows are free.
    Of the requests that wait, one of a lower *priority* begins first, and the last one of a higher is preempted first.
    *kv_transfer* makes it one leg of a request that two workers serve; send it only to workers whose Description has
    the role for it. The request of a decode leg has no pixels; its gateway supplies them at any time if asked.
    *traceparent* names the request's span for engines that send spans of their own; ours answers with SampleTimes.
    """

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    media: tuple[MediaItem, ...] = ()
    salt: bytes = b""
    num_samples: int = 1
    num_at_once: int | msgspec.UnsetType = msgspec.UNSET
    priority: int | msgspec.UnsetType = msgspec.UNSET
    kv_transfer: SendKv | ReceiveKv | None = None
    traceparent: str | msgspec.UnsetType = msgspec.UNSET


class MediaPixels(msgspec.Struct, frozen=True, array_like=True):
    """The pixels of media[index], in *slot* or *inline*."""

    index: int
    slot: SlotRef | None = None
    inline: bytes | None = None


class SupplyPixels(msgspec.Struct, frozen=True, kw_only=True, tag="pixels"):
    """The answer to PixelsWanted: pixels of a request that went out without them."""

    request_id: str
    media: tuple[MediaPixels, ...]


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Stop working on a request, or on one of its samples; an unknown id is no error."""

    request_id: str
    index: int | None = None


class ResetCaches(msgspec.Struct, frozen=True, kw_only=True, tag="reset"):
    """Forget what no request uses: KV blocks that could be reused, encoded images.

    Send it only to workers whose Description has *takes_resets*; another worker would end the stream.
    """

    prefix: bool = False
    media: bool = False


GatewayCommand = EngineRequest | SupplyPixels | Abort | ResetCaches
"""A gateway's message to a worker over the native stream, one msgpack message a frame."""
