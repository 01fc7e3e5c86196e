"""Reads videos' headers and frames from memory alone. Runs in decode processes, with FFmpeg (PyAV) and one thread.

FFmpeg reads the bytes through a Python object. It may use only container formats that name no other files, and listed
decoders. So no path, protocol or playlist is involved. What a container states is not trusted. Frames are counted by
their packets, without those of hidden frames, and the size is that of the first decoded frame. A video whose frames
change their size is refused. The rate comes from the packets' times, unless the container has counted all frames, or
states a rate that fits the times.
"""

import errno
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

import av
import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from saccade.errors import InvalidVideo, UnsupportedVideoFormat, VideoTooLarge
from saccade.media.video_header import MAX_FPS, MIN_FPS, VideoLimits, demuxer
from saccade.protocol.media import VideoHeader

CODECS = ("h264", "hevc", "vp8", "vp9", "libdav1d", "mpeg4", "gif")
"""FFmpeg's names of the decoders that are used."""

UNKNOWN_FPS = 24.0
"""The rate of a video that states none and has no two frames at different times, such as one of a single frame."""

AGREEMENT = 0.5
"""A stated rate is exact if it puts the last frame less than this part of a frame from that frame's own time."""

VP8_SHOWN = 0b10000
"""The bit of the first byte of a frame of VP8 that is shown (RFC 6386, 9.1)."""

BROKEN = (av.FFmpegError, ValueError, TypeError, LookupError, ArithmeticError, OSError, RuntimeError)
"""The exceptions that PyAV is known to raise for damaged videos."""


def read_header(encoded: bytes, limits: VideoLimits) -> VideoHeader:
    """Return an encoded video's header, after decoding the first frame and visiting every packet.

    Raises UnsupportedVideoFormat, VideoTooLarge and InvalidVideo.
    """
    with _opened(encoded, limits) as (container, stream):
        first: VideoFrame | None = None
        pts, dts = list[int | None](), list[int | None]()
        for packet in _packets(container, stream):
            if packet.size and not packet.is_discard and _is_shown(packet, stream.codec_context.name):
                pts.append(packet.pts)
                dts.append(packet.dts)
                limits.check_count(len(pts))
            if first is None:
                first = next(iter(stream.decode(packet)), None)
        if first is None:
            raise InvalidVideo("The video has no frame that can be decoded: it is empty, damaged or truncated.")
        width, height = _upright_size(first)
        limits.check_size(width, height)
        fps = _rate(stream, len(pts), _measured_rate(stream, pts) or _measured_rate(stream, dts))
        if not MIN_FPS <= fps <= MAX_FPS:
            raise InvalidVideo(f"The video has {fps:g} frames a second; from {MIN_FPS} to {MAX_FPS:g} are accepted.")
        return VideoHeader(max(1, len(pts)), fps, width, height)


def read_frames(
    encoded: bytes, header: VideoHeader, indices: Sequence[int], limits: VideoLimits
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the frames at ascending *indices*, upright, as RGB uint8 [height, width, 3].

    Raises the errors of read_header(), and InvalidVideo if the video has fewer frames or frames of another size.
    """
    with _opened(encoded, limits) as (container, stream):
        pending = iter(indices)
        next_index = next(pending, None)
        decoded = (frame for packet in _packets(container, stream) for frame in stream.decode(packet))
        for index, frame in enumerate(decoded):
            if next_index is None:
                return
            if index == next_index:
                yield _upright_rgb(frame, header)
                next_index = next(pending, None)
        if next_index is not None:
            raise InvalidVideo("The video is damaged or truncated: not all of its frames could be decoded.")


@contextmanager
def _opened(encoded: bytes, limits: VideoLimits) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a video. In the block, FFmpeg's errors become request errors."""
    limits.check_bytes(len(encoded))
    name = demuxer(encoded)
    # FFmpeg uses no protocol here: it opens nothing except the bytes.
    options = {"protocol_whitelist": "none", "codec_whitelist": ",".join(CODECS)}
    try:
        with av.open(io.BytesIO(encoded), "r", format=name, options=options, metadata_errors="ignore") as container:
            yield container, _stream(container, limits)
    except MemoryError:
        raise _too_much_memory() from None
    except BROKEN as error:
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            raise _too_much_memory() from None
        raise InvalidVideo("The video is damaged or truncated: it could not be decoded.") from None


def _stream(container: InputContainer, limits: VideoLimits) -> VideoStream:
    if not container.streams.video:
        raise InvalidVideo("The file has no video.")
    stream = container.streams.video[0]
    context = stream.codec_context
    if context is None or context.name not in CODECS:
        raise UnsupportedVideoFormat(
            "The video's codec is not supported; send H.264, H.265, VP8, VP9, AV1, MPEG-4 or GIF."
        )
    limits.check_size(context.width, context.height)
    context.thread_count = 1
    context.options = {"max_pixels": str(limits.max_pixels)}
    return stream


def _packets(container: InputContainer, stream: VideoStream) -> "Iterator[Packet[VideoStream]]":
    """Yield the packets, and finally the one that makes a decoder return the frames that it still holds.

    A packet that is cut off in a truncated file is left out, so that the frames before it are served.
    """
    return (packet for packet in container.demux(stream) if not packet.is_corrupt)


def _is_shown(packet: "Packet[VideoStream]", codec: str) -> bool:
    """Whether a packet's frame is shown. VP8 encoders also store hidden frames, to predict later frames from them."""
    return codec != "vp8" or bool(memoryview(packet)[0] & VP8_SHOWN)


def _measured_rate(stream: VideoStream, times: Sequence[int | None]) -> Fraction | None:
    """Return the rate that the packets' *times*, in the stream's time base, imply; None if they imply none."""
    known = [time for time in times if time is not None]
    if len(known) < max(2, len(times)) or stream.time_base is None:
        return None
    seconds = (max(known) - min(known)) * stream.time_base
    return (len(known) - 1) / seconds if seconds * int(MAX_FPS) >= len(known) - 1 else None


def _rate(stream: VideoStream, num_frames: int, measured: Fraction | None) -> float:
    """Return the average rate in frames per second.

    MP4 has a table of all frames and GIF their delays, whose average FFmpeg computes. Matroska and fragmented MP4 may
    state a nominal rate, that of the codec or of the first frames, or none. If such a rate does not agree with
    *measured*, *measured* is returned.
    """
    stated = stream.average_rate
    if measured is None or (stated and stream.frames >= num_frames):
        return float(stated or UNKNOWN_FPS)
    last = num_frames - 1
    return float(stated if stated and abs(last * stated / measured - last) < AGREEMENT else measured)


def _upright_size(frame: VideoFrame) -> tuple[int, int]:
    return (frame.height, frame.width) if frame.rotation % 180 else (frame.width, frame.height)


def _upright_rgb(frame: VideoFrame, header: VideoHeader) -> npt.NDArray[np.uint8]:
    if _upright_size(frame) != (header.width, header.height):
        raise InvalidVideo("The video's frames change their size, which is not supported.")
    rgb = np.asarray(frame.to_ndarray(format="rgb24", threads=1), np.uint8)
    return np.ascontiguousarray(np.rot90(rgb, frame.rotation // 90)) if frame.rotation else rgb


def _too_much_memory() -> VideoTooLarge:
    return VideoTooLarge("Decoding the video takes more memory than a video may use.")
