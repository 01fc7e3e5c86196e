"""The parts of memory that clients can fill: each has a bound, a gauge, and a row in the page on security."""

import json
import re
import threading
from pathlib import Path

import pytest
import scripted
from waiting import wait_until

from saccade.errors import QueueFull
from saccade.gateway import request
from saccade.gateway.admission import LARGE_BODY_BYTES
from saccade.gateway.config import GatewayConfig
from saccade.gateway.memory_parts import MemoryPart, MemoryParts
from saccade.gateway.structured_output import grammars
from saccade.gateway.structured_output.constraint import Constraint
from saccade.gateway.structured_output.trial import Outcome
from saccade.gateway.tenants.account import EVERYBODY, Account
from saccade.protocol.output import FinishReason, TokenDelta
from saccade.protocol.request import Grammar

PAGE = Path(__file__).parents[2] / "docs" / "security.md"


def test_the_page_names_every_part(gateway: scripted.Gateway) -> None:
    page = PAGE.read_text()
    table = page[page.index("| part | bound |") :].split("\n\n")[0]
    documented = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(documented) == sorted(gateway.application.memory.names)


def test_every_part_has_its_bytes_and_its_bound_on_the_metrics(gateway: scripted.Gateway) -> None:
    text = gateway.ask("GET", "/metrics").body.decode()
    samples = dict(re.findall(r'^(saccade_memory_\w+{part="\w+"}) (\S+)$', text, re.MULTILINE))
    for name in gateway.application.memory.names:
        held, bound = (float(samples[f'saccade_memory_{kind}{{part="{name}"}}']) for kind in ("bytes", "bound_bytes"))
        assert 0 <= held <= bound
        assert bound


def test_bounds_are_those_of_the_flags(gateway: scripted.Gateway) -> None:
    config = GatewayConfig()
    named = {
        "requests": config.max_request_memory_bytes,
        "pixels": config.max_pixel_bytes,
        "files": config.file_store_bytes,
        "responses": config.response_store_bytes,
        "fetched_images": config.url_cache_bytes,
        "prepared_images": config.image_cache_bytes,
        "routing_index": config.routing_index_bytes,
    }
    for name, bound in named.items():
        assert gateway.metric("saccade_memory_bound_bytes", part=name) == bound


def test_a_part_shows_what_it_has_now() -> None:
    parts, held = MemoryParts(), [3]
    parts.add_parts(MemoryPart("a", 10, lambda: held[0]))
    for number in (3, 7):
        held[0] = number
        num_bytes, bound = ([sample.value for sample in family.samples] for family in parts.collect())
        assert (num_bytes, bound) == ([number], [10])


async def test_pixels_without_room_wait_and_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "PIXELS_WAIT_SECONDS", 0.01)
    limits = request.Limits.of_config(GatewayConfig(shared_memory_bytes=1 << 20))
    bound = {part.name: part.bound_bytes for part in limits.memory_parts}["pixels"]
    with request.Request.begin_request(limits, Account(EVERYBODY), "a") as one:
        with await one.pixels(bound):
            with pytest.raises(QueueFull):
                await one.pixels(1)
            assert limits.pixels.weight == bound == 2 << 20
        with await one.pixels(1):
            assert limits.pixels.weight == 1


class QuickTrial:
    """Finds that a constraint is a grammar."""

    def __init__(self, constraint: Constraint, _: object) -> None:
        self._constraint = constraint

    def run_child(self) -> Outcome:
        return Outcome(Grammar("regex", self._constraint.text))

    def kill(self) -> None:
        pass


async def test_kept_grammars_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "Trial", QuickTrial)
    monkeypatch.setattr(grammars, "CACHE_BYTES", 100_000)
    kept = grammars.RequestGrammars()
    part, most = kept.memory_part, 0
    for number in range(20):
        await kept.grammar_of(Constraint("regex", f"{number}" + "a" * 4000, "guided_regex"))
        most = max(most, part.num_bytes())
    kept.close()
    assert part.bound_bytes / 2 < most <= part.bound_bytes == 100_000


def test_small_bodies_are_bounded_by_their_connections(gateway: scripted.Gateway) -> None:
    """They are in no part, and a connection has one: a second request is not read before the answer to the first."""
    num_before = gateway.application.limits.memory.num_bytes
    held = threading.Event()
    gateway.worker.script = [held, TokenDelta("r", [300], FinishReason.LENGTH)]
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "user": "x" * 60_000}).encode()
    assert len(body) < LARGE_BODY_BYTES
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    num_requests = len(gateway.worker.requests)
    with gateway.connect() as connection:
        connection.sendall(2 * (head.encode() + body))
        wait_until(lambda: len(gateway.worker.requests) == num_requests + 1)
        assert gateway.application.limits.admission.num_requests == 1
        assert gateway.application.limits.memory.num_bytes == num_before
        held.set()
        assert connection.recv(12) == b"HTTP/1.1 200"
