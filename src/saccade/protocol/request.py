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
    """A grammar that the whole answer must match.

    An answer that max_tokens or the client's stop ids cut short is the beginning of a match.
    """

    kind: Literal["json_schema", "regex", "lark", "structural_tag"]
    """A JSON schema, a regular expression, a Lark grammar of llguidance's, or xgrammar's structural tag, which is for
    the workers of other engines and covers the reasoning, too."""
    text: str
    reasoning_end_id: int | None = None
    """If the prompt ends within reasoning, the grammar begins after this token. Not for a structural tag."""


class ThinkingBudget(msgspec.Struct, frozen=True):
    """A limit on an answer's reasoning."""

    num_tokens: int
    """The most tokens of reasoning."""
    end_id: int
    """The token that ends it then, whatever is likelier."""
    start_id: int | None = None
    """The token that begins the reasoning as the answer's first; None if the prompt ends within it."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample the answer. Stop strings are text, so the gateway looks for them; the engine knows only ids."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    """Counts the tokens of the answer; *frequency_penalty* does so, too."""
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Counts the tokens of prompt and answer."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of its ids."""
    allowed_token_ids: tuple[int, ...] = ()
    """If there are any, no others are drawn."""
    seed: int | None = None
    """None draws a fresh one."""
    min_tokens: int = 0
    """No stop id is drawn before the answer has this number of tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """The model's end-of-sequence ids too, unless the client asked to ignore them."""
    num_logprobs: int | None = None
    """None for no log probabilities, 0 for those of the answer's tokens, k also for the k likeliest tokens at each
    place."""
    num_prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    grammar: Grammar | None = None
    """Comes before min_tokens, logit_bias and a request to ignore the end-of-sequence ids. Send it only to workers
    whose Description has *takes_grammars*: another worker would not see it."""
    thinking_budget: ThinkingBudget | None = None
    """Comes before all of them, and before stop ids. Send it only to workers whose Description has
    *takes_thinking_budgets*."""

    @property
    def penalises(self) -> bool:
        """Whether penalties change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """A prompt for the engine, and how to answer it."""

    request_id: str
    token_ids: list[int]
    """The prompt, with placeholders for images."""
    sampling: SamplingParams
    media: tuple[MediaItem, ...] = ()
    salt: bytes = b""
    """Separates tenants in every cache of blocks and encoder outputs."""
    num_samples: int = 1
    """How many answers are drawn, each with deltas under its index. Prompt and images are computed once."""
    num_at_once: int | msgspec.UnsetType = msgspec.UNSET
    """How many of them are computed at a time at most, however many rows are free."""
    priority: int | msgspec.UnsetType = msgspec.UNSET
    """Of the requests that wait, one with a lower number begins first. Of those that run, one with a higher number is
    preempted first."""
    kv_transfer: SendKv | ReceiveKv | None = None
    """Makes it one leg of a request that two workers serve; send it only to workers whose Description has the role for
    it. A decode leg has no pixels; its gateway supplies them at any time if asked."""
    traceparent: str | msgspec.UnsetType = msgspec.UNSET
    """The request's span, for engines that send spans of their own; ours answers with SampleTimes."""


class MediaPixels(msgspec.Struct, frozen=True, array_like=True):
    """The pixels of one media item, in a slot or inline."""

    index: int
    """The item's place in EngineRequest.media."""
    slot: SlotRef | None = None
    inline: bytes | None = None


class SupplyPixels(msgspec.Struct, frozen=True, kw_only=True, tag="pixels"):
    """The answer to PixelsWanted: the pixels for a request that was sent without them."""

    request_id: str
    media: tuple[MediaPixels, ...]


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Stop working on a request, or on one of its samples; an unknown id is ignored."""

    request_id: str
    index: int | None = None


class ResetCaches(msgspec.Struct, frozen=True, kw_only=True, tag="reset"):
    """Drop the reusable KV blocks (*prefix*) or encoded images (*media*) that no request uses.

    Send it only to workers whose Description has *takes_resets*; another worker would end the stream.
    """

    prefix: bool = False
    media: bool = False


GatewayCommand = EngineRequest | SupplyPixels | Abort | ResetCaches
"""A gateway's message to a worker over the native stream, one msgpack message a frame."""
