"""Encode pictures: alone, or spread over the ranks.

Spread, each rank encodes whole pictures, all of its own in one call. Then the ranks exchange which of them failed, so
that none waits in a collective for one that does not come, and send each other the features. A picture goes to one
rank, whatever its size: a rank may have none.
"""

import time
from collections.abc import Sequence as Ordered
from typing import NamedTuple

import numpy as np
import structlog
import torch

from saccade.engine.core.step import EncodeJob, Picture
from saccade.engine.executor.async_encoder import Encoded
from saccade.engine.executor.batch import transfer
from saccade.models.facts import MediaShape, ModelFacts
from saccade.models.network import Network
from saccade.nn.context import VisionAttentionBackend
from saccade.nn.parallel import Ranks

FAILURES = (RuntimeError, ValueError, MemoryError)
"""What torch raises for a picture that cannot be encoded, such as one that does not fit into memory."""

logger = structlog.get_logger(__name__)


class Outcome(NamedTuple):
    """The end of a job within a step. Pictures in *failed*, by encoding id, have features of zeros."""

    features: dict[int, torch.Tensor]
    failed: tuple[int, ...]
    seconds: float


class Encoder:
    """The vision encoder of a network, and the ranks that share its work."""

    def __init__(self, network: Network, backend: VisionAttentionBackend, ranks: Ranks) -> None:
        self.network = network
        self.backend = backend
        self.ranks = ranks

    @torch.inference_mode()
    def encode(self, job: EncodeJob) -> Encoded:
        """Encode all pictures here. Has no side effects, so another thread may call it while a step runs."""
        began = time.perf_counter()
        return Encoded(self._encode(job.pictures), time.perf_counter() - began)

    @torch.inference_mode()
    def encode_together(self, job: EncodeJob) -> Outcome:
        """Encode a job's pictures; every rank must call it with the same job. Failures are logged where they occur."""
        began = time.perf_counter()
        pictures, facts = job.pictures, self.network.facts
        owners = spread([facts.encode_cost(picture.grid) for picture in pictures], self.ranks.size)
        own = [picture for picture, owner in zip(pictures, owners, strict=True) if owner == self.ranks.rank]
        features: dict[int, torch.Tensor] = {}
        try:
            features = self._encode(own) if own else {}
        except FAILURES:
            logger.exception("encoding failed", job_id=job.job_id)
        missing = [
            owner == self.ranks.rank and picture.encoding_id not in features
            for picture, owner in zip(pictures, owners, strict=True)
        ]
        has_failed = self.ranks.any_of(missing)
        for picture, owner, is_missing in zip(pictures, owners, has_failed, strict=True):
            if is_missing:
                features[picture.encoding_id] = self._empty(picture, facts).zero_()
            elif self.ranks.size > 1:
                held = features.get(picture.encoding_id)
                tensor = self._empty(picture, facts) if held is None else held
                features[picture.encoding_id] = self.ranks.broadcast(tensor, owner)
        failed = tuple(picture.encoding_id for picture, bad in zip(pictures, has_failed, strict=True) if bad)
        return Outcome(features, failed, time.perf_counter() - began)

    def _encode(self, pictures: Ordered[Picture]) -> dict[int, torch.Tensor]:
        # The pixels are joined in one writable buffer, since torch accepts no view of immutable bytes.
        joined = bytearray(b"").join(picture.pixels for picture in pictures)
        (flat,) = transfer([np.frombuffer(joined, dtype=np.uint8)], self.network.device)
        items = [MediaShape(picture.grid, picture.original_size) for picture in pictures]
        metadata, counts = self.network.prepare(items, self.backend)
        features = self.network.encode(flat, metadata)
        # The parts are copies: a view would keep the whole batch's storage while one picture lives.
        parts = [part.clone() for part in features.split_with_sizes(counts)]
        for item, part in zip(items, parts, strict=True):
            needed = self.network.facts.encoding_values(*item)
            if part.numel() != needed or part.dtype != self.network.dtype:
                raise ValueError(f"{item} gave {part.numel()} values of {part.dtype}, not {needed}")
        return {picture.encoding_id: part for picture, part in zip(pictures, parts, strict=True)}

    def _empty(self, picture: Picture, facts: ModelFacts) -> torch.Tensor:
        """Return a tensor for the features of *picture*, as `encode` of the network gives them."""
        num_tokens = facts.item_tokens(picture.grid, picture.original_size)
        width = facts.encoding_values(picture.grid, picture.original_size) // num_tokens
        return torch.empty(num_tokens, width, dtype=self.network.dtype, device=self.network.device)


def spread(costs: Ordered[int], num_ranks: int) -> list[int]:
    """Return the rank of each picture: the costliest first, each to the rank with the least cost so far.

    Source: longest processing time first, Graham 1969, "Bounds on Multiprocessing Timing Anomalies". Equal costs and
    equal loads are taken in order, so that every rank gets the same result.
    """
    owners = [0] * len(costs)
    loads = [0] * num_ranks
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners
