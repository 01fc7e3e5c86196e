"""Decodes images to upright RGB pixels, within limits. Runs in decode processes.

Pillow and faster decoders do the work, without torch. Images are converted to RGB as in the reference processors
(transformers 5.23, image_transforms.py, convert_to_rgb): transparency is composited on white, and everything else is
Pillow's convert("RGB"). One kind differs on purpose: 16-bit greyscale keeps the upper byte, as Pillow does for 16-bit
colour. convert() would turn all values above 255 white. The orientation comes from read_header(), so the decoded pixels
always match the tokens counted from the header.
"""

import io
import struct
import warnings
import zlib

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image

from saccade.errors import ImageTooLarge, InvalidImage
from saccade.media import bmp, jpeg, png, rgbx
from saccade.media.header import ImageHeader, ImageLimits, read_header
from saccade.media.metadata import without_metadata

DECODER = f"pillow-{PIL.__version__} simplejpeg-{jpeg.VERSION} kornia-{png.VERSION} reader-3"
"""Names and versions of the decoders, and of the rules by which headers are read: part of every image's identity, since
workers keep what older gateways sent."""

WITHOUT_PILLOW = {"JPEG": jpeg.decode, "PNG": png.decode}
WHITE = (255, 255, 255, 255)
OPAQUE = (255, 255)
BAND_ROWS = 64
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# The exceptions that Pillow is known to raise for damaged images.
BROKEN = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, ArithmeticError, AttributeError, RuntimeError,
    struct.error, zlib.error,
)  # fmt: skip


def decode(encoded: bytes, limits: ImageLimits, keeps_alpha: bool = False) -> npt.NDArray[np.uint8]:
    """Return the image, or its first frame, upright, as RGB uint8 [height, width, 3].

    With *keeps_alpha*, an image with transparency is RGBA [height, width, 4] instead. Raises UnsupportedImageFormat,
    ImageTooLarge (also if an allocation fails) and InvalidImage (also if truncated).
    """
    header = read_header(encoded)
    limits.check_header(header, len(encoded))
    try:
        with warnings.catch_warnings():
            # Pillow warns of large or unusual images, which the limits above already allow.
            warnings.simplefilter("ignore")
            return _upright(encoded, header, keeps_alpha)
    except MemoryError:
        raise ImageTooLarge("Decoding the image takes more memory than an image may use.") from None
    except BROKEN:
        raise InvalidImage(f"The {header.format} is damaged or truncated: its pixels could not be decoded.") from None


def _upright(encoded: bytes, header: ImageHeader, keeps_alpha: bool) -> npt.NDArray[np.uint8]:
    encoded = without_metadata(encoded, header.format)
    if header.format in WITHOUT_PILLOW and header.orientation not in UPRIGHT:
        plain = WITHOUT_PILLOW[header.format](encoded, header.height, header.width)
        if plain is not None:
            return plain
    image = _loaded(encoded, header, keeps_alpha)
    if header.orientation in UPRIGHT:
        image = image.transpose(UPRIGHT[header.orientation])
    return _as_array(image)


def _loaded(encoded: bytes, header: ImageHeader, keeps_alpha: bool) -> Image.Image:
    """Return the image as RGB, or as RGBA if it has transparency and *keeps_alpha*.

    The decoder's other memory is released on return.
    """
    if header.format == "PNG":
        transparent = png.decode(encoded, header.height, header.width, "RGBA")
        if transparent is not None:
            image = Image.frombuffer("RGBA", (header.width, header.height), transparent, "raw", "RGBA", 0, 1)
            return image if keeps_alpha else _on_white(image)
    if header.format == "BMP" and (indexed := bmp.decode(encoded)) is not None:
        return indexed
    with Image.open(io.BytesIO(encoded), formats=(header.format.upper(),)) as image:
        if image.size != (header.width, header.height):
            raise ValueError("header and content disagree")
        image.load()
        return _with_colours(image, keeps_alpha)


def _as_array(image: Image.Image) -> npt.NDArray[np.uint8]:
    # Pillow stores four bytes per pixel; copying them takes a third of the time of np.array(), which packs three.
    memory = rgbx.empty(image.height, image.width)
    mode = "RGBX" if image.mode == "RGB" else "RGBA"
    target = Image.frombuffer(mode, image.size, memory, "raw", mode, 0, 1)
    target.im.paste(image.im, (0, 0, *image.size))
    return memory[..., : len(image.mode)]


def _with_colours(image: Image.Image, keeps_alpha: bool) -> Image.Image:
    if image.mode.startswith("I;16"):
        return _rgb_of_16_bit(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        return _as_mode(image, "RGBA") if keeps_alpha else _on_white(image)
    return _as_mode(image, "RGB")


def _on_white(image: Image.Image) -> Image.Image:
    # Band by band: the intermediate copies of a whole image take three times its memory.
    rgb = Image.new("RGB", image.size)
    for top in range(0, image.height, BAND_ROWS):
        box = (0, top, image.width, min(top + BAND_ROWS, image.height))
        band = _as_mode(image.crop(box), "RGBA")
        if band.getchannel("A").getextrema() != OPAQUE:
            band = Image.alpha_composite(Image.new("RGBA", band.size, WHITE), band)
        rgb.paste(band.convert("RGB"), box)
    return rgb


def _as_mode(image: Image.Image, mode: str) -> Image.Image:
    # convert() copies even if there is nothing to convert.
    return image if image.mode == mode else image.convert(mode)


def _rgb_of_16_bit(image: Image.Image) -> Image.Image:
    samples = np.asarray(image)
    grey = (samples >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if transparent is not None:
        grey[samples == transparent] = 255
    return Image.fromarray(grey).convert("RGB")
