"""Cache events from an engine's publisher to the client, in our keys: directly, and through SMG's own relay.

The client connects to a publisher on its worker's host; under another name the host is not certainly the same.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import smg_servicer
import tokenspeed_worker
import zmq
import zmq.asyncio
from sglang_servicer import Engine as SglangEngine
from sglang_servicer import arguments, servicer_class
from sglang_servicer import listening as listening_sglang
from sglang_servicer import registered as registered_sglang
from streams import generate
from test_smg_kv_events import asked, image, padded
from tokenspeed_worker import FILES, Slots
from waiting import until

from saccade.connectors.smg.client import SmgClient
from saccade.errors import WorkerUnavailable
from saccade.identity.blocks import MediaRun, block_keys, root_key
from saccade.protocol.kv_events import BlockRemoved, BlockStored, KvEvent, KvEvents
from saccade.protocol.request import EngineRequest

STOPPED = {"type": "stop", "matched": 7}
REQUEST = asked(64, msgspec.structs.replace(image(1, (20, 10)), inline=bytes(48), pixel_dtype="bfloat16"))


HELLO = ["BlockStored", [77], None, [199] * 16, 16]
GOODBYE = ["BlockRemoved", [77]]


class Publisher:
    """An engine's publisher of cache events, which does not know who listens."""

    def __init__(self, host: str, port: int = 0) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PUB)
        try:
            self._socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        except zmq.ZMQError:
            self.close()
            raise
        self.port = int(self._socket.last_endpoint.rpartition(b":")[2])
        self.endpoint = f"tcp://{host}:{self.port}"
        self._number = 1

    async def publish(self, *events: Any) -> None:
        payload = msgspec.msgpack.encode([1.5, list(events), 0])
        await self._socket.send_multipart([b"", self._number.to_bytes(8, "big"), payload])
        self._number += 1

    async def begin(self, messages: AsyncGenerator[KvEvents, None]) -> None:
        """Publish until *messages* tells of it."""
        assert (await anext(messages)).snapshot
        arrived = asyncio.ensure_future(anext(messages))
        while not arrived.done():
            await self.publish(HELLO)
            await asyncio.wait({arrived}, timeout=0.1)

    def begin_anew(self) -> None:
        self._number = 0

    def close(self) -> None:
        self._context.destroy(linger=0)


DIRECT, RELAYED = "127.0.0.1", "localhost"


@pytest.fixture(params=[DIRECT, RELAYED])
def publisher(request: pytest.FixtureRequest) -> Any:
    publisher = Publisher(request.param)
    yield publisher
    publisher.close()


@contextlib.contextmanager
def publishers_of_ranks(host: str) -> Iterator[tuple[Publisher, Publisher]]:
    """The publishers of two ranks, at neighbouring ports."""
    while True:
        first = Publisher(host)
        try:
            second = Publisher(host, first.port + 1)
        except zmq.ZMQError:
            first.close()
            continue
        break
    yield first, second
    first.close()
    second.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.files.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


@asynccontextmanager
async def tokenspeed(
    folder: Path, publisher: Publisher, slots: Slots, monkeypatch: pytest.MonkeyPatch, rank: int | None = None
) -> AsyncIterator[SmgClient]:
    """A client of SMG's servicer, or of a *rank* of its engine's two."""
    engine = smg_servicer.Engine.serving(folder, [([7], STOPPED)], eos_token_id=7, vocab_size=512)
    config = {"enable_kv_cache_events": True, "endpoint": publisher.endpoint}
    engine.server_args.kv_events_config = json.dumps(config)
    of_rank = "" if rank is None else f"?rank={rank}"
    if rank is not None:
        engine.server_args.mapping = SimpleNamespace(attn=SimpleNamespace(dp_size=2))
    with smg_servicer.servicer_class(monkeypatch, names_ranks=rank is not None) as servicer_of:
        listening = tokenspeed_worker.listening(engine.servicer(servicer_of))
        async with listening as url, tokenspeed_worker.registered(url + of_rank, slots) as client:
            yield client
        if rank is not None:
            assert {request.data_parallel_rank for request in engine.requests} == {rank}


@asynccontextmanager
async def sglang(
    folder: Path, publisher: Publisher, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SmgClient]:
    config = {"publisher": "zmq", "endpoint": publisher.endpoint}
    said = arguments(folder, page_size=16, kv_events_config=json.dumps(config))
    with servicer_class(monkeypatch) as servicer_of:
        listening = listening_sglang(SglangEngine(said, [([7], STOPPED)]).servicer(servicer_of))
        async with listening as target, registered_sglang(target, slots) as client:
            yield client


def keys(client: SmgClient, request: EngineRequest) -> list[bytes]:
    assert client.description is not None
    root = root_key(client.description.fingerprint, b"")
    return block_keys(root, request.token_ids, [MediaRun(20, 10, request.media[0].content_hash)], 16)


