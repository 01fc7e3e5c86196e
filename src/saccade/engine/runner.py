"""Run the network: encode, embed, forward, sample."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from saccade.engine import logprobs
from saccade.engine.batch import Batch, build_batch, transfer
from saccade.engine.encode_lane import Encoded, EncodeLane
from saccade.engine.encoder_cache import EncoderCache, EncoderKey
from saccade.engine.sampler import Sampler
from saccade.engine.sequence import Sequence
from saccade.engine.threads import Threads
from saccade.nn.context import Backend, ForwardContext, KvCache
from saccade.protocol.output import TokenLogprob


@dataclass(slots=True)
class Timings:
    """Wall-clock sums since the engine's start. Encoding is part of the network's time, but for what is done aside."""

    schedule_seconds: float = 0.0
    batch_seconds: float = 0.0
    encode_seconds: float = 0.0
    network_seconds: float = 0.0
    postprocess_seconds: float = 0.0


@dataclass(slots=True)
class StepOutput:
    """What a step gave: a token of each sequence that was ready for one, log probabilities where they are wanted.

    *prompt_logprobs* continue what each sequence has. *encode_seconds* is the time of the step's vision encoding.
    """

    sampled: list[tuple[Sequence, int, TokenLogprob | None]] = field(default_factory=list)
    prompt_logprobs: list[tuple[Sequence, list[TokenLogprob]]] = field(default_factory=list)
    encode_seconds: float = 0.0


class ModelRunner:
    """Owns network, KV caches and encodings of one device; one call of `run` is one step."""

    def __init__(
        self, network: Any, backend: Backend, encoder_cache: EncoderCache[torch.Tensor], threads: Threads
    ) -> None:
        self.network = network
        self.threads = threads
        self.backend = backend
        self.encoder_cache = encoder_cache
        embedding = next(network.parameters())
        self.device: torch.device = embedding.device
        self.dtype: torch.dtype = embedding.dtype
        self.sampler = Sampler(network.placeholder_token_ids, self.device)
        self.lane = EncodeLane(self.encode, threads.aside)
        self.kv_caches: list[KvCache] = []
        self.block_size = 0
        self.timings = Timings()
        self.num_encoded_items = 0
        self.num_encoded_patches = 0

    def use_caches(self, kv_caches: list[KvCache], block_size: int) -> None:
        """Take *kv_caches* as the paged state from now on."""
        self.kv_caches = kv_caches
        self.block_size = block_size
        self.backend.use_caches(kv_caches)

    @torch.inference_mode()
    def run(self, chunks: Mapping[Sequence, int], pixels: Mapping[EncoderKey, bytes]) -> StepOutput:
        """Encode *pixels*, compute *chunks*, and sample for each sequence that is ready."""
        began = time.perf_counter()
        num_patches = sum(key.num_patches for key in pixels)
        num_context_tokens = sum(sequence.num_computed_tokens for sequence in chunks)
        self.threads.use(sum(chunks.values()) + num_patches, num_context_tokens, bool(self.lane.in_flight))
        batch = build_batch(chunks, self.block_size, self.device)
        built = time.perf_counter()
        self.timings.batch_seconds += built - began
        encode_seconds = 0.0
        if pixels:
            encoded = self.encode(pixels)
            encode_seconds = encoded.seconds
            self.keep(encoded)
        hidden = self._forward(batch)
        output = self._sample(hidden, batch)
        output.encode_seconds = encode_seconds
        self.timings.network_seconds += time.perf_counter() - built
        return output

    @torch.inference_mode()
    def encode(self, pixels: Mapping[EncoderKey, bytes]) -> Encoded:
        """Encode pictures in one call; changes nothing else, so that the lane may call it while a step runs."""
        began = time.perf_counter()
        # Joined into one writable buffer: torch takes no view of immutable bytes.
        flat = torch.from_numpy(np.frombuffer(bytearray(b"").join(pixels.values()), dtype=np.uint8))
        metadata, counts = self.network.prepare([key.grid for key in pixels], self.backend)
        num_patches = sum(key.num_patches for key in pixels)
        features = self.network.encode(flat.view(num_patches, -1).to(self.device), metadata)
        # Copies: a view would keep the whole batch's storage for as long as one picture lives.
        parts = [part.clone() for part in features.split_with_sizes(counts)]
        return Encoded(dict(zip(pixels, parts, strict=True)), time.perf_counter() - began)

    def keep(self, encoded: Encoded) -> None:
        """Put the features of pictures into the cache."""
        for key, features in encoded.features.items():
            self.encoder_cache.put(key, features, features.numel() * features.element_size())
            self.num_encoded_patches += key.num_patches
        self.num_encoded_items += len(encoded.features)
        self.timings.encode_seconds += encoded.seconds

    def check_device(self) -> None:
        """Return if the device still works; else let its error out, since no later step could succeed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _forward(self, batch: Batch) -> torch.Tensor:
        plan = self.backend.plan(batch.layout, self.dtype)
        context = ForwardContext(batch.positions, batch.layout, self.kv_caches, self.backend, plan)
        if batch.media_rows is None:
            return self.network(batch.input_ids, context)  # type: ignore[no-any-return]
        parts = [self.encoder_cache.get(item.key)[item.start : item.stop] for item in batch.media]
        return self.network(batch.input_ids, context, batch.media_rows, torch.cat(parts))  # type: ignore[no-any-return]

    def _sample(self, hidden: torch.Tensor, batch: Batch) -> StepOutput:
        prompts = logprobs.prompt_rows(batch.sequences, batch.layout.query_lengths)
        scored = [row for row, s in enumerate(batch.sampled) if s.sampling.num_logprobs is not None]
        if prompts or scored:
            return self._score(hidden, batch, scored, prompts)
        if not batch.sampled:
            return StepOutput()
        logits = self.network.logits(hidden.index_select(0, batch.sample_rows))
        token_ids = self.sampler(logits, batch.sampled).tolist()
        return StepOutput([(s, token_id, None) for s, token_id in zip(batch.sampled, token_ids, strict=True)])

    def _score(
        self, hidden: torch.Tensor, batch: Batch, scored: list[int], prompts: list[logprobs.PromptRows]
    ) -> StepOutput:
        """Sample, and find log probabilities of the *scored* rows of the samples and of *prompts*."""
        targets = [np.array(rows.target_ids, dtype=np.int64) for rows in prompts]
        on_device = transfer([np.array(scored, dtype=np.int64), *targets], self.device)
        # Sampling changes the logits in place; log probabilities are those of the model.
        logits = self.network.logits(hidden.index_select(0, batch.sample_rows))
        raw = logits.index_select(0, on_device[0])
        ids = self.sampler(logits, batch.sampled)
        num_tops = [batch.sampled[row].sampling.num_logprobs or 0 for row in scored]
        scores = logprobs.score(raw, ids.index_select(0, on_device[0]), max(num_tops, default=0))
        prompt_scores = [
            self._score_prompt(hidden, rows, ids) for rows, ids in zip(prompts, on_device[1:], strict=True)
        ]
        token_ids, host_scores, *host_prompts = logprobs.fetch([ids.double(), scores, *prompt_scores])
        found = dict(zip(scored, logprobs.unpack(host_scores, num_tops), strict=True))
        return StepOutput(
            [(s, int(token_ids[row]), found.get(row)) for row, s in enumerate(batch.sampled)],
            [
                (rows.sequence, logprobs.unpack(host, [rows.num_top] * len(host)))
                for rows, host in zip(prompts, host_prompts, strict=True)
            ],
        )

    def _score_prompt(self, hidden: torch.Tensor, rows: logprobs.PromptRows, target_ids: torch.Tensor) -> torch.Tensor:
        before = hidden[rows.start : rows.stop]
        pieces = rows.pieces(self.network.vocab_size)
        scores = [
            logprobs.score(self.network.logits(before[piece]), target_ids[piece], rows.num_top) for piece in pieces
        ]
        return torch.cat(scores)
