"""Counts the values of JSON before objects are made of it."""


def num_strings(text: bytes | bytearray) -> int:
    """Return the number of strings, names among them."""
    return _without_escapes(text).count(b'"') // 2


def num_brackets(text: bytes | bytearray) -> int:
    """Return the number of arrays and objects."""
    return sum(part.count(b"[") + part.count(b"{") for part in _outside_strings(text))


def num_commas(text: bytes | bytearray) -> int:
    """Return the number of commas between values."""
    return sum(part.count(b",") for part in _outside_strings(text))


def num_items(array: bytes) -> int:
    """Return a lower bound of the number of items in an *array* of numbers."""
    return array.count(b",") + 1


def _outside_strings(text: bytes | bytearray) -> list[bytes | bytearray]:
    return list(_without_escapes(text).split(b'"')[::2])


def _without_escapes(text: bytes | bytearray) -> bytes | bytearray:
    # Pairs first: a quote after an escaped backslash is not escaped.
    return text.replace(rb"\\", b"").replace(rb"\"", b"")
