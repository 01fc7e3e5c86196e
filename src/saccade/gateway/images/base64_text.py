"""Decodes base64 as clients write it: perhaps with white space, the URL-safe alphabet, or no padding."""

import binascii
import re
from typing import Final

import pybase64

from saccade.errors import InvalidBase64
from saccade.media.video_header import FRAMES_PREFIX

WHITE: Final = b" \t\r\n\v\f"
_STANDARD: Final = bytes.maketrans(b"-_", b"+/")
_OTHER: Final = re.compile(rb"[^A-Za-z0-9+/]")
STEP: Final = 1 << 20
"""Characters that are cleaned at a time, so that only one copy of a long text exists."""


def decode_base64(text: str) -> bytes:
    """Return the bytes that *text*, from a data: URL, encodes. Raises an InvalidBase64 that says what is wrong."""
    try:
        return pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return _decode_cleaned(text)


def _decode_cleaned(text: str) -> bytes:
    letters = bytearray()
    for start in range(0, len(text), STEP):
        # A character beyond ASCII becomes "?", which is no letter of base64.
        letters += text[start : start + STEP].encode("ascii", "replace").translate(_STANDARD, WHITE)
    padding = 0
    while padding < 2 and letters.endswith(b"="):
        del letters[-1]
        padding += 1
    if _OTHER.search(letters):
        frames = f" Frames with commas between them are a video, `{FRAMES_PREFIX}`." if b"," in letters else ""
        what = "it has `=` before its end" if b"=" in letters else "it has other characters than base64"
        raise InvalidBase64(f"The data: URL's payload is not valid base64: {what}.{frames}")
    if len(letters) % 4 == 1:
        raise InvalidBase64("The data: URL's payload is not valid base64: a character is missing, or one is too many.")
    letters += b"=" * (-len(letters) % 4)
    return pybase64.b64decode(letters, validate=True)
