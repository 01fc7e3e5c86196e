"""Conversations are kept by tenant, within a bound of bytes."""

import sys
from collections import Counter

import pytest

from saccade.errors import InvalidValue, PreviousResponseNotFound, ResponseNotFound
from saccade.gateway.apis.responses.memory_store import MemoryResponseStore
from saccade.gateway.apis.responses.store import ResponseStore, StoredResponse, num_message_bytes
from saccade.gateway.chat_request import CalledFunction, ChatMessage, ContentPart, ImageUrl, ToolCall
from saccade.gateway.field_schemas import MAX_MESSAGES, MAX_PARTS


def turn(text: str, role: str = "user") -> ChatMessage:
    return ChatMessage(role=role, content=text)


async def keep(
    store: ResponseStore, name: str, previous: str | None = None, tenant: bytes = b"", size: int = 1
) -> None:
    messages = (turn(name * size), turn(f"to {name}", "assistant"))
    await store.put(tenant, name, StoredResponse(previous, messages, b"{}"))


async def test_conversations_go_back_to_their_beginning() -> None:
    store = MemoryResponseStore(1 << 20)
    await keep(store, "a")
    await keep(store, "b", "a")
    await keep(store, "c", "a")
    assert [message.content for message in await store.conversation(b"", "b")] == ["a", "to a", "b", "to b"]
    assert [message.content for message in await store.conversation(b"", "c")] == ["a", "to a", "c", "to c"]
    assert await store.body(b"", "c") == b"{}"


async def test_tenants_do_not_see_each_other() -> None:
    store = MemoryResponseStore(1 << 20)
    await keep(store, "a", tenant=b"one")
    for tenant in (b"", b"two"):
        with pytest.raises(PreviousResponseNotFound):
            await store.conversation(tenant, "a")
        with pytest.raises(ResponseNotFound):
            await store.body(tenant, "a")
        with pytest.raises(ResponseNotFound):
            await store.delete(tenant, "a")
    assert await store.conversation(b"one", "a")


async def test_deleted_response_ends_its_continuations() -> None:
    store = MemoryResponseStore(1 << 20)
    await keep(store, "a")
    await keep(store, "b", "a")
    await store.delete(b"", "a")
    with pytest.raises(PreviousResponseNotFound):
        await store.conversation(b"", "b")
    assert await store.body(b"", "b")


async def test_the_least_recently_used_goes_first() -> None:
    store = MemoryResponseStore(52_000)
    for name in "abcd":
        await keep(store, name, size=10_000)
    await store.conversation(b"", "a")
    await keep(store, "e", size=10_000)
    assert await store.body(b"", "a")
    with pytest.raises(ResponseNotFound):
        await store.body(b"", "b")


async def test_the_tenant_that_holds_most_loses_its_own() -> None:
    store = MemoryResponseStore(60_000)
    await keep(store, "a", tenant=b"modest", size=1000)
    for name in "bcdefgh":
        await keep(store, name, tenant=b"greedy", size=10_000)
    assert await store.body(b"modest", "a")
    assert await store.body(b"greedy", "h")
    with pytest.raises(ResponseNotFound):
        await store.body(b"greedy", "b")


async def test_a_conversation_over_a_quarter_of_the_store_is_not_taken() -> None:
    store = MemoryResponseStore(1 << 20)
    assert store.takes(num_message_bytes([turn("a" * 250_000)]))
    assert not store.takes(num_message_bytes([turn("a" * 270_000)]))
    for name, response in {
        "answer": StoredResponse(None, (turn("a"), turn("a" * 270_000, "assistant")), b"{}"),
        "JSON": StoredResponse(None, (turn("a"),), b"{}" * 135_000),
    }.items():
        assert not await store.put(b"", name, response)
        with pytest.raises(ResponseNotFound):
            await store.body(b"", name)


async def test_a_response_that_is_pushed_out_at_once_is_not_kept() -> None:
    store = MemoryResponseStore(60_000)
    for number in range(20):
        await keep(store, str(number), tenant=b"%d" % number, size=1000)
    assert not await store.put(b"large", "a", StoredResponse(None, (turn("a" * 13_000),), b"{}"))
    assert await store.put(b"large", "a", StoredResponse(None, (turn("a"),), b"{}"))


def test_most_parts_are_counted_quickly() -> None:
    """Fields that are empty cost nothing: they are counted on the event loop."""
    message = ChatMessage(role="user", content=[ContentPart(type="text", text="a") for _ in range(MAX_PARTS)])
    calls = Counter[str]()
    sys.setprofile(lambda _, event, __: calls.update([event]))
    try:
        num_message_bytes([message])
    finally:
        sys.setprofile(None)
    assert calls["call"] < 8 * MAX_PARTS


def test_every_text_of_a_message_counts() -> None:
    long = "a" * 100_000
    call = ToolCall("id", CalledFunction("name", "{}"))
    for name, message in {
        "content": ChatMessage(role="user", content=long),
        "reasoning": ChatMessage(role="assistant", reasoning_content=long),
        "name": ChatMessage(role="user", content="", name=long),
        "id of a result": ChatMessage(role="tool", content="", tool_call_id=long),
        "id of a call": ChatMessage(role="assistant", tool_calls=[ToolCall(long, call.function)]),
        "name of a call": ChatMessage(role="assistant", tool_calls=[ToolCall("id", CalledFunction(long, "{}"))]),
        "arguments": ChatMessage(role="assistant", tool_calls=[ToolCall("id", CalledFunction("name", long))]),
        "text part": ChatMessage(role="user", content=[ContentPart(type="text", text=long)]),
        "image": ChatMessage(role="user", content=[ContentPart(type="image_url", image_url=ImageUrl(long))]),
        "image as a string": ChatMessage(role="user", content=[ContentPart(type="image_url", image_url=long)]),
    }.items():
        assert num_message_bytes([message]) > len(long), name


async def test_long_conversations_are_refused() -> None:
    store = MemoryResponseStore(64 << 20)
    previous = None
    for number in range(MAX_MESSAGES // 2 + 1):
        await keep(store, str(number), previous)
        previous = str(number)
    with pytest.raises(InvalidValue, match="more than 2048 messages"):
        await store.conversation(b"", str(MAX_MESSAGES // 2))
    assert len(await store.conversation(b"", str(MAX_MESSAGES // 2 - 1))) == MAX_MESSAGES
