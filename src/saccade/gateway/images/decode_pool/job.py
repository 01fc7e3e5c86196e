"""The messages between the gateway and a decode process: a job, then its answer.

Each is sent as a length and a msgpack struct. The first bytes of a job carry the descriptor of its slot, if it has one.
Before its first job, a decode process sends the measures that confine it.
"""

import struct
from typing import Any, ClassVar

import msgspec

from saccade.errors import ImageTooLarge, InternalError
from saccade.media.header import ImageLimits
from saccade.media.pdf_pages import PdfLimits, PdfPage
from saccade.media.video_header import VideoLimits
from saccade.protocol.media import ImageLayout, SlotRef, VideoHeader
from saccade.protocol.output import Failure
from saccade.transport import framing

RGB_BYTES = 3
"""Of a pixel."""

MAX_TENSOR_BYTES = 256 << 20
"""The limit of an image's tensors that the checkpoint's own processor makes."""

READY = b"ready"
"""The fork server's first message: it has imported everything and forks on demand."""

PID = struct.Struct("<i")
"""The fork server's answer to a socket: the id of the new process, sent with its pidfd."""


class VideoHeaderJob(msgspec.Struct, frozen=True, array_like=True, tag="video header"):
    """Read the header of the *encoded* video."""

    medium: ClassVar = "video"
    num_pixel_bytes: ClassVar = 0
    encoded: bytes
    limits: VideoLimits


class PdfJob(msgspec.Struct, frozen=True, array_like=True, tag="pdf"):
    """Read the page sizes of the *encoded* PDF."""

    medium: ClassVar = "PDF"
    num_pixel_bytes: ClassVar = 0
    encoded: bytes
    limits: PdfLimits


class DrawingJob(msgspec.Struct, frozen=True, array_like=True, tag="drawing"):
    """Draw a page of the *encoded* PDF. Its pixels come inline: RGB, uint8 [height, width, 3]."""

    medium: ClassVar = "PDF"
    encoded: bytes
    page: PdfPage
    allows_gaps: bool = False
    """Whether the page may lack letters that no font has."""

    @property
    def num_pixel_bytes(self) -> int:
        """The size of the answer's pixels, in bytes."""
        return self.page.height * self.page.width * RGB_BYTES


class LayoutJob(msgspec.Struct, frozen=True, array_like=True, tag="layout"):
    """Compute the layout of an upright image, for a family that runs the checkpoint's own processor."""

    medium: ClassVar = "image"
    num_pixel_bytes: ClassVar = 0
    family: str
    """A folder of saccade.models."""
    settings: dict[str, Any]
    """Those of the family's Layout."""
    width: int
    """Pixels."""
    height: int

    def checked(self, layout: ImageLayout | None) -> ImageLayout:
        """Return the answer's *layout*, whose size a compromised process may have invented.

        Raises ImageTooLarge, and InternalError if there is none.
        """
        if layout is None:
            raise InternalError("A decode process answered without the image's layout.")
        if layout.num_pixel_bytes > MAX_TENSOR_BYTES:
            raise ImageTooLarge(
                f"The model's processor makes {layout.num_pixel_bytes} bytes of an image of {self.width} x "
                f"{self.height} pixels; at most {MAX_TENSOR_BYTES} are served. Send a smaller image."
            )
        return layout


class PixelJob(msgspec.Struct, frozen=True, array_like=True, tag="pixels"):
    """Decode an image and write its patches."""

    encoded: bytes
    """An image, a video or a PDF."""
    family: str
    """A folder of saccade.models."""
    settings: dict[str, Any]
    """Those of the family's Layout."""
    layout: ImageLayout
    """Of the upright image."""
    limits: ImageLimits
    video_limits: VideoLimits
    video: VideoHeader | None = None
    """The header of a video, from a VideoHeaderJob."""
    page: PdfPage | None = None
    """The page of a PDF to decode, from a PdfJob."""
    allows_gaps: bool = False
    """Whether a page may lack letters that no font has."""
    slot: SlotRef | None = None
    """Where the patches go; None to send them back. The slot's descriptor is sent along, and its name is for messages
    only."""

    @property
    def num_pixel_bytes(self) -> int:
        """The size of the patches, in bytes."""
        return self.layout.num_pixel_bytes

    @property
    def medium(self) -> str:
        """The medium, for errors: image, video or PDF."""
        return "PDF" if self.page is not None else "image" if self.video is None else "video"


InlineJob = VideoHeaderJob | PdfJob | DrawingJob | LayoutJob
"""Jobs without a slot."""

Job = InlineJob | PixelJob


class StageSeconds(msgspec.Struct, frozen=True, array_like=True):
    """The wall-clock seconds that each stage of a job took."""

    decode: float = 0.0
    """From bytes to RGB. A video's frames are decoded one at a time while patches are written, so for a video this
    includes *preprocess*."""
    preprocess: float = 0.0
    """Resizing, and writing patches straight into the slot."""
    write: float = 0.0
    """Opening and sealing the slot."""


class ImageAnswer(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The answer to a job."""

    seconds: StageSeconds = StageSeconds()
    inline: bytes | None = None
    """The patches; None if they are in the job's slot."""
    failure: Failure | None = None
    """Why there are none."""
    video_header: VideoHeader | None = None
    """For a VideoHeaderJob."""
    pages: list[PdfPage] | None = None
    """For a PdfJob."""
    layout: ImageLayout | None = None
    """For a LayoutJob."""
    is_whole: bool = True
    """False for a page that lacks letters."""


class Confinement(msgspec.Struct, frozen=True, array_like=True):
    """A decode process's first message, which says which of confinement.MEASURES are in force."""

    holds: tuple[str, ...]


def frame(message: Job | ImageAnswer | Confinement) -> tuple[bytes, bytes]:
    """Return the length prefix and the payload of *message* separately, because joining them would copy the image."""
    payload = msgspec.msgpack.encode(message)
    return framing.prefix(payload), payload
