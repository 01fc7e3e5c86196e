"""Text of PDFs whose font is not in the file: drawn with the fonts of the extra, or refused by page and font.  # F22"""

import struct
from collections.abc import Callable
from pathlib import Path

import drawn_pdfs
import numpy as np
import pdf_forms
import pdfs
import pytest
from pdf_forms import wide
from pdf_texts import ARIAL, Texts, collection, embedded, numbered, page, plain, simple, weighted
from tables import table

from saccade.errors import InvalidImage, StartupError
from saccade.media.pdf import Renderer
from saccade.media.pdf_fonts import CYRILLIC, JAPANESE, PdfFontSettings, installed_fonts, read_font
from saccade.media.pdf_pages import PdfPage

pytestmark = pytest.mark.ci

PAGE = PdfPage(0, 400, 200)
FONTS = installed_fonts(None)


def drawn(encoded: bytes, *, with_fonts: bool = True) -> np.ndarray:
    return drawn_pdfs.drawn(encoded, fonts=FONTS if with_fonts else ())


def refusal(encoded: bytes, *, with_fonts: bool) -> str:
    with pytest.raises(InvalidImage) as caught:
        drawn(encoded, with_fonts=with_fonts)
    return caught.value.message


def ink(image: np.ndarray) -> int:
    return int((image < 128).any(axis=2).sum())


CHINESE, JAPANESE_TEXT, KOREAN = "汉语简体", "日本語かな", "한국어말"
SCRIPTS: dict[str, tuple[str, Callable[[str], Texts]]] = {
    "Adobe-GB1": (CHINESE, lambda text: collection(text, b"GB1", b"UniGB-UTF16-H", name=b"STSong-Light")),
    "Adobe-GB1, GBK": (CHINESE, lambda text: collection(text, b"GB1", b"GBK-EUC-H", "gbk", b"SimSun", 2)),
    "Adobe-CNS1": ("漢語繁體", lambda text: collection(text, b"CNS1", b"UniCNS-UTF16-H", name=b"MSung-Light")),
    "Adobe-CNS1, Big5": ("漢語繁體", lambda text: collection(text, b"CNS1", b"ETen-B5-H", "big5", b"MingLiU", 2)),
    "Adobe-Japan1": (JAPANESE_TEXT, lambda text: collection(text, b"Japan1", b"UniJIS-UTF16-H", name=b"Ryumin-Light")),
    "Adobe-Japan1, Shift-JIS": (
        JAPANESE_TEXT, lambda text: collection(text, b"Japan1", b"90ms-RKSJ-H", "shift-jis", b"MS-Gothic", 2)
    ),
    "Adobe-Korea1": (KOREAN, lambda text: collection(text, b"Korea1", b"UniKS-UTF16-H", name=b"HYSMyeongJo-Medium")),
    "Adobe-Korea1, UHC": (KOREAN, lambda text: collection(text, b"Korea1", b"KSCms-UHC-H", "cp949", b"Batang", 2)),
    "vertical": ("日本ー。", lambda text: collection(text, b"Japan1", b"UniJIS-UTF16-V")),
    "vertical Chinese": (CHINESE, lambda text: collection(text, b"GB1", b"UniGB-UTF16-V")),
    "letters of another collection": ("们汉体简", lambda text: collection(text, b"Japan1", b"UniJIS-UTF16-H")),
    "bold": (JAPANESE_TEXT, lambda text: collection(text, b"Japan1", b"UniJIS-UTF16-H", name=b"Gothic,Bold")),
    "heavy": (JAPANESE_TEXT, lambda text: weighted(text, 160)),
    "by names of letters": ("日本かな", lambda text: numbered(text, is_named=True)),
    "Cyrillic": ("Дата ЖЩ", simple),
    "Cyrillic, TrueType": ("Дата ЖЩ", lambda text: simple(text, ARIAL)),
    "Cyrillic, bold": ("Дата ЖЩ", lambda text: simple(text, b"/Subtype/TrueType/BaseFont/TimesNewRoman,Bold")),
    "Cyrillic, a subset": ("Дата ЖЩ", lambda text: simple(text, b"/Subtype/Type1/BaseFont/ABCDEF+Myriad-Roman")),
    "Cyrillic and Latin": ("Дaté Щ", simple),
    "Greek": ("Ωαβγδ", simple),
    "Hebrew": ("אבגדש", simple),
    "Arabic": ("ابتثج", simple),
    "Arabic, joined": ("ﺏﺐﺑﺒﻙ", lambda text: simple(text, ARIAL)),
    "Arabic and Latin": ("ابab1", simple),
}  # fmt: skip
WITHIN = ("page", "form", "free text", "stamp")


