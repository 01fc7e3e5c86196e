"""Answers as a client reads them, event by event and with given times."""

import msgspec
import pytest
from scripted_server import event, stream, usage
from tables import table

from saccade.bench.client import AnswerReader


def read(*arrivals: str | bytes) -> AnswerReader:
    """Read pieces of which the first arrives at 10 ms, the second at 20 ms."""
    reader = AnswerReader()
    for number, content in enumerate(arrivals, 1):
        reader.feed(content.encode() if isinstance(content, str) else content, 10.0 * number)
    return reader


def test_the_role_is_no_text_and_reasoning_is() -> None:
    reader = read(
        event({"role": "assistant", "content": ""}),
        event({"reasoning_content": "hm"}),
        event({"reasoning": "hm"}),
        event({"content": "yes"}) + event({"content": " no"}),
        event({}, usage=usage(9, 3, 4)),
        "data: [DONE]\n\n",
    )
    assert reader.text_ms == [20, 30, 40, 40]
    assert (reader.last_ms, "".join(reader.texts), reader.usage["completion_tokens"]) == (50, "yes no", 4)
    assert reader.fault() is None


def test_events_may_be_cut_anywhere() -> None:
    content = stream(["é", "b"]).replace("\n", "\r\n").encode()
    for place in range(1, len(content)):
        reader = read(content[:place], content[place:])
        assert reader.texts == ["é", "b"]
        assert len(reader.text_ms) == 2
        assert reader.fault() is None


@table(
    ("arrivals", "kind"),
    [
        ([event({"content": "a"})], "stream broken off"),
        ([event({"content": "a"}), 'data: {"error": {"message": "gone"}}\n\n', "data: [DONE]\n\n"], "error event"),
        ([event({"content": ""}), "data: [DONE]\n\n"], "no text"),
    ],
)
def test_faults_of_answers(arrivals: list[str], kind: str) -> None:
    fault = read(*arrivals).fault()
    assert fault is not None
    assert fault[0] == kind


def test_what_is_no_chunk_is_an_error() -> None:
    with pytest.raises(msgspec.MsgspecError):
        read("data: <html>\n")
    with pytest.raises(AttributeError):
        read("data: [1]\n")


def test_comments_and_names_of_events_are_skipped() -> None:
    assert read(": ping\n\nevent: chunk\n" + stream()).texts == ["a", "b", "c"]
