"""Turns each text file in a message into text: the file's name, then its content."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import UNSET, structs

from saccade.errors import BodyTooLarge, InvalidBase64, InvalidValue
from saccade.gateway.body_bounds import MAX_BYTES_BESIDE_IMAGES
from saccade.gateway.chat_request import ChatMessage, ContentPart, FileSource
from saccade.gateway.images.base64_text import decode_base64
from saccade.gateway.json_body import decode
from saccade.gateway.media_parameters import ImageLimits, limits_of

ALL_TEXTS: Final = "text/"
TEXT_TYPES: Final = frozenset(
    f"application/{name}" for name in ("json", "xml", "yaml", "x-yaml", "toml", "javascript", "x-javascript")
)
UNTYPED: Final = ("", "application/octet-stream")
ENDINGS: Final = (
    *(".txt", ".md", ".markdown", ".rst", ".tex", ".csv", ".tsv", ".json", ".jsonl", ".xml", ".html", ".htm", ".css"),
    *(".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf", ".log", ".sql", ".diff", ".patch", ".proto", ".sh", ".bash"),
    *(".py", ".pyi", ".js", ".mjs", ".jsx", ".ts", ".tsx", ".java", ".kt", ".scala", ".go", ".rs", ".c", ".h", ".cc"),
    *(".cpp", ".hpp", ".cs", ".swift", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".ps1"),
)
"""Of names of files whose type is not stated."""

CHARSETS: Final = ("charset=utf-8", "charset=utf8", "charset=us-ascii")
MAX_HEAD: Final = 256
"""Characters of a data: URL before its comma."""

MAX_BEFORE_DATA: Final = 1024
IMAGE_OR_PDF: Final = re.compile(rb'"file_data"[ \t\r\n]*:[ \t\r\n]*"data:(?:image|application\\?/pdf)')
"""Tells a file that is no text by its first bytes of JSON, so that megabytes are not decoded here, too."""

_FILE: Final = msgspec.json.Decoder(FileSource)


@dataclass
class TextFiles:
    """Reads the text files of one request, at most MAX_BYTES_BESIDE_IMAGES characters together, as they are sent."""

    num_characters: int = 0

    def read_file(self, url: str | None, filename: str | None, field: str) -> str | None:
        """Return the *filename* and the text of *url*, the value of *field*; None if *url* is not a text file.

        Raises BodyTooLarge, InvalidBase64 and InvalidValue, which name the field.
        """
        head, comma, _ = (url or "")[:MAX_HEAD].partition(",")
        if url is None or not comma:
            return None
        text = self.text_of(f"{head},", url[len(head) + 1 :], field, filename or "")
        return None if text is None else on_own_lines(filename or None, text)

    def text_of(self, head: str, payload: str, field: str, filename: str = "") -> str | None:
        """Return the text in *payload*, the rest of a data: URL after *head*; None if the URL is not a text file.

        Raises the same errors as read_file().
        """
        scheme, _, described = head.removesuffix(",").lower().partition(":")
        kind, *parameters = (word.strip() for word in described.split(";"))
        if scheme != "data" or not _is_text(kind, filename):
            return None
        self.count(len(head) + len(payload), field)
        if parameters[-1:] != ["base64"]:
            raise InvalidValue(f"`{field}` must be in base64: `data:text/plain;base64,...`.", field)
        for parameter in parameters:
            if parameter.startswith("charset=") and parameter.replace('"', "") not in CHARSETS:
                raise _not_utf8("its type states another charset", field)
        return _text_of(payload, field)

    def count(self, num_characters: int, field: str) -> None:
        """Count the characters of another file, the value of *field*. Raises BodyTooLarge."""
        self.num_characters += num_characters
        if self.num_characters > MAX_BYTES_BESIDE_IMAGES:
            raise BodyTooLarge(
                f"The text files have more than {MAX_BYTES_BESIDE_IMAGES} characters together, as they are sent.", field
            )


def on_own_lines(*texts: str | None) -> str:
    """Return the *texts* that are not None, each on its own line, since templates write no separator between parts."""
    return "\n".join(("", *(text.removesuffix("\n") for text in texts if text is not None), ""))


def _is_text(kind: str, filename: str) -> bool:
    if kind in UNTYPED:
        return filename.lower().endswith(ENDINGS)
    return kind.startswith(ALL_TEXTS) or kind in TEXT_TYPES


def _text_of(payload: str, field: str) -> str:
    try:
        content = decode_base64(payload)
    except InvalidBase64 as error:
        raise error.at(field) from error
    if b"\0" in content:
        raise _not_utf8("it has NUL bytes", field)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(f"byte {error.start} is wrong", field) from None


def _not_utf8(fault: str, field: str) -> InvalidValue:
    return InvalidValue(
        f"`{field}` is not text in UTF-8: {fault}. Save the file in UTF-8; send an image or a PDF with its own type.",
        field,
    )


def check_no_limits(holder: ImageLimits, field: str) -> None:
    """Raise InvalidValue if the text file *holder*, the value of *field*, sets limits for images."""
    details = [] if getattr(holder, "detail", None) in (None, "auto") else ["detail"]
    for name in [*limits_of(holder), *details]:
        raise InvalidValue(f"`{field}.{name}` is for images, and this file is text; leave it out.", f"{field}.{name}")


def with_text_files(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return *messages* with text files replaced by text parts. Raises a RequestError that names the field."""
    files = TextFiles()
    return [_with_texts(message, f"messages[{position}]", files) for position, message in enumerate(messages)]


def _with_texts(message: ChatMessage, field: str, files: TextFiles) -> ChatMessage:
    parts = message.content
    if not isinstance(parts, list) or all(part.type != "file" for part in parts):
        return message
    read = [_with_text(part, f"{field}.content[{index}]", files) for index, part in enumerate(parts)]
    return structs.replace(message, content=read)


def _with_text(part: ContentPart, field: str, files: TextFiles) -> ContentPart:
    if part.type != "file" or part.file is UNSET or IMAGE_OR_PDF.search(memoryview(part.file)[:MAX_BEFORE_DATA]):
        return part
    file = decode(part.file, _FILE, f"{field}.file")
    if file.file_id is not None:
        return part
    text = files.read_file(file.file_data, file.filename, f"{field}.file.file_data")
    if text is None or part.image_url or part.video_url:
        # What is in another part's field is refused with the type that the client sent.
        return part
    check_no_limits(part, field)
    check_no_limits(file, f"{field}.file")
    return structs.replace(part, type="text", text=text, file=UNSET)
