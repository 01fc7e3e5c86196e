"""Translates the blocks of Anthropic's messages into the content parts of a chat."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.gateway.apis.messages.wire import BLOCK_TYPES, SKIPPED_TYPES, Block, Content, CountRequest, Source
from saccade.gateway.apis.text_files import TextFiles, check_no_limits, on_own_lines
from saccade.gateway.chat_request import ContentPart, ImageUrl
from saccade.gateway.image_source import url_of_file
from saccade.gateway.media_parameters import limits_of, with_limits

MEDIA_TYPE: Final = re.compile(r"[a-zA-Z0-9.+-]+/[a-zA-Z0-9.+-]+")
DATA_URL: Final = "data:"
Named = tuple[str, Block]
"""A block after its field, such as `messages[0].content[1]`."""


def named_blocks(blocks: Sequence[Block], field: str) -> list[Named]:
    """Return the *blocks* that are not skipped, each after its own field. *field* is the field of the list."""
    named = ((f"{field}[{index}]", block) for index, block in enumerate(blocks))
    return [(name, block) for name, block in named if block.type not in SKIPPED_TYPES]


def skipped_blocks(request: CountRequest) -> list[str]:
    """Return the field and type of each skipped block in *request*."""
    contents = [(request.system, "system")]
    contents += [(message.content, f"messages[{at}].content") for at, message in enumerate(request.messages)]
    return [f"{field} ({kind})" for content, name in contents for field, kind in _skipped(content, name)]


def _skipped(content: Content | None, field: str) -> Iterator[tuple[str, str]]:
    if isinstance(content, str):
        return
    for index, block in enumerate(content or ()):
        if block.type in SKIPPED_TYPES:
            yield f"{field}[{index}]", block.type
        yield from _skipped(block.content, f"{field}[{index}].content")


@dataclass(frozen=True)
class Reading:
    """State for reading one request: the client's *names* for the chat's fields, and *files* to read text files."""

    names: dict[str, str]
    files: TextFiles = field(default_factory=TextFiles)


def parts_of(blocks: Iterable[Named], chat_field: str, reading: Reading) -> list[ContentPart]:
    """Return *blocks* as the parts of the chat's *chat_field*, and note the client's field names in *reading*.

    Raises RequestError for blocks that are incomplete or not served.
    """
    parts: list[ContentPart] = []
    for name, block in _with_contents(blocks):
        text = _text_document(block, name, reading.files)
        if text is None and block.type == "document" and (block.title or block.context):
            reading.names[f"{chat_field}[{len(parts)}]"] = name
            parts.append(ContentPart(type="text", text=on_own_lines(block.title or None, block.context or None)))
        place = f"{chat_field}[{len(parts)}]"
        reading.names[place] = name
        parts.append(_part(block, name, place, reading.names) if text is None else ContentPart(type="text", text=text))
    return parts


def _with_contents(blocks: Iterable[Named]) -> Iterator[Named]:
    """Yield *blocks*. A document that consists of blocks is replaced by its title, its context and those blocks."""
    for name, block in blocks:
        match block:
            case Block(type="document", source=Source(type="content", content=content) as source):
                _check_no_limits(block, source, name)
                if block.title or block.context:
                    yield name, Block("text", on_own_lines(block.title or None, block.context or None))
                yield from _document_blocks(content, f"{name}.source.content")
            case _:
                yield name, block


def _document_blocks(content: str | Sequence[Block] | None, field: str) -> Iterator[Named]:
    """Yield the texts and images of a document. Raises a RequestError that names the field."""
    match content:
        case str(text):
            yield field, Block("text", on_own_lines(text))
        case None:
            raise InvalidValue(f"`{field}` is missing.", field)
        case _:
            for index, block in enumerate(content):
                name = f"{field}[{index}]"
                match block:
                    case Block(type="text", text=str(text)):
                        yield name, Block("text", on_own_lines(text))
                    case Block(type="text" | "image"):
                        yield name, block
                    case _:
                        raise UnsupportedParameter(
                            f"`{name}.type`: a document holds blocks of text and images.", f"{name}.type"
                        )


def _text_document(block: Block, name: str, files: TextFiles) -> str | None:
    """Return the title, context and text of *block*, or None if it is not a text document.

    Raises a RequestError that names the field.
    """
    match block:
        case Block(type="document", source=Source(type="text", data=str(text)) as source):
            files.count(len(text), f"{name}.source.data")
        case Block(type="document", source=Source(type="base64", data=str(data), media_type=str(kind)) as source) if (
            read := files.text_of(f"data:{kind};base64,", data, f"{name}.source.data")
        ) is not None:
            text = read
        case _:
            return None
    _check_no_limits(block, source, name)
    return on_own_lines(block.title or None, block.context or None, text)


def _check_no_limits(block: Block, source: Source, name: str) -> None:
    """Raise InvalidValue if *block*, a document without pages, or its *source* sets limits for images."""
    check_no_limits(block, name)
    check_no_limits(source, f"{name}.source")


def _part(block: Block, field: str, chat_field: str, names: dict[str, str]) -> ContentPart:
    """Return *block* as the part *chat_field* of a chat."""
    match block:
        case Block(type="text", text=str(text)):
            return ContentPart(type="text", text=text)
        case Block(type="text"):
            raise InvalidValue(f"`{field}.text` is missing.", f"{field}.text")
        case Block(type="image" | "document", source=Source() as source):
            name, url = _url(source, f"{field}.source")
            names[f"{chat_field}.image_url"] = names[f"{chat_field}.image_url.url"] = name
            names |= {f"{chat_field}.image_url.{key}": f"{field}.source.{key}" for key in limits_of(source)}
            part = ContentPart(type="image_url", image_url=with_limits(ImageUrl(url), source))
            return with_limits(part, block)
        case Block(type="image" | "document", source=source):
            fault = "is missing" if source is None else "must be an object"
            raise InvalidValue(f"`{field}.source` {fault}.", f"{field}.source")
        case Block(type="search_result"):
            return ContentPart(type="text", text=_search_result(block, field))
    raise not_served(block, field)


def _search_result(block: Block, field: str) -> str:
    """Return a search result's title, source and texts, each on its own line."""
    for name in ("title", "source"):
        if not isinstance(getattr(block, name), str):
            raise InvalidValue(f"`{field}.{name}` must be a text.", f"{field}.{name}")
    if not isinstance(block.content, list):
        raise InvalidValue(f"`{field}.content` must be an array of text blocks.", f"{field}.content")
    lines = [f"{block.title}", f"{block.source}"]
    for name, inner in named_blocks(block.content, f"{field}.content"):
        match inner:
            case Block(type="text", text=str(text)):
                lines.append(text)
            case Block(type="text"):
                raise InvalidValue(f"`{name}.text` is missing.", f"{name}.text")
            case _:
                raise not_served(inner, name)
    return on_own_lines(*lines)


