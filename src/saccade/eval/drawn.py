"""Draws 1000 questions with images in OCRBench's layout: the same ones at every call, without any files.

Each of OCRBench's ten kinds has as many questions as in OCRBench. Handwriting is imitated, and there are no
photographs. So scores can be compared between servers and settings, but not with published scores.
"""

import bisect
import io
import itertools
import random
from collections.abc import Mapping

from PIL import Image, ImageDraw, ImageFont

from saccade.errors import StartupError
from saccade.eval.rows import Row

SEED = "ocr 1"
KINDS = {
    "Regular Text Recognition": 50,
    "Irregular Text Recognition": 50,
    "Artistic Text Recognition": 50,
    "Handwriting Recognition": 50,
    "Digit String Recognition": 50,
    "Non-Semantic Text Recognition": 50,
    "Scene Text-centric VQA": 200,
    "Doc-oriented VQA": 200,
    "Key Information Extraction": 200,
    "Handwritten Mathematical Expression Recognition": 100,
}
TOTAL = sum(KINDS.values())
WORDS = (
    "BREAD COFFEE HOTEL MARKET GARDEN BRIDGE STATION MUSEUM OFFICE SCHOOL THEATRE LIBRARY BAKERY FLOWERS RIVER HARBOUR "
    "TAXI OPEN EXIT SALE BANK PARK CITY BOOK SHOP FISH MILK TEA BUS CAR INN ZOO"
)
NAMES = ("Anna Berger", "Carlos Diaz", "Emma Fox", "Ivan Petrov", "John Hill", "Mei Lin", "Omar Said", "Sara Jones")
INKS = ("black", "darkred", "darkgreen", "navy", "purple", "saddlebrown")
SIGNS = ("red", "green", "blue", "orange", "purple", "brown")
PAPER = (250, 248, 240)
DIGITS = "0123456789"
READ = "What does it say?"


SIZE = 30
"""Of letters, in pixels."""

Drawing = tuple[str, str, Image.Image]
"""A question, its answer and the image."""


def row(number: int) -> Row:
    """Return question *number*, from 0, as a row of OCRBench's file, whose `image` is a PNG file."""
    ends = list(itertools.accumulate(KINDS.values()))
    kind = list(KINDS)[bisect.bisect_right(ends, number)]
    question, answer, image = _draw(kind, random.Random(f"{SEED} {number}"))
    file = io.BytesIO()
    image.save(file, "PNG")
    layout = {"dataset_name": "drawn", "id": number + 1, "type": kind, "question": question, "answers": [answer]}
    return {**layout, "image": file.getvalue()}


def _draw(kind: str, rng: random.Random) -> Drawing:
    word = rng.choice(WORDS.split())
    match kind.split()[0]:
        case "Irregular":
            angle = rng.choice((-1, 1)) * rng.randint(10, 40)
            return READ, word, _line(word, rng).rotate(angle, Image.Resampling.BICUBIC, expand=True, fillcolor=PAPER)
        case "Artistic":
            return READ, word, _line(word, rng, border=rng.randint(2, 4))
        case "Handwriting":
            return READ, word.lower(), _handwriting(word.lower(), rng)
        case "Scene":
            return _street(rng)
        case "Doc-oriented":
            date = f"{rng.randint(1, 28):02}.{rng.randint(1, 12):02}.20{rng.randint(10, 26)}"
            fields = {
                "invoice number": _signs(rng),
                "customer": rng.choice(NAMES),
                "date": date,
                "phone": _signs(rng, DIGITS),
            }
            return _page(f"{word} LTD", fields, "What is the {}?", rng)
        case "Key":
            names = (*rng.sample(WORDS.lower().split(), 3), "tax", "total")
            prices = {name: f"{rng.randint(50, 9999) / 100:.2f}" for name in names}
            return _page(f"{word} SHOP", prices, "How much is the {}? Answer with the number in the image.", rng)
        case "Handwritten":
            return _formula(rng)
    text = {"Regular": word, "Digit": _signs(rng, DIGITS), "Non-Semantic": _signs(rng)}[kind.split()[0]]
    return READ, text, _line(text, rng)