async def told(client: SmgClient, publisher: Publisher, *batches: Any) -> list[KvEvent]:
    """What the client tells of *batches*."""
    events: list[KvEvent] = []
    async with contextlib.aclosing(client.kv_events(blocks=True)) as messages:
        await publisher.begin(messages)
        for batch in batches:
            await publisher.publish(*batch)
        await publisher.publish(GOODBYE)
        while not events or not isinstance(events[-1], BlockRemoved) or events[-1].key != hello(client):
            events += (await asyncio.wait_for(anext(messages), 20.0)).events
    return [event for event in events if getattr(event, "key", None) != hello(client)]


async def rest(messages: AsyncGenerator[KvEvents, None]) -> None:
    async for _ in messages:
        pass


def hello(client: SmgClient) -> bytes:
    assert client.description is not None
    return block_keys(root_key(client.description.fingerprint, b""), [199] * 16, (), 16)[0]


async def test_tokenspeed(
    folder: Path, publisher: Publisher, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:  # E5, E8
    async with tokenspeed(folder, publisher, slots, monkeypatch) as client:
        assert client.exactness.level == "EXACT"
        [delta async for delta in generate(client, REQUEST)]
        stored = ["BlockStored", [1 << 63, 2, 3, 4], None, padded(REQUEST), 16]
        events = await told(client, publisher, [stored], [["BlockRemoved", [4]]])
        expected = keys(client, REQUEST)
    assert [event.key for event in events] == [*expected, expected[3]]
    assert isinstance(events[-1], BlockRemoved)


@pytest.mark.parametrize("host", [DIRECT, RELAYED])
@pytest.mark.parametrize("rank", [0, 1])
async def test_each_rank_of_tokenspeed_is_known_by_its_own_events(
    folder: Path, host: str, rank: int, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:  # E5, E8
    with publishers_of_ranks(host) as publishers:
        async with tokenspeed(folder, publishers[0], slots, monkeypatch, rank) as client:
            assert client.exactness.level == "EXACT"
            [delta async for delta in generate(client, REQUEST)]
            others = publishers[1 - rank]
            await others.publish(["BlockStored", [5], None, [9] * 16, 16])
            stored = ["BlockStored", [1 << 63, 2, 3, 4], None, padded(REQUEST), 16]
            events = await told(client, publishers[rank], [stored], [["BlockRemoved", [4]]])
            expected = keys(client, REQUEST)
    assert [event.key for event in events] == [*expected, expected[3]]


async def test_sglang(folder: Path, publisher: Publisher, slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:  # E8
    async with sglang(folder, publisher, slots, monkeypatch) as client:
        assert client.exactness.level == "TEXT_PREFIX"
        stored = {
            "type": "BlockStored",
            "block_hashes": [-1, -2, -3, -4],
            "parent_block_hash": None,
            "token_ids": padded(REQUEST),
            "block_size": 16,
            "lora_id": None,
            "medium": "GPU",
        }
        salted = stored | {"block_hashes": [5], "token_ids": [9] * 16, "cache_salt": "another gateway's"}
        on_disk = stored | {"block_hashes": [6], "token_ids": [9] * 16, "medium": "DISK"}
        events = await told(client, publisher, [stored, salted, on_disk])
        expected = keys(client, REQUEST)
    # The image begins in the second block.
    assert [event.key for event in events if isinstance(event, BlockStored)] == expected[:1]


@pytest.mark.parametrize("publisher", [DIRECT], indirect=True)
async def test_wide_pads_of_sglang(
    folder: Path, publisher: Publisher, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:  # E5
    wide = [1_000_000 + (1 << 61) + token_id if token_id >= 1_000_000 else token_id for token_id in padded(REQUEST)]
    async with sglang(folder, publisher, slots, monkeypatch) as client:
        stored = {"type": "BlockStored", "block_hashes": [1, 2, 3, 4], "token_ids": wide, "block_size": 16}
        events = await told(client, publisher, [stored | {"parent_block_hash": None, "lora_id": None}])
        expected = keys(client, REQUEST)
    assert [event.key for event in events] == expected[:1]


async def test_an_engine_that_begins_anew_ends_the_feed(
    folder: Path, publisher: Publisher, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:  # E5
    async with tokenspeed(folder, publisher, slots, monkeypatch) as client:
        async with contextlib.aclosing(client.kv_events(blocks=True)) as messages:
            await publisher.begin(messages)
            publisher.begin_anew()
            await publisher.publish(HELLO)
            with pytest.raises(WorkerUnavailable, match=r"DATA_LOSS|begin anew"):
                await asyncio.wait_for(rest(messages), 20.0)
        await until(lambda: client.ready)
