"""A request cannot turn the server inward: nothing connects to the canary, and every refusal reads the same."""  # F6

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop
from structlog.testing import capture_logs
from tables import table
from web import IMAGE, Resolver, WebServer, answer, fetching, serving

from saccade.errors import InvalidImageUrl, SaccadeError
from saccade.media import addresses
from saccade.media.fetch import Fetcher
from saccade.media.image_url import (
    BARE_BASE64,
    FILES_NOT_READ,
    NO_SCHEME,
    NOT_FETCHED,
    UNKNOWN_SCHEME,
    UNSUPPORTED_SCHEME,
)

HERE = ("127.0.0.1/32",)
ELSEWHERE = ("127.0.0.2/32",)
"""Another address of this machine, allowed in place of a public one, so that no test leaves the machine."""

LITERALS = [
    "http://127.0.0.1:{port}/",
    "http://127.0.0.1.:{port}/",
    "http://localhost:{port}/",
    "http://localhost.:{port}/",
    "http://LOCALHOST:{port}/",
    "http://2130706433:{port}/",
    "http://0x7f.1:{port}/",
    "http://0x7f000001:{port}/",
    "http://0177.0.0.1:{port}/",
    "http://127.1:{port}/",
    "http://0:{port}/",
    "http://0.0.0.0:{port}/",
    "http://①②⑦.⓪.⓪.①:{port}/",
    "http://127。0。0。1:{port}/",
    "http://[::1]:{port}/",
    "http://[::]:{port}/",
    "http://[::ffff:127.0.0.1]:{port}/",
    "http://[::ffff:7f00:1]:{port}/",
    "http://[0:0:0:0:0:ffff:127.0.0.1]:{port}/",
    "http://[::127.0.0.1]:{port}/",
    "http://[64:ff9b::7f00:1]:{port}/",
    "http://[64:ff9b:1::7f00:1]:{port}/",
    "http://[2002:7f00:1::]:{port}/",
    "http://[fe80::1%25lo]:{port}/",
    "http://[fe80::1%lo]:{port}/",
]
CONFUSING = [
    "http://allowed.test\\@127.0.0.1:{port}/",
    "http://127.0.0.1\\.allowed.test:{port}/",
    "http:\\\\127.0.0.1:{port}/",
    "http://user@127.0.0.1:{port}/",
    "http://user:secret@127.0.0.1:{port}/",
    "http://@127.0.0.1:{port}/",
    "http://allowed.test@127.0.0.1:{port}/",
    "http://127.0.0.1:{port}/%00",
    "http://127.0.0.1%00.allowed.test:{port}/",
    "http://127.0.0.1\t:{port}/",
    "http://127.0.0.1:{port}/a\r\nHost: b",
    "http://127.0.0.1:{port}/\x00",
    "http://127.0.0.1:{port}/\x7f",
    "http://127.0.0.1:{port}/\u2028",
    "http://127.0.0.1:{port}/\ud800",
    "http://127.0.0.1:{port}/a b",
    " http://127.0.0.1:{port}/",
    "http://127%2e0%2e0%2e1:{port}/",
    "http://127.0.0.1:{port}:80/",
    "http://127.0.0.1:99999/",
    "http://127.0.0.1:-1/",
    "http://[127.0.0.1]:{port}/",
    "http://[::1/",
    "http:///127.0.0.1:{port}/",
    "http:127.0.0.1:{port}/",
    "http://",
]
NOT_OF_THE_WEB = [
    ("//127.0.0.1:{port}/", NO_SCHEME),
    ("127.0.0.1:{port}/", NO_SCHEME),
    ("localhost:{port}/", NO_SCHEME),
    ("", UNKNOWN_SCHEME),
    (" ", UNKNOWN_SCHEME),
    ("ftp://127.0.0.1:{port}/", UNSUPPORTED_SCHEME.format(scheme="ftp")),
    ("S3://bucket/a.png", UNSUPPORTED_SCHEME.format(scheme="s3")),
    ("gs://bucket/a.png", UNSUPPORTED_SCHEME.format(scheme="gs")),
    ("blob:http://127.0.0.1:{port}/", UNSUPPORTED_SCHEME.format(scheme="blob")),
    ("gopher://127.0.0.1:{port}/", UNKNOWN_SCHEME),
    ("unix:///tmp/socket", UNKNOWN_SCHEME),
    ("javascript:alert(1)", UNKNOWN_SCHEME),
    ("my-secret-token:a", UNKNOWN_SCHEME),
    ("file:///etc/passwd", FILES_NOT_READ),
    ("file://127.0.0.1/etc/passwd", FILES_NOT_READ),
    ("FILE:///etc/passwd", FILES_NOT_READ),
    ("/home/x.png", NO_SCHEME),
    ("./a.png", NO_SCHEME),
    ("~/my cat.png", NO_SCHEME),
    ("cat.png", NO_SCHEME),
    ("C:\\x.png", NO_SCHEME),
    ("C:/x.png", NO_SCHEME),
    ("\\\\server\\x.png", NO_SCHEME),
    ("iVBORw0KGgoAAAANSUhEUgAA", BARE_BASE64),
    ("/9j/4AAQSkZJRgABAQ==", BARE_BASE64),
    ("R0lGODlhAQABAIAAAAAAAP", BARE_BASE64),
    ("UklGRiQAAABXRUJQVlA4", BARE_BASE64),
    ("image/png;base64,iVBORw0KGgo", BARE_BASE64),
    ("QUJD" * 100_000, BARE_BASE64),
    ("QUJD" * 19 + "\n" + "QUJD" * 19 + "\n" + "QUJD" * 40, BARE_BASE64),
]


