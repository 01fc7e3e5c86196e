"""Counts the values of JSON before objects are made of it."""

STRETCH_BYTES = 4096


def num_strings(text: bytes | bytearray) -> int:
    """Return the number of strings, names among them."""
    return _without_escapes(text).count(b'"') // 2


def num_brackets(text: bytes | bytearray) -> int:
    """Return the number of arrays and objects."""
    return sum(part.count(b"[") + part.count(b"{") for part in _outside_strings(text))


def num_commas(text: bytes | bytearray) -> int:
    """Return the number of commas between values."""
    return sum(part.count(b",") for part in _outside_strings(text))


def num_marks(text: bytes | bytearray, mark: bytes) -> int:
    """Return how often the character *mark* is in *text*, strings included; stretches without it take no time."""
    num, start = 0, text.find(mark)
    while start >= 0:
        end = start + STRETCH_BYTES
        num += text.count(mark, start, end)
        start = text.find(mark, end)
    return num


def num_items(array: bytes) -> int:
    """Return a lower bound of the number of items in an *array* of numbers."""
    return array.count(b",") + 1


def _outside_strings(text: bytes | bytearray) -> list[bytes | bytearray]:
    return list(_without_escapes(text).split(b'"')[::2])


def _without_escapes(text: bytes | bytearray) -> bytes | bytearray:
    # Pairs first: a quote after an escaped backslash is not escaped.
    return text.replace(rb"\\", b"").replace(rb"\"", b"")
