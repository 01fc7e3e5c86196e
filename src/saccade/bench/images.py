"""Generates distinct images and videos from a seed; image files are about as large as photos."""

import io

import av
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]
NUM_SCENES = 4
MARGIN = 64
"""An image is cut from one of NUM_SCENES scenes, which are this much larger. A scene costs as much as 20 images."""

OCTAVE = 0.68
"""The contrast of an octave of noise over that of the next coarser one. It makes JPEG files as large as photos are."""

QUALITY = 85
FPS = 8


class Photographer:
    """Makes images and videos of one size. The same seed gives the same files."""

    def __init__(self, seed: int, width: int, height: int) -> None:
        self._width, self._height = width, height
        random = np.random.default_rng([seed, width, height])
        self._scenes = [_scene(random, width + MARGIN, height + MARGIN) for _ in range(NUM_SCENES)]

    def _pixels(self, random: np.random.Generator) -> Pixels:
        """Cut an image from a scene, swap its colours, and put a mark on it."""
        left, top = random.integers(0, MARGIN + 1, 2)
        scene = self._scenes[random.integers(NUM_SCENES)][top : top + self._height, left : left + self._width]
        pixels = np.ascontiguousarray(scene[:, :, random.permutation(3)])
        x, y = random.integers(self._width), random.integers(self._height)
        pixels[y : y + self._height // 8 + 1, x : x + self._width // 8 + 1] = random.integers(0, 256, 3)
        return pixels

    def jpeg(self, random: np.random.Generator) -> bytes:
        """Return an image that *random* chooses."""
        return bytes(simplejpeg.encode_jpeg(self._pixels(random), QUALITY, "RGB", "420"))

    def clip(self, random: np.random.Generator, seconds: float) -> bytes:
        """Return a video, MP4 with H.264: an image that moves sideways. An odd side loses its last pixel."""
        width, height, file = self._width // 2 * 2, self._height // 2 * 2, io.BytesIO()
        pixels = self._pixels(random)[:height, :width]
        with av.open(file, "w", format="mp4") as container:
            # Without this tuning the bytes can differ from run to run.
            stream = container.add_stream("libx264", rate=FPS, options={"tune": "zerolatency", "threads": "1"})
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for index in range(max(1, round(seconds * FPS))):
                frame = av.VideoFrame.from_ndarray(np.roll(pixels, 4 * index, 1), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        return file.getvalue()


def _scene(random: np.random.Generator, width: int, height: int) -> Pixels:
    """Return noise of all scales, [height, width, 3]."""
    total, cells, contrast = np.full((height, width, 3), 128, np.float32), 3, 1.0
    while cells < max(width, height):
        shape = (max(2, cells * height // max(width, height)), max(2, cells * width // max(width, height)), 3)
        noise = Image.fromarray(random.integers(0, 256, shape, np.uint8))
        total += contrast * (np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC), np.float32) - 128)
        cells, contrast = 2 * cells, OCTAVE * contrast
    return total.clip(0, 255).astype(np.uint8)
