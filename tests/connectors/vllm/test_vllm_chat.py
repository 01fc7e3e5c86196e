"""The client of vLLM's HTTP against a server that takes chats only."""

from typing import Any

import pybase64
import pytest
from streams import generate
from vllm_worker import VllmServer, ask, image, listening, registered, usage
from waiting import until

from saccade.connectors.events.named_images import media_identifier
from saccade.connectors.vllm.client import VllmClient
from saccade.errors import ImageTooLarge, SaccadeError, UnsupportedParameter, WorkerFailed
from saccade.protocol.chat import ChatPrompt
from saccade.protocol.needs import needs_of_request
from saccade.protocol.output import FinishReason, TokenDelta
from saccade.protocol.request import EngineRequest, Grammar
from saccade.transport import wire

CHAT = ChatPrompt(
    (
        {"role": "system", "content": "Be brief.", "name": "n"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]},
        {"role": "assistant", "content": "No.", "reasoning_content": "Hm."},
    ),
    (b"one image", b"another"),
    {"enable_thinking": False},
)
TEXT = ChatPrompt(({"role": "user", "content": "Hello"},), (), {})
MEDIA = (image(1, inline=None), image(2, start=3, inline=None))


def chunk(*token_ids: int, reason: str | None = None, **fields: Any) -> dict[str, Any]:
    """One event of a streamed chat."""
    choice = {"index": 0, "delta": {"content": "x"}, "token_ids": list(token_ids), "finish_reason": reason, **fields}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice]}


def first(*prompt_token_ids: int) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return {"id": "chatcmpl-1", "choices": [choice], "prompt_token_ids": list(prompt_token_ids)}


def chats_only(*script: Any) -> VllmServer:
    server = VllmServer()
    server.render = 403
    server.script = list(script) or [first(5, 262, 262, 6), chunk(1), chunk(2, reason="stop"), usage()]
    return server


async def answer(client: VllmClient, request: EngineRequest, chat: ChatPrompt = TEXT) -> list[TokenDelta]:
    return [delta async for delta in generate(client, request, chat=lambda: chat)]


async def test_grammars_are_refused() -> None:  # F13
    async with listening(chats_only()) as url, registered(url) as client:
        asked = ask(grammar=Grammar("structural_tag", "{}"))
        refusals = [client.state.refusal(needs_of_request(request), b"") for request in (asked, ask())]
    assert isinstance(refusals[0], UnsupportedParameter)
    assert refusals[1] is None


async def test_a_chat_with_images() -> None:  # E8
    server = chats_only()
    async with listening(server) as url, registered(url) as client:
        assert client.state.takes_chats
        deltas = await answer(client, ask(*MEDIA, salt=b"tenant", top_k=3, min_tokens=1), CHAT)
    assert [(delta.token_ids, delta.finish_reason, delta.num_cached_tokens) for delta in deltas] == [
        ([1], None, 0),
        ([2], FinishReason.STOP, 3),
    ]
    body = server.requests[-1]
    assert server.paths[-1] == "/v1/chat/completions"
    system, user, assistant = body["messages"]
    assert system == {"role": "system", "content": "Be brief.", "name": "n"}
    assert assistant == {"role": "assistant", "content": "No.", "reasoning_content": "Hm.", "reasoning": "Hm."}
    one, text, other = user["content"]
    assert text == {"type": "text", "text": "and"}
    for number, part, encoded in ((1, one, b"one image"), (2, other, b"another")):
        kind, _, data = part["image_url"]["url"].partition(",")
        assert kind == "data:application/octet-stream;base64"
        assert pybase64.b64decode(data) == encoded
        assert part["uuid"] == media_identifier(b"tenant", bytes([number]) * 32)
    assert (body["cache_salt"], body["chat_template_kwargs"]) == (b"tenant".hex(), {"enable_thinking": False})
    assert (body["top_k"], body["min_tokens"], body["max_tokens"], body["n"]) == (3, 1, 10, 1)
    assert (body["stop_token_ids"], body["ignore_eos"]) == ([7], True)
    assert (body["stream"], body["return_token_ids"]) == (True, True)
    assert (body["logprobs"], "top_logprobs" in body) == (False, False)
    assert "mm_processor_kwargs" not in body


async def test_log_probabilities() -> None:
    top = [{"token": "token_id:9", "logprob": -3.0}, {"token": "token_id:4", "logprob": -0.5}]
    content = [{"token": "token_id:9", "logprob": -3.0, "bytes": None, "top_logprobs": top}]
    server = chats_only(first(), chunk(9, reason="stop", logprobs={"content": content}), usage())
    async with listening(server) as url, registered(url) as client:
        (delta,) = await answer(client, ask(num_logprobs=1))
    assert (server.requests[-1]["logprobs"], server.requests[-1]["top_logprobs"]) == (True, 2)
    (told,) = delta.logprobs
    assert (told.logprob, told.rank, told.top_ids, told.top_logprobs) == (-3.0, 2, [4], [-0.5])


@pytest.mark.parametrize(
    ("content", "problem"), [(None, "none"), ([{"token": "a word", "logprob": 0.0}], "no id"), ([], "too few")]
)
async def test_log_probabilities_that_make_no_sense(content: Any, problem: str) -> None:
    server = chats_only(first(), chunk(9, reason="stop", logprobs={"content": content}), usage())
    async with listening(server) as url, registered(url) as client:
        with pytest.raises(WorkerFailed):
            await answer(client, ask(num_logprobs=0))


async def test_a_server_that_tokenises_otherwise_is_not_known() -> None:  # E5
    server = chats_only()
    changes: list[str] = []

    def note(client: VllmClient) -> None:
        changes.append(client.exactness.level)

    async with listening(server) as url, registered(url, on_change=note) as client:
        await answer(client, ask())
        assert client.exactness.level == "TEXT_PREFIX"
        server.script[0] = first(5, 262, 6)
        for _ in range(2):
            assert len(await answer(client, ask())) == 2
        assert client.exactness.level == "NONE"
        assert "tokenises" in client.exactness.reason
        assert changes == ["TEXT_PREFIX", "NONE"]


async def test_refusals() -> None:
    server = chats_only()
    async with listening(server) as url, registered(url) as client:
        with pytest.raises(UnsupportedParameter, match="prompt_logprobs"):
            await answer(client, ask(num_prompt_logprobs=1))
        server.script = [400]
        with pytest.raises(SaccadeError) as failure:
            await answer(client, ask())
        assert "words of the engine's" not in failure.value.message


async def test_too_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 10)
    async with listening(chats_only()) as url, registered(url) as client:
        with pytest.raises(ImageTooLarge):
            await answer(client, ask(*MEDIA), CHAT)


async def test_closing_the_iterator_aborts_the_request() -> None:
    server = chats_only(first(), chunk(1), 60.0)
    async with listening(server) as url, registered(url) as client:
        deltas = generate(client, ask(), chat=lambda: TEXT)
        await anext(deltas)
        await deltas.aclose()
        await until(lambda: server.num_aborted)
