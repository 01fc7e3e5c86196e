"""The program of a decode process: it decodes images and writes the model family's patches to the jobs' slots.

`python -m saccade.gateway.images.decode_pool.process --fd N --memory-bytes M` is the fork server. It imports
everything, reads the fonts for PDFs once, and stays single-threaded. For each socket that it gets over descriptor N, it
forks a decode process and answers with that process's id and pidfd. The fork server ends, with all its children, when
the gateway closes the other end of the connection.

A decode process confines itself before its first job. If every measure is in force, it can then open no file or socket,
and reaches a slot only through the job's descriptor. So the fork server imports everything that a job needs, and uses
it once.
"""

import argparse
import codecs
import contextlib
import gc
import io
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import av
import msgspec
import numpy as np
import numpy.typing as npt
from PIL import AvifImagePlugin, Image

from saccade import models
from saccade.errors import ImageTooLarge, InvalidVideo, SaccadeError, StartupError, VideoTooLarge
from saccade.gateway.confinement import confine
from saccade.gateway.images.decode_pool.job import (
    PID,
    READY,
    Confinement,
    DrawingJob,
    ImageAnswer,
    Job,
    LayoutJob,
    PdfJob,
    PixelJob,
    StageSeconds,
    VideoHeaderJob,
    frame,
)
from saccade.media import video
from saccade.media.decode import decode
from saccade.media.exact_resize import resize_planes
from saccade.media.header import ImageLimits
from saccade.media.pdf import Renderer
from saccade.media.pdf_fonts import installed_fonts
from saccade.media.pdf_pages import PdfLimits
from saccade.media.resample import resample
from saccade.media.resize import resize
from saccade.media.video_header import VideoLimits
from saccade.processes.parent_death import tie_to_parent
from saccade.protocol.media import NUMPY_DTYPE, ImageLayout, VideoHeader
from saccade.protocol.output import Failure
from saccade.tracebacks import hide_messages
from saccade.transport import framing
from saccade.transport.shared_memory import SlotError, write_slot

NICENESS = 5
"""Lower priority than the event loop and a network on the CPU, but still a quarter of a core if all are busy.

At 10 it would be a tenth, and a valid image of many megapixels would run into its time limit.
"""


SAMPLE_PDF = (
    b"%PDF-1.7\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj 2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj "
    b"3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]>>endobj trailer<</Root 1 0 R>>"
)
SMALL_BYTES = 4096
"""A smaller answer, without pixels, is sent in one call, so that it wakes the gateway once."""


Writer = Callable[[npt.NDArray[Any]], None]


def fork_server(control: socket.socket) -> socket.socket | None:
    """Fork a process for every socket that arrives.

    Return the socket in each child, and None in the server once the gateway is gone. Raises ConnectionError if the
    gateway ends in the middle of a message.
    """
    # The kernel reaps children by itself; the gateway watches them by pidfd.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # These reach a whole terminal or service at once; the gateway still drains, and needs decode processes for it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    control.sendall(READY)
    server = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return None
        connection = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            _die_with(server)
            os.setsid()
            control.close()
            return connection
        connection.close()
        pidfd = os.pidfd_open(pid)
        socket.send_fds(control, [PID.pack(pid)], [pidfd])
        os.close(pidfd)


def decode_process(connection: socket.socket, memory_bytes: int, pdf: Renderer) -> None:
    """Do one job after another until the gateway closes *connection*; jobs may use *memory_bytes*.

    Raises ConnectionError if the gateway ends in the middle of a message.
    """
    os.nice(NICENESS)
    decoder: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)
    _send(connection, Confinement(confine(memory_bytes)))
    while True:
        prefix, slots = _receive_with_slot(connection)
        try:
            if len(prefix) < framing.PREFIX_BYTES:
                return
            job = decoder.decode(framing.receive(connection, framing.length(prefix)))
            reply = answer(job, slots[0] if slots else None, pdf)
        finally:
            for descriptor in slots:
                os.close(descriptor)
        _send(connection, reply)


