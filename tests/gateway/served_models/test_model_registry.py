"""The names that a model may be asked for by."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import scripted

from saccade.protocol.output import FinishReason, TokenDelta


@pytest.fixture(scope="module")
def gateway(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    """A gateway whose worker calls its model tiny, and small too."""
    with scripted.running(tiny_qwen3_vl) as running:
        assert running.worker.description is not None
        running.worker.description = msgspec.structs.replace(running.worker.description, aliases=("small", "wee"))
        yield running


def test_every_name_is_listed(gateway: scripted.Gateway) -> None:
    cards = gateway.ask("GET", "/v1/models").json["data"]
    assert [card["id"] for card in cards] == ["tiny", "small", "wee"]
    assert gateway.ask("GET", "/v1/models/small").json == {**cards[0], "id": "small"}


@pytest.mark.parametrize("name", ["tiny", "small", "wee"])
def test_answer_has_the_first_name_whichever_was_asked_for(name: str, gateway: scripted.Gateway) -> None:
    gateway.worker.script = [TokenDelta("", [gateway.eos], FinishReason.STOP)]
    answer = gateway.ask(
        "POST", "/v1/chat/completions", {"model": name, "messages": [{"role": "user", "content": "a"}]}
    )
    assert (answer.status, answer.json["model"]) == (200, "tiny")


def test_one_model_of_several_names_need_not_be_named(gateway: scripted.Gateway) -> None:
    assert gateway.ask("POST", "/tokenize", {"prompt": "Hello"}).status == 200


def test_unknown_name_is_told_all_names(gateway: scripted.Gateway) -> None:
    answer = gateway.chat(model="other")
    assert answer.status == 404
    assert "served: tiny, small, wee." in answer.json["error"]["message"]
