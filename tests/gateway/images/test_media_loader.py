"""Images by URL: data, file and http; one fetch for all who ask at a time, and none while the answer is fresh."""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import generate_latest
from tables import table
from web import IMAGE, Resolver, answer, fetching, serving

from saccade.errors import InvalidBase64, InvalidImageUrl, SaccadeError
from saccade.gateway.config import GatewayConfig
from saccade.gateway.images.media import FetchCollector
from saccade.gateway.images.media_loader import MediaLoader, decode_data_url, is_data_url
from saccade.gateway.images.url_cache import UrlCache
from saccade.gateway.request import Limits, Request
from saccade.gateway.tenants.account import EVERYBODY, Account
from saccade.telemetry import Metrics

HERE = ("127.0.0.1/32",)
FRESH = {"Cache_Control": "max-age=600"}


@contextlib.asynccontextmanager
async def reading(**settings: Any) -> AsyncIterator[MediaLoader]:
    async with fetching(Resolver(["127.0.0.1"]), **{"allowed_networks": HERE, **settings}) as fetcher:
        yield MediaLoader(fetcher, UrlCache(1 << 20), Metrics())


async def read(loader: MediaLoader, url: str, salt: bytes) -> bytes:
    with Request.begin_request(Limits.of_config(GatewayConfig()), Account(EVERYBODY), None) as request:
        return await loader.fetch(request, url, salt)


class Gate:
    """A server's reply that comes once *is_open*; *entered* once somebody asked."""

    def __init__(self, reply: bytes = answer()) -> None:
        self.is_open = asyncio.Event()
        self.entered = asyncio.Event()
        self.reply = reply

    async def __call__(self, path: str, writer: asyncio.StreamWriter) -> None:
        self.entered.set()
        await self.is_open.wait()
        writer.write(self.reply)


@table("payload", [b"", IMAGE, bytes(range(256)) * 2000])
@table("head", ["data:image/png;base64,", "DATA:;base64,", "data:text/html;charset=x;BASE64,"])
def test_data_url(head: str, payload: bytes) -> None:
    url = head + base64.b64encode(payload).decode()
    assert is_data_url(url)
    assert decode_data_url(url) == payload


@table(
    ("url", "kind"),
    [
        ("data:", InvalidImageUrl),
        ("data:image/png,AAAA", InvalidImageUrl),
        ("data:image/png;base64", InvalidImageUrl),
        ("data:;base64,A", InvalidBase64),
        ("data:;base64,AA%0AAA", InvalidBase64),
        ("data:;base64,AAA=AAAA", InvalidBase64),
        ("data:;base64,AA.~", InvalidBase64),
        ("data:;base64,ÄÄÄÄ", InvalidBase64),
        ("data:;base64," + "A" * 400_001, InvalidBase64),
    ],
)
def test_data_url_that_is_no_image(url: str, kind: type[SaccadeError]) -> None:
    with pytest.raises(SaccadeError) as caught:
        decode_data_url(url)
    assert type(caught.value) is kind


@pytest.mark.parametrize("url", ["", "image.png"])
async def test_url_that_is_no_image(url: str) -> None:
    async with reading() as loader:
        assert not is_data_url(url)
        with pytest.raises(InvalidImageUrl):
            await read(loader, url, b"")


async def test_concurrent_requests_of_one_tenant_share_a_fetch() -> None:
    gate = Gate()
    async with serving(gate) as web, reading() as loader:
        url = f"http://127.0.0.1:{web.port}/"
        readers = [asyncio.create_task(read(loader, url, salt)) for salt in (b"a", b"a", b"b", b"a")]
        await gate.entered.wait()
        gate.is_open.set()
        assert await asyncio.gather(*readers) == [IMAGE] * 4
        assert web.num_connects == 2
        await read(loader, url, b"a")  # no lifetime was given, so it is fetched anew
        assert web.num_connects == 3


async def test_error_of_a_shared_fetch_reaches_all() -> None:
    gate = Gate(answer(b"", 404))
    async with serving(gate) as web, reading() as loader:
        readers = [asyncio.create_task(read(loader, f"http://127.0.0.1:{web.port}/", b"")) for _ in range(2)]
        await gate.entered.wait()
        gate.is_open.set()
        ends = await asyncio.gather(*readers, return_exceptions=True)
        assert ([type(end) for end in ends], web.num_connects) == ([InvalidImageUrl] * 2, 1)


async def test_cancelled_request_does_not_end_a_shared_fetch() -> None:
    gate = Gate()
    async with serving(gate) as web, reading() as loader:
        first, second = (asyncio.create_task(read(loader, f"http://127.0.0.1:{web.port}/", b"")) for _ in range(2))
        await gate.entered.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        gate.is_open.set()
        assert (await second, web.num_connects) == (IMAGE, 1)


