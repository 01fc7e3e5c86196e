"""Fields of PDF forms, as viewers draw them: ISO 32000-1, 12.7.  # F22"""

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pdf_forms as forms
import pdfs
import pytest
from drawn_pdfs import drawn, pages
from pdf_forms import Field, filled, text
from tables import table

from saccade.errors import InvalidImage


def blue(encoded: bytes, number: int = 0) -> int:
    """Return the number of blue pixels, which is the colour of values."""
    red, green, shade = np.moveaxis(drawn(encoded, number).astype(int), 2, 0)
    return int(((shade > 200) & (red < 100) & (green < 100)).sum())


def without_fields(encoded: bytes) -> bytes:
    """Return the PDF with a form that does not name its fields; the page still has them."""
    return re.sub(rb"/Fields\[\d+ 0 R\]", b"/Fields[]      ", encoded)


TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "with an appearance": lambda value: filled(text(value, shown=value)),
    "without": lambda value: filled(text(value)),
    "to be made again": lambda value: filled(text(value, shown=b"OLD"), forms.NEED),
    "without, to be made": lambda value: filled(text(value), forms.NEED),
    "an appearance in another font": lambda value: filled(text(value, b"/DA(/Cour 9 Tf 0 0 1 rg)")),
    "of any size": lambda value: filled(text(value, b"/DA(/Helv 0 Tf 0 0 1 rg)")),
    "several lines": lambda value: filled(text(value + b"\\n" + value, flags=forms.MULTILINE)),
    "a comb": lambda value: filled(text(value, b"/MaxLen 12", forms.COMB)),
    "to the right": lambda value: filled(text(value, b"/Q 2")),
    "UTF-16": lambda value: filled(text(b"\\376\\377" + b"".join(b"\\000%c" % letter for letter in value))),
    "only to be read": lambda value: filled(text(value, flags=1)),
    "to be printed": lambda value: filled(text(value, b"/F 4")),
    "a value of the parent": lambda value: filled(Field(b"/Parent<</FT/Tx/T(b)/V(%s)>>%s" % (value, forms.STYLE))),
    "a kind and a value of the grandparent": lambda value: filled(
        Field(b"/T(a)/Parent<</T(b)/Parent<</FT/Tx/T(c)/V(%s)%s>>>>" % (value, forms.STYLE))
    ),
    "no name": lambda value: filled(Field(b"/FT/Tx/V(%s)%s" % (value, forms.STYLE))),
    "no name, with an appearance": lambda value: filled(Field(b"/FT/Tx", [(b"", forms.SHOWN % value)])),
    "without any appearance": lambda value: filled(text(value, b"/AP<<>>")),
    "an appearance that is null": lambda value: filled(text(value, b"/AP<</N null>>")),
    "an appearance for clicks alone": lambda value: filled(text(value, b"/AP<</D<</Length 0>>>>")),
    "an empty appearance": lambda value: filled(replace(text(value), appearances=[(b"", b"")])),
    "invisible if unknown": lambda value: filled(text(value, b"/F 1")),
    "a style of the form": lambda value: filled(Field(b"/FT/Tx/T(a)/V(%s)" % value)).replace(
        b"0 Tf 0 g", b"0 Tf 0 0 1 rg"
    ),
    "a turned page": lambda value: filled(text(value), page=b"/Rotate 90"),
    "a cut page": lambda value: filled(text(value), page=b"/CropBox[10 30 190 90]"),
    "a turned field": lambda value: filled(text(value, b"/MK<</R 180>>")),
    "the second page": lambda value: filled(text(value), before=1),
    "a combo box": lambda value: filled(forms.choice(value, forms.COMBO)),
    "a combo box to be made again": lambda value: filled(
        replace(forms.choice(value, forms.COMBO), appearances=[(b"", forms.SHOWN % b"OLD")]), forms.NEED
    ),
    "a signature": lambda value: filled(Field(b"/FT/Sig/T(a)", [(b"", forms.SHOWN % value)])),
    "a field that no form names": lambda value: without_fields(filled(text(value, shown=value))),
    "a field without a form": lambda value: filled(text(value, shown=value)).replace(b"/AcroForm", b"/Acroform"),
    "a form with XFA": lambda value: filled(text(value), b"/XFA[]"),
}
"""PDFs of one field, by its value."""


@table("name", TEXTS)
def test_value_of_a_field_is_in_the_picture(name: str) -> None:
    page = name == "the second page"
    one, same, other = (drawn(TEXTS[name](value), int(page)) for value in (b"PAID 4200", b"PAID 4200", b"PAID 1900"))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    assert blue(TEXTS[name](b"PAID 4200"), int(page)) > 100


@table("flags", [0, forms.RADIO], ["a tick box", "a radio button"])
@table("is_drawn", [True, False])
@table("form", [b"", forms.NEED])
def test_state_of_a_button_is_in_the_picture(flags: int, is_drawn: bool, form: bytes) -> None:
    on, off = (drawn(filled(forms.button(state, flags, is_drawn=is_drawn), form)) for state in (b"Yes", b"Off"))
    num_marked, num_unmarked = ((image < 128).any(axis=2).sum() for image in (on, off))
    assert num_marked > num_unmarked + 50
    if is_drawn and not form:
        assert (on[100, 60].tolist(), off[100, 60].tolist()) == ([0, 0, 255], [255, 0, 0])
    else:
        assert num_unmarked == 0


