"""Conversations are kept by tenant, within a bound of bytes."""

import pytest

from saccade.errors import InvalidValue, ResponseNotFound
from saccade.gateway.openai.requests import MAX_MESSAGES, ChatMessage, ContentPart, ImageUrl
from saccade.gateway.responses.store import ResponseStore


def turn(text: str, role: str = "user") -> ChatMessage:
    return ChatMessage(role=role, content=text)


def keep(store: ResponseStore, name: str, previous: str | None = None, tenant: bytes = b"", size: int = 1) -> None:
    store.begin(tenant, name, previous, [turn(name * size)])
    store.complete(tenant, name, [turn(f"to {name}", "assistant")], b"{}")


def test_conversations_go_back_to_their_beginning() -> None:
    store = ResponseStore(1 << 20)
    keep(store, "a")
    keep(store, "b", "a")
    keep(store, "c", "a")
    assert [message.content for message in store.conversation(b"", "b")] == ["a", "to a", "b", "to b"]
    assert [message.content for message in store.conversation(b"", "c")] == ["a", "to a", "c", "to c"]
    assert store.body(b"", "c") == b"{}"


def test_tenants_do_not_see_each_other() -> None:
    store = ResponseStore(1 << 20)
    keep(store, "a", tenant=b"one")
    for tenant in (b"", b"two"):
        with pytest.raises(ResponseNotFound):
            store.conversation(tenant, "a")
        with pytest.raises(ResponseNotFound):
            store.body(tenant, "a")
        with pytest.raises(ResponseNotFound):
            store.delete(tenant, "a")
    assert store.conversation(b"one", "a")


def test_what_is_not_whole_is_not_found() -> None:
    store = ResponseStore(1 << 20)
    store.begin(b"", "a", None, [turn("a")])
    with pytest.raises(ResponseNotFound) as raised:
        store.conversation(b"", "a")
    assert raised.value.param == "previous_response_id"


def test_a_request_that_ends_without_an_answer_leaves_nothing() -> None:
    store = ResponseStore(16_000)
    keep(store, "a")
    for number in range(10):
        store.begin(b"other", str(number), None, [turn("b" * 4000)])
        store.end(b"other", str(number))
    store.end(b"", "a")
    assert store.body(b"", "a") == b"{}"


def test_a_deleted_response_ends_what_continues_it() -> None:
    store = ResponseStore(1 << 20)
    keep(store, "a")
    keep(store, "b", "a")
    store.delete(b"", "a")
    with pytest.raises(ResponseNotFound):
        store.conversation(b"", "b")
    assert store.body(b"", "b")


def test_the_least_recently_used_goes_first() -> None:
    store = ResponseStore(40_000)
    keep(store, "a", size=10_000)
    keep(store, "b", size=10_000)
    store.conversation(b"", "a")
    keep(store, "c", size=10_000)
    assert store.body(b"", "a")
    with pytest.raises(ResponseNotFound):
        store.body(b"", "b")
    # One that does not fit at all is not kept, and what was dropped while it was answered stays away.
    keep(store, "d", size=50_000)
    with pytest.raises(ResponseNotFound):
        store.body(b"", "d")


def test_pictures_count() -> None:
    store = ResponseStore(30_000)
    part = ContentPart(type="image_url", image_url=ImageUrl("data:" + "A" * 40_000))
    store.begin(b"", "a", None, [ChatMessage(role="user", content=[part])])
    store.complete(b"", "a", [], b"{}")
    with pytest.raises(ResponseNotFound):
        store.body(b"", "a")


def test_long_conversations_are_refused() -> None:
    store = ResponseStore(64 << 20)
    previous = None
    for number in range(MAX_MESSAGES // 2 + 1):
        keep(store, str(number), previous)
        previous = str(number)
    with pytest.raises(InvalidValue, match="more than 2048 messages"):
        store.conversation(b"", str(MAX_MESSAGES // 2))
    assert len(store.conversation(b"", str(MAX_MESSAGES // 2 - 1))) == MAX_MESSAGES
