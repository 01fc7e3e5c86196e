"""Long bodies are parsed in a thread, and short ones on the event loop, in turns. # F11"""

import asyncio
import threading
from collections.abc import Callable

import pytest
import scripted
from waiting import SECONDS

from saccade.errors import InvalidValue
from saccade.gateway import parameters
from saccade.gateway.admission import Admission
from saccade.gateway.work_threads import LONG_BODY_BYTES, WorkThreads

SHORT, LONG = bytes(LONG_BODY_BYTES), bytes(LONG_BODY_BYTES + 1)


@pytest.fixture
def threads() -> WorkThreads:
    return WorkThreads(Admission(1))


def thread_of(_: bytes | bytearray) -> str:
    return threading.current_thread().name


async def test_only_long_bodies_leave_the_event_loop(threads: WorkThreads) -> None:
    assert await threads.parse(SHORT, thread_of) == threading.current_thread().name
    assert (await threads.parse(LONG, thread_of)).startswith("parse")
    threads.close()


async def test_an_error_of_a_long_body_reaches_its_request(threads: WorkThreads) -> None:
    def refuse(_: bytes | bytearray) -> None:
        raise InvalidValue("no")

    with pytest.raises(InvalidValue, match="no"):
        await threads.parse(LONG, refuse)
    threads.close()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_client_that_leaves_keeps_its_turn_until_its_body_is_parsed(threads: WorkThreads, fails: bool) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def work(_: bytes | bytearray) -> None:
        begun.set()
        assert may_end.wait(SECONDS)  # the event loop would wait for itself if it parsed here
        if fails:
            raise InvalidValue("no")

    parsing = asyncio.create_task(threads.parse(LONG, work))
    await asyncio.to_thread(begun.wait)
    parsing.cancel()
    done, _ = await asyncio.wait([parsing], timeout=0.05)
    assert not done
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await parsing
    threads.close()


CHAT = {"messages": [{"role": "user", "content": "a"}]}
BODIES: dict[str, Callable[[str], dict[str, object]]] = {
    "/v1/chat/completions": lambda text: {**CHAT, "x": text},
    "/v1/completions": lambda text: {"prompt": "a", "x": text},
    "/v1/messages": lambda text: {**CHAT, "max_tokens": 1, "x": text},
    "/v1/messages/count_tokens": lambda text: {**CHAT, "x": text},
    "/v1/responses": lambda text: {"input": "a", "x": text},
    "/tokenize": lambda text: {**CHAT, "x": text},
    "/detokenize": lambda text: {"tokens": [1], "x": text},
}


@pytest.mark.parametrize("path", BODIES)
def test_every_api_parses_long_bodies_in_a_thread(
    path: str, gateway: scripted.Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    check_bounds = parameters.check_bounds

    def check(*arguments: object) -> bytes:
        seen.append(threading.current_thread().name)
        return check_bounds(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(parameters, "check_bounds", check)
    for text in ("", "a" * LONG_BODY_BYTES):
        gateway.ask("POST", path, {"model": "tiny", **BODIES[path](text)})
    short, long = seen
    assert not short.startswith("parse")
    assert long.startswith("parse")
