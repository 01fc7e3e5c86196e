"""Counts the values in a JSON text before it is parsed into objects.

A count stops soon after it exceeds *most*. It reads the text in stretches, so that other threads can run in between.
"""

from collections.abc import Iterator

STRETCH_BYTES = 4096
"""What a sparse mark costs: a stretch without it takes no time."""

LONG_STRETCH_BYTES = 1 << 18


def num_strings(text: bytes | bytearray, most: int) -> int:
    """Return the number of strings in *text*, including object keys, or a number over *most*."""
    num_quotes = 0
    for stretch in _stretches(text):
        num_quotes += _without_escapes(stretch).count(b'"')
        if num_quotes // 2 > most:
            break
    return num_quotes // 2


def num_brackets(text: bytes | bytearray, most: int) -> int:
    """Return the number of arrays and objects in *text*, or a number over *most*."""
    return _num_outside_strings(text, (b"[", b"{"), most)


def num_commas(text: bytes | bytearray, most: int) -> int:
    """Return the number of commas between values in *text*, or a number over *most*."""
    return _num_outside_strings(text, (b",",), most)


def num_marks(text: bytes | bytearray, mark: bytes, most: int) -> int:
    """Return how often the character *mark* occurs in *text*, even in strings, or a number over *most*."""
    num, start = 0, text.find(mark)
    while start >= 0 and num <= most:
        end = start + STRETCH_BYTES
        num += text.count(mark, start, end)
        start = text.find(mark, end)
    return num


def num_items(array: bytes) -> int:
    """Return the number of items in *array*, a JSON array of numbers."""
    num_commas = array.count(b",")
    return num_commas + 1 if num_commas or array.strip(b"[] \t\r\n") else 0


def _num_outside_strings(text: bytes | bytearray, marks: tuple[bytes, ...], most: int) -> int:
    num, is_inside = 0, False
    for stretch in _stretches(text):
        parts = _without_escapes(stretch).split(b'"')
        num += sum(part.count(mark) for part in parts[is_inside::2] for mark in marks)
        if num > most:
            break
        is_inside ^= len(parts) % 2 == 0
    return num


def _stretches(text: bytes | bytearray) -> Iterator[bytes | bytearray]:
    """Yield *text* in pieces, none of which ends within an escape."""
    start = 0
    while start < len(text):
        stretch = text[start : start + LONG_STRETCH_BYTES]
        if (len(stretch) - len(stretch.rstrip(b"\\"))) % 2:
            stretch = text[start : start + len(stretch) + 1]
        yield stretch
        start += len(stretch)


def _without_escapes(text: bytes | bytearray) -> bytes | bytearray:
    # Pairs first: a quote after an escaped backslash is not escaped.
    return text.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in text else text
