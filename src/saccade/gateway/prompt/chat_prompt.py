"""Builds the chat for workers that take only chats, and says why they cannot serve some requests."""

from collections.abc import Mapping, Sequence
from typing import Any

from saccade.errors import InvalidValue, RequestError, UnsupportedParameter
from saccade.gateway.chat import Chat
from saccade.gateway.parameters import MAX_NAMES
from saccade.gateway.prompt.rendering import texts_of
from saccade.gateway.served_models.served_model import ServedModel
from saccade.protocol.chat import ChatPrompt
from saccade.protocol.needs import Need
from saccade.tokenization.image_tag import ImageTag


def chat_prompt(served: ServedModel, chat: Chat, images: Sequence[bytes]) -> ChatPrompt:
    """Return *chat* with its encoded *images*, for a worker that renders and tokenises chats itself."""
    return ChatPrompt(tuple(served.template.tagged(chat.messages)), tuple(images), chat.switches)


def errors_as_chat(
    served: ServedModel, chat: Chat, image_settings: Sequence[Mapping[str, Any]], limits: Sequence[str], lacks: Need
) -> Mapping[Need, RequestError]:
    """Return the error for workers without token ids, if some lack them and cannot serve *chat*; see why_not_as_chat().

    *lacks* has the needs that some workers cannot serve.
    """
    if Need.TOKEN_IDS not in lacks:
        return {}
    error = why_not_as_chat(served, chat, image_settings, limits)
    return {} if error is None else {Need.TOKEN_IDS: error}


def why_not_as_chat(
    served: ServedModel, chat: Chat, image_settings: Sequence[Mapping[str, Any]], limits: Sequence[str] = ()
) -> RequestError | None:
    """Return why a worker that renders and tokenises *chat* itself would get another prompt; None if it would not.

    Such a worker mistakes special tokens in users' text for the template's, and processes images with its own settings.
    *image_settings* are the processor settings for the chat's images; *limits* holds the fields that limit single
    images.
    """
    contents = [message["content"] for message in chat.messages if not isinstance(message["content"], str)]
    if any(part["type"] == "video" for parts in contents for part in parts):
        return UnsupportedParameter("This model's workers take no videos.", "messages")
    if chat.has_pdfs:
        return UnsupportedParameter("This model's workers take no PDFs; send the pages as images.", "messages")
    if chat.uses_tools:
        return UnsupportedParameter("This model's workers take no chats with tools.", "tools")
    if chat.plain is not None:
        return UnsupportedParameter("This model's workers take chats only.", "prompt")
    if not served.has_own_template:
        return UnsupportedParameter(
            "This model's workers render chats with its own template, and this server has --chat-template.", "messages"
        )
    if chat.template is not None:
        return UnsupportedParameter("`chat_template` is not served by this model's workers.", "chat_template")
    if chat.continues:
        # An API without this field names its `messages` here.
        field = "continue_final_message"
        return UnsupportedParameter(
            f"`{field}`: this model's workers continue no message; end with a message of the user.", field
        )
    if not chat.add_generation_prompt:
        field = "add_generation_prompt"
        return UnsupportedParameter(f"`{field}` is not served by this model's workers; leave it out.", field)
    tag = ImageTag(served.declaration.image_tag or served.declaration.placeholder)
    special = [token for token in served.tokenizer.special_tokens if token.strip()]
    texts = texts_of(chat)
    if any(token in text for text in texts for token in special) or (tag.form and any(map(tag.pattern.search, texts))):
        return InvalidValue(
            "The messages contain a special token of this model as text, which its workers cannot tell from a real "
            "one; remove it.",
            "messages",
        )
    if any(settings != served.layout.settings for settings in image_settings):
        named = ", ".join(f"`{field}`" for field in (*limits[:MAX_NAMES], "mm_processor_kwargs"))
        return UnsupportedParameter(
            f"This model's workers process all images alike: leave out {named} and `detail`.",
            limits[0] if limits else "messages",
        )
    return None
