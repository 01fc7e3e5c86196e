"""Checks a request's JSON against bounds before it is decoded.

msgspec holds the GIL while it decodes, so a thread does not help. A body that could take long is refused before any
decoding. Four figures bound the work:

- the bytes outside images.
- the JSON strings; each key, message and part needs at least one.
- the arrays and objects.
- the commas, which separate values of any kind.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from saccade.errors import BodyTooLarge, InvalidValue
from saccade.gateway.chat_request import ChatMessage
from saccade.gateway.field_schemas import MAX_PARTS, MAX_TOKENS
from saccade.json_counts import num_brackets, num_commas, num_marks, num_strings

MAX_BYTES_BESIDE_IMAGES: Final = 12 * 2**20
"""Three times the longest text: an escaped character takes up to three times its bytes."""

MAX_STRINGS: Final = 65_536
"""Keys and values; a request with the most messages and parts needs about 50,000."""

MAX_BRACKETS: Final = 65_536
"""Arrays and objects. A request with the most strings has half as many, since each object has names; to make 4 million
takes a minute.
"""

MAX_COMMAS: Final = 131_072
"""Outside of strings and of arrays of token ids, so numbers and nulls are bounded, too."""

MOST_COMMAS: Final = MAX_COMMAS + 3 * MAX_TOKENS
"""Of a body with three arrays of token ids, the longest that requests have: a prompt, and ids by two names."""

VALUE_BYTES: Final = 64
"""Roughly what a decoded value takes besides the bytes of its text."""

MAX_DATA_URLS: Final = 1024
"""Further ones count as text."""

_DATA_URL: Final = b'"data:'
_MOST_ESCAPES: Final = 1 / 16
"""Share of a data: URL's characters; PHP escapes the slashes of base64, a quarter of this."""

MAX_TOOLS_BYTES: Final = 2**20
"""Some 500 tools as agents declare them, and more tokens than most contexts have.

To read them, 600 of 1.8 kB each took 4 ms. The grammar of calls has bounds of its own (structured_output/trial.py).
"""

MAX_TOOLS_MARKS: Final = 100_000
"""Of brackets, braces and commas in tools: JSON of nothing else takes 25 times as long to decode as tools do."""

FindImage = Callable[[bytes | bytearray, int, int], int]
"""Returns the start of the first image whose marker is between two positions of a body, -1 for none.

The image starts after the opening quote of its string.
"""


def find_data_url(body: bytes | bytearray, start: int, end: int) -> int:
    """Find the next image in OpenAI's format, a data: URL. This function is a FindImage."""
    index = body.find(_DATA_URL, start, end)
    return index if index < 0 else index + len(_DATA_URL)


def check_bounds(body: bytes | bytearray, find_image: FindImage = find_data_url) -> bytes:
    """Return *body* without the bytes of its images; the JSON is otherwise the same.

    Raises BodyTooLarge for too many bytes outside images, and InvalidValue for too many strings, brackets or commas. In
    valid JSON, the text from an opening quote to the next quote contains no key and no other string. So an image's
    bytes are only searched for that quote and for escapes. They count only if they have many escapes or are not ASCII.
    """
    _check_counts(body)
    is_ascii = body.isascii()
    num_bytes = position = num_urls = 0
    pieces: list[bytes | bytearray] = []
    while position < len(body):
        # Not beyond the limit: a body that is too long takes no more time than a valid one.
        limit = position + MAX_BYTES_BESIDE_IMAGES - num_bytes + 1
        image = find_image(body, position, limit) if num_urls < MAX_DATA_URLS else -1
        start = min(limit, len(body)) if image < 0 else image
        num_bytes += start - position
        if num_bytes > MAX_BYTES_BESIDE_IMAGES:
            raise _too_large()
        pieces.append(body[position:start])
        end = body.find(b'"', start)
        position = len(body) if end < 0 else end
        num_urls += 1
        is_plain = _is_plain(body, start, position, is_ascii)
        num_bytes += 0 if is_plain else position - start
        # The quote may belong to an escape of a text.
        if not is_plain or body[position - 1 : position] == b"\\":
            pieces.append(body[start:position])
    if num_bytes > MAX_BYTES_BESIDE_IMAGES:
        raise _too_large()
    return b"".join(pieces)


