"""1000 questions in OCRBench's layout, with images that are drawn here: the same ones at every call, without files.

They have the ten kinds of OCRBench and their numbers. Handwriting is imitated, and there are no photographs: scores
compare servers and settings with each other, and are no scores of OCRBench.
"""

import bisect
import io
import itertools
import random
from collections.abc import Mapping, Sequence

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
    word, other = rng.sample(WORDS.split(), 2)
    code, number = (
        "".join(rng.choices(signs, k=rng.randint(2, 8))) for signs in ("ABCDEFGHJKLMNPRTUVWXY2346789", "0123456789")
    )
    match kind.split()[0]:
        case "Irregular":
            angle = rng.choice((-1, 1)) * rng.randint(10, 40)
            return READ, word, _line(word, rng).rotate(angle, Image.Resampling.BICUBIC, expand=True, fillcolor=PAPER)
        case "Artistic":
            return READ, word, _line(word, rng, border=rng.randint(2, 4))
        case "Handwriting":
            phrase = f"{word} {other}".lower()
            return READ, phrase, _handwriting(phrase, rng)
        case "Scene":
            return _street(rng)
        case "Doc-oriented":
            name, fields = _form(rng, code)
            return f"What is the {name}?", fields[name], _page([f"{word} LTD", ""], fields)
        case "Key":
            goods = [one.lower() for one in rng.sample(WORDS.split(), 3)]
            prices = {name: f"{rng.randint(50, 9999) / 100:.2f}" for name in (*goods, "tax", "total")}
            name = rng.choice((*goods, "tax", "total"))
            question = f"How much is the {name} on this receipt? Answer with the number in the image."
            return question, prices[name], _page([f"{word} SHOP", code, ""], prices)
        case "Handwritten":
            return _formula(rng)
    text = {"Regular": word, "Digit": number, "Non-Semantic": code}[kind.split()[0]]
    return READ, text, _line(text, rng)


def _font(size: int = SIZE) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise StartupError("The generated images need a Pillow with FreeType: `pip install --force-reinstall pillow`.")
    return font


def _line(text: str, rng: random.Random, border: int = 0) -> Image.Image:
    """Draw one line of text; with a *border* of its letters, in white on a colour."""
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


def _form(rng: random.Random, code: str) -> tuple[str, dict[str, str]]:
    """Return the name of a field, and all fields."""
    fields = {
        "invoice number": code,
        "customer": rng.choice(NAMES),
        "date": f"{rng.randint(1, 28):02}.{rng.randint(1, 12):02}.20{rng.randint(10, 26)}",
        "phone": f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}",
    }
    return rng.choice((*fields,)), fields


def _page(head: Sequence[str], fields: Mapping[str, str]) -> Image.Image:
    """Draw a printed page."""
    lines = [*head, *(f"{name.capitalize()}: {value}" for name, value in fields.items())]
    image = Image.new("RGB", (480, 40 * len(lines) + 40), "white")
    ImageDraw.Draw(image).multiline_text((30, 15), "\n".join(lines), "black", _font(), spacing=8)
    return image


def _formula(rng: random.Random) -> Drawing:
    """Draw a fraction, a power and a number. The answer is LaTeX, in the form of HME100K."""
    (x, y), under, power, number = rng.sample("abmnxyz", 2), rng.randint(2, 99), rng.randint(2, 9), rng.randint(10, 999)
    image = Image.new("RGB", (360, 130), PAPER)
    draw, left = ImageDraw.Draw(image), 92 + _font().getlength(f"+ {y}")
    draw.line((25, 62, 75, 62), "black", 2)
    for place, text, size, anchor in (
        ((50, 38), x, SIZE, "mm"),
        ((50, 88), str(under), SIZE, "mm"),
        ((90, 64), f"+ {y}", SIZE, "lm"),
        ((left, 46), str(power), SIZE * 2 // 3, "lm"),
        ((left + 26, 64), f"= {number}", SIZE, "lm"),
    ):
        draw.text(place, text, "black", _font(size), anchor=anchor)
    latex = f"\\frac {{ {x} }} {{ {under} }} + {y} ^ {{ {power} }} = {number}"
    return "Write the formula in the image in LaTeX.", latex, image
