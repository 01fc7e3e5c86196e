"""Fonts for PDF text whose own font is not in the file: from the extra `fonts`, and from an operator's folder.

A page must look the same on every machine, so the machine's own fonts are never used. Source for the tables that are
read here: OpenType 1.9.1, "Organization of an OpenType Font", "cmap" and "name".
"""

import importlib.util
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from saccade.errors import StartupError
from saccade.identity.content import files_digest

JAPANESE, KOREAN, SIMPLIFIED, TRADITIONAL = 128, 129, 134, 136
GREEK, VIETNAMESE, HEBREW, ARABIC, CYRILLIC = 161, 163, 177, 178, 204
"""Character sets, by their numbers in Windows, which PDFium uses too."""

SAMPLES: Mapping[int, str] = {
    JAPANESE: "あ日",
    KOREAN: "한",
    SIMPLIFIED: "们",
    TRADITIONAL: "們ㄅ",
    GREEK: "Ωα",
    VIETNAMESE: "ậ",
    HEBREW: "אש",
    ARABIC: "اب",
    CYRILLIC: "Жя",
}
"""A font of the operator is used for a character set if it has these letters."""


SUFFIXES = (".ttf", ".otf", ".ttc", ".otc")
MAX_FILES = 64
MAX_BYTES = 256 << 20
COLLECTION = b"ttcf"
COLLECTION_HEAD = struct.pack(">4sIII", COLLECTION, 0x10000, 1, 16)
WINDOWS, FAMILY_NAME = 3, 1
SEGMENTS, GROUPS = 4, 12
"""Forms of the table of letters."""


class Packaged(NamedTuple):
    """A font *file* of an installed *package*, for *charsets*."""

    package: str
    file: str
    charsets: frozenset[int]


EXTRA = (
    Packaged("fontpkg_arimo", "files/Arimo[wght].ttf", frozenset({GREEK, VIETNAMESE, HEBREW, CYRILLIC})),
    Packaged("pylopdf_fonts_ar", "NotoSansArabic-Variable.ttf", frozenset({ARABIC})),
    Packaged("pylopdf_fonts_jp", "NotoSansJP-Regular.otf", frozenset({JAPANESE})),
    Packaged("pylopdf_fonts_ko", "NotoSansKR-Regular.otf", frozenset({KOREAN})),
    Packaged("pylopdf_fonts_zh_cn", "NotoSansSC-Regular.otf", frozenset({SIMPLIFIED})),
    Packaged("pylopdf_fonts_zh_tw", "NotoSansTC-Regular.otf", frozenset({TRADITIONAL})),
)


class PdfFontSettings(msgspec.Struct, frozen=True):
    """The operator's *folder* of fonts. With *allows_gaps*, a page is drawn without the letters that no font has."""

    folder: str | None = None
    allows_gaps: bool = False

    @property
    def fingerprint(self) -> str:
        """Identifies the settings and fonts that pages are drawn with; part of every page's identity.

        Raises StartupError.
        """
        return f"{_digest(self.folder).hex()}-{'gaps' if self.allows_gaps else 'whole'}"


@dataclass(frozen=True)
class Font:
    """A font face in an OpenType file.

    - data: the file's bytes, which may contain several faces.
    - offset: the face's position in the bytes.
    - letters: the code points that the face can draw.
    """

    family: str
    data: bytes
    offset: int
    letters: frozenset[int]
    charsets: frozenset[int]


def installed_fonts(folder: str | None) -> tuple[Font, ...]:
    """Return the fonts in *folder*, sorted by filename, and then those of the extra. Raises StartupError."""
    return tuple(read_font(*file) for file in _files(folder))


@cache
def _digest(folder: str | None) -> bytes:
    return files_digest({str(index): content for index, (_, content, _) in enumerate(_files(folder))})


def _files(folder: str | None) -> Iterator[tuple[str, bytes, frozenset[int] | None]]:
    """Yield each font file's name, content and character sets. For an operator's font, the sets are None."""
    for path in _operators(Path(folder)) if folder is not None else ():
        yield path.name, _content(path), None
    for packaged in EXTRA:
        spec = importlib.util.find_spec(packaged.package)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            yield packaged.file, _content(Path(place, packaged.file)), packaged.charsets


