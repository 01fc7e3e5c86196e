"""What a server sends around an image is bounded, so that no server keeps the event loop busy."""  # F6

import asyncio
import contextlib

import pytest
from tables import table
from web import IMAGE, answer, fetching, serving

from saccade.errors import InvalidImageUrl
from saccade.media.response_limits import MAX_FRAMING_BYTES, MAX_HEAD_BYTES, MAX_INTERIM_ANSWERS

HERE = ("127.0.0.1/32",)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\n" + b"Link: <a>; rel=preload\r\n" * 100 + b"\r\n"


class Flood:
    """Sends *head*, and *more* again and again until the client leaves; *num_bytes* it could send."""

    def __init__(self, head: bytes, more: bytes) -> None:
        self.head = head
        self.more = more
        self.num_bytes = 0

    async def __call__(self, path: str, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(self.head)
            while True:
                writer.write(self.more)
                await writer.drain()
                self.num_bytes += len(self.more)


@table(
    ("head", "more"),
    [
        (b"", INTERIM * 1000),
        (b"", HINTS * 10),
        (b"", b"\r\n" * 1000),
        (CHUNKED + b"1;", b"a" * 10_000),
        (CHUNKED + b"0", b"0" * 10_000),
        (CHUNKED, (b"1;" + b"a" * 1000 + b"\r\nx\r\n") * 10),
        (CHUNKED, b"1\r\nx\r\n" * 1000),
        (CHUNKED + b"0\r\n", b"X-More: more\r\n" * 1000),
        (b"HTTP/1.1 200 OK\r\nX: ", b"x" * 10_000),
        (b"HTTP/1.1 200 OK\r\nX: x\r\n", b" x\r\n" * 1000),
        (b"HTTP/1.1 200 ", b"x" * 10_000),
    ],
)
async def test_flood_ends_early(head: bytes, more: bytes) -> None:
    flood = Flood(head, more)
    async with serving(flood) as web, fetching(allowed_networks=HERE) as fetcher:
        with pytest.raises(InvalidImageUrl, match="closed the connection or did not answer in HTTP"):
            await fetcher.fetch(f"http://127.0.0.1:{web.port}/")
        await web.ended.wait()
        assert web.num_connects == 1
        assert flood.num_bytes < 32 * MAX_FRAMING_BYTES  # what the sockets between them hold is in it


@pytest.mark.parametrize("first", [answer(), answer(IMAGE * 1000), b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"])
async def test_bytes_after_the_response_are_not_read(first: bytes) -> None:
    flood = Flood(first, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n" * 1000)
    async with serving(flood) as web, fetching(allowed_networks=HERE) as fetcher:
        with contextlib.suppress(InvalidImageUrl):
            assert (await fetcher.fetch(f"http://127.0.0.1:{web.port}/")).encoded in first
        await web.ended.wait()


async def test_few_interim_answers_and_a_long_head_are_no_flood() -> None:
    head = answer(IMAGE, **{f"X_{index}": "x" * 500 for index in range(100)})
    assert 40_000 < len(head) < MAX_HEAD_BYTES
    reply = INTERIM * (MAX_INTERIM_ANSWERS - 1) + HINTS + head
    async with serving(reply) as web, fetching(allowed_networks=HERE) as fetcher:
        assert (await fetcher.fetch(f"http://127.0.0.1:{web.port}/")).encoded == IMAGE


async def test_image_in_small_chunks_is_no_flood() -> None:
    image = bytes(range(256)) * 8192
    chunks = b"".join(b"10\r\n" + image[start : start + 16] + b"\r\n" for start in range(0, len(image), 16))
    async with serving(CHUNKED + chunks + b"0\r\n\r\n") as web, fetching(allowed_networks=HERE) as fetcher:
        for _ in range(2):  # the second time on the connection of the first, if that was kept
            assert (await fetcher.fetch(f"http://127.0.0.1:{web.port}/")).encoded == image
