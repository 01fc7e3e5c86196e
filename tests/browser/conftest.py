"""A real browser without a window, and servers of the bundled model for it. `make browser` runs these tests."""

import contextlib
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
from browsing import chromium

import saccade

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NO_DETAILS: Mapping[str, Any] = MappingProxyType({})
Opened = Callable[..., "contextlib.AbstractContextManager[Page]"]


@dataclass(frozen=True)
class Site:
    """A running server: the root of its API and of its admin port, and a key for each."""

    root: str
    admin: str = ""
    api_key: str = ""
    admin_key: str = ""


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """A server without keys."""
    with saccade.serve() as server:
        yield Site(server.url.removesuffix("v1"))


@pytest.fixture(scope="session")
def keyed_site() -> Iterator[Site]:
    """A server with an API key and an admin port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with saccade.serve(api_key="api-key", admin_port=port, admin_key="admin-key") as server:
        yield Site(server.url.removesuffix("v1"), f"http://127.0.0.1:{port}/", "api-key", "admin-key")


@pytest.fixture
def opened(browser: "Browser") -> Opened:
    """Opens a URL in a fresh profile; at the end of the block, nothing may have failed in the page.

    Pages may load and call nothing but the server that they come from.
    """

    @contextlib.contextmanager
    def open_page(url: str, width: int = 1440, may_fail: bool = False, **options: Any) -> Iterator["Page"]:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        page = context.new_page()
        page.set_default_timeout(60_000)
        faults: list[str] = []
        page.on(
            "console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: None if own(request.url) else faults.append(request.url))

        def own(address: str) -> bool:
            return address.startswith((url.rsplit("/", 1)[0] + "/", "data:", "blob:"))

        page.goto(url)
        yield page
        context.close()
        assert may_fail or faults == []

    return open_page


def answer_chats(page: "Page", *answers: str | dict[str, Any], usage: Mapping[str, Any] = NO_DETAILS) -> None:
    """Answer the chats of *page* in turn: a text as a stream of one delta, a dict as a refusal with status 429.

    *usage* has more fields of the usage.
    """
    rest = iter(answers)

    def fulfill(route: Any) -> None:
        answer = next(rest)
        if isinstance(answer, dict):
            route.fulfill(status=429, json=answer)
            return
        chunk = {"choices": [{"delta": {"content": answer}, "finish_reason": "stop"}]}
        end = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1, **usage}}
        stream = f"data: {json.dumps(chunk)}\n\ndata: {json.dumps(end)}\n\ndata: [DONE]\n\n"
        route.fulfill(body=stream, content_type="text/event-stream")

    page.route("**/v1/chat/completions", fulfill)
