"""The first requests of coding agents to the bundled model, which is too small for them. F13"""

from collections.abc import Iterator

import pytest
import scripted
from agents import REQUESTS
from tables import table

from saccade.cli.bundled import bundled

CONTEXT = 2048


@pytest.fixture(scope="module")
def reader() -> Iterator[scripted.Gateway]:
    with scripted.running(bundled("model"), max_model_len=CONTEXT) as gateway:
        yield gateway


@table("agent", REQUESTS)
def test_the_bundled_model_refuses_them_by_its_context(agent: str, reader: scripted.Gateway) -> None:
    path, body, param = REQUESTS[agent]
    answer = reader.ask("POST", path, {"model": "tiny", **body})
    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "context_length_exceeded", param), error
    assert f"maximum context length is {CONTEXT} tokens" in error["message"]
    assert "Please reduce the length" in error["message"]
