"""Validates a whole request before it becomes a Sequence, so that an invalid request does not affect others."""

import itertools
import math
import random
import secrets
from dataclasses import InitVar, dataclass

from saccade.engine.core.sequence import Sequence
from saccade.errors import ContextLengthExceeded, InvalidValue
from saccade.identity.blocks import root_key
from saccade.identity.content import HASH_BYTES
from saccade.models.spec import IMAGE, ModelSpec
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import MAX_NUM_SAMPLES, EngineRequest, SamplingParams, ThinkingBudget

MAX_NUM_LOGPROBS = 20
"""The limit of OpenAI's API, and the default limit of vLLM."""

MAX_SECONDS_PER_GROUP = 86_400
"""Between groups of a video's frames: a day, so that positions in time stay far below the largest integer."""


@dataclass(frozen=True)
class MediaMemory:
    """The memory limits for media items.

    An image or frame has at most *num_patches* patches, and an item has at most *num_bytes* of features, at *itemsize*
    bytes per value.
    """

    num_patches: int
    num_bytes: int
    itemsize: int


@dataclass(eq=False)
class RequestValidator:
    """Validates requests, and converts them to sequences. *fingerprint* identifies the model in block keys.

    Requests without a seed get random seeds, which are the same after each start if *seed* is set. A model whose image
    tokens share positions may have only *max_positions* positions, fewer than *max_model_len*.
    """

    spec: ModelSpec
    fingerprint: bytes
    max_model_len: int
    media_memory: MediaMemory | None = None
    seed: InitVar[int | None] = None
    max_positions: int | None = None

    def __post_init__(self, seed: int | None) -> None:
        self._random_bits = secrets.randbits if seed is None else random.Random(seed).getrandbits

    def validated(self, connection: int, request: EngineRequest, arrival: int) -> Sequence:
        """Return the sequence for *request*. Raises a RequestError that names the field."""
        self._check_tokens(request.token_ids)
        if not 1 <= request.num_samples <= MAX_NUM_SAMPLES:
            raise InvalidValue(f"n must be from 1 to {MAX_NUM_SAMPLES}.", "n")
        _check_sampling(request.sampling)
        self._check_ids(request.sampling)
        for index, item in enumerate(request.media):
            self._check_item(item, request.token_ids, f"media[{index}]")
        self._check_coverage(request)
        seed = self._random_bits(64) if request.sampling.seed is None else request.sampling.seed
        positions = self.spec.positions(request.media)
        root = root_key(self.fingerprint, request.salt)
        sequence = Sequence(connection, request, arrival, seed, root, positions)
        if self.max_positions is not None:
            self._check_positions(sequence, self.max_positions)
        return sequence

    def _check_positions(self, sequence: Sequence, most: int) -> None:
        """Make the answer end at the last position. Raises ContextLengthExceeded if the prompt takes all positions."""
        num_positions = sequence.num_prompt_tokens + sequence.positions.delta
        if num_positions >= most:
            raise ContextLengthExceeded.of(most, num_positions, 1, "token_ids")
        sequence.max_num_tokens = min(sequence.max_num_tokens, most - sequence.positions.delta)

    def _check_tokens(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidValue("The prompt is empty.", "token_ids")
        if len(token_ids) >= self.max_model_len:
            raise ContextLengthExceeded.of(self.max_model_len, len(token_ids), 1, "token_ids")
        if min(token_ids) < 0 or max(token_ids) >= self.spec.vocab_size:
            raise InvalidValue(f"Token ids must be from 0 to {self.spec.vocab_size - 1}.", "token_ids")

    def _check_ids(self, sampling: SamplingParams) -> None:
        """Raise InvalidValue for ids outside the vocabulary, or if no id is left to draw."""
        vocab_size = self.spec.vocab_size
        for param, ids in (("logit_bias", sampling.logit_bias), ("allowed_token_ids", sampling.allowed_token_ids)):
            if ids and (min(ids) < 0 or max(ids) >= vocab_size):
                raise InvalidValue(f"Token ids in {param} must be from 0 to {vocab_size - 1}.", param)
        budget = sampling.thinking_budget
        if budget is not None:
            _check_budget(budget, sampling, vocab_size)
        never = {*self.spec.placeholder_token_ids, *(sampling.stop_token_ids if sampling.min_tokens else ())}
        never = {token_id for token_id in never if 0 <= token_id < vocab_size}
        if sampling.allowed_token_ids and never.issuperset(sampling.allowed_token_ids):
            raise InvalidValue(
                "allowed_token_ids leaves no token to draw: media placeholders are never drawn, and stop ids only "
                "after min_tokens tokens.",
                "allowed_token_ids",
            )
        if len(never) >= vocab_size:
            raise InvalidValue(
                "stop_token_ids contains every token, so no token can be drawn before min_tokens.", "min_tokens"
            )

    def _check_item(self, item: MediaItem, token_ids: list[int], param: str) -> None:
        placeholder = self.spec.placeholder_of.get(item.modality)
        if placeholder is None:
            raise InvalidValue(f"This model does not accept {item.modality!r} input.", f"{param}.modality")
        if len(item.content_hash) != HASH_BYTES:
            raise InvalidValue(f"A content hash has {HASH_BYTES} bytes.", f"{param}.content_hash")
        try:
            num_tokens = self.spec.item_tokens(item.grid, item.original_size)
        except InvalidValue as error:
            raise InvalidValue(error.message, f"{param}.grid") from error
        if item.modality == IMAGE and item.grid[0] != 1:
            raise InvalidValue(f"An image's grid has one frame, not {item.grid[0]}.", f"{param}.grid")
        covered = sum(span.length for span in item.spans)
        if covered != num_tokens:
            raise InvalidValue(
                f"The spans cover {covered} tokens, but the image's grid makes {num_tokens}.", f"{param}.spans"
            )
        lengths = self.spec.span_lengths(item.grid, item.modality)
        if lengths is not None and tuple(span.length for span in item.spans) != lengths:
            raise InvalidValue(
                f"The placeholders of this item must be {len(lengths)} spans, of {lengths[0]} tokens each.",
                f"{param}.spans",
            )
        if item.seconds_per_group is not None and not 0 < item.seconds_per_group <= MAX_SECONDS_PER_GROUP:
            raise InvalidValue(
                f"seconds_per_group must be above 0 and at most {MAX_SECONDS_PER_GROUP}.",
                f"{param}.seconds_per_group",
            )
        for span in item.spans:
            _check_span(span, token_ids, placeholder, f"{param}.spans")
        if any(span.start >= following.start for span, following in itertools.pairwise(item.spans)):
            raise InvalidValue("The spans of an image must be in the prompt's order.", f"{param}.spans")
        self._check_pixels(item, param)
        if self.media_memory is not None:
            self._check_memory(item, param, self.media_memory)

    def _check_memory(self, item: MediaItem, param: str, limits: MediaMemory) -> None:
        num_patches = self.spec.encode_cost((1, *item.grid[1:]))
        if num_patches > limits.num_patches:
            raise InvalidValue(
                f"An image or frame of {num_patches} patches is too large for this worker, which has memory for "
                f"{limits.num_patches}. Send it smaller, or start the worker with a larger --encode-budget-patches.",
                param,
            )
        num_bytes = self.spec.encoder_output_values(item.grid, item.original_size) * limits.itemsize
        if num_bytes > limits.num_bytes:
            raise InvalidValue(
                f"The features of this item take {num_bytes} bytes, but this worker has memory for {limits.num_bytes}. "
                "Send a shorter or smaller one, or start the worker with a larger --encoder-cache-bytes.",
                param,
            )

    def _check_pixels(self, item: MediaItem, param: str) -> None:
        shape = self.spec.pixel_shape(item.grid, item.modality)
        if tuple(item.pixel_shape) != shape or item.pixel_dtype != "uint8":
            raise InvalidValue(
                f"This image's pixels must be uint8 of shape {shape}, not {item.pixel_dtype} of {item.pixel_shape}.",
                f"{param}.pixel_shape",
            )
        sizes = (None if item.inline is None else len(item.inline), None if item.slot is None else item.slot.nbytes)
        for size in sizes:
            if size is not None and size != math.prod(shape):
                raise InvalidValue(f"The image has {size} bytes of pixels instead of {math.prod(shape)}.", param)

    def _check_coverage(self, request: EngineRequest) -> None:
        spans = sorted((span.start, span.length) for item in request.media for span in item.spans)
        for (start, length), (following, _) in itertools.pairwise(spans):
            if start + length > following:
                raise InvalidValue("Spans of images must not overlap.", "media")
        placeholders = sum(request.token_ids.count(token_id) for token_id in self.spec.placeholder_token_ids)
        covered = sum(length for _, length in spans)
        if placeholders != covered:
            raise InvalidValue(
                f"The prompt has {placeholders} placeholder tokens, but its images cover {covered}.", "media"
            )


def _check_span(span: Span, token_ids: list[int], placeholder: int, param: str) -> None:
    stop = span.start + span.length
    if span.start < 0 or span.length < 1 or stop > len(token_ids):
        raise InvalidValue(f"The span [{span.start}, {stop}) does not lie within the prompt.", param)
    if token_ids[span.start : stop].count(placeholder) != span.length:
        raise InvalidValue(f"The span [{span.start}, {stop}) contains tokens that are not placeholders.", param)


def _check_budget(budget: ThinkingBudget, sampling: SamplingParams, vocab_size: int) -> None:
    if budget.num_tokens < 0:
        raise InvalidValue("thinking_budget must not be negative.", "thinking_budget")
    if not 0 <= budget.end_id < vocab_size or budget.end_id not in (sampling.allowed_token_ids or (budget.end_id,)):
        raise InvalidValue(
            "The token that ends the reasoning is not among those that the request and the model allow.",
            "thinking_budget",
        )


def _check_sampling(sampling: SamplingParams) -> None:
    if sampling.max_tokens < 1:
        raise InvalidValue("max_tokens must be at least 1.", "max_tokens")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise InvalidValue(f"min_tokens must be from 0 to max_tokens, which is {sampling.max_tokens}.", "min_tokens")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidValue("temperature must be a number of at least 0.", "temperature")
    if not 0 < sampling.top_p <= 1:
        raise InvalidValue("top_p must be over 0 and at most 1.", "top_p")
    if sampling.top_k < 0:
        raise InvalidValue("top_k must not be negative; 0 means no limit.", "top_k")
    if not 0 <= sampling.min_p <= 1:
        raise InvalidValue("min_p must be from 0 to 1.", "min_p")
    # Values far outside these ranges could make a logit infinite, and the draw meaningless.
    if not 0.01 <= sampling.repetition_penalty <= 100:
        raise InvalidValue("repetition_penalty must be from 0.01 to 100; 1 changes nothing.", "repetition_penalty")
    for param in ("presence_penalty", "frequency_penalty"):
        if not -2 <= getattr(sampling, param) <= 2:
            raise InvalidValue(f"{param} must be from -2 to 2.", param)
    if not all(-100 <= bias <= 100 for bias in sampling.logit_bias.values()):
        raise InvalidValue("logit_bias must map token ids to numbers from -100 to 100.", "logit_bias")
    logprob_counts = {"top_logprobs": sampling.num_logprobs, "prompt_logprobs": sampling.num_prompt_logprobs}
    for param, number in logprob_counts.items():
        if number is not None and not 0 <= number <= MAX_NUM_LOGPROBS:
            raise InvalidValue(f"{param} must be from 0 to {MAX_NUM_LOGPROBS}.", param)
