"""Chooses the images to encode, and pins encoder outputs for as long as sequences need them. Does not import torch.

A chunk ends before an image that does not fit the step's patch budget. An image larger than the whole budget is encoded
alone. While no sequence decodes, images are encoded in the step that needs them. While a sequence decodes, a step gets
only part of the budget, so that the next tokens come soon. An image that exceeds this part is encoded over several
steps: each step passes all its patches through some of the layers. Chunks end before the image until its last layer is
planned. An image that runs as a CUDA graph is encoded whole.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from saccade.engine.core.counters import Counters
from saccade.engine.core.encoder_cache import EncoderCache
from saccade.engine.core.frames import Frames
from saccade.engine.core.images import EncoderKey, RequestImage, Until
from saccade.engine.core.kv.manager import BlockManager
from saccade.engine.core.schedule import Budgets, Schedule, ScheduleBuilder, completes
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.step import EncoderSlice
from saccade.errors import InternalError, SaccadeError
from saccade.models.spec import IMAGE, Grid, ModelSpec, Size

PART_WITH_DECODES = 4
"""While a sequence decodes, a step encodes one of this many parts of its budget. On a GPU this is 4096 patches, which
predictions for an H100 put at 15 ms, next to 6 ms for the decodes of a model of 8B.
"""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True)
class EncodeCosts:
    """The cost of encoding a media item.

    *patches* returns how many patches to compute for a grid, and *num_bytes* the size of the features for a grid and an
    original size. All patches pass through *num_layers* layers; the last one is the projector, which comes after the
    encoder's own layers. A video is encoded part by part; *parts* returns the number of parts for a grid and a
    modality. An image of up to *most_whole* patches is encoded in one step.
    """

    patches: Callable[[Grid], int]
    num_bytes: Callable[[Grid, Size | None], int]
    num_layers: int = 1
    parts: Callable[[Grid, str], int] = lambda *_: 1
    most_whole: int = 0

    @staticmethod
    def of_model(spec: ModelSpec, itemsize: int, most_patches: int, most_whole: int = 0) -> "EncodeCosts":
        """Return the costs for the model of *spec*, whose feature values have *itemsize* bytes each.

        A part of a video has at most *most_patches* patches.
        """

        def parts(grid: Grid, modality: str) -> int:
            return 1 if modality == IMAGE else len(spec.video_parts(grid, most_patches))

        num_layers = spec.num_encoder_layers + 1 if spec.takes_media else 1
        return EncodeCosts(
            spec.encode_cost,
            lambda *shape: spec.encoder_output_values(*shape) * itemsize,
            num_layers,
            parts,
            most_whole,
        )


class _Paused(NamedTuple):
    """An image that is not encoded yet, or only in part: *num_layers* layers are left, each over *patches* patches."""

    output_id: int
    num_layers: int
    patches: int


@dataclass(eq=False)
class EncoderScheduler:
    """Plans the encoder's work within each step's *budgets*.

    Steps in flight complete the images in *launched*. *frames* receives the names of the slots that were read.
    """

    budgets: Budgets
    block_manager: BlockManager
    encoder_cache: EncoderCache
    costs: EncodeCosts
    frames: Frames
    counters: Counters
    launched: set[EncoderKey] = field(default_factory=set)
    _decodes: bool = False
    _paused: dict[EncoderKey, _Paused] = field(default_factory=dict)

    def share(self, sequence: Sequence, samples: Iterable[Sequence]) -> None:
        """Give the request's other *samples* the same pins that *sequence* has."""
        for image in sequence.images:
            for until in [until for index, until in image.pins if index == sequence.index]:
                for sample in samples:
                    self.encoder_cache.pin(image, sample.index, until)

    @property
    def has_unpinned(self) -> bool:
        """Whether steps have begun an image that no request needs any more."""
        return any(not self.encoder_cache.is_pinned(key) for key in self._paused)

    def begin_step(self, builder: ScheduleBuilder, decodes: bool) -> None:
        """Start scheduling a step, and continue with the images that earlier steps began.

        *decodes* says whether a sequence decodes in the step. If none does, the images are completed.
        """
        self.abandon_unpinned()
        self._decodes, budget = decodes, self.budgets.encode_budget_patches
        patches = max(1, budget // PART_WITH_DECODES) if decodes else budget
        builder.patch_layers = patches * self.costs.num_layers
        for key, paused in list(self._paused.items()):
            if not decodes or not builder.slices or paused.patches <= builder.patch_layers_left:
                self._go_on(key, paused, builder)

    def schedule_images(self, sequence: Sequence, num_tokens: int, builder: ScheduleBuilder) -> int:
        """Plan the encoder's work for a chunk, and return the chunk's length.

        The chunk ends before an image that stays unencoded.
        """
        start = sequence.num_launched_tokens
        for run, image in sequence.media_between(start, start + num_tokens):
            is_claimed = image.is_claimed(sequence.index) or self._claim(sequence, image, builder)
            is_encoded = image.key in self.encoder_cache or image.key in self.launched
            if not (is_claimed and (is_encoded or completes(image.key, builder.encode, builder.slices))):
                return max(0, run.start - start)
        return num_tokens

    def abandon(self, keys: Iterable[EncoderKey]) -> None:
        """Forget images that will not be encoded after all."""
        for key in keys:
            self.launched.discard(key)
            self._paused.pop(key, None)
            self.encoder_cache.abandon(key)

    def abandon_unpinned(self) -> None:
        """Forget the images that steps have begun but that no request needs any more."""
        self.abandon([key for key in self._paused if not self.encoder_cache.is_pinned(key)])

    def abandon_step(self, schedule: Schedule) -> None:
        """Forget the images of a step that failed."""
        self.abandon([key for key in schedule.images if self._is_of(schedule, key)])

    def encoded_by(self, schedule: Schedule) -> dict[int, EncoderKey]:
        """Return the images that a step has completed, by encoder output id.

        If an earlier step failed, an image of this step may have been forgotten or begun again. Such images are left
        out.
        """
        keys = [key for key in schedule.encoded if self._is_of(schedule, key)]
        return {self.encoder_cache.output_id(key): key for key in keys}

    def _is_of(self, schedule: Schedule, key: EncoderKey) -> bool:
        """Whether *key* still has an entry, and the same one that the step computed a slice for, if it computed one."""
        part = schedule.slices.get(key)
        is_known = self.encoder_cache.has_begun(key)
        return is_known and (part is None or self.encoder_cache.output_id(key) == part.output_id)

    def _claim(self, sequence: Sequence, image: RequestImage, builder: ScheduleBuilder) -> bool:
        """Pin an image that is encoded or will be. Return False if neither is possible."""
        if self.encoder_cache.has_begun(image.key):
            self.counters.encoder_cache_hits_total += 1
        elif not image.has_pixels:
            builder.lacking[sequence] = sequence.images_without_pixels
            return False
        elif not (self._fits(image, builder) and self._begin(sequence, image, builder)):
            return False
        self.encoder_cache.pin(image, sequence.index, Until.COMPUTED)
        return True

    def _begin(self, sequence: Sequence, image: RequestImage, builder: ScheduleBuilder) -> bool:
        """Plan to encode an image in this step, or at least to begin it. Return False if its pixels cannot be read."""
        try:
            pixels = image.read_patches(self.frames[sequence.connection].released)
        except SaccadeError as error:
            builder.unreadable[sequence] = image.key, error
            return False
        except Exception:
            logger.exception("reading an image failed", request_id=sequence.request_id)
            builder.unreadable[sequence] = image.key, InternalError("Reading the image's pixels failed.", image.param)
            return False
        self.encoder_cache.begin_image(image.key, self.costs.num_bytes(image.key.grid, image.key.original_size))
        builder.encode[image.key] = pixels
        paused = self._unencoded(image.key)
        num_patch_layers = paused.num_layers * paused.patches
        if num_patch_layers > builder.patch_layers_left and self._may_pause(image.key):
            self._go_on(image.key, paused, builder)
        else:
            builder.add_patch_layers(num_patch_layers)
            builder.runs_encoder_layers = True
        return True

    def _unencoded(self, key: EncoderKey) -> _Paused:
        """Return all the work for an image that has an entry in the cache."""
        num_parts = self.costs.parts(key.grid, key.modality)
        patches = -(-self.costs.patches(key.grid) // num_parts)
        return _Paused(self.encoder_cache.output_id(key), num_parts * self.costs.num_layers, patches)

    def _may_pause(self, key: EncoderKey) -> bool:
        return self._decodes and self.costs.num_layers > 1 and self.costs.patches(key.grid) > self.costs.most_whole

    def _go_on(self, key: EncoderKey, paused: _Paused, builder: ScheduleBuilder) -> None:
        """Plan the next layers of an image: as many as the step has room for, at least one."""
        num_layers = paused.num_layers
        if self._decodes:
            num_layers = min(num_layers, max(1, builder.patch_layers_left // paused.patches))
        builder.add_patch_layers(num_layers * paused.patches)
        builder.runs_encoder_layers |= paused.num_layers > 1
        num_left = paused.num_layers - num_layers
        builder.slices[key] = EncoderSlice(paused.output_id, num_layers if num_left else None)
        if num_left:
            self._paused[key] = paused._replace(num_layers=num_left)
        else:
            self._paused.pop(key, None)

    def lacking_images(self, sequence: Sequence) -> list[int]:
        """Return the indices of all images of *sequence* that lack pixels, if it needs one that is not encoded either.

        All of them are listed because the gateway is asked only once, and other encoder outputs may be evicted before
        it answers. If none is lacking, the encoder outputs of these images are pinned until the sequence ends.
        """
        indices = sequence.images_without_pixels
        if not indices:
            return []
        num_reused = sequence.num_tokens - self.block_manager.num_missing_tokens(sequence)
        absent = [sequence.images[index] for index in indices]
        for image in absent:
            is_here = self.encoder_cache.has_begun(image.key)
            if image.is_requested or (image.end > num_reused and not is_here):
                return indices
        for image in absent:
            if self.encoder_cache.has_begun(image.key):
                self.encoder_cache.pin(image, sequence.index, Until.ENDED)
        return []

    def commit(self, sequence: Sequence, start: int) -> None:
        """Unpin the encoder outputs whose last token was computed at or after *start*."""
        for _, image in sequence.media_between(start, sequence.num_computed_tokens):
            if image.end <= sequence.num_computed_tokens:
                self.encoder_cache.unpin(image, sequence.index, (Until.COMPUTED,))

    def unpin(self, sequence: Sequence, untils: Collection[Until] = tuple(Until)) -> None:
        """Remove the sequence's pins early, by default all of them, because it has ended or waits for pixels."""
        for image in sequence.images:
            self.encoder_cache.unpin(image, sequence.index, untils)

    def _fits(self, image: RequestImage, builder: ScheduleBuilder) -> bool:
        # An image larger than the whole budget would never fit, so it is encoded alone.
        is_first = not (builder.encode or builder.slices)
        num_layers = 1 if self._may_pause(image.key) else self.costs.num_layers
        return is_first or self.costs.patches(image.key.grid) * num_layers <= builder.patch_layers_left
