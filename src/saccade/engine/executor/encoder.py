"""Encode images: on a single rank, spread over the ranks, or with an encoder that is cut over the ranks.

If images are spread, each rank encodes whole images, together if it can, and the ranks send each other the features.
Each image goes to a single rank, whatever its size, so a rank may get none. If the encoder is cut, all ranks encode
every image together. Before the first collective of a call, the ranks tell each other which images failed. So no rank
waits for features that do not come. A later failure is not handled.

An image may be encoded in several steps, some layers in each. It is then alone in its calls to the network, and its
state between them is the network's paused computation. One rank encodes it, or all if the encoder is cut.

A video larger than the budget of a step is encoded in parts. Frames of one part do not see those of another, so the
encoder's memory does not grow with the video's length.
"""

import time
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np
import structlog
import torch

from saccade.engine.core.step import EncoderInput, EncoderSlice
from saccade.engine.executor.encoder_graphs import EncoderGraphs
from saccade.models.network import Network
from saccade.models.spec import IMAGE, Grid, MediaShape
from saccade.nn.context import VisionAttentionBackend
from saccade.nn.layerwise import Layerwise, advance, complete
from saccade.nn.parallel import Ranks
from saccade.nn.transfer import to_device

FAILURES = (RuntimeError, ValueError, MemoryError)
"""torch's exceptions for an image that cannot be encoded, such as one that does not fit into memory."""

logger = structlog.get_logger(__name__)


class Encoded(NamedTuple):
    """Features by encoder output id, [tokens, width], each in separate storage, and the *seconds* that encoding took.

    Images in *failed*, by encoder output id, have features of zeros.
    """

    features: dict[int, torch.Tensor]
    seconds: float
    failed: tuple[int, ...] = ()


class _Prepared(NamedTuple):
    """Images of one modality, or a part of a video, with the arguments of the network's `encode`."""

    images: Ordered[EncoderInput]
    pixels_B: torch.Tensor
    metadata: Any


class _Paused(NamedTuple):
    """An image between two steps. *computation* is None if another rank encodes it, or if encoding it failed."""

    image: EncoderInput
    computation: Layerwise | None


