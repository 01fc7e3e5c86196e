"""A request's sample in the scheduler. Does not import torch."""

import bisect
from array import array
from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from saccade.engine.core.grammar_matcher import GrammarMatcher
from saccade.engine.core.images import EncoderKey, RequestImage
from saccade.engine.core.seeds import sample_seed
from saccade.identity.blocks import MediaRun, block_key
from saccade.models.spec import Positions
from saccade.protocol.kv_transfer import ReceiveKv, SendKv
from saccade.protocol.output import FinishReason, SampleTimes, TokenLogprob
from saccade.protocol.request import EngineRequest

ALL, WINDOW = range(2)
"""The groups of layers with blocks: those that attend to all tokens, and those with a window."""


@dataclass(slots=True)
class Clock:
    """The times of one sample, in seconds from time.perf_counter."""

    arrived: float = 0.0
    scheduled: float | None = None
    """The begin of its first step."""
    first_token: float | None = None
    encode_seconds: float = 0.0
    """A duration: how long it waited for vision encoding."""

    def times(self, now: float) -> SampleTimes | None:
        """Return how long each phase of a sample that ends *now* took; None if it had no step."""
        if self.scheduled is None:
            return None
        first = now if self.first_token is None else self.first_token
        return SampleTimes(self.scheduled - self.arrived, first - self.scheduled, now - first, self.encode_seconds)


@dataclass(slots=True, eq=False)
class BlockTable:
    """A sequence's blocks in one group of layers."""

    blocks: "array[int]" = field(default_factory=lambda: array("q"))
    """Entry i is the block of tokens [i * block_size, (i + 1) * block_size)."""
    num_passed: int = 0
    """How many entries at the start name blocks that were given back."""
    num_sent: int = 0
    """How many entries at the start the executors know."""
    replaced: list[int] = field(default_factory=list)
    """Indices of entries that were exchanged, which executors do not know yet."""