async def refusal(fetcher: Fetcher, url: str) -> SaccadeError:
    with pytest.raises(SaccadeError) as caught:
        await fetcher.fetch(url)
    return caught.value


def _is_not_fetched(error: SaccadeError) -> bool:
    return type(error) is InvalidImageUrl and error.message == NOT_FETCHED


def _open_port(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Let the canary's port pass, so that it is the address that is refused."""
    monkeypatch.setattr(addresses, "PUBLIC_PORTS", frozenset({80, 443, port}))


async def test_allowed_host_is_fetched() -> None:
    async with serving() as web, fetching(allowed_networks=HERE) as fetcher:
        assert (await fetcher.fetch(f"http://127.0.0.1:{web.port}/a")).encoded == IMAGE
        assert (web.num_connects, web.paths) == (1, ["/a"])


@table("url", LITERALS)
async def test_no_form_of_a_private_address_is_connected_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as canary, serving(host="::1", port=canary.port) as second, fetching() as fetcher:
        _open_port(monkeypatch, canary.port)
        assert _is_not_fetched(await refusal(fetcher, url.format(port=canary.port)))
        assert canary.num_connects == second.num_connects == 0


@table("url", CONFUSING)
async def test_url_that_can_be_read_in_two_ways_is_refused_even_of_an_allowed_host(url: str) -> None:
    async with serving() as canary, fetching(Resolver(["127.0.0.1"]), allowed_networks=HERE) as fetcher:
        assert _is_not_fetched(await refusal(fetcher, url.format(port=canary.port)))
        assert canary.num_connects == 0


@table(("url", "sentence"), NOT_OF_THE_WEB)
async def test_text_that_is_no_web_url_is_refused_unresolved(url: str, sentence: str) -> None:
    async with serving() as canary, fetching(Resolver(["127.0.0.1"]), allowed_networks=HERE) as fetcher:
        error = await refusal(fetcher, url.format(port=canary.port))
        assert (type(error), error.message, canary.num_connects) == (InvalidImageUrl, sentence, 0)


async def test_log_names_the_flag_that_refused_and_nothing_that_was_sent() -> None:
    settings = {"allowed_domains": ("pictures.test", "inward.test")}
    async with fetching(Resolver(["127.0.0.1"]), **settings) as fetcher:
        with capture_logs() as lines:
            for _ in range(25):
                for url in ("http://sent.test/sent", "http://inward.test/sent", "file:///sent"):
                    await refusal(fetcher, url)
        flags = ("--allowed-media-domains", "--allowed-media-networks", "--allowed-local-media-path")
        assert [(line["flag"], line["count"]) for line in lines] == [(flag, n) for n in (1, 10) for flag in flags]
        assert "sent" not in str(lines)
        assert all(line["log_level"] == "warning" for line in lines)


@pytest.mark.parametrize("host", ["127.0.0.1", "rebound.test"])
async def test_other_ports_are_for_allowed_networks(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "is_public", lambda address: True)
    async with serving() as canary, fetching(Resolver(["127.0.0.1"])) as fetcher:
        assert _is_not_fetched(await refusal(fetcher, f"http://{host}:{canary.port}/"))
        assert canary.num_connects == 0
        _open_port(monkeypatch, canary.port)
        assert (await fetcher.fetch(f"http://{host}:{canary.port}/")).encoded == IMAGE


@pytest.mark.parametrize(
    "answers", [["127.0.0.1"], ["127.0.0.2", "127.0.0.1"], ["127.0.0.1", "127.0.0.2"], ["::1", "127.0.0.1"]]
)
async def test_name_that_leads_inward_is_not_followed(answers: list[str]) -> None:
    async with serving() as canary, fetching(Resolver(answers), allowed_networks=ELSEWHERE) as fetcher:
        assert _is_not_fetched(await refusal(fetcher, f"http://rebound.test:{canary.port}/"))
        assert canary.num_connects == 0
        assert fetcher.guard.num_refused > 0


@contextlib.asynccontextmanager
async def on_one_port() -> AsyncIterator[tuple[WebServer, WebServer]]:
    """A server at 127.0.0.2 and one at 127.0.0.1, on a port that no other program has at either."""
    while True:
        async with contextlib.AsyncExitStack() as servers:
            web = await servers.enter_async_context(serving(host="127.0.0.2"))
            try:
                canary = await servers.enter_async_context(serving(port=web.port))
            except OSError:
                continue
            yield web, canary
            return


async def test_name_that_turns_inward_between_two_fetches_is_not_followed() -> None:
    resolver = Resolver(["127.0.0.2"], ["127.0.0.1"])
    async with (
        on_one_port() as (web, canary),
        fetching(resolver, allowed_networks=ELSEWHERE) as fetcher,
    ):
        url = f"http://rebound.test:{web.port}/"
        assert (await fetcher.fetch(url)).encoded == IMAGE
        assert _is_not_fetched(await refusal(fetcher, url))
        assert (web.num_connects, canary.num_connects) == (1, 0)


@table(
    ("status", "location"),
    [
        *((status, "http://127.0.0.1:{port}/") for status in (301, 302, 303, 307, 308)),
        (302, "//127.0.0.1:{port}/"),
        (302, "http://localhost:{port}/"),
        (302, "http://[::ffff:127.0.0.1]:{port}/"),
        (302, "http://2130706433:{port}/"),
        (302, "http://127.0.0.2:{port}@127.0.0.1:{port}/"),
        (302, "http://127.0.0.2\\@127.0.0.1:{port}/"),
        (302, "file:///etc/passwd"),
        (302, "ftp://127.0.0.1/"),
        (302, "data:image/png;base64,AAAA"),
        (302, "http://\xff/"),
    ],
)
async def test_redirect_does_not_lead_inward(status: int, location: str) -> None:
    async with (
        on_one_port() as (web, canary),
        fetching(allowed_networks=ELSEWHERE, local_root=Path("/")) as fetcher,
    ):
        there = {"Location": location.format(port=web.port)}
        web.reply = {"/": answer(b"", 302, Location="/next"), "/next": answer(b"", status, **there)}
        assert _is_not_fetched(await refusal(fetcher, f"http://127.0.0.2:{web.port}/"))
        assert (web.num_connects, canary.num_connects) == (2, 0)


async def test_redirects_are_followed_to_their_bound() -> None:
    async def count(path: str, writer: asyncio.StreamWriter) -> None:
        left = int(path[1:])
        writer.write(answer(b"", 302, Location=f"/{left - 1}") if left else answer())

    async with serving(count) as web, fetching(allowed_networks=HERE) as fetcher:
        assert (await fetcher.fetch(f"http://127.0.0.1:{web.port}/3")).encoded == IMAGE
        assert web.paths == ["/3", "/2", "/1", "/0"]
        error = await refusal(fetcher, f"http://127.0.0.1:{web.port}/30")
        assert (type(error), web.paths[4:]) == (InvalidImageUrl, ["/30", "/29", "/28", "/27"])


@pytest.mark.parametrize("fault", ["closed", "unknown", "silent"])
async def test_unreachable_reads_as_forbidden(fault: str) -> None:
    async with serving() as web:
        pass  # nobody listens on its port any more
    resolver = Resolver([] if fault == "unknown" else ["127.0.0.1"])
    async with fetching(resolver, allowed_networks=HERE, connect_timeout_seconds=0.05) as fetcher:
        if fault == "silent":
            resolver.is_silent = True
        assert _is_not_fetched(await refusal(fetcher, f"http://name.test:{web.port}/"))
        assert _is_not_fetched(await refusal(fetcher, f"http://127.0.0.3:{web.port}/"))


@table(
    ("host", "is_allowed"),
    [
        ("pictures.test", True),
        ("PICTURES.test.", True),
        ("a.cdn.test", True),
        ("b.a.cdn.test", True),
        ("xn--mnchen-3ya.test", True),
        ("münchen.test", True),
        ("cdn.test", False),
        ("badcdn.test", False),
        ("sub.pictures.test", False),
        ("pictures.test.evil.test", False),
        ("pictures.test%2eevil.test", False),
        ("127.0.0.1", False),
    ],
)
async def test_only_listed_domains_are_fetched(host: str, is_allowed: bool) -> None:
    domains = ("pictures.test", "*.CDN.test", "münchen.test")
    settings = {"allowed_domains": domains, "allowed_networks": HERE}
    async with serving() as canary, fetching(Resolver(["127.0.0.1"]), **settings) as fetcher:
        if is_allowed:
            assert (await fetcher.fetch(f"http://{host}:{canary.port}/")).encoded == IMAGE
        else:
            assert _is_not_fetched(await refusal(fetcher, f"http://{host}:{canary.port}/"))
        assert canary.num_connects == is_allowed


async def test_redirect_leaves_the_listed_domains_no_more_than_a_url() -> None:
    settings = {"allowed_domains": ("pictures.test",), "allowed_networks": HERE}
    async with serving() as web, fetching(Resolver(["127.0.0.1"]), **settings) as fetcher:
        web.reply = {"/": answer(b"", 302, Location=f"http://evil.test:{web.port}/evil")}
        assert _is_not_fetched(await refusal(fetcher, f"http://pictures.test:{web.port}/"))
        assert web.paths == ["/"]


async def test_listed_domain_does_not_lead_inward(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as canary, fetching(Resolver(["127.0.0.1"]), allowed_domains=("pictures.test",)) as fetcher:
        _open_port(monkeypatch, canary.port)
        assert _is_not_fetched(await refusal(fetcher, f"http://pictures.test:{canary.port}/"))
        assert canary.num_connects == 0


async def test_credentials_and_proxies_of_this_machine_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login operator password secret")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with serving() as web, serving() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        async with fetching(allowed_networks=HERE) as fetcher:
            web.reply = {"/": answer(b"", 302, Set_Cookie="a=b", Location="/next"), "/next": answer()}
            await fetcher.fetch(f"http://127.0.0.1:{web.port}/")
        assert (proxy.num_connects, web.paths) == (0, ["/", "/next"])
        assert web.headers().keys() <= {"host", "accept", "accept-encoding", "user-agent", "connection"}
        assert web.headers()["accept-encoding"] == "identity"


async def test_encoded_url_is_sent_as_it_is() -> None:
    async with serving() as web, fetching(allowed_networks=HERE) as fetcher:
        signed = "/a%2Fb/../%7Ec?x=%2F&y=%2B+&sig=a%3D%3D"
        await fetcher.fetch(f"http://127.0.0.1:{web.port}{signed}#part")
        await fetcher.fetch(f"http://127.0.0.1:{web.port}/ü")
        assert web.paths == [signed, "/%C3%BC"]


CERTIFICATE = Path(__file__).with_name("images_test.pem")


@pytest.mark.parametrize(
    ("host", "is_trusted"), [("pictures.test", True), ("pictures.test", False), ("other.test", True)]
)
async def test_certificate_must_verify_and_name_the_host(host: str, is_trusted: bool) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(CERTIFICATE)
    trusted = str(CERTIFICATE) if is_trusted else os.devnull
    async with serving(tls=tls) as web, fetching(Resolver(["127.0.0.1"]), trusted, allowed_networks=HERE) as fetcher:
        url = f"https://{host}:{web.port}/"
        if is_trusted and host == "pictures.test":
            assert (await fetcher.fetch(url)).encoded == IMAGE
            web.reply = answer(b"", 302, Location=f"http://{host}:{web.port}/")
            assert _is_not_fetched(await refusal(fetcher, url))
        else:
            error = await refusal(fetcher, url)
            assert (type(error), "certificate" in error.message, web.requests) == (InvalidImageUrl, True, [])


def test_address_check_runs_on_the_serving_event_loop() -> None:
    async def attempt() -> None:
        async with serving() as web, fetching(allowed_networks=HERE) as fetcher, fetching() as careful:
            assert (await fetcher.fetch(f"http://localhost:{web.port}/")).encoded == IMAGE
            assert _is_not_fetched(await refusal(careful, f"http://localhost:{web.port}/"))
            assert web.num_connects == 1

    uvloop.run(attempt())
