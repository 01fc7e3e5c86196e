"""Reads whole numbers from text that others wrote."""

MAX_PORT = 65535


def read_whole_number(text: str | bytes, most: int) -> int | None:
    """Return the number that *text* spells in decimal digits, or None if it is anything else or is over *most*.

    int() would also accept signs, blanks, underscores and the digits of other scripts. It raises ValueError for more
    than 4,300 digits, including leading zeros.
    """
    if not text.isascii() or not text.isdigit():
        return None
    digits = text.lstrip("0") if isinstance(text, str) else text.lstrip(b"0")
    if len(digits) > len(str(most)):
        return None
    number = int(digits or "0")
    return number if number <= most else None


def read_port(text: str) -> int | None:
    """Return the port that *text* spells in at most five digits, or None if it is not a number up to MAX_PORT."""
    return read_whole_number(text, MAX_PORT) if len(text) <= len(str(MAX_PORT)) else None
