"""Run the network: encode, embed, forward, sample."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from saccade.engine.batch import Batch, build_batch
from saccade.engine.encoder_cache import EncoderCache, EncoderKey
from saccade.engine.sampler import Sampler
from saccade.engine.sequence import Sequence
from saccade.nn.context import AttentionBackend, ForwardContext, KvCache


@dataclass(slots=True)
class Timings:
    """Wall-clock sums since the engine's start. Encoding is part of the network's time."""

    schedule_seconds: float = 0.0
    batch_seconds: float = 0.0
    encode_seconds: float = 0.0
    network_seconds: float = 0.0
    postprocess_seconds: float = 0.0


class ModelRunner:
    """Owns network, KV caches and encodings of one device; one call of `run` is one step."""

    def __init__(self, network: Any, backend: AttentionBackend, encoder_cache: EncoderCache[torch.Tensor]) -> None:
        self.network = network
        self.backend = backend
        self.encoder_cache = encoder_cache
        embedding = next(network.parameters())
        self.device: torch.device = embedding.device
        self.dtype: torch.dtype = embedding.dtype
        self.sampler = Sampler(network.placeholder_token_ids, self.device)
        self.kv_caches: list[KvCache] = []
        self.block_size = 0
        self.timings = Timings()
        self.num_encoded_items = 0
        self.num_encoded_patches = 0

    def use_caches(self, kv_caches: list[KvCache], block_size: int) -> None:
        """Take *kv_caches* as the paged state from now on."""
        self.kv_caches = kv_caches
        self.block_size = block_size

    @torch.inference_mode()
    def run(self, chunks: Mapping[Sequence, int], pixels: Mapping[EncoderKey, bytes]) -> list[tuple[Sequence, int]]:
        """Encode *pixels*, compute *chunks*, and return the token sampled for each sequence that is ready for one."""
        began = time.perf_counter()
        batch = build_batch(chunks, self.block_size, self.device)
        built = time.perf_counter()
        self.timings.batch_seconds += built - began
        if pixels:
            self.encode(pixels)
            self.timings.encode_seconds += time.perf_counter() - built
        hidden = self._forward(batch)
        sampled = self._sample(hidden, batch)
        self.timings.network_seconds += time.perf_counter() - built
        return sampled

    @torch.inference_mode()
    def encode(self, pixels: Mapping[EncoderKey, bytes]) -> None:
        """Encode pictures in one call and put each one's features into the cache."""
        grids = [key.grid for key in pixels]
        # Joined into one writable buffer: torch takes no view of immutable bytes.
        flat = torch.from_numpy(np.frombuffer(bytearray(b"").join(pixels.values()), dtype=np.uint8))
        metadata, counts = self.network.prepare(grids, self.backend)
        num_patches = sum(frames * height * width for frames, height, width in grids)
        features = self.network.encode(flat.view(num_patches, -1).to(self.device), metadata)
        for key, part in zip(pixels, features.split_with_sizes(counts), strict=True):
            # A copy: a view would keep the whole batch's storage for as long as one picture lives.
            entry = part.clone()
            self.encoder_cache.put(key, entry, entry.numel() * entry.element_size())
        self.num_encoded_items += len(grids)
        self.num_encoded_patches += num_patches

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

    def _sample(self, hidden: torch.Tensor, batch: Batch) -> list[tuple[Sequence, int]]:
        if not batch.sampled:
            return []
        logits = self.network.logits(hidden.index_select(0, batch.sample_rows))
        return list(zip(batch.sampled, self.sampler(logits, batch.sampled), strict=True))
