"""A PDF's fields and free texts, before and after PDFium gives them an appearance. Source: ISO 32000-1, 12.5 and 12.7.

PDFium silently omits letters of a value that none of its fonts has. So this module compares the letters of the
values with those that PDFium has written.
"""

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_float
from typing import Any, NamedTuple

import pypdfium2_raw as pdfium
from blake3 import blake3

from saccade.media.pdf_text import UNSEEN, annotation, is_blank, letters_from

LAST_PLAIN = 0xFF
NO_TEXT_BYTES = 2
ON, OFF = "Yes", "Off"
"""The states in which PDFium draws a button that has no appearance; other names of the first are none to it."""

BUTTONS = (pdfium.FPDF_FORMFIELD_CHECKBOX, pdfium.FPDF_FORMFIELD_RADIOBUTTON)
WITH_VALUES = (pdfium.FPDF_FORMFIELD_TEXTFIELD, pdfium.FPDF_FORMFIELD_COMBOBOX, pdfium.FPDF_FORMFIELD_LISTBOX)
ROOM = 10_000
"""How much wider and higher a field is made, in points, so that all of its value is written."""

DEFAULT_FONT = "/Helv 12 Tf"
LEAST_FONT_SIZE = 4
DEFAULT_FONT_SIZE = 12


class Value(NamedTuple):
    """The text of a field or a free text, for PDFium to write. *number* is the annotation's index on its page."""

    number: int
    text: str


def complete_fields(page: pdfium.FPDF_PAGE, form: pdfium.FPDF_FORMHANDLE) -> None:
    """Change fields and free texts on *page* that PDFium would not draw as the file says.

    Call it before the page joins *form*.
    """
    for index, one in _annotations(page):
        if _is_free_text(one):
            _complete_free_text(one)
            continue
        flags = pdfium.FPDFAnnot_GetFlags(one)
        if flags & pdfium.FPDF_ANNOT_FLAG_INVISIBLE:  # of annotations of unknown kinds only
            pdfium.FPDFAnnot_SetFlags(one, flags & ~pdfium.FPDF_ANNOT_FLAG_INVISIBLE)
        kind = pdfium.FPDFAnnot_GetFormFieldType(form, one)
        if kind in BUTTONS:
            _complete_button(one)
        elif kind in WITH_VALUES:
            _complete_value(one, kind)
        else:
            _complete_kind(one, index)


def complete_states(page: pdfium.FPDF_PAGE, form: pdfium.FPDF_FORMHANDLE) -> None:
    """Set the missing states of check boxes and radio buttons on *page* from the values of their fields.

    Call it after *page* has joined *form*.
    """
    for _, one in _annotations(page):
        if pdfium.FPDFAnnot_GetFormFieldType(form, one) in BUTTONS and not _entry(one, b"AS"):
            by_value = _appearance(one)
            _set_entry(one, b"AS", _text(pdfium.FPDFAnnot_GetFormFieldExportValue, form, one))
            if not by_value or _appearance(one) != by_value:
                _set_entry(one, b"AS", OFF)


def _complete_button(button: pdfium.FPDF_ANNOTATION) -> None:
    state = _entry(button, b"AS")
    if not state and (state := _entry(button, b"V")):
        _set_entry(button, b"AS", state)
    if state not in ("", OFF) and not _appearance(button):
        pdfium.FPDFAnnot_SetAP(button, pdfium.FPDF_ANNOT_APPEARANCEMODE_NORMAL, None)
        _set_entry(button, b"AS", ON)


def _complete_value(field: pdfium.FPDF_ANNOTATION, kind: int) -> None:
    if not _appearance(field):
        pdfium.FPDFAnnot_SetAP(field, pdfium.FPDF_ANNOT_APPEARANCEMODE_NORMAL, None)
    if kind == pdfium.FPDF_FORMFIELD_TEXTFIELD:
        _make_writable(field, b"V")


def _complete_free_text(one: pdfium.FPDF_ANNOTATION) -> None:
    style = _entry(one, b"DA")
    if not _appearance(one) and " Tf" not in style:
        _set_entry(one, b"DA", f"{style} {DEFAULT_FONT}")
    _make_writable(one, b"Contents")


def _make_writable(one: pdfium.FPDF_ANNOTATION, key: bytes) -> None:
    value = _entry(one, key)
    if (clean := _writable(value)) != value:
        _set_entry(one, key, clean)


def _complete_kind(field: pdfium.FPDF_ANNOTATION, index: int) -> None:
    """Give *field* the name and kind that PDFium needs. It looks for the kind only in the field and its parent."""
    if not _entry(field, b"T"):
        _set_entry(field, b"T", f"unnamed {index}")
    if not pdfium.FPDFAnnot_HasKey(field, b"FT"):
        _set_entry(field, b"FT", "Btn" if _entry(field, b"AS") else "Tx")


def _writable(value: str) -> str:
    """Return *value* with letters and accents composed, plain blanks, and no format characters (category Cf)."""
    letters = unicodedata.normalize("NFC", value)
    return "".join(
        " " if unicodedata.category(one) == "Zs" else one for one in letters if unicodedata.category(one) != "Cf"
    )


def appearances(page: pdfium.FPDF_PAGE) -> dict[int, bytes]:
    """Return, by index, a digest of the appearance of each visible field and free text on *page*; b"" for none."""
    return {index: _appearance(one) for index, one in _annotations(page) if not pdfium.FPDFAnnot_GetFlags(one) & UNSEEN}


def values_drawn_anew(page: pdfium.FPDF_PAGE, form: pdfium.FPDF_FORMHANDLE, before: Mapping[int, bytes]) -> list[Value]:
    """Return the values of fields whose appearance differs from *before*, and of free texts that had none."""
    return [
        Value(index, _value(form, one))
        for index, one in _annotations(page)
        if index in before and (not before[index] if _is_free_text(one) else _appearance(one) != before[index])
    ]


