"""One request as the scheduler sees it. No torch."""

import bisect
from array import array
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from saccade.engine.encoder_cache import EncoderKey
from saccade.engine.pixels import PixelSource
from saccade.engine.seeds import sample_seed
from saccade.engine.token_counts import TokenCounts
from saccade.identity.blocks import MediaRun, block_key
from saccade.protocol.output import FinishReason, SampleTimes, TokenLogprob
from saccade.protocol.request import EngineRequest, SamplingParams


class Positions(Protocol):
    """Positions of a whole sequence, by one formula for prefill, decode and recomputation."""

    delta: int

    def slice(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the positions [3, stop - start] of tokens [start, stop)."""


@dataclass(slots=True)
class Clock:
    """When a sample came, had its first step and its first token, in time.perf_counter's seconds."""

    arrived: float = 0.0
    scheduled: float | None = None
    first_token: float | None = None
    encode_seconds: float = 0.0

    def times(self, now: float) -> SampleTimes | None:
        """Return where the time went of a sample that ends *now*; None where it had no step."""
        if self.scheduled is None:
            return None
        first = now if self.first_token is None else self.first_token
        return SampleTimes(self.scheduled - self.arrived, first - self.scheduled, now - first, self.encode_seconds)


class Sequence:
    """A prompt, the answer so far, and how much of both has its KV state computed.

    *token_ids* holds prompt and answer. *num_computed_tokens* of them have KV state; a step computes some of the rest,
    and when none is left, the next token is sampled. A retracted sequence starts again from 0: prompt and answer are
    then one long prompt. *block_table* names the paged blocks; *runs* (by start) say which tokens show which pictures,
    and run_sources[i] is the source of runs[i]. *arrival* orders sequences and is unique.
    A sequence is sample *index* of its request. *penalised*: penalties change its logits; *shaped*: those, biases
    or a minimum length do. *prompt_logprobs*, where asked for, are those of token_ids[1:] as far as they are known.
    """

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
        self.sampling = request.sampling
        self.request_seed = seed
        self.seed = sample_seed(seed, index)
        self.penalised = _penalises(request.sampling)
        self.shaped = self.penalised or _biases(request.sampling)
        self.clock = Clock()
        self.token_ids = list(request.token_ids)
        self.num_prompt_tokens = len(request.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        self.block_table = array("q")
        self.positions = positions
        self.sources = [PixelSource(item, request.salt, f"media[{index}]") for index, item in enumerate(request.media)]
        self.runs: list[MediaRun] = []
        self.run_sources: list[PixelSource] = []
        self._place_media(request)
        self._keys = [root]
        self.finish_reason: FinishReason | None = None
        self._token_counts: TokenCounts | None = None
        wanted = index == 0 and request.sampling.num_prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprob] | None = [] if wanted else None

    def sample(self, index: int, arrival: int) -> "Sequence":
        """Return another sample of the request, before this one has a token: own answer, shared prompt and pixels."""
        sample = Sequence(
            self.connection, self.request, arrival, self.request_seed, self._keys[0], self.positions, index
        )
        sample.num_cached_tokens = self.num_cached_tokens
        sample.clock.arrived = self.clock.arrived
        sample._keys = list(self._keys)
        for source, own in zip(self.sources, sample.sources, strict=True):
            own.share_pixels(source)
        return sample

    def _place_media(self, request: EngineRequest) -> None:
        placed = []
        for item, source in zip(request.media, self.sources, strict=True):
            offset = 0
            for span in item.spans:
                placed.append((MediaRun(span.start, span.length, item.content_hash, offset), source))
                offset += span.length
        placed.sort(key=lambda pair: pair[0].start)
        self.runs = [run for run, _ in placed]
        self._run_starts = [run.start for run in self.runs]
        self._run_ends = [run.start + run.length for run in self.runs]
        self.run_sources = [source for _, source in placed]

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens without KV state; 1 in decode."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether state may be reused: not while log probabilities of the prompt are missing, which need its logits."""
        return self.prompt_logprobs is None or len(self.prompt_logprobs) >= self.num_prompt_tokens - 1

    @property
    def token_counts(self) -> TokenCounts:
        """Tokens of the answer by id, and those of the prompt where the repetition penalty needs them."""
        if self._token_counts is None:
            repetition = self.sampling.repetition_penalty != 1
            self._token_counts = TokenCounts(self.token_ids[: self.num_prompt_tokens] if repetition else ())
        self._token_counts.update(self.token_ids, self.num_prompt_tokens)
        return self._token_counts

    @property
    def recomputable(self) -> bool:
        """Whether the sequence could be started again from nothing, whatever the caches have dropped."""
        return all(source.available for source in self.sources)

    def needs(self, keys: Collection[EncoderKey]) -> bool:
        """Whether the sequence has a pin on an encoding among *keys*."""
        return any(source.pinned and source.key in keys for source in self.sources)

    def media_between(self, start: int, stop: int) -> list[tuple[MediaRun, PixelSource]]:
        """Return the runs that overlap tokens [start, stop), in order, each with its source."""
        first, last = bisect.bisect_right(self._run_ends, start), bisect.bisect_left(self._run_starts, stop)
        return list(zip(self.runs[first:last], self.run_sources[first:last], strict=True))

    def parent_key(self, index: int) -> bytes:
        """Return the key before that of block *index*, the root's for the first; block_keys() has made it."""
        return self._keys[index]

    def block_keys(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Return the keys of the first *num_blocks* blocks, which must be full of known tokens."""
        for index in range(len(self._keys) - 1, num_blocks):
            start, stop = index * block_size, (index + 1) * block_size
            runs = [run for run, _ in self.media_between(start, stop)]
            self._keys.append(block_key(self._keys[-1], self.token_ids[start:stop], start, runs))
        return self._keys[1 : num_blocks + 1]


def _penalises(sampling: SamplingParams) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1)


def _biases(sampling: SamplingParams) -> bool:
    return bool(sampling.logit_bias or sampling.min_tokens)
