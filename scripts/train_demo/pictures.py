"""Pictures of short texts and of coloured shapes, drawn on the fly with Pillow alone.

Everything here is a function of its arguments: the same `split` and `seed` give the same picture as long as Pillow and
the font files are the same.  The module imports nothing of its neighbours, so tests and benchmarks can load it alone.

    item = draw("text", seed=7)          # item.image, item.question, item.answer
"""

import functools
import hashlib
import io
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
KINDS = ("text", "colour", "shape", "shape_colour")
QUESTIONS = {
    "text": ("What does it say?", "Read the text.", "What is written here?", "What text is in the picture?"),
    "colour": ("What colour is the text?", "What color is the text?", "Which colour is the text?"),
    "shape": ("What shape is it?", "Which shape is it?", "What shape is in the picture?"),
    "shape_colour": ("What colour is the shape?", "What color is the shape?", "Which colour is the shape?"),
}
# Corners on a circle of radius one around the middle; a circle has none.
_STAR = tuple((1.0 if corner % 2 == 0 else 0.42, corner * 36.0) for corner in range(10))
_ARM = ((0.33, 1.0), (0.33, 0.33), (1.0, 0.33))
SHAPES: dict[str, tuple[tuple[float, float], ...]] = {
    "circle": (),
    "square": ((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)),
    "diamond": ((0.0, -1.0), (1.0, 0.0), (0.0, 1.0), (-1.0, 0.0)),
    "triangle": ((0.0, -1.0), (1.0, 0.8), (-1.0, 0.8)),
    "star": tuple((far * math.sin(math.radians(turn)), -far * math.cos(math.radians(turn))) for far, turn in _STAR),
    "cross": tuple(
        (x * sign_x, y * sign_y)
        for sign_x, sign_y, arm in ((1, 1, _ARM), (1, -1, _ARM[::-1]), (-1, -1, _ARM), (-1, 1, _ARM[::-1]))
        for x, y in arm
    ),
}
# The shades of each name; every picture moves its shade a little further.
COLOURS = {
    "black": ((0, 0, 0), (25, 25, 25)),
    "red": ((255, 0, 0), (205, 20, 35)),
    "green": ((0, 128, 0), (25, 150, 60)),
    "blue": ((0, 0, 255), (30, 70, 200)),
    "orange": ((255, 140, 0), (240, 120, 10)),
    "purple": ((128, 0, 128), (110, 40, 170)),
    "brown": ((139, 69, 19), (115, 65, 30), (165, 42, 42)),
    "pink": ((255, 60, 160), (255, 105, 180)),
}
# Where Debian keeps the files, and the package each comes from.  "builtin" is Pillow's own font.
FONT_FOLDER = Path("/usr/share/fonts/truetype")
FONT_FILES = {
    "DejaVuSans": ("dejavu/DejaVuSans.ttf", "fonts-dejavu-core"),
    "DejaVuSans-Bold": ("dejavu/DejaVuSans-Bold.ttf", "fonts-dejavu-core"),
    "DejaVuSerif": ("dejavu/DejaVuSerif.ttf", "fonts-dejavu-core"),
    "DejaVuSansMono": ("dejavu/DejaVuSansMono.ttf", "fonts-dejavu-core"),
    "LiberationSans": ("liberation2/LiberationSans-Regular.ttf", "fonts-liberation2"),
    "LiberationSerif": ("liberation2/LiberationSerif-Regular.ttf", "fonts-liberation2"),
    "Lato": ("lato/Lato-Regular.ttf", "fonts-lato"),
}
TRAINING_FONTS = (
    "builtin",
    "DejaVuSans-Bold",
    "DejaVuSerif",
    "DejaVuSansMono",
    "DejaVuSans",
    "LiberationSans",
    "LiberationSerif",
)
KEPT_OUT_FONT = "Lato"
NATIVE_SIZE = (128, 64)