@dataclass(frozen=True, eq=False)
class Encoder:
    """The vision encoder of a network, and the ranks that share its work; *graphs* need an encoder that is not cut.

    Videos of more than *most_patches* are encoded in parts.
    """

    network: Network
    backend: VisionAttentionBackend
    ranks: Ranks
    graphs: EncoderGraphs | None = None
    most_patches: int | None = None
    _paused: dict[int, _Paused] = field(default_factory=dict)

    @torch.inference_mode()
    def encode(self, images: Ordered[EncoderInput], slices: Ordered[EncoderSlice] = ()) -> Encoded:
        """Encode the images of a step, and compute the *slices* of those that several steps encode.

        Every rank must call it with the same arguments. The rank that fails logs the failure. If a slice fails, the
        image is reported as failed with its last slice.
        """
        if not (images or slices):
            return Encoded({}, 0.0)
        began = time.perf_counter()
        cut = {one.output_id for one in slices}
        whole = [image for image in images if image.output_id not in cut]
        features = self._encode_whole(whole) if whole else {}
        self._begin([image for image in images if image.output_id in cut])
        for one in slices:
            image = self._paused[one.output_id].image
            part = self._advance(one)
            if one.num_layers is None:
                whole.append(image)
                if part is not None:
                    features[one.output_id] = part
        failed = tuple(image.output_id for image in whole if image.output_id not in features)
        for image in whole:
            if image.output_id in failed:
                features[image.output_id] = self._empty(image).zero_()
        return Encoded(features, time.perf_counter() - began, failed)

    @property
    def num_paused(self) -> int:
        """The number of images that are begun and not encoded yet."""
        return len(self._paused)

    def drop(self, output_ids: Iterable[int]) -> None:
        """Forget these images if they are begun: no later step goes on with them."""
        for output_id in output_ids:
            self._paused.pop(output_id, None)

    def num_patches(self, images: Ordered[EncoderInput], slices: Ordered[EncoderSlice]) -> int:
        """Return the number of patches in the images that a step encodes, or computes layers of."""
        begun = {image.output_id for image in images}
        others = (self._paused[one.output_id].image for one in slices if one.output_id not in begun)
        return sum(self.network.spec.encode_cost(image.grid) for image in chain(images, others))

    def _begin(self, images: Ordered[EncoderInput]) -> None:
        """Prepare images for slices. If one rank of a cut encoder cannot prepare an image, no rank goes on with it."""
        if not images:
            return
        begun = [self._layerwise(image) for image in images]
        # Also until every rank has read the pixels (ranks.arena).
        lost = self.ranks.any_of([self.ranks.cuts_encoder and one is None for one in begun])
        for image, computation, is_lost in zip(images, begun, lost, strict=True):
            self._paused[image.output_id] = _Paused(image, None if is_lost else computation)

    def _layerwise(self, image: EncoderInput) -> Layerwise | None:
        """Return the computation of an image's features; None if another rank does it, or it cannot be prepared."""
        if not self.ranks.cuts_encoder:
            is_own = self._owner(image.output_id) == self.ranks.rank
            return self._parts(self._prepare(group) for group in self._groups([image])) if is_own else None
        try:
            return self._parts([self._prepare(group) for group in self._groups([image])])
        except FAILURES:
            logger.exception("encoding failed", output_id=image.output_id)
            return None

    def _owner(self, output_id: int) -> int:
        """Return the rank that encodes an image in slices: the ranks take turns."""
        return output_id % self.ranks.size

    def _parts(self, prepared: Iterable[_Prepared]) -> Layerwise:
        """Return the features of one image or video, computed part by part."""
        parts: list[torch.Tensor] = []
        for group in prepared:
            features = yield from self.network.encode(group.pixels_B, group.metadata)
            parts.extend(self._separate(group.images, features).values())
            yield  # after the projector, as after each layer
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _advance(self, part: EncoderSlice) -> torch.Tensor | None:
        """Compute a slice. Return the features after the last one; None before it, and if the image cannot be encoded.

        Raises KeyError for an image that was not begun; with a cut encoder, a failure of the network is raised too.
        """
        image, computation = self._paused.pop(part.output_id)
        features = None
        try:
            if computation is not None and part.num_layers is not None:
                advance(computation, part.num_layers)
            elif computation is not None:
                features = complete(computation)
        except FAILURES:
            # The other ranks of a cut encoder wait in a sum.
            if self.ranks.cuts_encoder:
                raise
            logger.exception("encoding failed", output_id=part.output_id)
            computation = None
        if part.num_layers is not None:
            self._paused[part.output_id] = _Paused(image, computation)
            return None
        return features if self.ranks.cuts_encoder else self._shared(image, features)

    def _shared(self, image: EncoderInput, features: torch.Tensor | None) -> torch.Tensor | None:
        """Return the features that the image's rank has, on every rank; None if it has none."""
        owner = self._owner(image.output_id)
        (is_lost,) = self.ranks.any_of([owner == self.ranks.rank and features is None])
        if is_lost or self.ranks.size == 1:
            return features
        return self.ranks.broadcast(self._empty(image) if features is None else features, owner)

    def _encode_whole(self, images: Ordered[EncoderInput]) -> dict[int, torch.Tensor]:
        """Return the features of the images that did not fail, each encoded in this step."""
        return self._cut(images) if self.ranks.cuts_encoder else self._spread(images)

    def _spread(self, images: Ordered[EncoderInput]) -> dict[int, torch.Tensor]:
        """Return the features of the images that did not fail, each encoded by one rank."""
        owners = spread([self.network.spec.encode_cost(image.grid) for image in images], self.ranks.size)
        owned = list(zip(images, owners, strict=True))
        own = [image for image, owner in owned if owner == self.ranks.rank]
        features: dict[int, torch.Tensor] = {}
        try:
            features = self._encode(own) if own else {}
        except FAILURES:
            features = self._encode_alone(own)
        failures = self.ranks.any_of([owner == self.ranks.rank and p.output_id not in features for p, owner in owned])
        if self.ranks.size > 1:
            for (image, owner), is_lost in zip(owned, failures, strict=True):
                if not is_lost:
                    mine = features[image.output_id] if owner == self.ranks.rank else self._empty(image)
                    features[image.output_id] = self.ranks.broadcast(mine, owner)
        return features

    def _encode_alone(self, images: Ordered[EncoderInput]) -> dict[int, torch.Tensor]:
        """Return the features of the images that can be encoded alone: one that cannot must not fail the others.

        If the images failed only because there was no memory for all at once, they are encoded now.
        """
        features: dict[int, torch.Tensor] = {}
        for image in images:
            try:
                features |= self._encode([image])
            except FAILURES:
                logger.exception("encoding failed", output_id=image.output_id)
        return features

    def _cut(self, images: Ordered[EncoderInput]) -> dict[int, torch.Tensor]:
        """Return the features of the images that every rank can begin to encode, encoded by all ranks together.

        If a rank cannot begin with all of them, the ranks encode them one after another, as `_encode_alone` does.
        """
        prepared: list[_Prepared] = []
        try:
            prepared = [self._prepare(group) for group in self._groups(images)]
        except FAILURES:
            if len(images) == 1:
                logger.exception("encoding failed", output_id=images[0].output_id)
        (is_lost,) = self.ranks.any_of([not prepared])
        if not is_lost:
            return self._run(prepared)
        alone = [self._cut([image]) for image in images] if len(images) > 1 else []
        return dict(chain.from_iterable(features.items() for features in alone))

    def _encode(self, images: Ordered[EncoderInput]) -> dict[int, torch.Tensor]:
        if self.graphs is None:
            return self._encode_eagerly(images)
        # Graphs were captured with pixels of images; a video has other patches.
        still = [image for image in images if image.modality == IMAGE]
        groups, rest = self.graphs.packs([self.network.spec.encode_cost(image.grid) for image in still])
        eager = [image for image in images if image.modality != IMAGE] + [still[index] for index in rest]
        features = self._encode_eagerly(eager)
        for group in groups:
            features.update(self._replay([still[index] for index in group], self.graphs))
        return features

    def _replay(self, images: Ordered[EncoderInput], graphs: EncoderGraphs) -> dict[int, torch.Tensor]:
        features = graphs.run_images(self._pixels(images), _shapes(images))
        return self._encode_eagerly(images) if features is None else self._separate(images, features)

    def _encode_eagerly(self, images: Ordered[EncoderInput]) -> dict[int, torch.Tensor]:
        return self._run(self._prepare(group) for group in self._groups(images))

    def _groups(self, images: Ordered[EncoderInput]) -> list[list[EncoderInput]]:
        """Return the images for each call to the network: a modality's items, or one part of a large video."""
        whole: list[EncoderInput] = []
        parts: list[EncoderInput] = []
        for image in images:
            if image.modality == IMAGE or self.most_patches is None:
                whole.append(image)
            else:
                cut = cut_video(image, self.network.spec.video_parts(image.grid, self.most_patches))
                (whole if len(cut) == 1 else parts).extend(cut)
        return by_modality(whole) + [[part] for part in parts]

    def _pixels(self, images: Ordered[EncoderInput]) -> torch.Tensor:
        # The pixels are joined in one writable buffer, since torch accepts no view of immutable bytes.
        joined = bytearray(b"").join(image.pixels for image in images)
        return to_device(np.frombuffer(joined, dtype=np.uint8), self.network.device)

    def _prepare(self, images: Ordered[EncoderInput]) -> _Prepared:
        return _Prepared(images, self._pixels(images), self.network.prepare(_shapes(images), self.backend))

    def _run(self, prepared: Iterable[_Prepared]) -> dict[int, torch.Tensor]:
        features: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        for group in prepared:
            encoded = complete(self.network.encode(group.pixels_B, group.metadata))
            for output_id, part in self._separate(group.images, encoded).items():
                features[output_id].append(part)
        return {key: parts[0] if len(parts) == 1 else torch.cat(parts) for key, parts in features.items()}

    def _separate(self, images: Ordered[EncoderInput], features: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the features of each image. Raises ValueError for features of an unexpected shape or dtype."""
        expected = [self._empty(image) for image in images]
        # The parts are copies: a view would keep the whole batch's storage, and the next replay overwrites a graph's.
        parts = [part.clone() for part in features.split_with_sizes(list(map(len, expected)))]
        for image, part, empty in zip(images, parts, expected, strict=True):
            if (part.shape, part.dtype) != (empty.shape, empty.dtype):
                raise ValueError(f"an image of grid {image.grid} gave {part.shape} {part.dtype}")
        return {image.output_id: part for image, part in zip(images, parts, strict=True)}

    def _empty(self, image: EncoderInput) -> torch.Tensor:
        """Return an uninitialised tensor like the features that the network's `encode` returns for *image*."""
        spec = self.network.spec
        num_tokens = spec.item_tokens(image.grid, image.original_size)
        width = spec.encoder_output_values(image.grid, image.original_size) // num_tokens
        return torch.empty(num_tokens, width, dtype=self.network.dtype, device=self.network.device)


def _shapes(images: Ordered[EncoderInput]) -> list[MediaShape]:
    return [MediaShape(image.grid, image.original_size, image.modality) for image in images]


def cut_video(video: EncoderInput, grids: Ordered[Grid]) -> list[EncoderInput]:
    """Return the parts of *video* with *grids*, under its encoder output id. Its pixels must be in frame order."""
    frame_bytes = len(video.pixels) // video.grid[0]
    parts: list[EncoderInput] = []
    start = 0
    for grid in grids:
        stop = start + grid[0] * frame_bytes
        parts.append(msgspec.structs.replace(video, grid=grid, pixels=video.pixels[start:stop]))
        start = stop
    return parts


def by_modality(images: Ordered[EncoderInput]) -> list[list[EncoderInput]]:
    """Return *images* grouped by modality; patches in a group have the same shape."""
    groups: defaultdict[str, list[EncoderInput]] = defaultdict(list)
    for image in images:
        groups[image.modality].append(image)
    return list(groups.values())


def spread(costs: Ordered[int], num_ranks: int) -> list[int]:
    """Return the rank of each image: the costliest first, each to the rank with the least cost so far.

    Source: longest processing time first, Graham 1969, "Bounds on Multiprocessing Timing Anomalies". Equal costs and
    equal loads are taken in order, so that every rank gets the same result.
    """
    owners = [0] * len(costs)
    loads = [0] * num_ranks
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners
