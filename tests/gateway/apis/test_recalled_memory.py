"""A stored conversation is in the budget again when a request continues it: its bytes did not come with the body."""

import json

import scripted
from chats import data_url, random_image
from waiting import wait_until


def test_a_continued_conversation_needs_room_for_all_of_it(gateway: scripted.Gateway) -> None:
    gateway.answer_two_tokens()
    part = {"type": "input_image", "image_url": data_url(random_image(64, 64, 1))}
    first = gateway.ask("POST", "/v1/responses", {"model": "tiny", "input": [{"role": "user", "content": [part]}]})
    assert first.status == 200
    more = {"model": "tiny", "input": "more", "previous_response_id": first.json["id"]}
    memory = gateway.application.limits.memory
    num_bytes = 2 * len(json.dumps(part))
    with memory.reservation("another") as others:
        others.take_bytes(memory.capacity_bytes - num_bytes // 2)
        refused = gateway.ask("POST", "/v1/responses", more)
        assert (refused.status, refused.json["error"]["code"]) == (429, "queue_full")
        assert gateway.ask("POST", "/v1/responses", {"model": "tiny", "input": "new"}).status == 200
    assert gateway.ask("POST", "/v1/responses", more).status == 200
    wait_until(lambda: memory.num_bytes == 0)