@pytest.mark.ci
@table("name", SCRIPTS)
@table("within", WITHIN)
def test_text_in_a_font_that_the_file_lacks_is_drawn(name: str, within: str) -> None:
    text, write = SCRIPTS[name]
    image = drawn(page(write(text), within=within))
    assert ink(image) > 300
    assert np.array_equal(image, drawn(page(write(text), within=within)))
    other = drawn(page(write(text[::-1]), within=within))
    assert not np.array_equal(image, other)
    for letter in set(text.replace(" ", "")):
        assert ink(drawn(page(write(letter)))) > 10, letter


@table("name", SCRIPTS)
@table("within", WITHIN)
def test_without_fonts_it_is_refused_by_page_and_font(name: str, within: str) -> None:
    text, write = SCRIPTS[name]
    message = refusal(page(write(text), within=within), with_fonts=False)
    assert message.startswith("Page 1 of the PDF cannot be drawn: the font ")
    ((font, _),) = write(text).items()
    assert font.partition(b"/BaseFont/")[2].partition(b"/")[0].decode() in message
    assert "--pdf-font-folder" in message


LIGATURES = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding<</Differences[65/ff/ffi/ffl]>>>>"


@table(("codes", "letter"), [(b"6f416963", "U+FB00"), (b"66426f", "U+FB03"), (b"436c", "U+FB04")])
def test_ligature_is_drawn_or_refused_beside_its_letters(codes: bytes, letter: str) -> None:
    assert ink(drawn(page({LIGATURES: codes}))) > 150
    assert letter in refusal(page({LIGATURES: codes}), with_fonts=False)


@table("codes", [b"4142", b"414270", b"704142"])
@table("with_fonts", [True, False])
def test_letters_of_unknown_glyphs_are_refused_though_the_file_names_them(codes: bytes, with_fonts: bool) -> None:
    widths = b"/FirstChar 65/LastChar 66/Widths[600 600]"
    font = b"<</Type/Font/Subtype/Type1/BaseFont/Own/Encoding<</Differences[65/g1/g2]>>/ToUnicode 5 0 R%s>>" % widths
    assert "the font Own is not in the file" in refusal(page({font: codes}), with_fonts=with_fonts)


@table(
    "size",
    [b".001 Tf 20000 0 0 20000", b".3 Tf 70 0 0 70", b"90 Tf .2 0 0 .2", b"20 Tf 0 1 -1 0", b"20 Tf .7 .7 -.7 .7"],
)
def test_thin_letters_are_letters(size: bytes) -> None:
    thin = page(plain("l.-_|' ,i")).replace(b"20 Tf 10 70 Td", size + b" 90 40 Tm")
    assert ink(drawn(thin, with_fonts=False)) > 50


def test_scripts_of_one_page_have_fonts_of_their_own() -> None:
    texts = (simple("Дата"), simple("سلام", b"/Subtype/Type1/BaseFont/Amiri"), SCRIPTS["Adobe-Korea1"][1]("한국어"))
    image = drawn(page(*texts))
    assert all(ink(part) > 200 for part in np.split(image[40:190], 3))


VALUES = {
    "Chinese": "汉语", "traditional Chinese": "漢語", "Japanese": "日本かな", "Korean": "한국어",
    "Cyrillic": "Дата", "Greek": "Ωαβ", "Hebrew": "שלום", "Arabic": "سلام", "several": "Hi Дата 日本",
}  # fmt: skip