STATES: dict[str, Callable[[bytes], Field]] = {
    "not drawn": lambda state: Field(b"/FT/Btn/T(a)/V/%s/AS/%s" % (state, state), width=20),
    "without any appearance": lambda state: Field(b"/FT/Btn/T(a)/AS/%s/AP<<>>" % state, width=20),
    "a value alone": lambda state: Field(b"/FT/Btn/T(a)/V/%s" % state, [(b"Yes", forms.TICK), (b"2", forms.TICK)]),
    "a value alone, not drawn": lambda state: Field(b"/FT/Btn/T(a)/V/%s" % state, width=20),
    "the value of the group": lambda state: Field(
        b"/Parent<</FT/Btn/Ff %d/T(a)/V/%s/Kids[7 0 R]>>" % (forms.RADIO, state), [(b"2", forms.TICK)]
    ),
    "no name": lambda state: Field(b"/FT/Btn/AS/%s" % state, [(b"Yes", forms.TICK), (b"2", forms.TICK)]),
}
"""Buttons by their state."""


@table("name", STATES)
def test_state_of_a_button_is_found_wherever_it_stands(name: str) -> None:
    on, off = (drawn(filled(STATES[name](value))) for value in (b"2", b"Off"))
    num_marked, num_unmarked = ((image < 128).any(axis=2).sum() for image in (on, off))
    assert num_marked > num_unmarked + 50


@table(
    ("value", "plain"),
    [("4\xa0200", b"4 200"), ("4\u2009200", b"4 200"), ("Cafe\u0301", b"Caf\xe9"), ("a\u200bb\xadc", b"abc")],
)
@table("form", [b"", forms.NEED])
def test_blanks_and_accents_of_a_value_are_as_in_the_file(value: str, plain: bytes, form: bytes) -> None:
    assert np.array_equal(drawn(filled(text(forms.wide(value)), form)), drawn(filled(text(plain), form)))


def test_choice_of_a_list_is_in_the_picture() -> None:
    first, second = (drawn(filled(forms.choice(value))) for value in (b"Apple", b"Pear"))
    assert not np.array_equal(first, second)
    assert ((first < 128).any(axis=2)).sum() > 1000


@table("flag", [2, 32], ["hidden", "not to be viewed"])
@table("shown", [b"PAID", None])
@table("form", [b"", forms.NEED])
def test_field_that_is_not_shown_stays_out(flag: int, shown: bytes | None, form: bytes) -> None:
    encoded = filled(text(b"PAID", b"/F %d" % flag, shown=shown), form)
    assert (drawn(encoded) == 255).all()


@table("form", [b"", forms.NEED])
def test_password_shows_how_long_it_is_and_no_letter(form: bytes) -> None:
    one, other, longer = (
        drawn(filled(text(value, flags=forms.PASSWORD), form)) for value in (b"SECRET", b"TERCES", b"SECRETS")
    )
    assert np.array_equal(one, other)
    assert not np.array_equal(one, longer)
    assert np.array_equal(one, drawn(filled(text(b"******"), form)))


def test_empty_field_has_no_highlight() -> None:
    assert (drawn(filled(text(b""))) == 255).all()


HALF = b"/Resources<</ExtGState<</Half<</ca 0.5>>>>>>/Type/XObject/Subtype/Form/BBox[0 0 60 20]"
KINDS = {
    "a field": b"/Subtype/Widget/FT/Tx/T(a)",
    "a free text": b"/Subtype/FreeText/DA(/Helv 12 Tf)/Contents(PAID)",
    "a stamp": b"/Subtype/Stamp",
    "a square": b"/Subtype/Square",
}


@table("name", KINDS)
def test_annotation_is_drawn_once(name: str) -> None:
    annotation = b"<</Type/Annot/Rect[20 40 80 60]/AP<</N 4 0 R>>%s>>" % KINDS[name]
    objects = [
        b"<</Type/Catalog/Pages 2 0 R/AcroForm<</Fields[5 0 R]>>>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 100]/Annots[5 0 R]>>",
        pdfs.stream(b"/Half gs 1 0 0 rg 0 0 60 20 re f", HALF),
        annotation,
    ]
    image = drawn(pdfs.written(objects))
    assert image[100, 100].tolist() in ([255, 127, 127], [255, 128, 128])
    assert (image[:70] == 255).all()


STYLES = (b"/DA(/Helv 12 Tf 0 g)", b"/DA(/Arial 9 Tf)", b"/DA(1 0 0 rg)", b"/DA()", b"", b"/DA(/Helv 12 Tf)/AP<<>>")


@table("style", STYLES)
def test_free_text_without_an_appearance_is_drawn(style: bytes) -> None:
    one, other = (drawn(forms.free_text(b"/Contents(%s)%s" % (text, style))) for text in (b"PAID 4200", b"PAID 1900"))
    assert not np.array_equal(one, other)
    assert (drawn(forms.free_text(b"/F 2/Contents(PAID 4200)" + style)) == 255).all()
    blank = forms.free_text(b"/Contents(%s)%s" % (forms.wide("PAID\xa04200"), style))
    assert np.array_equal(drawn(blank), one)


def test_script_of_a_field_does_not_run() -> None:
    plain, scripted = (filled(text(b"PAID 4200", entries)) for entries in (b"", forms.ACTIONS))
    asks = b"/OpenAction<</S/JavaScript/JS(this.getField('a').value='no')>>"
    expected = drawn(plain)
    assert np.array_equal(drawn(scripted), expected)
    assert np.array_equal(
        drawn(filled(text(b"PAID 4200"), catalog=asks, page=b"/AA<</O" + asks[11:] + b">>")), expected
    )


def test_form_whose_pages_a_viewer_makes_is_refused() -> None:
    encoded = filled(text(b"PAID"), b"/XFA[]", catalog=b"/NeedsRendering true")
    with pytest.raises(InvalidImage, match="dynamic XFA form"):
        pages(encoded)