def _check_counts(body: bytes | bytearray) -> None:
    """Raise InvalidValue for too many values in *body*.

    Images contain hardly any of the counted characters, so they need not be left out.
    """
    if num_marks(body, b'"', 2 * MAX_STRINGS) > 2 * MAX_STRINGS and num_strings(body, MAX_STRINGS) > MAX_STRINGS:
        raise InvalidValue(f"The body has more than {MAX_STRINGS} names and texts.")
    if _num_open(body) > MAX_BRACKETS and num_brackets(body, MAX_BRACKETS) > MAX_BRACKETS:
        raise InvalidValue(f"The body has more than {MAX_BRACKETS} arrays and objects.")
    if num_marks(body, b",", MOST_COMMAS) > MOST_COMMAS and num_commas(body, MOST_COMMAS) > MOST_COMMAS:
        raise InvalidValue(f"The body has more than {MAX_COMMAS} values.")


def _num_open(text: bytes | bytearray) -> int:
    """Count the opening brackets and braces in *text*, strings included. The count is exact only up to MAX_BRACKETS."""
    return num_marks(text, b"[", MAX_BRACKETS) + num_marks(text, b"{", MAX_BRACKETS)


def check_commas(rest: bytes, arrays_of_ids: Sequence[bytes], find_longest: Callable[[], str | None]) -> None:
    """Raise InvalidValue if *rest*, a body without images, has too many commas.

    Commas in its *arrays_of_ids* do not count. The error names the field that *find_longest* returns.
    """
    num_of_ids = sum(array.count(b",") for array in arrays_of_ids)
    most = MAX_COMMAS + num_of_ids
    if num_commas(rest, most) > most:
        raise InvalidValue(f"The body has more than {MAX_COMMAS} values.", find_longest())


def num_value_bytes(body: bytes | bytearray) -> int:
    """Return an upper bound in bytes for the memory that the values in *body* take, without their texts.

    Brackets are counted only up to MAX_BRACKETS, because a body with more is refused before it is decoded.
    """
    return VALUE_BYTES * min(num_marks(body, b",", MAX_TOKENS) + _num_open(body), MAX_TOKENS)


def _is_plain(body: bytes | bytearray, start: int, end: int, is_ascii: bool) -> bool:
    """Return whether a URL decodes as fast as its bytes can be copied, as ASCII with few escapes does."""
    if not (is_ascii or body[start:end].isascii()):
        return False
    return body.find(b"\\", start, end) < 0 or body.count(b"\\", start, end) <= (end - start) * _MOST_ESCAPES


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(
        f"The request's body has more than {MAX_BYTES_BESIDE_IMAGES} bytes without the images in data: URLs."
    )


def check_tools(array: bytes, name: str) -> None:
    """Raise InvalidValue if the JSON *array* of tools, the value of the field *name*, is too large."""
    if len(array) > MAX_TOOLS_BYTES:
        raise InvalidValue(f"`{name}` must have at most {MAX_TOOLS_BYTES} bytes.", name)
    if sum(map(array.count, (b"[", b"{", b","))) > MAX_TOOLS_MARKS:
        raise InvalidValue(f"`{name}` has too many values; {MAX_TOOLS_MARKS} brackets and commas are read.", name)


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raise InvalidValue if *messages* have too many parts, or too many values in the arguments of their calls."""
    if sum(len(message.content) for message in messages if isinstance(message.content, list)) > MAX_PARTS:
        raise InvalidValue(f"The messages have more than {MAX_PARTS} parts together.", "messages")
    # Arguments are JSON in a string, so they are not among the brackets of the body.
    arguments = [call.function.arguments.encode() for message in messages for call in message.tool_calls or ()]
    if _is_over(arguments, _num_open, partial(num_brackets, most=MAX_BRACKETS), MAX_BRACKETS):
        raise InvalidValue(
            f"The arguments of the calls have more than {MAX_BRACKETS} arrays and objects together.", "messages"
        )
    if _is_over(arguments, _num_rough_commas, partial(num_commas, most=MAX_COMMAS), MAX_COMMAS):
        raise InvalidValue(f"The arguments of the calls have more than {MAX_COMMAS} values together.", "messages")


def _num_rough_commas(text: bytes) -> int:
    return num_marks(text, b",", MAX_COMMAS)


def _is_over(
    texts: Sequence[bytes], count_roughly: Callable[[bytes], int], count: Callable[[bytes], int], most: int
) -> bool:
    """Return whether *texts* together have more than *most* values.

    The rough count is cheaper, but includes characters inside strings.
    """
    return sum(map(count_roughly, texts)) > most and sum(map(count, texts)) > most