def _url(source: Source, field: str) -> tuple[str, str]:
    """Return the field that holds an image, and the image's URL."""
    match source:
        case Source(type="base64", data=str(data), media_type=media_type):
            if media_type is not None and not MEDIA_TYPE.fullmatch(media_type):
                raise InvalidValue(
                    f"`{field}.media_type` must be a media type such as image/png.", f"{field}.media_type"
                )
            # Clients of other servers put a whole URL in its place.
            is_url = data[: len(DATA_URL)].lower() == DATA_URL
            return f"{field}.data", data if is_url else f"data:{media_type or 'image/*'};base64,{data}"
        case Source(type="base64"):
            raise InvalidValue(f"`{field}.data` is missing.", f"{field}.data")
        case Source(type="url", url=str(url)):
            return f"{field}.url", url
        case Source(type="url"):
            raise InvalidValue(f"`{field}.url` is missing.", f"{field}.url")
        case Source(type="file", file_id=str(file_id)):
            return f"{field}.file_id", url_of_file(file_id)
        case Source(type="file"):
            raise InvalidValue(f"`{field}.file_id` is missing.", f"{field}.file_id")
    raise UnsupportedParameter(
        f"`{field}.type`: only base64, url and file are served, and text and content in documents.", f"{field}.type"
    )


def not_served(block: Block, field: str) -> InvalidValue | UnsupportedParameter:
    """Return the error for a *block* that *field* cannot hold."""
    if block.type in BLOCK_TYPES:
        return InvalidValue(f"`{field}`: a block of the type {block.type} does not belong here.", field)
    return UnsupportedParameter(
        f"`{field}.type`: blocks of this type are not served; send {', '.join(BLOCK_TYPES)}.", f"{field}.type"
    )
