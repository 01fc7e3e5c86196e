"""Every recorded request is answered as it was when it was recorded, byte for byte but for ids and times."""

import json

import recorded_requests
import scripted


def test_recorded_requests_are_answered_as_before(gateway: scripted.Gateway) -> None:
    before = dict(map(json.loads, recorded_requests.ANSWERS.read_text().splitlines()))
    requests = list(recorded_requests.recorded())
    assert [request.name for request in requests] == list(before)
    for request in requests:
        assert recorded_requests.exchange(gateway, request) == before[request.name], request.name
