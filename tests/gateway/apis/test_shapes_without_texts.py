"""Fields full of objects, lists and numbers without a text: a long body makes few values, whatever its API."""

import json
import tracemalloc
from collections.abc import Callable
from functools import partial

import pytest
from tables import table

from saccade.errors import RequestError
from saccade.gateway.apis.chat.reader import read_chat_completion
from saccade.gateway.apis.completions.reader import read_completion
from saccade.gateway.apis.messages.reader import read_count, read_messages
from saccade.gateway.apis.models import parse_detokenize, parse_tokenize
from saccade.gateway.apis.responses.memory_store import MemoryResponseStore
from saccade.gateway.apis.responses.reader import ResponseReader
from saccade.gateway.body_bounds import MAX_COMMAS, check_messages, num_value_bytes
from saccade.gateway.chat_request import CalledFunction, ChatMessage, ToolCall

NUM_BYTES = 3 << 20
MOST_BYTES = 20 << 20
"""What reading may take at most: copies of the body, and the values that are allowed."""

MOST_BYTES_OF_IDS = 48 << 20
"""The same if the values are token ids, which have a bound of their own."""

OF_IDS = ("allowed_token_ids", "prompt", "a list first", "text, tokens")

ITEMS = ["{}", "[]", "0", "null", "1e9", "[[]]", '{"a":{}}', "true"]

Read = Callable[[bytes], object]
CHAT: Read = lambda body: read_chat_completion(False, body, b"")  # noqa: E731
COMPLETION: Read = lambda body: read_completion(False, body, b"")  # noqa: E731
MESSAGES: Read = lambda body: read_messages(False, body, b"")  # noqa: E731
COUNT: Read = lambda body: read_count(False, body, b"")  # noqa: E731
RESPONSE: Read = lambda body: ResponseReader(False, MemoryResponseStore(1 << 26)).read_chat(body, b"")  # noqa: E731

TURN = '[{"role":"user","content":"a"}]'
CALL = '[{"id":"a","type":"function","function":{"name":"f","arguments":%s}}]'
COMMON = ("logit_bias", "stop", "metadata", "stop_token_ids", "allowed_token_ids", "unknown")
CHATS = ("tools", "tool_choice", "response_format", "chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs")
CHATS += ("stream_options", "structured_outputs", "bad_words")
FIELDS: dict[str, tuple[Read, str]] = {
    **{f"chat, {name}": (CHAT, f'{{"messages":{TURN},"{name}":@}}') for name in (*COMMON, *CHATS)},
    "chat, messages": (CHAT, '{"messages":@}'),
    "chat, content": (CHAT, '{"messages":[{"role":"user","content":@}]}'),
    "chat, calls": (CHAT, '{"messages":[{"role":"assistant","tool_calls":@}]}'),
    "chat, ids first": (CHAT, f'{{"allowed_token_ids":["a",@],"messages":{TURN}}}'),
    "tokens, messages": (parse_tokenize, '{"messages":@}'),
    "tokens, tools": (parse_tokenize, f'{{"messages":{TURN},"tools":@}}'),
    "text, tokens": (parse_detokenize, '{"tokens":@}'),
    "text, texts": (parse_detokenize, '{"tokens":["a",@]}'),
    **{f"completions, {name}": (COMPLETION, f'{{"prompt":"a","{name}":@}}') for name in COMMON},
    "completions, prompt": (COMPLETION, '{"prompt":@}'),
    "completions, a text first": (COMPLETION, '{"prompt":["a",@]}'),
    "completions, a list first": (COMPLETION, '{"prompt":[[1],@]}'),
    "completions, a space first": (COMPLETION, '{"prompt":[ "a",@]}'),
    **{
        f"messages, {name}": (MESSAGES, f'{{"max_tokens":1,"messages":{TURN},"{name}":@}}')
        for name in ("system", "tools", "tool_choice", "thinking", "stop_sequences", "metadata", "unknown")
    },
    "messages, messages": (MESSAGES, '{"max_tokens":1,"messages":@}'),
    "messages, input": (
        MESSAGES,
        '{"max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f",'
        '"input":{"a":@}}]}]}',
    ),
    "count, messages": (COUNT, '{"messages":@}'),
    **{
        f"responses, {name}": (RESPONSE, f'{{"input":"a","{name}":@}}')
        for name in ("tools", "tool_choice", "text", "reasoning", "metadata", "include", "instructions", "unknown")
    },
    "responses, input": (RESPONSE, '{"input":@}'),
    "responses, content": (RESPONSE, '{"input":[{"role":"user","content":@}]}'),
}
"""A reader, and a body with a place for what fills it."""


def filled(form: str, item: str, *, as_text: bool = False) -> bytes:
    """*form* with an array of *item* at its place, of NUM_BYTES together."""
    rest = form.replace(",@", "").replace("@", "")
    array = ",".join([item] * ((NUM_BYTES - len(rest)) // (len(item) + 1)))
    # An array in an array that has begun continues it.
    whole = array if ",@" in form and "[" in form[: form.index(",@")].rpartition(":")[2] else f"[{array}]"
    return form.replace("@", json.dumps(whole) if as_text else whole).encode()


def num_bytes_of(read: Callable[[], object]) -> int:
    """The most memory that *read* takes at a time."""
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            read()
        return tracemalloc.get_traced_memory()[1]
    except pytest.fail.Exception:  # it was read
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@table(("field", "item"), [("messages, input", "1e9"), ("completions, a text first", "[]"), ("responses, input", "{}")])
def test_items_without_texts_take_little_memory(field: str, item: str) -> None:
    check_memory(field, item)


@pytest.mark.ci
@table("item", ITEMS)
@table("field", FIELDS)
def test_any_items_take_little_memory(field: str, item: str) -> None:
    check_memory(field, item)


def check_memory(field: str, item: str) -> None:
    read, form = FIELDS[field]
    body = filled(form, item)
    assert abs(len(body) - NUM_BYTES) < 100
    most = MOST_BYTES_OF_IDS if field.endswith(OF_IDS) else MOST_BYTES
    assert num_bytes_of(partial(read, body)) < most


@table("item", ITEMS)
def test_values_in_arguments_are_bounded(item: str) -> None:
    body = filled(f'{{"messages":[{{"role":"assistant","tool_calls":{CALL % "@"}}}]}}', item, as_text=True)
    with pytest.raises(RequestError, match="The arguments of the calls have more than"):
        CHAT(body)


def test_as_many_values_as_are_allowed_are_read() -> None:
    numbers = json.dumps({"a": [0] * (MAX_COMMAS - 1), "b": "," * MAX_COMMAS})
    call = ToolCall("a", CalledFunction("f", numbers))
    check_messages([ChatMessage(role="assistant", tool_calls=[call])])
    ids = [1] * (1 << 20)
    assert parse_detokenize(json.dumps({"tokens": ids}).encode())[0].tokens == ids
    COMPLETION(json.dumps({"prompt": ids, "stop": ["a", "b"]}).encode())
    CHAT(json.dumps({"messages": [{"role": "user", "content": "a, b" * MAX_COMMAS}]}).encode())


def test_values_count_towards_memory() -> None:
    assert num_value_bytes(b'{"a": [{}, {}]}') == 64 * 5
    assert num_value_bytes(b'"' + b"a" * 100 + b'"') == 0