async def test_last_cancelled_request_ends_the_fetch() -> None:
    entered, ended = asyncio.Event(), asyncio.Event()

    async def send_until_left(path: str, writer: asyncio.StreamWriter) -> None:
        entered.set()
        with contextlib.suppress(OSError):
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0)
        ended.set()

    async with serving(send_until_left) as web, reading() as loader:
        url = f"http://127.0.0.1:{web.port}/"
        readers = [asyncio.create_task(read(loader, url, b"")) for _ in range(2)]
        await entered.wait()
        for reader in readers:
            reader.cancel()
        assert [type(end) for end in await asyncio.gather(*readers, return_exceptions=True)] == [
            asyncio.CancelledError
        ] * 2
        web.reply = answer()
        assert await read(loader, url, b"") == IMAGE  # one who comes now does not wait for the cancelled one
        await ended.wait()


async def test_fresh_image_is_fetched_once_for_each_tenant() -> None:
    async with serving(answer(**FRESH)) as web, reading() as loader:
        url = f"http://127.0.0.1:{web.port}/"
        for salt, num_connects in ((b"a", 1), (b"a", 1), (b"b", 2), (b"a", 2)):
            assert await read(loader, url, salt) == IMAGE
            assert web.num_connects == num_connects


async def test_stale_image_is_revalidated_by_its_tag() -> None:
    async with serving(answer(ETag='"a"', Last_Modified="then")) as web, reading() as loader:
        url = f"http://127.0.0.1:{web.port}/"
        await read(loader, url, b"")
        web.reply = answer(b"", 304, **FRESH)
        assert await read(loader, url, b"") == IMAGE
        assert web.headers()["if-none-match"] == '"a"'
        assert "if-modified-since" not in web.headers()  # one validator is kept, the more exact one
        assert await read(loader, url, b"") == IMAGE
        assert web.num_connects == 2


async def test_stale_image_that_has_changed_is_replaced() -> None:
    async with serving(answer(ETag='"a"')) as web, reading() as loader:
        url = f"http://127.0.0.1:{web.port}/"
        await read(loader, url, b"")
        web.reply = answer(b"another image", ETag='"b"')
        assert await read(loader, url, b"") == b"another image"
        web.reply = answer(b"", 304)
        assert await read(loader, url, b"") == b"another image"


async def test_stale_image_is_not_served_if_its_server_fails() -> None:
    async with serving(answer(ETag='"a"')) as web, reading() as loader:
        url = f"http://127.0.0.1:{web.port}/"
        await read(loader, url, b"")
        web.reply = answer(b"", 500)
        with pytest.raises(InvalidImageUrl):
            await read(loader, url, b"")


async def test_tag_of_one_server_is_not_shown_to_another() -> None:
    async with serving() as web, reading() as loader:
        web.reply = {
            "/": answer(b"", 302, Location="/a"),
            "/a": answer(b"a", ETag='"1"'),
            "/b": answer(b"b", ETag='"1"'),
        }
        url = f"http://127.0.0.1:{web.port}/"
        assert await read(loader, url, b"") == b"a"
        web.reply = {**web.reply, "/": answer(b"", 302, Location="/b")}
        assert await read(loader, url, b"") == b"b"
        assert all("if-none-match" not in web.headers(index) for index in range(len(web.requests)))


async def test_temporary_redirect_to_a_fresh_image_is_followed_again() -> None:
    async with serving() as web, reading() as loader:
        web.reply = {"/": answer(b"", 302, Location="/a"), "/a": answer(**FRESH)}
        for _ in range(2):
            assert await read(loader, f"http://127.0.0.1:{web.port}/", b"") == IMAGE
        assert web.paths == ["/", "/a"] * 2


async def test_permanent_redirect_to_a_fresh_image_is_not() -> None:
    async with serving() as web, reading() as loader:
        web.reply = {"/": answer(b"", 301, Location="/a"), "/a": answer(**FRESH)}
        for _ in range(2):
            assert await read(loader, f"http://127.0.0.1:{web.port}/", b"") == IMAGE
        assert web.paths == ["/", "/a"]


async def test_metrics() -> None:
    metrics = Metrics()
    async with serving() as web, fetching(allowed_networks=HERE) as fetcher:
        metrics.registry.register(FetchCollector(fetcher))
        loader = MediaLoader(fetcher, UrlCache(0), metrics)
        await read(loader, f"http://127.0.0.1:{web.port}/", b"")
        with pytest.raises(InvalidImageUrl):
            await read(loader, "http://127.0.0.2/", b"")
    lines = generate_latest(metrics.registry).decode().splitlines()
    assert 'saccade_fetches_total{outcome="ok"} 1.0' in lines
    assert 'saccade_fetches_total{outcome="invalid_image_url"} 1.0' in lines
    assert f"saccade_fetch_bytes_total {float(len(IMAGE))}" in lines
    assert "saccade_fetch_refused_connections_total 1.0" in lines
    assert 'saccade_stage_seconds_count{stage="fetch"} 2.0' in lines
