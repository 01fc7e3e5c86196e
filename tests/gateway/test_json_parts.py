"""JSON in parts: the same text as at once, and no step works on much of it."""

import asyncio
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from starlette.types import Message, Receive, Scope, Send

from saccade.gateway.byte_budget import ByteBudget
from saccade.gateway.json_parts import (
    TURN_BYTES,
    JsonItems,
    Part,
    filled,
    joined,
    made_in_turns,
    num_bytes,
    num_held_bytes,
    separated,
)
from saccade.gateway.server.answer_memory import AnswerMemory

ITEMS: list[Any] = [None, 1.5, 'a "quoted" text\n\U0001f9ff', {"k": [1, {}]}, [], -0.0, "x" * 300]


def text(parts: list[Part], piece_bytes: int = 64) -> bytes:
    return b"".join(joined(parts, piece_bytes))


@pytest.mark.parametrize("number", [0, 1, 2, len(ITEMS)])
@pytest.mark.parametrize("piece_bytes", [1, 64, 1 << 16])
def test_items_are_a_list(number: int, piece_bytes: int) -> None:
    items = JsonItems(ITEMS[:number])
    written = text([b"[", items, b"]"], piece_bytes)
    assert written == msgspec.json.encode(ITEMS[:number])
    assert num_bytes([b"[", items, b"]"]) == len(written)


@pytest.mark.parametrize("dropped", [0, 1, 2, 3, 9])
def test_dropped_items(dropped: int) -> None:
    items = JsonItems(ITEMS[:3])
    items.drop(dropped)
    items.add_item("next")
    assert text([b"[", items, b"]"]) == msgspec.json.encode([*ITEMS[: max(0, 3 - dropped)], "next"])
    assert items.num_bytes == len(text([items]))


class Inner(Struct):
    """A value in Outer."""

    content: list[Any]


class Outer(Struct):
    """A value whose lists and texts are filled."""

    name: str
    content: str
    inner: Inner
    after: int = 1


def test_fields_are_filled_in_place() -> None:
    """Texts that look like the field are no fields: their quotes are escaped."""
    deceit = '"content":[],"content":""'
    parts = filled(
        Outer(deceit, "", Inner([])), {b'"content":""': [b"a", b"b"], b'"content":[]': [JsonItems([deceit, 2])]}
    )
    assert text(parts) == msgspec.json.encode(Outer(deceit, "ab", Inner([deceit, 2])))
    assert text(filled(Outer("", deceit, Inner([])), {})) == msgspec.json.encode(Outer("", deceit, Inner([])))


def test_what_stands_in_several_places_is_held_once() -> None:
    shared = JsonItems(ITEMS)
    parts = list(separated([[shared], [shared], [JsonItems([1])]]))
    assert num_bytes(parts) == 2 * shared.num_bytes + len(b",,1")
    assert num_held_bytes(parts) <= shared.num_bytes + len(b",,1")


def test_pieces_are_short() -> None:
    parts: list[Part] = [b"{", JsonItems(["x" * 90] * 5000), b",", JsonItems([1] * 5000), b"}"]
    pieces = [len(piece) for piece in joined(parts, 4096)]
    assert max(pieces) <= 2 * 4096
    # Not one for each item either.
    assert min(first + second for first, second in pairwise(pieces)) > 4096


async def num_rounds_of_others(work: Any) -> int:
    """The rounds of the loop that others get while *work* runs without a pause of its own."""
    rounds = 0

    async def count() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count())
    await work
    other.cancel()
    return rounds


async def test_others_run_while_parts_are_made() -> None:
    def make() -> list[Part]:
        return [bytes(TURN_BYTES // 4), JsonItems([0] * 1000)]

    assert await num_rounds_of_others(made_in_turns([make] * 2)) == 0
    assert await num_rounds_of_others(made_in_turns([make] * 41)) == 10


@pytest.mark.parametrize("body_bytes", [16 << 20, 64 << 10])
async def test_others_run_while_a_client_reads_a_long_answer_at_once(body_bytes: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for start in range(0, 16 << 20, body_bytes):
            more = start + body_bytes < 16 << 20
            await send({"type": "http.response.body", "body": bytes(body_bytes), "more_body": more})

    sent = []

    async def send(message: Message) -> None:
        sent.append(len(message.get("body", b"")))

    async def receive() -> Message:
        raise AssertionError

    memory = ByteBudget(1 << 30)
    serving = AnswerMemory(app, lambda _: memory.reservation())({"type": "http", "method": "POST"}, receive, send)
    assert await num_rounds_of_others(serving) == (16 << 20) // TURN_BYTES
    assert sum(sent) == 16 << 20
