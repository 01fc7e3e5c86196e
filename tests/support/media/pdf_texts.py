"""PDFs whose text is in fonts that they lack, or in one that they have; written here."""

from collections.abc import Mapping

from pdfs import stream, written

NAMES = {"Д": b"afii10021", "а": b"afii10065", "Ω": b"Omega", "α": b"alpha", "א": b"afii57664", "ש": b"afii57689"}
"""Names of Adobe's glyph list; other letters are named by their numbers, as uni0416."""

Texts = Mapping[bytes, bytes]
"""Codes, in hexadecimal, by the font that shows them."""

HELVETICA = b"/Subtype/Type1/BaseFont/Helvetica"
ARIAL = b"/Subtype/TrueType/BaseFont/Arial"


def simple(text: str, font: bytes = HELVETICA) -> Texts:
    """Return a simple font whose codes from 33 are the letters of *text*, and the text in it."""
    letters = sorted(set(text))
    names = b" ".join(b"/" + NAMES.get(letter, b"uni%04X" % ord(letter)) for letter in letters)
    encoding = b"/Encoding<</Type/Encoding/BaseEncoding/WinAnsiEncoding/Differences[33 %s]>>" % names
    codes = b"".join(b"%02x" % (33 + letters.index(letter)) for letter in text)
    return {b"<</Type/Font%s%s>>" % (font, encoding): codes}


def plain(text: str, font: bytes = HELVETICA) -> Texts:
    """Return a simple font without an encoding of its own, and the text in it."""
    return {b"<</Type/Font%s>>" % font: text.encode("cp1252").hex().encode()}


def collection(
    text: str, ordering: bytes, cmap: bytes, codec: str = "utf-16-be", name: bytes = b"Any", kind: int = 0
) -> Texts:
    """Return a font of Adobe's collection *ordering*, and the text in it."""
    system = b"/CIDSystemInfo<</Registry(Adobe)/Ordering(%s)/Supplement 2>>" % ordering
    descendant = b"<</Type/Font/Subtype/CIDFontType%d/BaseFont/%s%s>>" % (kind, name, system)
    font = b"<</Type/Font/Subtype/Type0/BaseFont/%s/Encoding/%s/DescendantFonts[%s]>>" % (name, cmap, descendant)
    return {font: text.encode(codec).hex().encode()}


def weighted(text: str, weight: int) -> Texts:
    """Return a Japanese font of a *weight*, and the text in it."""
    ((font, codes),) = collection(text, b"Japan1", b"UniJIS-UTF16-H").items()
    descriptor = b"/FontDescriptor<</Type/FontDescriptor/FontName/Any/Flags 4/StemV %d>>" % weight
    return {font.replace(b"/BaseFont/Any/CIDSystemInfo", b"/BaseFont/Any%s/CIDSystemInfo" % descriptor): codes}


def numbered(text: str, *, is_named: bool) -> Texts:
    """Return a font whose codes are numbers of its glyphs, with the names of its letters or without, and *text*."""
    names = b"/ToUnicode 5 0 R" if is_named else b""
    system = b"/CIDSystemInfo<</Registry(Adobe)/Ordering(Identity)/Supplement 0>>"
    descendant = b"<</Type/Font/Subtype/CIDFontType2/BaseFont/Any%s>>" % system
    font = b"<</Type/Font/Subtype/Type0/BaseFont/Any/Encoding/Identity-H/DescendantFonts[%s]%s>>" % (descendant, names)
    return {font: text.encode("utf-16-be").hex().encode()}


TO_UNICODE = (
    b"/CIDInit /ProcSet findresource begin 12 dict begin begincmap 1 begincodespacerange <0000> <ffff> "
    b"endcodespacerange 256 beginbfrange %s endbfrange endcmap end end"
    % b" ".join(b"<%02x00> <%02xff> <%02x00>" % (high, high, high) for high in range(256))
)


def page(*texts: Texts, mode: int = 0, within: str = "page", font_file: bytes = b"") -> bytes:
    """Return a PDF of one page that shows *texts*, one below the other; *mode* 3 is invisible.

    They are *within* the page, a form on it, or an annotation. Object 6 is *font_file*, for fonts that are in the file.
    """
    lines = [(font, codes) for some in texts for font, codes in some.items()]
    fonts = b"/Resources<</Font<<%s>>>>" % b"".join(b"/F%d %s" % (index, font) for index, (font, _) in enumerate(lines))
    content = b" ".join(
        b"BT %d Tr /F%d 20 Tf 10 %d Td <%s> Tj ET" % (mode, index, 70 - 25 * index, codes)
        for index, (_, codes) in enumerate(lines)
    )
    drawing = stream(content, b"/Type/XObject/Subtype/Form/BBox[0 0 200 100]" + fonts)
    entries = {
        "page": fonts + b"/Contents 7 0 R",
        "form": b"/Resources<</XObject<</X 4 0 R>>>>/Contents 8 0 R",
        "free text": b"/Annots[<</Type/Annot/Subtype/FreeText/Rect[0 0 200 100]/DA(/F0 20 Tf)/AP<</N 4 0 R>>>>]",
        "stamp": b"/Annots[<</Type/Annot/Subtype/Stamp/Rect[0 0 200 100]/AP<</N 4 0 R>>>>]",
    }[within]
    return written(
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 100]%s>>" % entries,
            drawing,
            stream(TO_UNICODE),
            stream(font_file, b"/Length1 %d" % len(font_file)),
            stream(content),
            stream(b"/X Do"),
        ]
    )


def embedded(text: str, glyphs: Mapping[str, int]) -> Texts:
    """Return a font that is in the file, as object 6, and *text* by the numbers of its *glyphs*."""
    descriptor = b"/FontDescriptor<</Type/FontDescriptor/FontName/Own/Flags 4/FontFile2 6 0 R>>"
    system = b"/CIDSystemInfo<</Registry(Adobe)/Ordering(Identity)/Supplement 0>>/CIDToGIDMap/Identity"
    descendant = b"<</Type/Font/Subtype/CIDFontType2/BaseFont/Own%s%s>>" % (descriptor, system)
    font = b"<</Type/Font/Subtype/Type0/BaseFont/Own/Encoding/Identity-H/DescendantFonts[%s]>>" % descendant
    return {font: b"".join(b"%04x" % glyphs[letter] for letter in text)}


HOSTILE = {
    "a font of forty weights": page(*(weighted("日本", 40 + index) for index in range(40))),
    "forty thousand letters": page(
        collection("".join(map(chr, range(0x3400, 0xD000))), b"GB1", b"UniGB-UTF16-H"), numbered("Ab", is_named=False)
    ),
    "a name of ten thousand letters": page(simple("Дата", b"/Subtype/Type1/BaseFont/" + b"A" * 10_000)),
    "a name of control characters": page(simple("Дата", b"/Subtype/Type1/BaseFont/A#00#0aB#ff#fe")),
    "a font of itself": page(
        {b"<</Type/Font/Subtype/Type0/BaseFont/A/Encoding/Identity-H/DescendantFonts[3 0 R]>>": b"0041"}
    ),
    "a code without end": page(
        {b"<</Type/Font/Subtype/Type1/BaseFont/Any/FirstChar -1/LastChar 99999999>>": b"41" * 9999}
    ),
}
"""Texts that are drawn in some way, or refused, and harm nothing."""
