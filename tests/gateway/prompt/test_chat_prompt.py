"""Chats for workers that render and tokenise them by themselves."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.gateway.chat import Chat
from saccade.gateway.chat_request import ChatMessage, ChatRequest, ContentPart, ImageUrl
from saccade.gateway.prompt.chat_prompt import chat_prompt, why_not_as_chat
from saccade.gateway.prompt.messages import read_chat
from saccade.gateway.served_models.served_model import ServedModel
from saccade.models.family import ImageOptions
from saccade.models.files import read_model_files


@pytest.fixture(scope="module")
def served_of(checkpoint: Callable[[str], Path]) -> Callable[[str], ServedModel]:
    return lambda name: ServedModel.from_files("m", read_model_files(checkpoint(name)), 4096)


def chat_of(served: ServedModel, *messages: ChatMessage, switches: Mapping[str, Any] | None = None) -> Chat:
    request = ChatRequest(model="m", messages=list(messages), chat_template_kwargs=switches)
    return read_chat(request, served.declaration)


def user(*parts: str | None) -> ChatMessage:
    """A turn of texts and images."""
    image = ContentPart("image_url", image_url=ImageUrl("data:,"))
    return ChatMessage("user", [image if part is None else ContentPart("text", part) for part in parts])


@pytest.mark.parametrize(
    "messages",
    [
        [user("What is it?", None)],
        [ChatMessage("user", "a < b | c > d <|im_en d|>"), ChatMessage("assistant", "No.")],
    ],
)
def test_plain_chats(messages: list[ChatMessage], served_of: Any) -> None:
    served = served_of("qwen3_vl")
    assert why_not_as_chat(served, chat_of(served, *messages), [served.layout.settings]) is None


def test_prompts_that_only_the_gateway_renders_are_refused(served_of: Any) -> None:
    served = served_of("qwen3_vl")
    own = replace(chat_of(served, user("What?")), template=served.template)
    for chat, field in ((Chat.of_plain([1, 2]), "prompt"), (own, "chat_template")):
        error = why_not_as_chat(served, chat, [])
        assert isinstance(error, UnsupportedParameter)
        assert error.param == field


def test_operators_template_is_refused(served_of: Any) -> None:
    served = served_of("qwen3_vl")
    error = why_not_as_chat(replace(served, has_own_template=False), chat_of(served, user("What?")), [])
    assert isinstance(error, UnsupportedParameter)
    assert "--chat-template" in error.message


@pytest.mark.parametrize(("field", "given"), [("continue_final_message", True), ("add_generation_prompt", False)])
def test_another_end_of_the_prompt_is_refused(field: str, given: bool, served_of: Any) -> None:
    served, messages = served_of("qwen3_vl"), [user("What?"), ChatMessage("assistant", "It")]
    request = ChatRequest(model="m", messages=messages, **{field: given})  # type: ignore[arg-type]
    error = why_not_as_chat(served, read_chat(request, served.declaration), [])
    assert isinstance(error, UnsupportedParameter)
    assert error.param == field


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage("user", "Say <|im_end|>."),
        user(None, "<|image_pad|>"),
        ChatMessage("user", "x", name="<|im_start|>"),
        ChatMessage("assistant", "x", reasoning_content="<|im_end|>"),
    ],
)
def test_special_tokens_in_users_text(message: ChatMessage, served_of: Any) -> None:  # E5 F2
    served = served_of("qwen3_vl")
    error = why_not_as_chat(served, chat_of(served, user("x"), message), [])
    assert isinstance(error, InvalidValue)
    assert error.param == "messages"


def test_image_tags_in_users_text(served_of: Any) -> None:  # E5 F2
    served = served_of("phi3_v")
    assert isinstance(why_not_as_chat(served, chat_of(served, user("<|image_1|>", None)), []), InvalidValue)
    assert why_not_as_chat(served, chat_of(served, user("image_1", None)), []) is None


def test_images_with_settings_of_their_own(served_of: Any) -> None:  # E5
    served = served_of("qwen3_vl")
    plain, small = served.layout.settings, served.layout.settings_for(ImageOptions(max_pixels=65536))
    error = why_not_as_chat(served, chat_of(served, user(None, None)), [plain, small])
    assert isinstance(error, UnsupportedParameter)


def test_images_keep_their_places_in_templates_for_strings(served_of: Any) -> None:  # F1
    served = served_of("phi3_v")
    messages = (user("a", None, "b"), ChatMessage("assistant", "c"), user(None, "d", None))
    prompt = chat_prompt(served, chat_of(served, *messages), [b"1", b"2", b"3"])
    assert prompt.images == (b"1", b"2", b"3")
    first, answer, second = prompt.messages
    image = {"type": "image"}
    assert first["content"] == [{"type": "text", "text": "a<|image_1|>\nb"}, image]
    assert answer == {"role": "assistant", "content": "c"}
    assert second["content"] == [{"type": "text", "text": "<|image_2|>\nd<|image_3|>\n"}, image, image]


def test_chats_are_unchanged_for_templates_for_lists(served_of: Any) -> None:  # F1
    served = served_of("qwen3_vl")
    chat = chat_of(served, user("a", None, "b"), switches={"add_vision_id": True})
    prompt = chat_prompt(served, chat, [b"1"])
    assert list(prompt.messages) == chat.messages
    assert prompt.switches == {"add_vision_id": True}
