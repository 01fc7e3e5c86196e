"""A gateway over two real workers knows where every picture is: repeats land on the worker that holds them."""

import contextlib
import json
import random
import re
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from chats import openai_messages, picture
from PIL import Image
from server import Server, free_port, program

NUM_PICTURES = 6
REPEATS = 2
HIT_RATE = "saccade_router_kv_hit_rate"


@dataclass(frozen=True)
class Fleet:
    """A gateway over two workers, and its admin port."""

    server: Server
    admin_port: int

    def workers(self) -> list[Any]:
        """What GET /workers says."""
        headers = {"authorization": "Bearer operator"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.admin_port}/workers", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as response:
            return list(json.load(response)["workers"])

    def wait_until_exact(self) -> None:
        deadline = time.monotonic() + 30
        while [worker["exactness"] for worker in self.workers()] != ["EXACT", "EXACT"]:
            assert time.monotonic() < deadline, self.workers()
            time.sleep(0.05)

    def wait_until_idle(self) -> None:
        """Wait until every answer's events have arrived: the known blocks stand still."""
        seen, known = None, self.workers()
        while known != seen or any(worker["booked"]["requests"] for worker in known):
            time.sleep(0.3)
            seen, known = known, self.workers()

    def rates(self) -> tuple[float, float]:
        """Count and sum of the hit rates."""
        if HIT_RATE not in re.findall(r"^(\w+?)_count", self.server.metrics(), re.MULTILINE):
            return 0.0, 0.0
        return self.server.metric(f"{HIT_RATE}_count"), self.server.metric(f"{HIT_RATE}_sum")


@pytest.fixture(scope="module")
def worker_urls(tiny_qwen3_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two workers of one model."""
    folder = tmp_path_factory.mktemp("fleet")
    urls = [f"unix:{folder}/{name}/w.sock" for name in "ab"]
    with contextlib.ExitStack() as running:
        for url in urls:
            flags = ("--uds", url.removeprefix("unix:"), "--max-model-len", "1024", "--dtype", "float32")
            running.enter_context(program("worker", str(tiny_qwen3_vl), *flags))
        yield urls


@contextlib.contextmanager
def fleet_of(urls: list[str], policy: str) -> Iterator[Fleet]:
    port, admin_port = free_port(), free_port()
    flags = ("--port", str(port), "--decode-processes", "1", "--admin-port", str(admin_port), "--admin-key", "operator")
    with program("gateway", *(f"--worker-url={url}" for url in urls), *flags, "--routing-policy", policy) as process:
        server = Server(port, process)
        server.wait_until_ready()
        fleet = Fleet(server, admin_port)
        fleet.wait_until_exact()
        yield fleet


def ask(fleet: Fleet, shown: Image.Image) -> tuple[int, int]:
    """Ask about a picture; return how many tokens of the prompt were cached, and its length."""
    with fleet.server.client() as client:
        answer = client.chat.completions.create(
            model=fleet.server.name, messages=openai_messages(shown, "What is it?"), max_tokens=2, temperature=0
        )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0, answer.usage.prompt_tokens


def ask_first(fleet: Fleet, seed: int) -> list[Image.Image]:
    """Ask once about new pictures, and return them."""
    shown = [picture(96, 96, seed + number) for number in range(NUM_PICTURES)]
    for each in shown:
        ask(fleet, each)
    return shown


def ask_again(fleet: Fleet, shown: list[Image.Image]) -> tuple[list[int], list[tuple[int, int, float]]]:
    """Ask about pictures again in a shuffle.

    Return the pictures' numbers, and of each ask what ask() returns and its hit rate.
    """
    fleet.wait_until_idle()
    again = [*range(NUM_PICTURES)] * REPEATS
    random.Random(0).shuffle(again)
    found = []
    for number in again:
        count, total = fleet.rates()
        cached, length = ask(fleet, shown[number])
        new_count, new_total = fleet.rates()
        assert new_count == count + 1
        found.append((cached, length, new_total - total))
    return again, found


def best(length: int) -> int:
    """The most tokens of a prompt that can be cached: the last one is always computed."""
    return (length - 1) // 16 * 16


def test_repeats_land_on_the_holder(worker_urls: list[str]) -> None:  # E6
    with fleet_of(worker_urls, "round_robin") as other:
        shown = ask_first(other, seed=100)  # each worker gets half of them
    with fleet_of(worker_urls, "auto") as fleet:
        _, found = ask_again(fleet, shown)
        for cached, length, rate in found:
            assert cached == best(length)
            assert rate == pytest.approx(cached / length)
        workers = fleet.workers()
        assert [worker["reason"] for worker in workers] == ["", ""]
        assert all(worker["ready"] and worker["holdings"]["blocks"] >= NUM_PICTURES / 2 for worker in workers)
        assert fleet.server.metric("saccade_router_exact") == 2


def test_round_robin_finds_what_its_turns_give(worker_urls: list[str]) -> None:  # E6
    """The control: a repeat is cached exactly where its turn falls on a worker that has seen the picture."""
    with fleet_of(worker_urls, "round_robin") as fleet:
        again, found = ask_again(fleet, ask_first(fleet, seed=200))
        seen = {(number, number % 2) for number in range(NUM_PICTURES)}
        expected = []
        for turn, number in enumerate(again, NUM_PICTURES):
            expected.append((number, turn % 2) in seen)
            seen.add((number, turn % 2))
        assert [cached == best(length) for cached, length, _ in found] == expected
        assert [rate for *_, rate in found] == pytest.approx([cached / length for cached, length, _ in found])
        assert 0 < sum(expected) < len(expected)
