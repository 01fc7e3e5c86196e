"""Fleets with vLLM workers: which of them a prompt goes to, and in which form."""

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from streams import stream
from vllm_worker import PIXELS, VllmServer, ask, event, image, listening, usage
from waiting import until

from saccade.connectors.smg import sglang_address, tokenspeed
from saccade.connectors.vllm import http as vllm_http
from saccade.errors import InvalidValue, StartupError
from saccade.fleet.address import check_url
from saccade.fleet.dispatch import Dispatcher
from saccade.fleet.feed import CacheListener
from saccade.fleet.index import BlockIndex
from saccade.fleet.kept_images import MAX_MISSES
from saccade.fleet.pool import WorkerPool
from saccade.fleet.prompt import Prompt
from saccade.fleet.router import Router
from saccade.identity.blocks import MediaRun
from saccade.models.files import read_model_files
from saccade.protocol.chat import ChatPrompt
from saccade.protocol.needs import Need
from saccade.protocol.request import EngineRequest, MediaPixels
from saccade.transport.wire import TLS_SCHEME

CHAT = ChatPrompt(({"role": "user", "content": "Hello"},), (), {})
ERROR = InvalidValue("why", "messages")


@pytest.fixture
def fleet_of(checkpoint: Callable[[str], Path]) -> Any:
    given = {"m": read_model_files(checkpoint("qwen3_vl"))}

    @contextlib.asynccontextmanager
    async def made(*urls: str) -> AsyncIterator[WorkerPool]:
        worker_pool = WorkerPool(urls, lambda _: None, model_files=given)
        await worker_pool.start()
        try:
            await until(lambda: all(client.state.ready for client in worker_pool.clients))
            yield worker_pool
        finally:
            await worker_pool.close()

    return made


def servers() -> tuple[VllmServer, VllmServer]:
    """One that takes chats only, and one that takes token ids."""
    chats, tokens = VllmServer(), VllmServer()
    chats.render = 403
    for server in (chats, tokens):
        server.script = [event(1, reason="stop"), usage()]
    return chats, tokens


async def answer(dispatcher: Dispatcher, request: EngineRequest, error: InvalidValue | None = None) -> list[int]:
    async with dispatcher.place(
        "m", Prompt(request.token_ids, errors={} if error is None else {Need.TOKEN_IDS: error})
    ) as placement:
        deltas = stream(dispatcher, placement, request, chat=lambda: CHAT)
        return [token_id async for delta in deltas for token_id in delta.token_ids]


async def test_prompts_that_need_token_ids_go_to_workers_that_accept_them(fleet_of: Any) -> None:  # E5
    chats, tokens = servers()
    async with listening(chats) as one, listening(tokens) as other, fleet_of(one, other) as worker_pool:
        dispatcher = Dispatcher(worker_pool)
        lacks = dispatcher.lacks("m")
        assert (Need.TOKEN_IDS in lacks.of_some, Need.TOKEN_IDS in lacks.of_all) == (True, False)
        for number in range(4):
            assert await answer(dispatcher, ask(name=f"r{number}"), ERROR) == [1]
    assert len(chats.paths) == 1
    assert tokens.paths[1:] == ["/inference/v1/generate"] * 4


async def test_prompts_that_need_token_ids_are_refused_without_such_a_worker(fleet_of: Any) -> None:  # E5
    chats, _ = servers()
    async with listening(chats) as url, fleet_of(url) as worker_pool:
        dispatcher = Dispatcher(worker_pool)
        lacks = dispatcher.lacks("m")
        assert (Need.TOKEN_IDS in lacks.of_some, Need.TOKEN_IDS in lacks.of_all) == (True, True)
        with pytest.raises(InvalidValue, match="why"):
            await answer(dispatcher, ask(), ERROR)
        assert dispatcher.num_requests == 0
        assert await answer(dispatcher, ask()) == [1]
    assert chats.paths[1:] == ["/v1/chat/completions"]


