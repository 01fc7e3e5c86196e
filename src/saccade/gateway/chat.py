"""The internal chat, which each API's body becomes: messages as a template takes them, images, tools, switches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saccade.models.family import ImageOptions, VideoOptions
from saccade.tokenization.chat_template import ChatTemplate, Message, Tool


@dataclass(frozen=True)
class ImageSource:
    """Where an image or video of a request comes from, and its options. The *url* of an image may be a file's id.

    *field* names the place of *url*, as `messages[0].content[1].image_url.url`.
    """

    field: str
    url: str
    options: ImageOptions | VideoOptions


@dataclass(frozen=True)
class PlainPrompt:
    """A prompt that no template renders, in *field* of a request: text, all of which stays text, or token ids."""

    content: str | list[int]
    field: str


@dataclass(frozen=True)
class Chat:
    """A chat as templates take it: images[i] belongs to the i-th part of type "image" or "video". Or the token ids
    of a *plain* prompt, which no template renders.

    *num_characters* is how much work the chat is. *tools* are those that the prompt declares. Where the chat
    *continues*, its prompt ends behind the text of the last message. *template* renders it instead of the model's own.
    """

    messages: list[Message]
    num_characters: int
    images: list[ImageSource]
    add_generation_prompt: bool
    switches: Mapping[str, Any]
    tools: tuple[Tool, ...] = ()
    continues: bool = False
    template: ChatTemplate | None = None
    plain: list[int] | None = None

    @classmethod
    def of_plain(cls, token_ids: list[int]) -> "Chat":
        """Return the ids of a plain prompt in place of messages; the answer goes on with its text."""
        return cls([], len(token_ids), [], False, {}, continues=True, plain=token_ids)

    @property
    def uses_tools(self) -> bool:
        """Whether there is anything about tools in the chat."""
        return bool(self.tools) or any(
            message["role"] == "tool" or "tool_calls" in message for message in self.messages
        )