def keep_values(page: pdfium.FPDF_PAGE, values: Sequence[Value]) -> None:
    """Remove all annotations on *page* except those in *values*, which get room for all of their text."""
    numbers = {value.number for value in values}
    for index in reversed(range(pdfium.FPDFPage_GetAnnotCount(page))):
        if index not in numbers:
            pdfium.FPDFPage_RemoveAnnot(page, index)
            continue
        with annotation(page, index) as one:
            sides = pdfium.FS_RECTF()
            pdfium.FPDFAnnot_GetRect(one, sides)
            sides.right, sides.bottom = sides.right + ROOM, sides.bottom - ROOM
            pdfium.FPDFAnnot_SetRect(one, sides)


def lost_letters(values: Sequence[Value], page: pdfium.FPDF_PAGE, first: int) -> frozenset[int]:
    """Return letters of *values* that are missing, or have no outline, in *page*'s objects from number *first* on.

    Letters up to U+00FF are returned only if they have no outline, since fonts without letter names have them too.
    """
    every = {ord(letter) for value in values for letter in value.text}
    letters, flat = letters_from(page, first)
    unusual = {letter for letter in every if letter > LAST_PLAIN and not is_blank(letter)}
    return frozenset((unusual - letters) | (every & flat))


def _value(form: pdfium.FPDF_FORMHANDLE, field: pdfium.FPDF_ANNOTATION) -> str:
    if _is_free_text(field):
        return _entry(field, b"Contents")
    kind = pdfium.FPDFAnnot_GetFormFieldType(form, field)
    if kind == pdfium.FPDF_FORMFIELD_LISTBOX:
        return "\n".join(_labels_in_sight(form, field))
    if kind not in WITH_VALUES:
        return ""
    if (
        kind == pdfium.FPDF_FORMFIELD_TEXTFIELD
        and pdfium.FPDFAnnot_GetFormFieldFlags(form, field) & pdfium.FPDF_FORMFLAG_TEXT_PASSWORD
    ):
        return ""
    value = _text(pdfium.FPDFAnnot_GetFormFieldValue, form, field)
    if kind == pdfium.FPDF_FORMFIELD_COMBOBOX:
        # PDFium shows the label of the option, and says what it exports.
        labels = (
            _label(form, field, index)
            for index in range(pdfium.FPDFAnnot_GetOptionCount(form, field))
            if pdfium.FPDFAnnot_IsOptionSelected(form, field, index)
        )
        return next(labels, value)
    return value


def _labels_in_sight(form: pdfium.FPDF_FORMHANDLE, field: pdfium.FPDF_ANNOTATION) -> Iterator[str]:
    number, size, sides = c_float(), c_float(), pdfium.FS_RECTF()
    pdfium.FPDFAnnot_GetNumberValue(field, b"TI", number)
    pdfium.FPDFAnnot_GetFontSize(form, field, size)
    pdfium.FPDFAnnot_GetRect(field, sides)
    height = min(sides.top - sides.bottom, ROOM)
    first = int(max(0, min(number.value, ROOM)))
    count = 1 + int(height / max(size.value or DEFAULT_FONT_SIZE, LEAST_FONT_SIZE))
    last = min(first + count, pdfium.FPDFAnnot_GetOptionCount(form, field))
    return (_label(form, field, index) for index in range(first, last))


def _label(form: pdfium.FPDF_FORMHANDLE, field: pdfium.FPDF_ANNOTATION, index: int) -> str:
    return _text(pdfium.FPDFAnnot_GetOptionLabel, form, field, index)


def _appearance(field: pdfium.FPDF_ANNOTATION) -> bytes:
    content = _wide(pdfium.FPDFAnnot_GetAP, field, pdfium.FPDF_ANNOT_APPEARANCEMODE_NORMAL)
    return blake3(content).digest() if content else b""


def _entry(field: pdfium.FPDF_ANNOTATION, key: bytes) -> str:
    return _text(pdfium.FPDFAnnot_GetStringValue, field, key)


def _set_entry(field: pdfium.FPDF_ANNOTATION, key: bytes, text: str) -> None:
    content = text.encode("utf-16-le", errors="replace") + b"\0\0"
    pdfium.FPDFAnnot_SetStringValue(field, key, (pdfium.FPDF_WCHAR * (len(content) // 2)).from_buffer_copy(content))


def _text(read: Any, *arguments: Any) -> str:
    return _wide(read, *arguments).decode("utf-16-le", errors="replace")


def _wide(read: Any, *arguments: Any) -> bytes:
    """Return the UTF-16 bytes that *read* writes to a buffer, without the terminating zero."""
    length = read(*arguments, None, 0)
    if length <= NO_TEXT_BYTES:
        return b""
    buffer = (pdfium.FPDF_WCHAR * (length // 2))()
    read(*arguments, buffer, length)
    return bytes(buffer)[:-2]


def _is_free_text(one: pdfium.FPDF_ANNOTATION) -> bool:
    return bool(pdfium.FPDFAnnot_GetSubtype(one) == pdfium.FPDF_ANNOT_FREETEXT)


def _annotations(page: pdfium.FPDF_PAGE) -> Iterator[tuple[int, pdfium.FPDF_ANNOTATION]]:
    """Yield the index and annotation of each field and free text. An annotation is valid only until the next."""
    for index in range(pdfium.FPDFPage_GetAnnotCount(page)):
        with annotation(page, index) as one:
            if pdfium.FPDFAnnot_GetSubtype(one) in (pdfium.FPDF_ANNOT_WIDGET, pdfium.FPDF_ANNOT_FREETEXT):
                yield index, one