def _signs(rng: random.Random, signs: str = "ABCDEFGHJKLMNPRTUVWXY2346789") -> str:
    return "".join(rng.choices(signs, k=rng.randint(2, 8)))


def _font(size: int = SIZE) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise StartupError("The generated images need a Pillow with FreeType; install pillow from its wheel.")
    return font


def _line(text: str, rng: random.Random, border: int = 0) -> Image.Image:
    """Draw one line of text; if its letters have a *border*, in white on a colour."""
    font = _font(rng.randint(SIZE, 2 * SIZE))
    left, top, right, bottom = map(round, font.getbbox(text, stroke_width=border))
    size = right - left + 2 * SIZE, bottom - top + 2 * SIZE
    image = Image.new("RGB", size, rng.choice(SIGNS) if border else PAPER)
    place, ink = (SIZE - left, SIZE - top), "white" if border else rng.choice(INKS)
    ImageDraw.Draw(image).text(place, text, ink, font, stroke_width=border, stroke_fill="black")
    return image


def _handwriting(text: str, rng: random.Random) -> Image.Image:
    """Draw letters that are turned and out of line."""
    image, left = Image.new("RGB", (SIZE * len(text), 3 * SIZE), PAPER), 0.0
    for letter in text:
        tile = Image.new("L", (2 * SIZE, 2 * SIZE))
        ImageDraw.Draw(tile).text((SIZE // 2, SIZE // 3), letter, 255, _font())
        tile = tile.rotate(rng.uniform(-12, 12), Image.Resampling.BICUBIC)
        image.paste("navy", (round(left), SIZE // 2 + rng.randint(-4, 4)), tile)
        left += _font().getlength(letter) + rng.randint(0, 2)
    return image.crop((0, 0, round(left) + SIZE, 3 * SIZE))


def _street(rng: random.Random) -> Drawing:
    """Draw three signs."""
    image, colours, words = (
        Image.new("RGB", (420, 320), "lightgrey"),
        rng.sample(SIGNS, 3),
        rng.sample(WORDS.split(), 3),
    )
    draw = ImageDraw.Draw(image)
    for index, (colour, word) in enumerate(zip(colours, words, strict=True)):
        left, top = rng.randint(10, 190), 15 + 100 * index
        draw.rectangle((left, top, left + 215, top + 70), colour, "black", 3)
        draw.text((left + 107, top + 36), word, "white", _font(), anchor="mm")
    return f"What does the {colours[0]} sign say?", words[0], image


def _page(head: str, fields: Mapping[str, str], question: str, rng: random.Random) -> Drawing:
    """Draw a printed page, and ask for a field."""
    lines = [head, "", *(f"{name.capitalize()}: {value}" for name, value in fields.items())]
    image = Image.new("RGB", (480, 40 * len(lines) + 40), "white")
    ImageDraw.Draw(image).multiline_text((30, 15), "\n".join(lines), "black", _font(), spacing=8)
    name = rng.choice((*fields,))
    return question.format(name), fields[name], image


def _formula(rng: random.Random) -> Drawing:
    """Draw a product, a power and a sum. The answer is LaTeX, in the form of HME100K."""
    (x, y), power, (a, b) = rng.sample("abmnxyz", 2), rng.randint(2, 9), rng.sample(range(2, 999), 2)
    image, left = Image.new("RGB", (400, 100), PAPER), 30.0
    for text, size, top in ((f"{a}{x}", SIZE, 55), (str(power), SIZE * 2 // 3, 38), (f"+ {y} = {b}", SIZE, 55)):
        ImageDraw.Draw(image).text((left, top), text, "black", _font(size), anchor="lm")
        left += _font(size).getlength(text) + 4
    return "Write the formula in the image in LaTeX.", f"{a} {x} ^ {{ {power} }} + {y} = {b}", image