@table("name", VALUES)
@table("form", [b"", pdf_forms.NEED])
@table("flags", [0, pdf_forms.MULTILINE])
def test_value_of_a_field_in_such_letters_is_drawn_or_refused(name: str, form: bytes, flags: int) -> None:
    encoded = pdf_forms.filled(pdf_forms.text(wide(VALUES[name]), flags=flags), form)
    assert ink(drawn(encoded)) > 100
    assert refusal(encoded, with_fonts=False).startswith("Page 1 of the PDF cannot be drawn: the font")


@table("text", ["สวัสดี", "नमस्ते", "∑√", "☐", "Дата қ"])
def test_value_of_which_letters_would_be_lost_is_refused(text: str) -> None:
    encoded = pdf_forms.filled(pdf_forms.text(wide(text)))
    assert "a field" in refusal(encoded, with_fonts=True)
    assert refusal(encoded, with_fonts=False)


LOST: dict[str, pdf_forms.Field] = {
    "after letters that are drawn": pdf_forms.text(wide("Łódź İzmir"), flags=pdf_forms.MULTILINE),
    "after letters of another script": pdf_forms.text(wide("Дата ğ"), flags=pdf_forms.MULTILINE),
    "in the second line": pdf_forms.text(wide("Łódź\nşğı"), flags=pdf_forms.MULTILINE),
    "in the second option": pdf_forms.choice(b"A", options=[b"(A)", b"(%s)" % wide("İzmir")]),
    "in the label of an option": pdf_forms.choice(b"k", pdf_forms.COMBO, [b"[(k)(%s)]" % wide("İzmir")]),
}


@table("name", LOST)
@table("label", [False, True], ["alone", "with the letters on the page"])
def test_letters_of_a_value_are_not_lost_behind_others(name: str, label: bool) -> None:
    ((font, codes),) = simple("İşğı").items()
    shown = b"/Resources<</Font<</F %s>>>>/Contents 8 0 R" % font if label else b""
    encoded = pdf_forms.filled(LOST[name], page=shown, after=[pdfs.stream(b"BT /F 9 Tf 10 80 Td <%s> Tj ET" % codes)])
    assert "in a field" in refusal(encoded, with_fonts=True)


@table("text", ["Дата", "日本", "PAID ğ", "one\nДата"])
@table("style", [b"", b"/DA(/Helv 12 Tf 0 g)"])
def test_free_text_of_which_letters_would_be_lost_is_refused(text: str, style: bytes) -> None:
    assert "a free text" in refusal(pdf_forms.free_text(b"/Contents(%s)%s" % (wide(text), style)), with_fonts=True)


@table("name", VALUES)
@table("entries", [b"/F 2", b"/F 32"], ["hidden", "not to be viewed"])
def test_value_that_is_not_shown_needs_no_font(name: str, entries: bytes) -> None:
    encoded = pdf_forms.filled(pdf_forms.text(wide(VALUES[name]), entries))
    assert (drawn(encoded, with_fonts=False) == 255).all()


@table("flags", [0, pdf_forms.MULTILINE])
def test_long_value_of_which_a_part_is_out_of_sight_is_drawn(flags: int) -> None:
    text = "Дата " * 40 + "ъэю"
    assert ink(drawn(pdf_forms.filled(pdf_forms.text(wide(text), flags=flags)))) > 100


def test_password_in_such_letters_needs_no_font() -> None:
    encoded = pdf_forms.filled(pdf_forms.text(wide("Дата"), flags=pdf_forms.PASSWORD))
    assert ink(drawn(encoded, with_fonts=False)) > 10


