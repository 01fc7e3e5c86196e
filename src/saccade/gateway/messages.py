"""OpenAI messages to what a chat template takes, and the pictures in them."""

import binascii
from collections.abc import Sequence
from typing import Any

import pybase64

from saccade.errors import InvalidBase64, InvalidImageUrl, InvalidValue, UnsupportedParameter
from saccade.gateway.openai import ChatMessage, ContentPart
from saccade.tokenization.chat_template import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles that clients send, and what templates call them."""


def read_messages(messages: Sequence[ChatMessage]) -> tuple[list[Message], list[tuple[str, str]]]:
    """Return the chat as templates take it, and (field, URL) of every picture in order. Raises RequestError."""
    chat: list[Message] = []
    urls: list[tuple[str, str]] = []
    for position, message in enumerate(messages):
        field = f"messages[{position}]"
        if message.role in ("tool", "function") or message.tool_calls:
            raise UnsupportedParameter("Tool calls and their results are not served yet.", field)
        if message.role not in ROLES:
            raise InvalidValue(f"`{field}.role` must be one of {', '.join(ROLES)}.", f"{field}.role")
        content: Any = message.content
        if content is None:
            raise InvalidValue(f"`{field}.content` is missing.", f"{field}.content")
        if not isinstance(content, str):
            parts = enumerate(content)
            content = [_read_part(part, f"{field}.content[{index}]", urls) for index, part in parts]
        name = {"name": message.name} if message.name is not None else {}
        chat.append({"role": ROLES[message.role], "content": content, **name})
    return chat, urls


def _read_part(part: ContentPart, field: str, urls: list[tuple[str, str]]) -> dict[str, str]:
    match part:
        case ContentPart(type="text", text=str(text)):
            return {"type": "text", "text": text}
        case ContentPart(type="text"):
            raise InvalidValue(f"`{field}.text` is missing.", f"{field}.text")
        case ContentPart(type="image_url", image_url=None):
            raise InvalidValue(f"`{field}.image_url` is missing.", f"{field}.image_url")
        case ContentPart(type="image_url", image_url=str(url)):
            urls.append((f"{field}.image_url", url))
        case ContentPart(type="image_url", image_url=image):
            urls.append((f"{field}.image_url.url", image.url))  # type: ignore[union-attr]
        case _:
            raise UnsupportedParameter(
                f"`{field}.type`: parts of this type are not served yet; send `text` and `image_url`.", f"{field}.type"
            )
    return {"type": "image"}


def decode_data_url(url: str) -> bytes:
    """Return the bytes of a data: URL. Raises InvalidImageUrl and InvalidBase64."""
    head, comma, payload = url.partition(",")
    if head[:5].lower() != "data:":
        raise InvalidImageUrl("Images are not fetched by URL yet; send the image itself as a data: URL in base64.")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidImageUrl("A data: URL must be `data:image/png;base64,` followed by the image in base64.")
    try:
        return pybase64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidBase64("The data: URL's payload is not valid base64.") from error
