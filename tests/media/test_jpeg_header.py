"""Kinds of JPEG: what libjpeg-turbo decodes is decoded, and the other kinds are refused by name."""

import io

import attacks
import images
import jpegs
import numpy as np
import pytest
from PIL import Image
from tables import table

from saccade.errors import UnsupportedImageFormat
from saccade.media.decode import decode
from saccade.media.header import ImageLimits, read_header

PLAIN = images.encode(images.random_image(20, 10), "JPEG")
HEADS = {"": b"", "JFIF": jpegs.JFIF, "Adobe RGB": jpegs.ADOBE_RGB, "Adobe YCC": jpegs.ADOBE_YCC}


def lossless(components: int, bits: int, head: str) -> bytes:
    pixels = np.random.default_rng(components).integers(0, 1 << bits, (5, 7, components))
    return jpegs.lossless(pixels, bits, HEADS[head])


@table(
    ("components", "head"),
    [(1, ""), (1, "JFIF"), (1, "Adobe YCC"), (3, ""), (3, "Adobe RGB"), (4, ""), (4, "JFIF"), (4, "Adobe RGB")],
)
def test_lossless_jpegs_of_plain_colours_are_decoded(components: int, head: str) -> None:
    encoded = lossless(components, 8, head)
    with Image.open(io.BytesIO(encoded)) as image:
        assert np.array_equal(decode(encoded, ImageLimits()), np.asarray(image.convert("RGB")))


def with_frame(marker: int, head: bytes = b"") -> bytes:
    return jpegs.SOI + head + jpegs.of_frame(PLAIN, marker)[2:]


@table(
    ("encoded", "kind"),
    [
        *((lossless(components, bits, ""), f"lossless, with {bits} bits a sample")
          for components in (1, 3) for bits in (2, 12, 16)),
        *((lossless(3, 8, head), "lossless, in other colours than RGB") for head in ("JFIF", "Adobe YCC")),
        (lossless(4, 8, "Adobe YCC"), "lossless, in other colours than RGB"),
        (lossless(2, 8, ""), "lossless, with 2 components"),
        *((with_frame(marker), "hierarchical") for marker in (0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF, 0xDE)),
        (with_frame(0xC0, jpegs.frame(0xDE)), "hierarchical"),
        (with_frame(0xCB), "lossless with arithmetic coding"),
        (with_frame(0xF7), "JPEG-LS"),
        *((jpegs.SOI + jpegs.frame(marker, bits=12) + PLAIN[2:], "with 12 bits a sample") for marker in (0xC1, 0xC2)),
        *((jpegs.SOI + jpegs.frame(0xC0, components=number) + PLAIN[2:], f"with {number} components")
          for number in (2, 5)),
        (jpegs.SOI + attacks.segment(0xFE, b"x") + b"\0\0" + lossless(1, 16, "")[2:],
         "lossless, with 16 bits a sample"),
    ],
)  # fmt: skip
def test_other_kinds_of_jpeg_are_refused_by_name(encoded: bytes, kind: str) -> None:
    with pytest.raises(UnsupportedImageFormat) as refused:
        read_header(encoded)
    assert refused.value.message == (
        f"The JPEG is {kind}, which is not supported; send a baseline or progressive JPEG with 8 bits a sample, or "
        "a PNG."
    )