LATIN = {
    **{
        f"{font.decode()}{encoding.decode()}": page(plain(text, b"/Subtype/%s%s" % (font, encoding)))
        for font in (
            b"Type1/BaseFont/Helvetica", b"Type1/BaseFont/Times-BoldItalic", b"Type1/BaseFont/Courier",
            b"TrueType/BaseFont/ArialMT", b"TrueType/BaseFont/TimesNewRoman,Bold", b"Type1/BaseFont/Myriad",
            b"TrueType/BaseFont/Arimo", b"Type1/BaseFont/NotoSansJP", b"TrueType/BaseFont/Wingdings",
        )
        for encoding in (b"", b"/Encoding/WinAnsiEncoding", b"/Encoding/StandardEncoding")
        for text in ("Total: 4200 \u20ac\u2014\xe9\xdf\xa0\xad\t\r\n",)
    },
    "Symbol": page(plain("abgp\xa5\xb7", b"/Subtype/Type1/BaseFont/Symbol")),
    "ZapfDingbats": page(plain("4lnu", b"/Subtype/Type1/BaseFont/ZapfDingbats")),
    "every code": page({b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>": bytes(range(256)).hex().encode()}),
    "every code, TrueType": page({b"<</Type/Font/Subtype/TrueType/BaseFont/Arial>>": bytes(range(256)).hex().encode()}),
    "ZapfDingbats, TrueType": page(plain("4nu", b"/Subtype/TrueType/BaseFont/ZapfDingbats")),
    "Latin of a collection": page(collection("Total 4200", b"Japan1", b"UniJIS-UTF16-H")),
    "a value": pdf_forms.filled(pdf_forms.text(b"Total 4200")),
    "a list": pdf_forms.filled(pdf_forms.choice(b"Pear")),
    "no text": pdfs.pdf(pdfs.SQUARE),
}  # fmt: skip
"""Pages that PDFium draws with its own fonts."""


@table("name", LATIN)
def test_latin_pages_and_symbols_are_the_same_with_fonts_and_without(name: str) -> None:
    plain_image = drawn(LATIN[name], with_fonts=False)
    assert np.array_equal(drawn(LATIN[name]), plain_image)
    assert ink(plain_image) > 50


GLYPHS = {"日": 40, "本": 60, "Д": 80}


def arimo(first: int = 0, last: int = 0) -> bytes:
    """Return the file of Arimo, or one whose only letters are those from *first* to *last*; others are blank."""
    font = next(font for font in FONTS if font.family == "Arimo")
    content = bytearray(font.data[font.offset :])
    columns = (last, 0xFFFF, 0, first, 0xFFFF, 36 - first & 0xFFFF, 1, 0, 0)
    letters = struct.pack(">HHHHIHHHHHHH9H", 0, 1, 3, 1, 12, 4, 32, 0, 4, 0, 0, 0, *columns)
    for number in range(struct.unpack_from(">H", content, 4)[0]):
        place = 12 + 16 * number
        start = struct.unpack_from(">I", content, place + 8)[0] - font.offset
        struct.pack_into(">I", content, place + 8, start)
        table = bytes(content[place : place + 4])
        if first and table == b"cmap":
            struct.pack_into(">II", content, place + 8, len(content), len(letters))
        elif first and table == b"loca":
            content[start : start + 4] = content[start + 4 : start + 8]
        elif first and table == b"post":  # it has names of letters
            content[place : place + 4] = b"none"
    return bytes(content) + letters


@table("value", [b"ABCD", b"ABXY", b"XYZ", wide("ABé"), wide("AB€"), wide("ABДа")])
@table("flags", [0, pdf_forms.MULTILINE])
@table("form", [b"", pdf_forms.NEED])
def test_value_in_a_font_of_the_file_has_all_letters_or_is_refused(value: bytes, flags: int, form: bytes) -> None:
    file = arimo(ord("A"), ord("D"))
    own = (
        b"/Own<</Type/Font/Subtype/TrueType/BaseFont/ABCDEF+Own/Encoding/WinAnsiEncoding/FirstChar 32/LastChar 255"
        b"/Widths[%s]/FontDescriptor<</Type/FontDescriptor/FontName/ABCDEF+Own/Flags 32/FontFile2 8 0 R>>>>"
        % (b"600 " * 224)
    )
    field = pdf_forms.text(value, b"", flags)
    field = pdf_forms.Field(field.entries.replace(b"/Helv", b"/Own"))
    encoded = pdf_forms.filled(field, form, fonts=own, after=[pdfs.stream(file, b"/Length1 %d" % len(file))])
    if value in (b"ABCD", wide("ABДа")):
        assert ink(drawn(encoded)) > 150
    else:
        assert "in a field" in refusal(encoded, with_fonts=True)


@table("with_fonts", [True, False])
def test_fonts_that_are_in_the_file_are_untouched(with_fonts: bool) -> None:
    encoded = page(embedded("日本Д", GLYPHS), font_file=arimo())
    image = drawn(encoded, with_fonts=with_fonts)
    assert ink(image) > 100
    assert np.array_equal(image, drawn(encoded))


@table("with_fonts", [True, False])
@table("name", ["Adobe-Japan1", "Cyrillic"])
def test_invisible_text_needs_no_font(name: str, with_fonts: bool) -> None:
    text, write = SCRIPTS[name]
    assert (drawn(page(write(text), mode=3), with_fonts=with_fonts) == 255).all()


@table("with_fonts", [True, False])
@table(
    ("texts", "font"),
    [
        (simple("\ue000A"), "Helvetica"),
        (simple("\ue000A", ARIAL), "Arial"),
        (simple("ДатаႠ", b"/Subtype/Type1/BaseFont/Myriad"), "Myriad"),
        (collection("日\ue000", b"Japan1", b"UniJIS-UTF16-H", name=b"Gothic"), "Gothic"),
        (collection("\U00020000", b"Japan1", b"UniJIS-UTF16-H", name=b"Gothic"), "Gothic"),
        (numbered("日本", is_named=False), "Any"),
        (numbered("Ab", is_named=False), "Any"),
    ],
)
def test_letters_that_no_font_has_are_refused_by_page_and_font(texts: Texts, font: str, with_fonts: bool) -> None:
    assert refusal(page(texts), with_fonts=with_fonts).startswith(
        f"Page 1 of the PDF cannot be drawn: the font {font} is not in the file, "
    )


@table("text", ["𠮷", "𠮷野", "野𠮷"])
def test_letter_beyond_16_bits_is_refused_as_one(text: str) -> None:
    assert "1 letter (U+20BB7)" in refusal(page(collection(text, b"Japan1", b"UniJIS-UTF16-H")), with_fonts=True)


def test_bold_is_bolder() -> None:
    regular, bold = (
        drawn(page(collection(JAPANESE_TEXT, b"Japan1", b"UniJIS-UTF16-H", name=name)))
        for name in (b"Gothic", b"Gothic,Bold")
    )
    assert bold.astype(int).sum() < regular.astype(int).sum()


def test_operator_allows_pages_without_such_letters() -> None:
    encoded = page(plain("Total"), simple("Дата"))
    with Renderer() as renderer:
        drawing, other = (renderer.render(one, PAGE, allows_gaps=True) for one in (encoded, page(plain("Total"))))
    assert (drawing.is_whole, other.is_whole) == (False, True)
    assert np.array_equal(drawing.image, other.image)


def test_fonts_of_the_operator_go_before_the_others(tmp_path: Path) -> None:
    font = next(font for font in FONTS if font.family == "Noto Sans KR")
    (tmp_path / "b.OTF").write_bytes(font.data)
    (tmp_path / "a.txt").write_text("no font")
    first, *others = installed_fonts(str(tmp_path))
    assert (first.family, others) == ("Noto Sans KR", list(FONTS))
    assert {JAPANESE, CYRILLIC} <= first.charsets
    image = drawn_pdfs.drawn(page(SCRIPTS["Adobe-Japan1"][1]("日本かな")), fonts=[first])
    assert ink(image) > 100


def test_identity_of_pages_has_the_fonts(tmp_path: Path) -> None:
    (tmp_path / "a.otf").write_bytes(FONTS[0].data)
    every = {
        PdfFontSettings().fingerprint,
        PdfFontSettings(allows_gaps=True).fingerprint,
        PdfFontSettings(str(tmp_path)).fingerprint,
    }
    assert len(every) == 3


@table(
    "content",
    [b"", b"no font", b"\0\1\0\0\xff\xff" + bytes(99), b"ttcf" + bytes(99), FONTS[0].data[:5000]],
)
def test_broken_font_of_the_operator_stops_the_start(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"a\.ttf is not an OpenType font"):
        read_font("a.ttf", content)
    (tmp_path / "a.ttf").write_bytes(content)
    with pytest.raises(StartupError):
        installed_fonts(str(tmp_path))


def test_folder_without_fonts_stops_the_start(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(StartupError, match="--pdf-font-folder"):
            installed_fonts(str(folder))
