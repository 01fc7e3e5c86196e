"""A worker whose queue is full, seen through the gateway."""

import pytest
import scripted

from saccade.errors import QueueFull
from saccade.protocol.output import Failure, FinishReason, TokenDelta


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue_tells_when_to_come_again(stream: bool, gateway: scripted.Gateway) -> None:
    failure = Failure(QueueFull.code, "1024 requests are waiting at this worker already; try again shortly.")
    gateway.worker.script = [TokenDelta("r", [], FinishReason.ERROR, failure=failure)]
    answer = gateway.chat(stream=stream)
    assert (answer.status, answer.json["error"]["code"]) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    assert "x-should-retry" not in answer.headers
