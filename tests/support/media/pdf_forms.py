"""PDFs with filled forms, written here: each field is one widget, with an appearance or without."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdfs import stream, written

TICK = b"0 0 1 rg 2 2 16 16 re f"
NO_TICK = b"1 0 0 rg 8 8 4 4 re f"
SHOWN = b"BT /Helv 12 Tf 0 0 1 rg 4 5 Td (%s) Tj ET"
STYLE = b"/DA(/Helv 12 Tf 0 0 1 rg)"
MULTILINE, PASSWORD, RADIO, COMBO, COMB = 1 << 12, 1 << 13, 3 << 14, 1 << 17, 1 << 24
NEED = b"/NeedAppearances true"
FONTS = b"/Font<</Helv 4 0 R/ZaDb 5 0 R>>"


@dataclass(frozen=True)
class Field:
    """*entries* of a field's dictionary, and its *appearances* by state; the only one of a text has the state b""."""

    entries: bytes
    appearances: Sequence[tuple[bytes, bytes]] = ()
    width: int = 160
    height: int = 20


def text(value: bytes, entries: bytes = b"", flags: int = 0, shown: bytes | None = None) -> Field:
    """A text field; its appearance says *shown*."""
    dictionary = b"/FT/Tx/T(a)/Ff %d/V(%s)%s%s" % (flags, value, STYLE, entries)
    return Field(dictionary, [(b"", SHOWN % shown)] if shown is not None else [])


def free_text(entries: bytes) -> bytes:
    """Return a PDF with an annotation of text, which has no appearance."""
    return written(
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 100]/Annots[4 0 R]>>",
            b"<</Type/Annot/Subtype/FreeText/Rect[20 30 180 80]%s>>" % entries,
        ]
    )


def wide(text: str) -> bytes:
    """Return *text* in UTF-16, as the inside of a PDF's string."""
    return b"\\376\\377" + b"".join(b"\\%03o" % byte for byte in text.encode("utf-16-be"))


def choice(value: bytes, flags: int = 0, options: Sequence[bytes] = (b"(Apple)", b"(Pear)", b"(Quince)")) -> Field:
    """A list of *options*, or a combo box."""
    dictionary = b"/FT/Ch/T(a)/Ff %d/V(%s)/Opt[%s]%s" % (flags, value, b"".join(options), STYLE)
    return Field(dictionary, height=50)


def button(state: bytes, flags: int = 0, *, is_drawn: bool = True) -> Field:
    """A tick box, or a radio button, in the state Yes or Off."""
    dictionary = b"/FT/Btn/T(a)/Ff %d/V/%s/AS/%s/DA(/ZaDb 0 Tf 0 g)" % (flags, state, state)
    return Field(dictionary, [(b"Yes", TICK), (b"Off", NO_TICK)] if is_drawn else [], width=20)


def filled(
    field: Field,
    form: bytes = b"",
    page: bytes = b"",
    catalog: bytes = b"",
    before: int = 0,
    after: Sequence[bytes] = (),
    fonts: bytes = b"",
) -> bytes:
    """Return a PDF with *field* on its page, which *before* empty ones precede; *after* are further objects.

    The others are further entries of dictionaries; *fonts* are those of the form.
    """
    numbers = [6 + index for index in range(before + 1)]
    widget = numbers[-1] + 1
    kids = b" ".join(b"%d 0 R" % number for number in numbers)
    box = b"/Type/Page/Parent 2 0 R/MediaBox[0 0 200 100]/Resources<<%s>>" % FONTS
    states = [(name, widget + 1 + index) for index, (name, _) in enumerate(field.appearances)]
    if states and states[0][0]:
        entries = b"/AP<</N<<%s>>>>" % b"".join(b"/%s %d 0 R" % state for state in states)
    else:
        entries = b"".join(b"/AP<</N %d 0 R>>" % number for _, number in states)
    size = b"/BBox[0 0 %d %d]/Resources<<%s>>/Type/XObject/Subtype/Form" % (field.width, field.height, FONTS)
    rectangle = b"/Rect[20 40 %d %d]" % (20 + field.width, 40 + field.height)
    return written(
        [
            b"<</Type/Catalog/Pages 2 0 R/AcroForm 3 0 R%s>>" % catalog,
            b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids, len(numbers)),
            b"<</Fields[%d 0 R]/DR<<%s>>/DA(/Helv 0 Tf 0 g)%s>>" % (widget, FONTS[:-2] + fonts + b">>", form),
            b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>",
            b"<</Type/Font/Subtype/Type1/BaseFont/ZapfDingbats>>",
            *[b"<<%s>>" % box] * before,
            b"<<%s/Annots[%d 0 R]%s>>" % (box, widget, page),
            b"<</Type/Annot/Subtype/Widget%s%s%s>>" % (rectangle, field.entries, entries),
            *(stream(drawing, size) for _, drawing in field.appearances),
            *after,
        ]
    )


ACTIONS = b"/AA<</K<</S/JavaScript/JS(while\\(1\\);)>>/F<</S/JavaScript/JS(event.value='no')>>>>"
HOSTILE = {
    "a value of a megabyte": filled(text(b"PAID " * 200_000, flags=MULTILINE)),
    "a value of a megabyte in a font of any size": filled(text(b"PAID " * 200_000, b"/DA(/Helv 0 Tf)", MULTILINE)),
    "a value of control characters": filled(text(bytes(range(1, 32)).replace(b"\r", b"") * 50)),
    "a value of operators": filled(text(b"\\) Tj ET Q q 1000 0 0 1000 0 0 cm 0 0 9 9 re f BT \\(")),
    "a value of halves of pairs": filled(text(b"\xfe\xff\xd8\x00\xdc\x00\xd8\x00")),
    "a style of operators": filled(text(b"PAID", b"/DA(/Helv 12 Tf ET Q 1e30 0 0 1e30 0 0 cm BT)")),
    "a font of a huge size": filled(text(b"PAID", b"/DA(/Helv 1e30 Tf)")),
    "a font that is not there": filled(text(b"PAID", b"/DA(/None 12 Tf)")),
    "a comb of a billion": filled(text(b"PAID", b"/MaxLen 1000000000", COMB)),
    "a parent that is its own": filled(text(b"PAID", b"/Parent 7 0 R/Kids[7 0 R]")),
    "a field without a kind": filled(Field(b"/T(a)/V(PAID)")),
    "a value of another type": filled(Field(b"/FT/Tx/T(a)/V<</A 7 0 R>>" + STYLE)),
    "an appearance that draws itself": filled(Field(b"/FT/Tx/T(a)/AP<</N 7 0 R>>")),
    "a huge rectangle": filled(text(b"PAID", b"/Rect[-1e30 -1e30 1e30 1e30]")),
    "turned by a billion": filled(text(b"PAID", b"/MK<</R 999999999>>")),
    "a page of itself": filled(text(b"PAID", b"/P 6 0 R"), page=b"/Annots[7 0 R 7 0 R 6 0 R 1 0 R]"),
}
"""Forms that are drawn in some way, or refused, and harm nothing."""
