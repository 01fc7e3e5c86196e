"""Encode pictures: alone, spread over the ranks, or with an encoder that is cut over the ranks.

Spread, each rank encodes whole pictures, all of its own in one call, and the ranks send each other the features. A
picture goes to one rank, whatever its size: a rank may have none. Where the encoder is cut, all ranks encode every
picture. Before the first collective of a job the ranks exchange which pictures failed, so that none waits for one that
does not come; a failure after it is not handled.

A video larger than the budget of a step is encoded in parts, whose frames do not see those of others: so the memory
that the encoder takes does not grow with its length.

With graphs, pictures within a step are packed for them; a job beside the steps runs without them, as they have one set
of buffers.
"""

import time
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from typing import Any, NamedTuple

import msgspec
import numpy as np
import structlog
import torch

from saccade.engine.core.step import EncodeJob, Picture
from saccade.engine.executor.async_encoder import Encoded
from saccade.engine.executor.encoder_graphs import EncoderGraphs
from saccade.models.facts import IMAGE, Grid, MediaShape
from saccade.models.network import Network
from saccade.nn.context import VisionAttentionBackend
from saccade.nn.parallel import Ranks
from saccade.nn.transfer import transfer

FAILURES = (RuntimeError, ValueError, MemoryError)
"""What torch raises for a picture that cannot be encoded, such as one that does not fit into memory."""

logger = structlog.get_logger(__name__)


class Outcome(NamedTuple):
    """The end of a job within a step. Pictures in *failed*, by encoding id, have features of zeros."""

    features: dict[int, torch.Tensor]
    failed: tuple[int, ...]
    seconds: float


class _Prepared(NamedTuple):
    """Pictures of one modality, or parts of videos; the arguments of a network's `encode`, and the tokens of each."""

    pictures: Ordered[Picture]
    pixels_B: torch.Tensor
    metadata: Any
    counts: list[int]