def answer(job: Job, slot: int | None, pdf: Renderer) -> ImageAnswer:
    """Do *job* and return its answer. *slot* is the slot's descriptor; *pdf* renders PDFs.

    An unforeseen exception ends the process, and the gateway replaces it.
    """
    try:
        if isinstance(job, VideoHeaderJob):
            return ImageAnswer(video_header=video.read_header(job.encoded, job.limits))
        if isinstance(job, PdfJob):
            return ImageAnswer(pages=pdf.read_pages(job.encoded, job.limits))
        if isinstance(job, DrawingJob):
            drawing = pdf.render(job.encoded, job.page, allows_gaps=job.allows_gaps)
            return ImageAnswer(inline=drawing.image.tobytes(), is_whole=drawing.is_whole)
        if isinstance(job, LayoutJob):
            layout_of = models.load_processor_pixels(job.family).layout_of
            return ImageAnswer(layout=layout_of(job.width, job.height, job.settings))
        return _prepare(job, slot, pdf)
    except SaccadeError as error:
        return ImageAnswer(failure=Failure(error.code, error.message))
    except MemoryError:
        code = VideoTooLarge.code if job.medium == "video" else ImageTooLarge.code
        return ImageAnswer(failure=Failure(code, f"The {job.medium} takes more memory than one may use."))


def _writer(job: PixelJob, pdf: Renderer) -> tuple[Writer, bool]:
    """Return a function that writes the patches, and False if a PDF's page lacks letters, else True.

    An image is decoded before that function is called; video frames are decoded during the call.
    """
    if job.video is not None:
        if job.video.indices:
            frames = _decoded_frames(job.encoded, job.video, job.limits)
        else:
            frames = video.read_frames(job.encoded, job.video, job.layout.frames, job.video_limits)
        return partial(models.load_video_pixels(job.family)(job.settings).write_pixels, frames, job.layout), True
    is_whole = True
    if job.page is None:
        image = decode(job.encoded, job.limits, models.families()[job.family].keeps_alpha)
    else:
        image, is_whole = pdf.render(job.encoded, job.page, allows_gaps=job.allows_gaps)
    return partial(models.load_pixels(job.family)(job.settings).write_pixels, image, job.layout), is_whole