Box = tuple[float, float, float, float]
Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Style:
    """How varied the pictures are."""

    lengths: tuple[int, ...] = (1, 2, 3, 4)
    """How many characters, each as likely as it is often here."""
    fonts: tuple[str, ...] = TRAINING_FONTS
    size: tuple[int, int] = NATIVE_SIZE
    coloured: bool = True
    tint: bool = True
    """Backgrounds other than white."""
    height: tuple[float, float] = (0.36, 0.72)
    """Font size as a share of the picture's height."""
    rescaled: float = 0.3
    """Share of the pictures drawn larger or smaller and resampled to `size`."""
    compressed: float = 0.2
    """Share of the pictures that went through JPEG."""


@dataclass(frozen=True)
class Drawn:
    """One picture with its question, its answer, and what the drawing knows about it."""

    image: Image.Image
    kind: str
    question: str
    answer: str
    text: str
    """Empty where the picture shows a shape."""
    colour: str
    font: str
    boxes: tuple[Box, ...]
    """One box a character in pixels of `image`: left, top, right, bottom."""
    shape: str = ""


def held_out(text: str) -> bool:
    """Whether training never draws this text.  One text in ten; single characters are too few to keep any out."""
    return len(text) > 1 and hashlib.sha256(text.encode()).digest()[0] % 10 == 0


def available_fonts(names: Sequence[str]) -> tuple[str, ...]:
    """Those of `names` whose file this machine has."""
    return tuple(name for name in names if name == "builtin" or (FONT_FOLDER / FONT_FILES[name][0]).is_file())


def missing_fonts(names: Sequence[str]) -> dict[str, str]:
    """Font name to Debian package, for those of `names` that this machine lacks."""
    found = available_fonts(names)
    return {name: FONT_FILES[name][1] for name in names if name not in found}