class Sequence:
    """A prompt, its answer so far, and the number of their tokens that have KV state.

    A step computes some of the tokens without KV state; when none are left, the step samples the next token. A
    preempted sequence starts again from token 0, with prompt and answer as one long prompt.

    What it computes:
    - token_ids: the ids of the prompt and answer, at most max_num_tokens.
    - runs: which tokens show which part of which image, in order of their first token.
    - images: the request's images in order, shared by all its samples.
    - sampling: the request's parameters, without the grammar's text.
    - grammar, matcher: the request's grammar, and its matcher, which is None until the grammar is compiled.
    - mask: the ids that the grammar allows next, as packed bits; empty if it allows all.
    - penalised: whether penalties change the logits.
    - speculates: whether tokens may be proposed. Proposals need the last token.
    - draft: the ids that the model's draft layer proposes next.
    - prompt_logprobs: the known log probabilities of token_ids[1:]; None if the request does not ask for them.

    Its progress, in tokens:
    - num_computed_tokens: the first tokens that have KV state.
    - num_launched_tokens: the first tokens that will have KV state when the steps in flight are collected.
    - num_steps_in_flight: launched steps with a chunk of this sequence that are not yet collected.
    - num_cached_tokens: prompt tokens that the prefix cache had; None before the first step.

    What it holds:
    - tables: its blocks by layer group (ALL, WINDOW).
    - row: its row in the executors while it runs.
    - has_drawn: whether the executors know its last token.
    - kept_state: the number of the recurrent state that its row resumes from.
    - shares_state: whether what it computes becomes reusable.

    Its place among others:
    - priority, arrival: lower priorities go first, then earlier arrivals.
    - index: its index among the request's samples.
    - leads_samples: whether other samples wait for its first token.

    If a prefill worker and a decode worker share the request:
    - awaits_kv: whether the prompt's state has yet to arrive from the prefill worker.
    - forks: in sample 0, the other samples until that state has arrived.
    - received_state: the recurrent state, as bytes, that its next row starts with.
    - completes_prompt: whether the state of the prompt is sent only after this sample's first token.
    """

    # A step reads a few of these for each sequence, and slots need fewer lines of the CPU cache than a large dict.
    __slots__ = (
        "__weakref__", "_keys", "_reasoning_limit", "_run_ends", "_run_images", "_run_starts", "arrival", "awaits_kv",
        "clock", "completes_prompt", "connection", "draft", "finish_reason", "forks", "grammar", "has_drawn", "images",
        "index", "kept_state", "leads_samples", "mask", "matcher", "max_num_tokens", "num_cached_tokens",
        "num_computed_tokens", "num_launched_tokens", "num_prompt_tokens", "num_steps_in_flight", "penalised",
        "positions", "priority", "prompt_logprobs", "received_state", "request", "request_id", "request_seed", "row",
        "runs", "sampling", "seed", "shares_state", "speculates", "tables", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        connection: int,
        request: EngineRequest,
        arrival: int,
        seed: int,
        root: bytes,
        positions: Positions,
        index: int = 0,
    ) -> None:
        self.connection = connection
        self.request = request
        self.index = index
        self.request_id = request.request_id
        self.arrival = arrival
        self.priority = request.priority or 0
        self.grammar = request.sampling.grammar
        self.matcher: GrammarMatcher | None = None
        self.mask = b""
        self.sampling = request.sampling
        if self.grammar is not None:
            self.sampling = msgspec.structs.replace(request.sampling, grammar=None)
        self.request_seed = seed
        self.seed = sample_seed(seed, index)
        self.penalised = request.sampling.penalises
        self.clock = Clock()
        budget = request.sampling.thinking_budget
        self._reasoning_limit = -1
        if budget is not None:
            self._reasoning_limit = len(request.token_ids) + (budget.start_id is not None) + budget.num_tokens
        self.token_ids = list(request.token_ids)
        self.num_prompt_tokens = len(request.token_ids)
        self.max_num_tokens = self.num_prompt_tokens + request.sampling.max_tokens
        self.num_computed_tokens = 0
        self.num_launched_tokens = 0
        self.num_steps_in_flight = 0
        self.num_cached_tokens: int | None = None
        self.tables = [BlockTable(), BlockTable()]
        self.row: int | None = None
        self.has_drawn = False
        self.kept_state: int | None = None
        self.positions = positions
        self.images = [RequestImage(item, request.salt, f"media[{index}]") for index, item in enumerate(request.media)]
        self.leads_samples = False
        self.runs: list[MediaRun] = []
        self._place_media()
        self._keys = [root]
        self.finish_reason: FinishReason | None = None
        self.awaits_kv = isinstance(request.kv_transfer, ReceiveKv)
        self.completes_prompt = False
        self.speculates = False
        self.shares_state = True
        self.draft: tuple[int, ...] = ()
        self.forks: list[Sequence] = []
        self.received_state = b""
        scores_prompt = index == 0 and request.sampling.num_prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprob] | None = [] if scores_prompt else None

    @property
    def turn(self) -> tuple[int, int, int]:
        """A unique key that orders sequences; sample i waits as though it had come i requests later.

        So the samples of several requests take rows in turn, and no request waits for all samples of an earlier one.
        """
        return self.priority, self.arrival + self.index, self.index

    def sample(self, index: int) -> "Sequence":
        """Return another sample of the request, without an answer. The samples share the prompt and images."""
        sample = Sequence(
            self.connection, self.request, self.arrival, self.request_seed, self._keys[0], self.positions, index
        )
        sample.max_num_tokens = self.max_num_tokens
        sample.num_cached_tokens = self.num_cached_tokens
        sample.clock.arrived = self.clock.arrived
        sample._keys = list(self._keys)
        sample.images = self.images
        sample.matcher, sample.mask = None if self.matcher is None else self.matcher.copy(), self.mask
        sample._place_media()
        return sample

    def append(self, token_id: int) -> FinishReason | None:
        """Add the answer's next token. Return why the answer ends with it, or None if it goes on."""
        self.token_ids.append(token_id)
        if self.matcher is not None:
            self.matcher.take_token(token_id)
            if self.matcher.is_finished:
                return FinishReason.STOP
        if token_id in self.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_tokens >= self.max_num_tokens else None

    def _place_media(self) -> None:
        placed = []
        for item, image in zip(self.request.media, self.images, strict=True):
            offset = 0
            for span in item.spans:
                placed.append((MediaRun(span.start, span.length, item.content_hash, offset), image))
                offset += span.length
        placed.sort(key=lambda pair: pair[0].start)
        self.runs = [run for run, _ in placed]
        self._run_starts = [run.start for run in self.runs]
        self._run_ends = [run.start + run.length for run in self.runs]
        self._run_images = [image for _, image in placed]

    @property
    def block_table(self) -> "array[int]":
        """The blocks of the layers that attend to all tokens."""
        return self.tables[ALL].blocks

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_expected_tokens(self) -> int:
        """The number of tokens, including those that steps in flight draw."""
        num_tokens = len(self.token_ids)
        return num_tokens if num_tokens > self.num_launched_tokens else self.num_launched_tokens + 1

    @property
    def num_expected_answer_tokens(self) -> int:
        """The number of tokens in the answer, including those that steps in flight draw."""
        return self.num_expected_tokens - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """The number of tokens that no launched step computes; 1 while decoding."""
        num_tokens = len(self.token_ids) - self.num_launched_tokens
        return num_tokens if num_tokens > 0 else 1

    @property
    def is_decoding(self) -> bool:
        """Whether the answer has begun, or begins with the steps in flight, and its last token alone is pending."""
        return self.num_pending_tokens == 1 and self.num_expected_answer_tokens > 0

    @property
    def waits_for_commit(self) -> bool:
        """Whether the next chunk can be planned only when the steps in flight are collected.

        Masks and proposals need the last token, and the answer may end with the token that is being drawn.
        """
        if not self.num_steps_in_flight:
            return False
        num_tokens = self.num_expected_tokens
        if num_tokens == len(self.token_ids):
            return not self.reads_prefix_cache
        has_mask = self.matcher is not None or num_tokens == self._reasoning_limit
        return self.speculates or has_mask or num_tokens >= self.max_num_tokens or not self.reads_prefix_cache

    @property
    def num_tokens_to_propose(self) -> int:
        """The largest number of tokens to propose.

        If all are accepted, the token after them reaches the answer's maximum length or the end of its thinking budget.
        """
        num_tokens = len(self.token_ids)
        if num_tokens == self.num_prompt_tokens:
            return 0
        limit = self.max_num_tokens if self._reasoning_limit < num_tokens else self._reasoning_limit
        return min(limit, self.max_num_tokens) - num_tokens - 1

    @property
    def takes_drafts(self) -> bool:
        """Whether the token after the one that is being drawn may be proposed."""
        return self.speculates and self.num_expected_tokens + 2 < self.max_num_tokens

    @property
    def must_end_reasoning(self) -> bool:
        """Whether the answer's next token must end the reasoning, because the thinking budget is used up.

        This depends only on the answer's tokens, so preemption, replay and samples keep no state for it.
        """
        budget = self.sampling.thinking_budget
        if budget is None or self.num_expected_tokens != self._reasoning_limit:
            return False
        begin = self._reasoning_limit - budget.num_tokens
        is_reasoning = budget.start_id is None or self.token_ids[begin - 1] == budget.start_id
        return is_reasoning and budget.end_id not in self.token_ids[begin:]

    @property
    def has_mask(self) -> bool:
        """Whether only some ids may be the answer's next token."""
        return bool(self.mask) or (self.sampling.thinking_budget is not None and self.must_end_reasoning)

    @property
    def awaits_grammar(self) -> bool:
        return self.grammar is not None and self.matcher is None

    @property
    def num_samples_to_come(self) -> int:
        """How many samples begin at this one's first token, if its prompt state will be sent; otherwise 0.

        The state is sent only after their first tokens.
        """
        is_first = self.leads_samples and isinstance(self.request.kv_transfer, SendKv)
        return self.request.num_samples - 1 if is_first else 0

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether state may be reused.

        It may not while prompt log probabilities are missing, since they need the logits.
        """
        return self.prompt_logprobs is None or len(self.prompt_logprobs) >= self.num_prompt_tokens - 1

    @property
    def recomputable(self) -> bool:
        """Whether the sequence can be recomputed from scratch, even if the caches drop its encoder outputs."""
        return all(image.has_pixels for image in self.images)

    @property
    def images_without_pixels(self) -> list[int]:
        """The indices of the images whose pixels are missing here."""
        return [index for index, image in enumerate(self.images) if not image.has_pixels]

    def needs(self, keys: Collection[EncoderKey]) -> bool:
        """Whether the sequence's chunks read an encoder output among *keys*."""
        return any(image.key in keys and image.is_claimed(self.index) for image in self.images)

    def media_between(self, start: int, stop: int) -> list[tuple[MediaRun, RequestImage]]:
        """Return the runs that overlap tokens [start, stop), in order, each with its image."""
        first, last = bisect.bisect_right(self._run_ends, start), bisect.bisect_left(self._run_starts, stop)
        return list(zip(self.runs[first:last], self._run_images[first:last], strict=True))

    def parent_key(self, index: int) -> bytes:
        """Return the key of the block before block *index*; for block 0, the root.

        block_keys() must have computed it.
        """
        return self._keys[index]

    def block_keys(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Return the keys of the first *num_blocks* blocks, which must be full of known tokens."""
        for index in range(len(self._keys) - 1, num_blocks):
            start, stop = index * block_size, (index + 1) * block_size
            runs = [run for run, _ in self.media_between(start, stop)]
            self._keys.append(block_key(self._keys[-1], self.token_ids[start:stop], start, runs))
        return self._keys[1 : num_blocks + 1]


def row_of(sequence: Sequence) -> int:
    """Return the row of *sequence*. Raises ValueError if it has none."""
    if sequence.row is None:
        raise ValueError(f"the sequence of request {sequence.request_id!r} has no row")
    return sequence.row