def _operators(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise StartupError(f"--pdf-font-folder: {folder} is no folder.")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    num_bytes = sum(path.stat().st_size for path in paths)
    if len(paths) > MAX_FILES or num_bytes > MAX_BYTES:
        raise StartupError(
            f"--pdf-font-folder may have {MAX_FILES} fonts and {MAX_BYTES >> 20} MiB; {folder} has more."
        )
    if not paths:
        raise StartupError(f"--pdf-font-folder: {folder} has no font ({', '.join(SUFFIXES)}).")
    return paths


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"The font {path} cannot be read: {error.strerror}.") from error


def read_font(name: str, content: bytes, charsets: frozenset[int] | None = None) -> Font:
    """Return the first face in *content*, the OpenType or TrueType file *name*. Raises StartupError.

    Without *charsets*, the face's letters decide which character sets it has.
    """
    try:
        # PDFium keeps one copy of a collection, and one of another font for each weight in which a file asks for it.
        data = content if content.startswith(COLLECTION) else _as_collection(content)
        (offset,) = struct.unpack_from(">I", data, 12)
        tables = _tables(data, offset)
        letters = frozenset(_letters(data, tables[b"cmap"]))
        family = _family(data, tables[b"name"])
    except (struct.error, KeyError, UnicodeDecodeError, OverflowError, MemoryError):
        raise StartupError(f"{name} is not an OpenType font that can be read.") from None
    if charsets is None:
        charsets = frozenset(charset for charset, sample in SAMPLES.items() if letters.issuperset(map(ord, sample)))
    return Font(family, data, offset, letters, charsets)


def covering(fonts: Sequence[Font], letters: Iterable[int]) -> Font | None:
    """Return the first font that can draw all *letters*."""
    every = frozenset(letters)
    return next((font for font in fonts if every <= font.letters), None)


def _as_collection(content: bytes) -> bytes:
    """Return a collection with only the font in *content*. Table offsets count from the beginning of the file."""
    data = bytearray(COLLECTION_HEAD + content)
    for number in range(struct.unpack_from(">H", content, 4)[0]):
        place = len(COLLECTION_HEAD) + 12 + 16 * number + 8
        (start,) = struct.unpack_from(">I", data, place)
        struct.pack_into(">I", data, place, start + len(COLLECTION_HEAD))
    return bytes(data)


def _tables(data: bytes, offset: int) -> dict[bytes, int]:
    (number,) = struct.unpack_from(">H", data, offset + 4)
    entries = (struct.unpack_from(">4sIII", data, offset + 12 + 16 * index) for index in range(number))
    return {tag: start for tag, _, start, _ in entries}


def _letters(data: bytes, start: int) -> set[int]:
    number = struct.unpack_from(">H", data, start + 2)[0]
    places = {start + struct.unpack_from(">I", data, start + 8 + 8 * index)[0] for index in range(number)}
    by_form = {struct.unpack_from(">H", data, place)[0]: place for place in sorted(places)}
    # Groups have all that segments have, and the letters beyond 16 bits.
    return _groups(data, by_form[GROUPS]) if GROUPS in by_form else _segments(data, by_form[SEGMENTS])


def _groups(data: bytes, start: int) -> set[int]:
    letters = set[int]()
    for index in range(struct.unpack_from(">I", data, start + 12)[0]):
        first, last, _ = struct.unpack_from(">III", data, start + 16 + 12 * index)
        letters.update(range(first, min(last, 0x10FFFF) + 1))
    return letters


def _segments(data: bytes, start: int) -> set[int]:
    (double,) = struct.unpack_from(">H", data, start + 6)
    columns = [start + 14, *(start + 16 + double * column for column in (1, 2, 3))]
    letters = set[int]()
    for index in range(double // 2):
        last, first, delta, distance = (struct.unpack_from(">H", data, column + 2 * index)[0] for column in columns)
        for letter in range(first, min(last, 0xFFFE) + 1):
            glyph = letter
            if distance:
                (glyph,) = struct.unpack_from(">H", data, columns[3] + 2 * index + distance + 2 * (letter - first))
            if glyph and (glyph + delta) & 0xFFFF:
                letters.add(letter)
    return letters


def _family(data: bytes, start: int) -> str:
    _, number, strings = struct.unpack_from(">HHH", data, start)
    for index in range(number):
        platform, _, _, kind, length, place = struct.unpack_from(">HHHHHH", data, start + 6 + 12 * index)
        if (platform, kind) == (WINDOWS, FAMILY_NAME):
            first = start + strings + place
            return data[first : first + length].decode("utf-16-be")
    raise KeyError(FAMILY_NAME)
