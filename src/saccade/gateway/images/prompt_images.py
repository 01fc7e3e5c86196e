"""One prompt's images, and which of them need pixels."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from saccade.errors import UnsupportedParameter
from saccade.gateway.images.encoded_image import EncodedImage
from saccade.models.family import Layout
from saccade.protocol.media import Span


@dataclass(frozen=True)
class PromptImages:
    """One prompt's images: spans[i] are the placeholders of images[i].

    The worker should hold the encoder outputs of *held_hashes*, so these images are sent without pixels.
    """

    images: tuple[EncodedImage, ...] = ()
    spans: tuple[tuple[Span, ...], ...] = ()
    held_hashes: frozenset[bytes] = frozenset()

    @property
    def num_pixel_bytes(self) -> int:
        """Size of the patches to prepare, in bytes; a repeated image counts once."""
        return sum(image.layout.num_pixel_bytes for image in self.to_prepare().values())

    def to_prepare(self) -> dict[bytes, EncodedImage]:
        """Return the images that need pixels, keyed by content hash. A repeated image appears once."""
        images: dict[bytes, EncodedImage] = {}
        for image in self.images:
            if image.content_hash not in self.held_hashes:
                images.setdefault(image.content_hash, image)
        return images

    def on_wire(
        self, layout: Layout, pixel_dtype: str, needs_pixels: Callable[[bytes], bool] = lambda _: True
    ) -> "PromptImages":
        """Return a copy in a worker's pixel format: uint8 for Saccade's own workers, normalised otherwise.

        Images whose content hash does not satisfy *needs_pixels* are sent without them. Raises UnsupportedParameter if
        the model's family or a video has no normalised format.
        """
        held_hashes = frozenset(image.content_hash for image in self.images if not needs_pixels(image.content_hash))
        images = self.images
        if pixel_dtype != "uint8":
            _refuse_videos(images)
            images = tuple(
                dataclasses.replace(image, layout=layout.external(image.layout, pixel_dtype)) for image in self.images
            )
        return PromptImages(images, self.spans, held_hashes)

    def is_by_hash(self, index: int) -> bool:
        """Return whether image *index* exists and is sent by its hash."""
        return 0 <= index < len(self.images) and self.images[index].content_hash in self.held_hashes

    def all_by_hash(self) -> "PromptImages":
        """Return a copy in which every image is sent by its hash."""
        return dataclasses.replace(self, held_hashes=frozenset(image.content_hash for image in self.images))

    def by_hash(self) -> "PromptImages":
        """Return a copy with the encoded bytes of only the images that are sent by their hash."""
        images = (
            image if self.is_by_hash(index) else dataclasses.replace(image, encoded=b"")
            for index, image in enumerate(self.images)
        )
        return dataclasses.replace(self, images=tuple(images))

    def images_at(self, media: Sequence[int]) -> "PromptImages":
        """Return the images at these indices, all with pixels."""
        return PromptImages(tuple(self.images[i] for i in media), tuple(self.spans[i] for i in media))


def _refuse_videos(images: Iterable[EncodedImage]) -> None:
    for image in images:
        if image.video is not None:
            raise UnsupportedParameter("This model's workers take no videos; send images.", image.field)
