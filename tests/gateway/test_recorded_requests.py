"""Every recorded request is answered as it was when it was recorded, byte for byte but for ids and times."""

import json
from pathlib import Path

import recorded_requests
import scripted


def test_recorded_requests_are_answered_as_before(tiny_qwen3_vl: Path) -> None:
    before = dict(map(json.loads, recorded_requests.ANSWERS.read_text().splitlines()))
    requests = list(recorded_requests.recorded())
    assert [request.name for request in requests] == list(before)
    # A gateway of its own: what other tests upload and store would stand in its lists.
    with scripted.running(tiny_qwen3_vl) as gateway:
        for request in requests:
            assert recorded_requests.exchange(gateway, request) == before[request.name], request.name
