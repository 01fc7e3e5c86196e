"""The chat that a template renders, independent of the request's API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saccade.gateway.image_source import ImageSource
from saccade.tokenization.chat_template import ChatTemplate
from saccade.tokenization.messages import Message, Tool


@dataclass(frozen=True)
class PlainPrompt:
    """A prompt that no template renders, from a request's *field*: token ids, or text without special tokens."""

    content: str | list[int]
    field: str


@dataclass(frozen=True)
class Chat:
    """A chat to render, or a prompt that no template renders."""

    messages: list[Message]
    """In a form that the template writes."""
    num_characters: int
    """Measures the work for the chat."""
    images: list[ImageSource]
    """Entry i belongs to the i-th part of type "image" or "video"."""
    add_generation_prompt: bool
    switches: Mapping[str, Any]
    """Further variables of the template."""
    tools: tuple[Tool, ...] = ()
    """Those that the prompt declares."""
    continues: bool = False
    """Whether the prompt ends after the text of the last message."""
    template: ChatTemplate | None = None
    """Replaces the model's own."""
    plain: list[int] | None = None
    """The token ids of a prompt that no template renders."""
    has_pdfs: bool = False
    client_messages: Sequence[Message] = ()
    """The messages as the request has them."""
    warning: str = ""
    """For the client."""

    @classmethod
    def of_plain(cls, token_ids: list[int]) -> "Chat":
        """Return a Chat that has a plain prompt's ids instead of messages; the answer continues the prompt's text."""
        return cls([], len(token_ids), [], False, {}, continues=True, plain=token_ids)

    def with_pages(self, counts: Sequence[int]) -> "Chat":
        """Return the chat with counts[i] images in place of image i; a PDF becomes one image for each page."""
        pending = iter(counts)

        def pages(parts: list[dict[str, str]]) -> list[dict[str, str]]:
            return [page for part in parts for page in [part] * (1 if part["type"] == "text" else next(pending))]

        messages = [
            message if isinstance(message["content"], str) else {**message, "content": pages(message["content"])}
            for message in self.messages
        ]
        return replace(self, messages=messages, has_pdfs=True)

    @property
    def uses_tools(self) -> bool:
        """Whether the chat declares tools, or contains tool calls or results."""
        return bool(self.tools) or any(
            message["role"] == "tool" or "tool_calls" in message for message in self.messages
        )
