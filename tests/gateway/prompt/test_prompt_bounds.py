"""Text that cannot fit is refused before anything is fetched or tokenised; text that the template leaves out counts not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from saccade.errors import ContextLengthExceeded
from saccade.gateway.chat_request import ChatMessage, ChatRequest, ContentPart, TokenizeRequest
from saccade.gateway.prompt.prompt_bounds import check_context, read_chat_that_may_fit
from saccade.gateway.served_models.served_model import ServedModel
from saccade.models.files import read_model_files
from saccade.tokenization.chat_template import ChatTemplate
from saccade.tokenization.text_bound import UNKNOWN

LENGTH = 64


@pytest.fixture
def served(tiny_qwen3_vl: Path) -> ServedModel:
    return ServedModel.from_files("tiny", read_model_files(tiny_qwen3_vl), LENGTH)


def asking(*messages: ChatMessage, **fields: Any) -> ChatRequest:
    return ChatRequest(model="tiny", messages=list(messages), **fields)


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage("user", "x" * 10_000),
        ChatMessage("user", [ContentPart("text", "x" * 100)] * 100),
        ChatMessage("user", "\u4f60" * 10_000),
    ],
    ids=["text", "parts", "wide"],
)
def test_text_that_cannot_fit_is_not_tokenised(message: ChatMessage, served: ServedModel, monkeypatch: Any) -> None:
    def encode(*_: Any) -> None:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(type(served.tokenizer), "encode", encode)
    for request in (asking(message), TokenizeRequest(messages=[message])):
        with pytest.raises(ContextLengthExceeded) as error:
            read_chat_that_may_fit(request, served)
        assert error.value.param == "messages"
        assert "at least" in error.value.message


def test_text_that_may_fit_is_tokenised(served: ServedModel) -> None:
    most = LENGTH * served.tokenizer.text_bound.bytes_per_token
    assert len(read_chat_that_may_fit(asking(ChatMessage("user", "x" * most)), served).messages) == 1
    with pytest.raises(ContextLengthExceeded):
        read_chat_that_may_fit(asking(ChatMessage("user", "x" * (most + 1))), served)


def test_reasoning_that_the_template_leaves_out_does_not_count(served: ServedModel) -> None:
    source = "{% for m in messages %}{{ m.content }}{% if loop.last %}{{ m.reasoning_content }}{% endif %}{% endfor %}"
    last = replace(served, template=ChatTemplate(source, served.tokenizer.special_tokens, {}))
    question, answer = ChatMessage("user", "hi"), ChatMessage("assistant", "hi", reasoning_content="x" * 10_000)
    assert len(read_chat_that_may_fit(asking(question, answer, question), last).messages) == 3
    with pytest.raises(ContextLengthExceeded):
        read_chat_that_may_fit(asking(question, answer), last)


def test_a_tokenizer_without_a_bound_is_asked(served: ServedModel) -> None:
    served.tokenizer.text_bound = UNKNOWN
    assert read_chat_that_may_fit(asking(ChatMessage("user", "x" * 10_000)), served).messages


@pytest.mark.parametrize(
    ("request_", "completion"),
    [
        (asking(ChatMessage("user", "")), 1),
        (asking(ChatMessage("user", ""), max_tokens=7), 7),
        (asking(ChatMessage("user", ""), max_tokens=7, max_completion_tokens=9), 9),
        (TokenizeRequest(messages=[ChatMessage("user", "")]), 0),
    ],
)
def test_the_error_counts_prompt_and_answer(request_: Any, completion: int, served: ServedModel) -> None:
    check_context(LENGTH, request_, served)
    with pytest.raises(ContextLengthExceeded) as error:
        check_context(LENGTH + 1, request_, served)
    assert error.value.message == (
        f"This model's maximum context length is {LENGTH} tokens. However, you requested {LENGTH + 1 + completion} "
        f"tokens ({LENGTH + 1} in the messages, {completion} in the completion). Please reduce the length of the "
        "messages or completion."
    )
