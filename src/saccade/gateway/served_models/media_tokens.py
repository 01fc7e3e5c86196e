"""What stands for images and videos in a model's prompts, and where in a rendered prompt it is."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from saccade.protocol.media import ImageLayout
from saccade.tokenization.tokenizer import Segment


class Placeholders(NamedTuple):
    """What stands for media in a model's prompts: the token id of an *image*, and what stands for a video.

    A template writes *video_tokens* for a video. Its placeholder is the token *video*, with the id *video_id*; None for
    a model without videos.
    """

    image: int
    video_id: int | None = None
    video: str = ""
    video_tokens: tuple[str, ...] = ()

    @property
    def ids(self) -> frozenset[int]:
        """The ids of all placeholders."""
        return frozenset(placeholder for placeholder in (self.image, self.video_id) if placeholder is not None)

    def of(self, layout: ImageLayout) -> int:
        """Return the id of the placeholders of the image or video of *layout*."""
        return self.image if self.video_id is None or not layout.frames else self.video_id


def media_segments(
    segments: Sequence[Segment], special_tokens: Mapping[str, int], placeholders: Placeholders
) -> Iterator[tuple[int, int, bool]]:
    """Yield for each image and video in a rendered prompt: its segments [start, stop), and whether it is a video."""
    position, width = 0, len(placeholders.video_tokens)
    while position < len(segments):
        here = segments[position : position + width]
        is_video = width > 0 and all(one.is_special for one in here)
        if is_video and tuple(one.text for one in here) == placeholders.video_tokens:
            yield position, position + width, True
            position += width
            continue
        segment = segments[position]
        position += 1
        if segment.is_special and special_tokens.get(segment.text) == placeholders.image:
            yield position - 1, position, False
