"""What a server sends is bounded in size and time, and whatever it sends ends in an error of ours."""  # F6

import asyncio
import gzip
import os
import resource
from pathlib import Path

import pytest
import structlog
from tables import table
from web import IMAGE, Handler, Resolver, answer, fetching, serving

from saccade.errors import ImageTooLarge, InvalidImageUrl, QueueFull, SaccadeError, StartupError
from saccade.media.fetch import FetchConfig, Fetcher
from saccade.media.image_url import FILE_NOT_READ, FILES_NOT_READ, NOT_FETCHED
from saccade.media.resolver import DnsResolver

HERE = ("127.0.0.1/32",)


async def drip(path: str, writer: asyncio.StreamWriter) -> None:
    """Send a byte, and no more."""
    writer.write(answer(b"", length=1000) + b"x")
    await writer.drain()
    await asyncio.Event().wait()


async def stay_silent(path: str, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def never_end(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")
        await writer.drain()


async def never_end_without_length(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
    while True:
        writer.write(b"x" * 0x1000)
        await writer.drain()


async def never_end_headers(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-More: more\r\n" * 100)
        await writer.drain()


async def fetched(reply: bytes | Handler, **settings: object) -> bytes:
    """Return what is fetched of *reply*; the connection is closed by then, or the server would not end."""
    async with serving(reply) as web, fetching(allowed_networks=HERE, **settings) as fetcher:
        try:
            return (await fetcher.fetch(f"http://127.0.0.1:{web.port}/")).encoded
        finally:
            # Asked once; twice if the connection ended before a word, as one that was kept open may.
            assert web.num_connects == (2 if reply == b"" else 1)
            if reply not in (drip, stay_silent):
                await web.ended.wait()


async def refused(reply: bytes | Handler, **settings: object) -> SaccadeError:
    with pytest.raises(SaccadeError) as caught:
        await fetched(reply, **settings)
    return caught.value


@pytest.mark.parametrize(
    "reply",
    [
        never_end,
        never_end_without_length,
        answer(b"x" * 1001),
        answer(b"x" * 1001, length=10**15),
        answer(b"", length=1001),
    ],
)
async def test_body_over_the_limit_is_refused(reply: bytes | Handler) -> None:
    assert type(await refused(reply, max_bytes=1000)) is ImageTooLarge


@table("length", ["0" * 4000 + "1000", "0" * 6000 + "1000"])
async def test_zeros_before_a_length_are_no_part_of_it(length: str) -> None:
    assert await fetched(answer(b"x" * 1000, length=length), max_bytes=1000) == b"x" * 1000


async def test_body_at_the_limit_is_fetched() -> None:
    assert await fetched(answer(b"x" * 1000), max_bytes=1000) == b"x" * 1000


@pytest.mark.parametrize("reply", [drip, stay_silent])
async def test_slow_response_times_out(reply: Handler) -> None:
    error = await refused(reply, timeout_seconds=0.1)
    assert (type(error), "0.1 seconds" in error.message) == (InvalidImageUrl, True)


@table(
    "reply",
    [
        answer(IMAGE, length=len(IMAGE) + 1),
        answer(IMAGE, length=len(IMAGE) - 1),
        answer(IMAGE, length="-1"),
        answer(IMAGE, length="12, 13"),
        answer(IMAGE, X_Huge="x" * 100_000),
        answer(IMAGE, **{f"X_{index}": "x" for index in range(1000)}),
        answer(IMAGE, Transfer_Encoding="chunked"),
        never_end_headers,
        b"\x15\x03\x01\x00\x02\x02\x50",
        b"+PONG\r\n",
        b"",
    ],
)
async def test_answer_that_is_not_whole_http(reply: bytes | Handler) -> None:
    error = await refused(reply)
    sentence = "The URL's server closed the connection or did not answer in HTTP."
    assert (type(error), error.message) == (InvalidImageUrl, sentence)


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip", "GZIP"])
async def test_compressed_body_is_not_unpacked(encoding: str) -> None:
    bomb = gzip.compress(bytes(1 << 20))
    error = await refused(answer(bomb, Content_Encoding=encoding), max_bytes=10_000)
    assert (type(error), "compressed" in error.message) == (InvalidImageUrl, True)


@table("status", [204, 206, 300, 304, 401, 403, 404, 500, 503])
async def test_status(status: int) -> None:
    error = await refused(answer(b"", status, WWW_Authenticate="Basic"))
    assert (type(error), f"status {status}" in error.message) == (InvalidImageUrl, True)


@pytest.mark.parametrize(
    ("url", "is_accepted"), [("http://127.0.0.1:{port}/" + "a" * 100, False), ("http://127.0.0.1:{port}/a", True)]
)
async def test_length_of_a_url(url: str, is_accepted: bool) -> None:
    async with serving() as web, fetching(allowed_networks=HERE, max_url_characters=100) as fetcher:
        if is_accepted:
            await fetcher.fetch(url.format(port=web.port))
        else:
            with pytest.raises(InvalidImageUrl, match="at most 100"):
                await fetcher.fetch(url.format(port=web.port))
        assert web.num_connects == is_accepted


async def test_turns_are_bounded_and_the_wait_for_one_too() -> None:
    settings = {"max_concurrent": 1, "turn_timeout_seconds": 0.05}
    async with serving(stay_silent) as web, fetching(allowed_networks=HERE, **settings) as fetcher:
        url = f"http://127.0.0.1:{web.port}/"
        first = asyncio.create_task(fetcher.fetch(url))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await fetcher.fetch(url)
        first.cancel()
        web.reply = answer()
        assert (await fetcher.fetch(url)).encoded == IMAGE  # the turn was given back
        assert (fetcher.outcomes, fetcher.num_bytes) == ({"queue_full": 1, "ok": 1}, len(IMAGE))


@pytest.mark.parametrize("host", ["127.0.0.1", "name.test"])
async def test_no_socket_left_is_no_fault_of_the_client(host: str) -> None:
    resolver = DnsResolver(["127.0.0.1:53"]) if host == "name.test" else None
    async with serving() as web, fetching(resolver, allowed_networks=HERE) as fetcher:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            with pytest.raises(QueueFull):
                await fetcher.fetch(f"http://{host}:{web.port}/")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert (await fetcher.fetch(f"http://127.0.0.1:{web.port}/")).encoded == IMAGE


async def test_tenant_that_keeps_all_turns_busy_is_not_served_again_before_others() -> None:
    entered = asyncio.Queue[str]()
    leave = asyncio.Queue[None]()

    async def wait(path: str, writer: asyncio.StreamWriter) -> None:
        entered.put_nowait(path)
        await leave.get()
        writer.write(answer())

    async with serving(wait) as web, fetching(allowed_networks=HERE, max_concurrent=2) as fetcher:
        url = f"http://127.0.0.1:{web.port}"
        greedy = [asyncio.create_task(fetcher.fetch(f"{url}/a{index}", client=b"a")) for index in range(6)]
        await asyncio.sleep(0)
        other = asyncio.create_task(fetcher.fetch(f"{url}/b", client=b"b"))
        await asyncio.sleep(0)
        paths = []
        for _ in range(7):
            paths.append(await entered.get())
            if len(paths) > 1:
                leave.put_nowait(None)
        leave.put_nowait(None)
        await asyncio.gather(other, *greedy)
        assert (sorted(paths[:2]), paths[2]) == (["/a0", "/a1"], "/b")


async def test_name_server_that_does_not_answer_holds_up_no_other() -> None:
    resolver = Resolver(["127.0.0.1"])
    async with serving() as web, fetching(resolver, allowed_networks=HERE) as fetcher:
        resolver.is_silent = True
        hung = asyncio.create_task(fetcher.fetch(f"http://silent.test:{web.port}/"))
        assert (await fetcher.fetch(f"http://127.0.0.1:{web.port}/")).encoded == IMAGE
        hung.cancel()


@table(
    "settings",
    [
        {"allowed_networks": ("10.0.0.1/8",)},
        {"allowed_networks": ("everything",)},
        {"allowed_domains": ("https://pictures.test",)},
        {"allowed_domains": ("pictures.test/path",)},
        {"allowed_domains": ("*.*.test",)},
        {"allowed_domains": ("*",)},
        {"allowed_domains": ("",)},
        {"allowed_domains": ("2130706433",)},
    ],
)
def test_meaningless_settings_stop_the_start(settings: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(StartupError, match="--allowed-media-"):
        Fetcher(FetchConfig(**settings))  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with an image, and things beside and in it that must not be read."""
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "root-beside").mkdir()
    (tmp_path / "root-beside" / "secret").write_bytes(b"secret")
    root = tmp_path / "root"
    (root / "in ner").mkdir(parents=True)
    (root / "in ner" / "a.png").write_bytes(IMAGE)
    (root / "link.png").symlink_to("in ner/a.png")
    (root / "link-out").symlink_to("../secret")
    (root / "folder-out").symlink_to("..")
    os.mkfifo(root / "pipe")
    return root


@table("path", ["/in%20ner/a.png", "/link.png", "/in%20ner/../link.png"])
@table("host", ["", "localhost"])
async def test_local_file_is_read(root: Path, path: str, host: str) -> None:
    async with fetching(local_root=root) as fetcher:
        fetched = await fetcher.fetch(f"file://{host}{root}{path}")
        assert (fetched.encoded, fetched.reuse.is_storable) == (IMAGE, False)


@table(
    "path",
    ["/../secret", "/%2e%2e/secret", "/..%2Fsecret", "/link-out", "/folder-out/secret", "/pipe", "/missing", "/in%20ner", "", "-beside/secret", "/in%20ner/a.png%00", "/a%5C..%5C..%5Csecret"],
)  # fmt: skip
async def test_only_files_inside_the_folder_are_read(root: Path, path: str) -> None:
    async with fetching(local_root=root) as fetcher:
        with pytest.raises(InvalidImageUrl) as caught:
            await fetcher.fetch(f"file://{root}{path}")
        assert caught.value.message == (NOT_FETCHED if "%00" in path else FILE_NOT_READ)


async def test_file_outside_of_the_folder_is_logged_with_the_flag(root: Path) -> None:
    """A missing file in it is refused in the same words, but by no setting."""
    async with fetching(local_root=root) as fetcher:
        with structlog.testing.capture_logs() as lines:
            for path in ("/missing.png", "/../secret"):
                with pytest.raises(InvalidImageUrl):
                    await fetcher.fetch(f"file://{root}{path}")
    (line,) = lines
    assert (line["event"], line["flag"]) == ("image not fetched", "--allowed-local-media-path")
    assert str(root) not in str(line)


async def test_path_is_answered_by_how_to_name_a_file_if_files_are_read(root: Path) -> None:
    for settings, is_named in (({"local_root": root}, True), ({}, False)):
        async with fetching(**settings) as fetcher:
            with pytest.raises(InvalidImageUrl) as caught:
                await fetcher.fetch(f"{root}/link.png")
        assert ("file://" in caught.value.message) is is_named
        assert ("opens no paths" in caught.value.message) is not is_named


@pytest.mark.parametrize("settings", [{}, {"local_root": True}])
async def test_file_of_another_host_and_any_file_without_a_folder_is_forbidden(
    root: Path, settings: dict[str, bool]
) -> None:
    async with fetching(**({"local_root": root} if settings else {})) as fetcher:
        host = "other.test" if settings else ""
        with pytest.raises(InvalidImageUrl) as caught:
            await fetcher.fetch(f"file://{host}{root}/in%20ner/a.png")
        assert caught.value.message == (FILE_NOT_READ if settings else FILES_NOT_READ)


async def test_size_of_a_local_file(root: Path) -> None:
    async with fetching(local_root=root, max_bytes=len(IMAGE) - 1) as fetcher:
        with pytest.raises(ImageTooLarge):
            await fetcher.fetch(f"file://{root}/link.png")