async def test_workers_that_accept_token_ids_are_preferred(fleet_of: Any) -> None:
    _, tokens = servers()
    async with listening(tokens) as url, fleet_of(url) as worker_pool:
        dispatcher = Dispatcher(worker_pool)
        lacks = dispatcher.lacks("m")
        assert (Need.TOKEN_IDS in lacks.of_some, Need.TOKEN_IDS in lacks.of_all) == (False, False)
        request = ask(image())
        async with dispatcher.place("m", Prompt(request.token_ids)) as placement:
            assert [delta.token_ids async for delta in stream(dispatcher, placement, request)] == [[1]]
    assert tokens.paths[1:] == ["/inference/v1/generate"]


async def test_every_rank_is_a_target(fleet_of: Any) -> None:
    _, tokens = servers()
    async with listening(tokens) as url, fleet_of(f"{url}?ranks=2") as worker_pool:
        assert [client.url for client in worker_pool.clients] == [f"{url}?rank=0", f"{url}?rank=1"]
        dispatcher = Dispatcher(worker_pool, Router("round_robin", BlockIndex(1 << 20), Random(1)))
        for number in range(2):
            await answer(dispatcher, ask(name=f"r{number}"))
    assert {headers["X-data-parallel-rank"] for headers in tokens.headers} == {"0", "1"}


async def by_name(dispatcher: Dispatcher, number: int, salt: bytes = b"") -> bool:
    """Ask about one image in request *number*, and return whether it went by its name."""
    held = image()
    request = ask(held, name=f"r{number}")
    (span,) = held.spans
    prompt = Prompt(request.token_ids, (MediaRun(span.start, span.length, held.content_hash),), salt)

    async def supply(media: Sequence[int]) -> tuple[MediaPixels, ...]:
        return tuple(MediaPixels(index, inline=PIXELS) for index in media)

    async with dispatcher.place("m", prompt) as placement:
        needs_pixels = placement.needs_pixels(held.content_hash)
        media = (msgspec.structs.replace(held, inline=PIXELS if needs_pixels else None),)
        request = msgspec.structs.replace(request, media=media, salt=salt)
        async for _ in stream(dispatcher, placement, request, supply):
            pass
    return not needs_pixels


async def test_images_that_were_sent_go_by_their_name_until_the_server_is_away(fleet_of: Any) -> None:  # F5
    _, server = servers()
    server.held = set()
    async with listening(server) as url, fleet_of(url) as worker_pool:
        (worker,) = worker_pool.clients
        router = Router("auto", BlockIndex(1 << 20), Random(0))
        dispatcher = Dispatcher(worker_pool, router)
        listener = CacheListener(worker_pool, router)
        assert [await by_name(dispatcher, number) for number in range(3)] == [False, True, True]
        assert not await by_name(dispatcher, 3, b"other")
        await worker.close()
        await until(lambda: not worker.state.ready and not dispatcher.num_requests)
        await worker.start()
        await until(lambda: worker.state.ready)
        assert not await by_name(dispatcher, 4)
        await listener.close()


async def test_a_server_that_keeps_no_images_gets_pixels_at_once(fleet_of: Any) -> None:  # F5
    _, server = servers()
    async with listening(server) as url, fleet_of(url) as worker_pool:
        dispatcher = Dispatcher(worker_pool)
        for number in range(MAX_MISSES):
            server.held = None
            assert not await by_name(dispatcher, 2 * number)
            server.held = set()
            assert await by_name(dispatcher, 2 * number + 1)
        server.held = None
        assert [await by_name(dispatcher, number) for number in (100, 101)] == [False, False]


@pytest.mark.parametrize("url", ["vllm://h", "vllms://h:1?ranks=0", "vllm:/h:1"])
def test_malformed_addresses(url: str) -> None:
    with pytest.raises(StartupError):
        check_url(url)


def test_refusal_of_an_address_names_every_kind() -> None:
    with pytest.raises(StartupError) as caught:
        check_url("http://h:1")
    ranked = (*tokenspeed.ADDRESSES.schemes, *vllm_http.ADDRESSES.schemes)
    kinds = ("unix:", "grpc://", TLS_SCHEME, sglang_address.SCHEME, *ranked)
    assert [kind for kind in kinds if kind not in caught.value.message] == []


def test_addresses() -> None:
    for url in ("vllm://h:1", "vllms://h:1?ranks=2", "tokenspeed://h:1", "grpcs://h:1", "unix:/path"):
        check_url(url)
