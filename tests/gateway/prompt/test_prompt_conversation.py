"""All turns of a conversation have one name, and other conversations have others."""

from dataclasses import replace
from typing import Any

from tables import table

from saccade.gateway.chat import Chat
from saccade.gateway.prompt.conversation import conversation_of

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": "image"}]}
ANSWER = {"role": "assistant", "content": "A cat."}
AGAIN = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And this?"}]}


def name_of(*messages: dict[str, Any], images: bytes = b"") -> bytes:
    """The name of a conversation whose images are the bytes of *images*."""
    chat = replace(Chat.of_plain([]), plain=None, client_messages=messages)
    return conversation_of(chat, [bytes([one]) * 32 for one in images])


def test_all_turns_have_the_name_of_the_first() -> None:
    first = name_of(SYSTEM, ASKED, images=b"a")
    assert len(first) == 16
    assert name_of(SYSTEM, ASKED, ANSWER, AGAIN, images=b"ab") == first
    assert name_of(SYSTEM, ASKED, ANSWER, AGAIN, ANSWER, ASKED, images=b"aba") == first
    words = {"role": "user", "content": "What is it?"}
    assert name_of(words, ANSWER, AGAIN, images=b"b") == name_of(words)


@table(
    ("messages", "images"),
    [
        ([SYSTEM, ASKED], b"b"),
        ([ASKED], b"a"),
        ([SYSTEM, AGAIN], b"a"),
        ([SYSTEM, {"role": "user", "content": "What is it?"}], b""),
        ([{"role": "system", "content": "Be long."}, ASKED], b"a"),
        ([ANSWER, ASKED], b"a"),
    ],
)
def test_other_conversations_have_other_names(messages: list[dict[str, Any]], images: bytes) -> None:
    assert name_of(*messages, images=images) != name_of(SYSTEM, ASKED, images=b"a")


def test_texts_are_not_run_together() -> None:
    parts = [{"type": "text", "text": text} for text in ("ab", "c")]
    assert name_of({"role": "user", "content": parts}) != name_of({"role": "user", "content": "abc"})


def test_a_plain_prompt_has_no_name() -> None:
    assert conversation_of(Chat.of_plain([1, 2]), []) == b""