@functools.lru_cache(maxsize=4096)
def load_font(name: str, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The font at a size in pixels."""
    if name == "builtin":
        return ImageFont.load_default(size)
    return ImageFont.truetype(str(FONT_FOLDER / FONT_FILES[name][0]), size)


def draw(kind: str, seed: int, split: str = "test", style: Style | None = None) -> Drawn:
    """Draw the picture number `seed` of a split.

    `split` is "train" or "test".  Texts of two characters and more are held out of "train" by `held_out`, and "test"
    draws only from those.  The split is part of what seeds the generator, so equal seeds differ between the two.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    if split not in ("train", "test"):
        raise ValueError(f"split must be train or test, not {split!r}")
    style = style or Style(fonts=available_fonts(TRAINING_FONTS))
    rng = random.Random(f"{split}/{kind}/{seed}")
    if kind.startswith("shape"):
        return _draw_shape(rng, kind, style)
    text = _choose_text(rng, style.lengths, split)
    font = rng.choice(style.fonts)
    colour = rng.choice(tuple(COLOURS)) if style.coloured else "black"
    image, boxes = _paint(rng, text, font, colour, style)
    answer = text if kind == "text" else colour
    return Drawn(image, kind, rng.choice(QUESTIONS[kind]), answer, text, colour, font, boxes)


def _draw_shape(rng: random.Random, kind: str, style: Style) -> Drawn:
    shape, colour = rng.choice(tuple(SHAPES)), rng.choice(tuple(COLOURS))
    high = rng.uniform(0.2, 0.42) * style.size[1]
    wide = high * rng.uniform(0.95, 1.05)
    middle = (rng.uniform(wide + 2, style.size[0] - wide - 2), rng.uniform(high + 2, style.size[1] - high - 2))
    # Drawn large and scaled down the edges come out soft, drawn as it is they are hard.
    fine = rng.choice((1, 4))
    image = Image.new("RGB", (style.size[0] * fine, style.size[1] * fine), _background(rng))
    pen, shade = ImageDraw.Draw(image), _shade(rng, colour)
    left, top, right, bottom = (part * fine for part in (*_moved(middle, -wide, -high), *_moved(middle, wide, high)))
    if SHAPES[shape]:
        centre_x, centre_y = (left + right) / 2, (top + bottom) / 2
        pen.polygon([(centre_x + x * wide * fine, centre_y + y * high * fine) for x, y in SHAPES[shape]], fill=shade)
    else:
        pen.ellipse((left, top, right, bottom), fill=shade)
    if fine > 1:
        image = image.resize(style.size, Image.Resampling.BICUBIC)
    if rng.random() < style.compressed:
        image = _compress(image, rng.randint(60, 95))
    answer = shape if kind == "shape" else colour
    return Drawn(image, kind, rng.choice(QUESTIONS[kind]), answer, "", colour, "", (), shape)


def _moved(point: tuple[float, float], across: float, down: float) -> tuple[float, float]:
    return point[0] + across, point[1] + down


def _choose_text(rng: random.Random, lengths: tuple[int, ...], split: str) -> str:
    length = rng.choice(lengths)
    while True:
        text = "".join(rng.choice(CHARACTERS) for _ in range(length))
        if length == 1 or held_out(text) == (split == "test"):
            return text


def _paint(
    rng: random.Random, text: str, font_name: str, colour: str, style: Style
) -> tuple[Image.Image, tuple[Box, ...]]:
    canvas = _canvas_size(rng, style)
    background = _background(rng) if style.tint else (255, 255, 255)
    image = Image.new("RGB", canvas, background)
    font = _fit_font(rng, text, font_name, canvas, style.height)
    left, top, right, bottom = font.getbbox(text)
    spare_x, spare_y = canvas[0] - (right - left), canvas[1] - (bottom - top)
    x = rng.uniform(0.03, 0.97) * spare_x - left
    y = rng.uniform(0.03, 0.97) * spare_y - top
    ImageDraw.Draw(image).text((x, y), text, fill=_shade(rng, colour), font=font)
    edges = [x + font.getlength(text[:count]) for count in range(len(text) + 1)]
    if canvas != style.size:
        image = image.resize(style.size, Image.Resampling.BICUBIC)
    if rng.random() < style.compressed:
        image = _compress(image, rng.randint(60, 95))
    wide, high = style.size[0] / canvas[0], style.size[1] / canvas[1]
    rows = ((y + top) * high, (y + bottom) * high)
    boxes = tuple((a * wide, rows[0], b * wide, rows[1]) for a, b in itertools.pairwise(edges))
    return image, boxes


def _canvas_size(rng: random.Random, style: Style) -> tuple[int, int]:
    """The size drawn at: mostly the final one, sometimes another of nearly the same shape."""
    if rng.random() >= style.rescaled:
        return style.size
    factor = rng.uniform(0.9, 2.5)
    stretch = rng.uniform(0.95, 1.05)
    return round(style.size[0] * factor * stretch), round(style.size[1] * factor)


def _fit_font(
    rng: random.Random, text: str, name: str, canvas: tuple[int, int], height: tuple[float, float]
) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """A font of a random size, made smaller where the text would not fit the width."""
    size = round(rng.uniform(*height) * min(canvas[1], 0.6 * canvas[0]))
    font = load_font(name, size)
    width = font.getlength(text)
    room = 0.94 * canvas[0]
    return font if width <= room else load_font(name, max(8, int(size * room / width)))


def _background(rng: random.Random) -> Colour:
    if rng.random() < 0.3:
        return (255, 255, 255)
    base = rng.randint(225, 255)
    red, green, blue = (max(205, min(255, base + rng.randint(-22, 12))) for _ in range(3))
    return red, green, blue


def _shade(rng: random.Random, colour: str) -> Colour:
    red, green, blue = (max(0, min(255, part + rng.randint(-12, 12))) for part in rng.choice(COLOURS[colour]))
    return red, green, blue


def _compress(image: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer).convert("RGB")