class Encoder:
    """The vision encoder of a network, and the ranks that share its work; *graphs* are for a whole encoder.

    Videos of more than *most_patches* are encoded in parts.
    """

    def __init__(
        self,
        network: Network,
        backend: VisionAttentionBackend,
        ranks: Ranks,
        graphs: EncoderGraphs | None = None,
        most_patches: int | None = None,
    ) -> None:
        self.network = network
        self.backend = backend
        self.ranks = ranks
        self.graphs = graphs
        self.most_patches = most_patches

    @torch.inference_mode()
    def encode(self, job: EncodeJob) -> Encoded:
        """Encode all pictures here. Has no side effects, so another thread may call it while a step runs."""
        began = time.perf_counter()
        return Encoded(self._encode_eagerly(job.pictures), time.perf_counter() - began)

    @torch.inference_mode()
    def encode_together(self, job: EncodeJob) -> Outcome:
        """Encode a job's pictures; every rank must call it with the same job. Failures are logged where they occur."""
        began = time.perf_counter()
        features = self._cut(job) if self.ranks.cuts_encoder else self._spread(job)
        failed = tuple(picture.encoding_id for picture in job.pictures if picture.encoding_id not in features)
        for picture in job.pictures:
            if picture.encoding_id in failed:
                features[picture.encoding_id] = self._empty(picture).zero_()
        return Outcome(features, failed, time.perf_counter() - began)

    def _spread(self, job: EncodeJob) -> dict[int, torch.Tensor]:
        """Return the features of the pictures that did not fail, each encoded by one rank."""
        owners = spread([self.network.facts.encode_cost(picture.grid) for picture in job.pictures], self.ranks.size)
        owned = list(zip(job.pictures, owners, strict=True))
        own = [picture for picture, owner in owned if owner == self.ranks.rank]
        features: dict[int, torch.Tensor] = {}
        try:
            features = self._encode(own) if own else {}
        except FAILURES:
            logger.exception("encoding failed", job_id=job.job_id)
        lost = self.ranks.any_of([owner == self.ranks.rank and p.encoding_id not in features for p, owner in owned])
        if self.ranks.size > 1:
            for (picture, owner), is_lost in zip(owned, lost, strict=True):
                if not is_lost:
                    mine = features[picture.encoding_id] if owner == self.ranks.rank else self._empty(picture)
                    features[picture.encoding_id] = self.ranks.broadcast(mine, owner)
        return features

    def _cut(self, job: EncodeJob) -> dict[int, torch.Tensor]:
        """Return the features of all pictures, encoded by all ranks together; none if a rank cannot begin."""
        prepared: list[_Prepared] = []
        try:
            prepared = [self._prepare(group) for group in self._groups(job.pictures)]
        except FAILURES:
            logger.exception("encoding failed", job_id=job.job_id)
        (is_lost,) = self.ranks.any_of([not prepared])
        return {} if is_lost else self._run(prepared)

    def _encode(self, pictures: Ordered[Picture]) -> dict[int, torch.Tensor]:
        if self.graphs is None:
            return self._encode_eagerly(pictures)
        # Graphs were captured with pixels of pictures; a video has other patches.
        still = [picture for picture in pictures if picture.modality == IMAGE]
        groups, rest = self.graphs.packs([self.network.facts.encode_cost(picture.grid) for picture in still])
        eager = [picture for picture in pictures if picture.modality != IMAGE] + [still[index] for index in rest]
        features = self._encode_eagerly(eager)
        for group in groups:
            features.update(self._replay([still[index] for index in group], self.graphs))
        return features

    def _replay(self, pictures: Ordered[Picture], graphs: EncoderGraphs) -> dict[int, torch.Tensor]:
        replayed = graphs.run(self._pixels(pictures), _shapes(pictures))
        if replayed is None:
            return self._encode_eagerly(pictures)
        return self._separate(pictures, replayed.features, replayed.counts)

    def _encode_eagerly(self, pictures: Ordered[Picture]) -> dict[int, torch.Tensor]:
        return self._run(self._prepare(group) for group in self._groups(pictures))

    def _groups(self, pictures: Ordered[Picture]) -> list[list[Picture]]:
        """Return what one call of the network encodes: a modality's items, or one part of a large video."""
        whole: list[Picture] = []
        parts: list[Picture] = []
        for picture in pictures:
            if picture.modality == IMAGE or self.most_patches is None:
                whole.append(picture)
            else:
                cut = cut_video(picture, self.network.facts.video_parts(picture.grid, self.most_patches))
                (whole if len(cut) == 1 else parts).extend(cut)
        return by_modality(whole) + [[part] for part in parts]

    def _pixels(self, pictures: Ordered[Picture]) -> torch.Tensor:
        # The pixels are joined in one writable buffer, since torch accepts no view of immutable bytes.
        joined = bytearray(b"").join(picture.pixels for picture in pictures)
        (flat,) = transfer([np.frombuffer(joined, dtype=np.uint8)], self.network.device)
        return flat

    def _prepare(self, pictures: Ordered[Picture]) -> _Prepared:
        return _Prepared(pictures, self._pixels(pictures), *self.network.prepare(_shapes(pictures), self.backend))

    def _run(self, prepared: Iterable[_Prepared]) -> dict[int, torch.Tensor]:
        features: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        for group in prepared:
            encoded = self.network.encode(group.pixels_B, group.metadata)
            for encoding_id, part in self._separate(group.pictures, encoded, group.counts).items():
                features[encoding_id].append(part)
        return {key: parts[0] if len(parts) == 1 else torch.cat(parts) for key, parts in features.items()}

    def _separate(
        self, pictures: Ordered[Picture], features: torch.Tensor, counts: list[int]
    ) -> dict[int, torch.Tensor]:
        """Return the features of each picture. Raises ValueError for features of an unexpected shape or dtype."""
        # The parts are copies: a view would keep the whole batch's storage, and the next replay overwrites a graph's.
        parts = [part.clone() for part in features.split_with_sizes(counts)]
        for picture, part in zip(pictures, parts, strict=True):
            needed = self._empty(picture)
            if (part.shape, part.dtype) != (needed.shape, needed.dtype):
                raise ValueError(f"a picture of grid {picture.grid} gave {part.shape} {part.dtype}")
        return {picture.encoding_id: part for picture, part in zip(pictures, parts, strict=True)}

    def _empty(self, picture: Picture) -> torch.Tensor:
        """Return a tensor for the features of *picture*, as `encode` of the network gives them."""
        facts = self.network.facts
        num_tokens = facts.item_tokens(picture.grid, picture.original_size)
        width = facts.encoding_values(picture.grid, picture.original_size) // num_tokens
        return torch.empty(num_tokens, width, dtype=self.network.dtype, device=self.network.device)


def _shapes(pictures: Ordered[Picture]) -> list[MediaShape]:
    return [MediaShape(picture.grid, picture.original_size, picture.modality) for picture in pictures]


def cut_video(video: Picture, grids: Ordered[Grid]) -> list[Picture]:
    """Return the parts of *video* with *grids*, under its encoding id. Pixels lie frame after frame."""
    frame_bytes = len(video.pixels) // video.grid[0]
    parts: list[Picture] = []
    start = 0
    for grid in grids:
        stop = start + grid[0] * frame_bytes
        parts.append(msgspec.structs.replace(video, grid=grid, pixels=video.pixels[start:stop]))
        start = stop
    return parts


def by_modality(pictures: Ordered[Picture]) -> list[list[Picture]]:
    """Return *pictures* in groups of one modality, whose patches have one shape."""
    groups: defaultdict[str, list[Picture]] = defaultdict(list)
    for picture in pictures:
        groups[picture.modality].append(picture)
    return list(groups.values())


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