def _decoded_frames(encoded: bytes, header: VideoHeader, limits: ImageLimits) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the frames that gateway.images.frames_url has read, as RGB [height, width, 3], uint8, upright."""
    _, images = msgspec.msgpack.decode(encoded, type=tuple[VideoHeader, list[bytes]])
    for image in images:
        rgb = decode(image, limits)
        if rgb.shape[:2] != (header.height, header.width):
            raise InvalidVideo("The video's frames have several sizes, which is not supported.")
        yield rgb


def _prepare(job: PixelJob, slot: int | None, pdf: Renderer) -> ImageAnswer:
    began = time.perf_counter()
    write_patches, is_whole = _writer(job, pdf)
    decoded = time.perf_counter()

    def write(target: bytearray | memoryview) -> float:
        """Fill *target* and return the seconds it took."""
        start = time.perf_counter()
        write_patches(_array(target, job.layout))
        return time.perf_counter() - start

    inline = None
    try:
        if job.slot is None or slot is None:
            raise SlotError("no slot was given")
        with write_slot(slot, job.slot) as target:
            preprocess = write(target)
    except SlotError:
        # Without shared memory the request is slower, but does not fail.
        buffer = bytearray(job.layout.num_pixel_bytes)
        preprocess = write(buffer)
        inline = bytes(buffer)
    rest = time.perf_counter() - decoded - preprocess
    if job.video is not None:
        return ImageAnswer(StageSeconds(preprocess, 0.0, rest), inline)
    return ImageAnswer(StageSeconds(decoded - began, preprocess, rest), inline, is_whole=is_whole)


def _array(target: bytearray | memoryview, layout: ImageLayout) -> npt.NDArray[Any]:
    return np.frombuffer(target, NUMPY_DTYPE[layout.pixel_dtype]).reshape(layout.pixel_shape)


def _preload(pdf_font_folder: str | None, libraries: Sequence[str]) -> Renderer:
    """Import all that a job needs and use it once, so that no child repeats this or starts a thread.

    Return the PDF renderer.
    """
    # A library of processors would import them if they are installed, and no job needs them.
    sys.modules["torch"] = sys.modules["torchvision"] = None  # type: ignore[assignment]
    # A thread per core would exceed the limits of a decode process, and the other processes use the cores.
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "AVIF", "BMP"):
        sample = io.BytesIO()
        Image.new("RGB", (64, 64)).save(sample, kind)
        decode(sample.getvalue(), ImageLimits())
    header = video.read_header(_sample_video(), VideoLimits())
    list(video.read_frames(_sample_video(), header, (0,), VideoLimits()))
    pdf = Renderer(installed_fonts(pdf_font_folder))
    for page in pdf.read_pages(SAMPLE_PDF, PdfLimits(ImageLimits())):
        pdf.render(SAMPLE_PDF, page)
    for name in filter(models.takes_images, models.families()):
        library = models.families()[name].library
        if library is None:
            models.load_pixels(name)
        elif library in libraries:
            models.load_processor_pixels(name).load_library()
    # A library may load more of itself at its first use, which a confined process cannot do.
    for codec in ("ascii", "latin-1", "utf-16-le", "utf-16-be", "unicode_escape"):
        codecs.lookup(codec)
    sample_rgb = np.zeros((8, 8, 3), np.uint8)
    resize(sample_rgb, 4, 4)
    resize_planes(sample_rgb, 4, 4, "bicubic")
    resample(sample_rgb, 4, 4, Image.Resampling.BICUBIC)
    if len(os.listdir("/proc/self/task")) > 1:
        raise StartupError("The decode server must have one thread only; set OMP_NUM_THREADS=1 in its environment.")
    # Children share these pages as long as the collector leaves them alone.
    gc.collect()
    gc.freeze()
    return pdf


def _sample_video() -> bytes:
    """Return a video with one frame."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=1)
        stream.width = stream.height = 64
        stream.codec_context.thread_count = 1
        container.mux(stream.encode(av.VideoFrame(64, 64, "yuv420p")))
        container.mux(stream.encode())
    return file.getvalue()


def _die_with(parent: int) -> None:
    tie_to_parent(signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit


def _send(connection: socket.socket, message: ImageAnswer | Confinement) -> None:
    prefix, payload = frame(message)
    if len(payload) < SMALL_BYTES:
        connection.sendall(prefix + payload)
    else:
        connection.sendall(prefix)
        connection.sendall(payload)


def _receive_with_slot(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return a job's length prefix, which is empty if the gateway is gone, and any descriptor of a slot."""
    prefix, descriptors, _, _ = socket.recv_fds(connection, framing.PREFIX_BYTES, 1)
    if 0 < len(prefix) < framing.PREFIX_BYTES:
        prefix += framing.receive(connection, framing.PREFIX_BYTES - len(prefix))
    return prefix, descriptors


def main() -> None:
    """Run the fork server and, in each fork, a decode process."""
    parser = argparse.ArgumentParser(prog="saccade.gateway.images.decode_pool.process")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--pdf-font-folder")
    parser.add_argument("--processor-library", action="append", default=[])
    arguments = parser.parse_args()
    hide_messages()
    pdf = _preload(arguments.pdf_font_folder, arguments.processor_library)
    # The connection breaks if the gateway ends before it has read everything, as after a refused start.
    with contextlib.suppress(ConnectionError):
        connection = fork_server(socket.socket(fileno=arguments.fd))
        if connection is not None:
            decode_process(connection, arguments.memory_bytes, pdf)


if __name__ == "__main__":
    main()
