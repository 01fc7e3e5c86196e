"""The board on the admin port, in a real browser: workers, errors, and where a chat would go."""

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest
from conftest import Opened, Site

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


def enter_key(page: "Page", key: str) -> None:
    page.fill("#admin-key", key)
    page.press("#admin-key", "Enter")


def refuse_one(site: Site) -> None:
    body = json.dumps({"model": "gone", "messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {
        "Authorization": f"Bearer {site.api_key}",
        "Content-Type": "application/json",
        "X-Request-Id": "refused-1",
    }
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(urllib.request.Request(site.root + "v1/chat/completions", body, headers))


def test_board_shows_workers_and_a_refused_request(keyed_site: Site, opened: Opened) -> None:
    refuse_one(keyed_site)
    with opened(keyed_site.admin) as page:
        assert "Enter an admin key" in page.inner_text("#error")
        enter_key(page, keyed_site.admin_key)
        page.wait_for_selector("#board:not([hidden])")
        assert "1 of 1" in page.inner_text("#tiles")
        workers = page.inner_text("#workers")
        assert "saccade-reader" in workers
        assert "ready" in workers
        page.wait_for_selector("#errors:has-text('refused-1')")
        assert "model_not_found" in page.inner_text("#errors")
        assert page.inner_text("#error") == ""


def test_wrong_key_shows_the_sentence_of_the_server(keyed_site: Site, opened: Opened) -> None:
    with opened(keyed_site.admin, may_fail=True) as page:
        enter_key(page, "wrong")
        page.wait_for_selector("#error:has-text('This admin key')")
        assert not page.is_visible("#board")
        enter_key(page, keyed_site.admin_key)
        page.wait_for_selector("#board:not([hidden])")


def test_board_shows_where_a_chat_would_go(keyed_site: Site, opened: Opened) -> None:
    with opened(keyed_site.admin, may_fail=True) as page:
        enter_key(page, keyed_site.admin_key)
        page.wait_for_selector("#board:not([hidden])")
        page.click("#form button.main")
        page.wait_for_selector("#route-error:has-text('x-api-key')")
        page.fill("#tenant-key", keyed_site.api_key)
        page.click("#form button.main")
        page.wait_for_selector("#route:has-text('the only worker')")
        assert not page.is_visible("#route-error")


@pytest.mark.parametrize("width", [375, 1440])
def test_board_never_scrolls_sideways(keyed_site: Site, opened: Opened, width: int) -> None:
    refuse_one(keyed_site)
    with opened(keyed_site.admin, width) as page:
        enter_key(page, keyed_site.admin_key)
        page.wait_for_selector("#errors:has-text('refused-1')")
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
