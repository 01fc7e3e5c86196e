"""The messages between the gateway and a decode process: one job, one answer, each a length and a msgpack struct.

The first bytes of a job carry the descriptor of its slot. Before its first job a decode process sends the measures that
confine it.
"""

import struct
from typing import Any

import msgspec

from saccade.media.header import ImageLimits
from saccade.media.pdf_pages import PdfLimits, PdfPage
from saccade.media.video_header import VideoLimits
from saccade.protocol.media import ImageLayout, SlotRef, VideoHeader
from saccade.protocol.output import Failure
from saccade.transport import framing

READY = b"ready"
"""The fork server's first message: it has imported everything and forks on demand."""

PID = struct.Struct("<i")
"""The fork server's answer to a socket: the id of the new process, sent with its pidfd."""


class ImageJob(msgspec.Struct, frozen=True, array_like=True, tag="image"):
    """Decode *encoded* and write the patches of *layout* to *slot*, or send them back if there is no slot.

    The slot's descriptor is sent along; its name only serves in messages.

    *family* is a folder of saccade.models; *settings* are its Layout's. *layout* is of the upright image.
    """

    encoded: bytes
    family: str
    settings: dict[str, Any]
    layout: ImageLayout
    limits: ImageLimits
    slot: SlotRef | None = None


class VideoHeaderJob(msgspec.Struct, frozen=True, array_like=True, tag="video header"):
    """Read the header of the *encoded* video."""

    encoded: bytes
    limits: VideoLimits


class VideoJob(msgspec.Struct, frozen=True, array_like=True, tag="video"):
    """As ImageJob, for the *encoded* video; *header* comes from a VideoHeaderJob."""

    encoded: bytes
    family: str
    settings: dict[str, Any]
    layout: ImageLayout
    header: VideoHeader
    limits: VideoLimits
    slot: SlotRef | None = None


class PdfJob(msgspec.Struct, frozen=True, array_like=True, tag="pdf"):
    """Read the sizes of the pages of the *encoded* PDF."""

    encoded: bytes
    limits: PdfLimits


class PageJob(msgspec.Struct, frozen=True, array_like=True, tag="page"):
    """As ImageJob, for a *page* of the *encoded* PDF; *page* comes from a PdfJob."""

    encoded: bytes
    family: str
    settings: dict[str, Any]
    layout: ImageLayout
    page: PdfPage
    slot: SlotRef | None = None


SizeJob = VideoHeaderJob | PdfJob
"""Jobs without pixels."""

PixelJob = ImageJob | VideoJob | PageJob
Job = SizeJob | PixelJob


def medium_of(job: Job) -> str:
    """Return what *job* decodes, for errors."""
    if isinstance(job, PdfJob | PageJob):
        return "PDF"
    return "image" if isinstance(job, ImageJob) else "video"


class StageSeconds(msgspec.Struct, frozen=True, array_like=True):
    """Wall-clock seconds: bytes to RGB; resize and patches, straight into the slot; opening and sealing the slot.

    A video's frames are decoded one at a time while patches are written; *decode* then includes both.
    """

    decode: float = 0.0
    preprocess: float = 0.0
    write: float = 0.0


class ImageAnswer(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The patches are in the job's slot or in *inline*; with *failure* there are none.

    A VideoHeaderJob is answered by *video_header*, a PdfJob by *pages*.
    """

    seconds: StageSeconds = StageSeconds()
    inline: bytes | None = None
    failure: Failure | None = None
    video_header: VideoHeader | None = None
    pages: list[PdfPage] | None = None


class Confinement(msgspec.Struct, frozen=True, array_like=True):
    """The first message of a decode process: those of confinement.MEASURES that confine it."""

    holds: tuple[str, ...]


def frame(message: Job | ImageAnswer | Confinement) -> tuple[bytes, bytes]:
    """Return the length prefix and the payload of *message*; joining them would copy the image."""
    payload = msgspec.msgpack.encode(message)
    return framing.prefix(payload), payload
