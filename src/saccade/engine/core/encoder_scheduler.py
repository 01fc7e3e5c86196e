"""Choose the images to encode, and pin encoder outputs for as long as sequences need them. No torch.

A chunk ends before an image that does not fit the step's patch budget. An image larger than the whole budget is encoded
alone. While no sequence decodes, images are encoded in the step that needs them. While a sequence decodes, a step has a
part of the budget, so that the next tokens come soon. After a larger image, no image is encoded until as many steps
have passed as have its patches in their budgets.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import structlog

from saccade.engine.core.counters import Counters
from saccade.engine.core.encoder_cache import EncoderCache
from saccade.engine.core.frames import Frames
from saccade.engine.core.images import EncoderKey, RequestImage, Until
from saccade.engine.core.kv.manager import BlockManager
from saccade.engine.core.schedule import Budgets, ScheduleBuilder
from saccade.engine.core.sequence import Sequence
from saccade.errors import InternalError, SaccadeError
from saccade.models.spec import Grid, ModelSpec, Size

PART_WITH_DECODES = 4
"""While a sequence decodes, a step encodes one of this many parts of its budget. On a GPU this is 4096 patches, which
predictions for an H100 put at 15 ms, next to 6 ms for the decodes of a model of 8B.
"""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True)
class EncodeCosts:
    """The cost of encoding a media item of a grid and original size: patches to compute, bytes of features to keep."""

    patches: Callable[[Grid], int]
    num_bytes: Callable[[Grid, Size | None], int]

    @staticmethod
    def of_model(spec: ModelSpec, itemsize: int) -> "EncodeCosts":
        """Return the costs for the model of *spec*, whose features have *itemsize* bytes each."""
        return EncodeCosts(spec.encode_cost, lambda *shape: spec.encoder_output_values(*shape) * itemsize)


@dataclass(eq=False)
class EncoderScheduler:
    """Plans the encoder, within *budgets* of each step. Steps in flight encode the images of *launched*.

    *frames* get the names of slots that were read.
    """

    budgets: Budgets
    block_manager: BlockManager
    encoder_cache: EncoderCache
    costs: EncodeCosts
    frames: Frames
    counters: Counters
    launched: set[EncoderKey] = field(default_factory=set)
    _decodes: bool = False
    _owed_patches: int = 0

    def share(self, sequence: Sequence, samples: Iterable[Sequence]) -> None:
        """Pin for further samples of a request the encoder outputs that *sequence* has pinned."""
        for image in sequence.images:
            for until in [until for index, until in image.pins if index == sequence.index]:
                for sample in samples:
                    self.encoder_cache.pin(image, sample.index, until)

    def begin_step(self, decodes: bool) -> int:
        """Start scheduling a step, and return its patches. *decodes* says whether a sequence decodes in the step."""
        budget = self.budgets.encode_budget_patches
        part = max(1, budget // PART_WITH_DECODES)
        self._decodes = decodes
        self._owed_patches = max(0, self._owed_patches - part) if decodes else 0
        if not decodes:
            return budget
        return 0 if self._owed_patches else part

    def schedule_images(self, sequence: Sequence, num_tokens: int, builder: ScheduleBuilder) -> int:
        """Plan the encoder's work for a chunk, and return its length. It ends before an image that stays unencoded."""
        start = sequence.num_launched_tokens
        for run, image in sequence.media_between(start, start + num_tokens):
            is_claimed = image.is_claimed(sequence.index) or self._claim(sequence, image, builder)
            is_there = image.key in self.encoder_cache or image.key in builder.encode or image.key in self.launched
            if not (is_claimed and is_there):
                return max(0, run.start - start)
        return num_tokens

    def abandon(self, keys: Iterable[EncoderKey]) -> None:
        """Forget images that are not encoded after all."""
        for key in keys:
            self.launched.discard(key)
            self.encoder_cache.abandon(key)

    def _claim(self, sequence: Sequence, image: RequestImage, builder: ScheduleBuilder) -> bool:
        """Pin an image that is encoded, or planned to be. Return False if it cannot be."""
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
        """Plan to encode an image in this step. Return False if it cannot be read."""
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
        patches = self.costs.patches(image.key.grid)
        builder.patches = max(0, builder.patches - patches)
        if self._decodes:
            self._owed_patches += patches
        return True

    def lacking_images(self, sequence: Sequence) -> list[int]:
        """Return the indices of the images of *sequence* without pixels, if it needs one that is not encoded either.

        The list has all images without pixels: the gateway is asked only once, and other encoder outputs may be evicted
        before it answers. If the sequence lacks no image, its encoder outputs are pinned until it ends.
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
        """Unpin the encoder outputs whose last token, from *start* on, was computed."""
        for _, image in sequence.media_between(start, sequence.num_computed_tokens):
            if image.end <= sequence.num_computed_tokens:
                self.encoder_cache.unpin(image, sequence.index, (Until.COMPUTED,))

    def unpin(self, sequence: Sequence, untils: Collection[Until] = tuple(Until)) -> None:
        """Undo pins of *sequence* early: all by default, when it has ended or waits for pixels."""
        for image in sequence.images:
            self.encoder_cache.unpin(image, sequence.index, untils)

    def _fits(self, image: RequestImage, builder: ScheduleBuilder) -> bool:
        # An image larger than the whole budget would never fit, so it is encoded alone.
        is_first = builder.patches > 0 and not builder.encode
        return is_first or self.costs.patches(image.key.grid) <= builder.patches
