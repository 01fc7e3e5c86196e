"""The pages for browsers: their policy, that they need no key, and that --no-page leaves nothing of them."""

import base64
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import scripted
from tables import table

from saccade.gateway.config import GatewayConfig

PATHS = ("/", "/docs")


@pytest.fixture(scope="module")
def keyed(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    with scripted.running(tiny_qwen3_vl, GatewayConfig(api_keys=("secret",))) as gateway:
        yield gateway


@table("path", PATHS)
def test_page_needs_no_key_and_runs_only_its_own_scripts(path: str, keyed: scripted.Gateway) -> None:
    response = keyed.ask("GET", path)
    html = response.body.decode()
    assert (response.status, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    inline = re.findall(r"<(style|script)>(.*?)</\1>", html, re.DOTALL)
    for tag in ("style", "script"):
        digests = [hashlib.sha256(content.encode()).digest() for kind, content in inline if kind == tag]
        assert policy[f"{tag}-src"].split() == [f"'sha256-{base64.b64encode(one).decode()}'" for one in digests]
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert re.search(r"<(?:script|style) |\son\w+=|\sstyle=|(?:src|href)=\"(?:https?:|//)", html) is None
    assert "innerHTML" not in html


def test_everything_that_the_page_calls_still_needs_the_key(keyed: scripted.Gateway) -> None:
    for method, path in (("GET", "/v1/models"), ("GET", "/openapi.json"), ("POST", "/v1/chat/completions")):
        assert keyed.ask(method, path).status == 401
    assert keyed.ask("POST", "/", Authorization="Bearer secret").status == 405


def test_without_page_its_paths_do_not_exist(tiny_qwen3_vl: Path) -> None:
    with scripted.running(tiny_qwen3_vl, GatewayConfig(page=False)) as gateway:
        for path in PATHS:
            response = gateway.ask("GET", path)
            assert response.status == 404
            assert response.json["error"]["code"] == "not_found"


def test_a_name_that_was_pointed_here_gets_no_page(gateway: scripted.Gateway) -> None:
    assert gateway.ask("GET", "/").status == 200
    assert gateway.ask("GET", "/", Host="evil.example").status == 403
    assert gateway.ask("GET", "/", Origin="https://evil.example").status == 403
