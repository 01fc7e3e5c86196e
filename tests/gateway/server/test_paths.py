"""Paths: a slash at the end is no other path, and a wrong method learns which ones are right."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import scripted
from tables import table
from waiting import wait_until

from saccade.gateway.apis.openapi import describe
from saccade.gateway.config import GatewayConfig
from saccade.gateway.server.access_log import POLLED

ROUTES = [
    (method.upper(), path)
    for path, methods in describe()["paths"].items()
    for method in methods.keys() & {"get", "post", "delete"}
]
PAGES = [("GET", "/docs")]
OPEN = ("/live", "/ready", "/health", "/ping", "/docs")


@pytest.fixture(scope="module")
def keyed(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    """A gateway with a key, below a path of its own."""
    with scripted.running(tiny_qwen3_vl, GatewayConfig(api_keys=("secret",), root_path="/own")) as made:
        made.answer_two_tokens()
        yield made


def named(path: str) -> str:
    """A path with names for its parameters."""
    return re.sub(r"{\w+_id}", "unknown", path.replace("{model}", "tiny").replace("{number}", "1"))


def ask(gateway: scripted.Gateway, method: str, path: str, **headers: str) -> tuple[int, str, str]:
    """Status and error code of an answer, and the route in the log, which has no line of a probe that succeeded."""
    answer = gateway.ask(method, path, b"{}" if method == "POST" else None, **headers)
    request_id = answer.headers["x-request-id"]
    is_hidden = path.removeprefix("/own").rstrip("/") in POLLED and answer.status in (200, 503)
    lines = gateway.lines(request_id) if is_hidden else [gateway.line(request_id)]
    routes = [line["route"] for line in lines]
    is_error = answer.status >= 400 and answer.headers["content-type"] == "application/json"
    return answer.status, answer.json["error"]["code"] if is_error and "error" in answer.json else "", "".join(routes)


def statuses_counted(gateway: scripted.Gateway, route: str) -> Counter[str]:
    """How often /metrics has counted each status of *route*."""
    return Counter(
        {
            sample.labels["status"]: int(sample.value)
            for metric in gateway.application.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "saccade_http_requests_total" and sample.labels["route"] == route
        }
    )


@table("method, path", [*ROUTES, *PAGES])
def test_slash_at_the_end_changes_nothing(gateway: scripted.Gateway, method: str, path: str) -> None:
    route = path.replace("{model}", "{model:path}")
    before = statuses_counted(gateway, route)
    plain = ask(gateway, method, named(path))
    assert plain[0] not in (405, 501)
    assert plain[2] in (route, "")
    assert ask(gateway, method, f"{named(path)}/") == plain
    # A request is counted after its answer has been sent.
    wait_until(lambda: statuses_counted(gateway, route).total() == before.total() + 2)
    assert statuses_counted(gateway, route) - before == {str(plain[0]): 2}


@table("method, path", [*ROUTES, *PAGES])
def test_two_slashes_are_another_path(gateway: scripted.Gateway, method: str, path: str) -> None:
    assert ask(gateway, method, f"{named(path)}//")[0] in (404, 405)


@table("method, path", [*ROUTES, *PAGES])
@table("root", ["", "/own"])
def test_keys_see_the_path_without_the_slash(keyed: scripted.Gateway, method: str, path: str, root: str) -> None:
    assert (ask(keyed, method, f"{root}{named(path)}/")[0] == 401) == (path not in OPEN)
    with_key = ask(keyed, method, f"{root}{named(path)}/", Authorization="Bearer secret")
    assert with_key == ask(keyed, method, named(path), Authorization="Bearer secret")


@table("path", ["/", "/own", "/own/", "/v1/chat/completions/?a=/", "/v1/models/tiny/?/"])
def test_other_slashes(keyed: scripted.Gateway, path: str) -> None:
    assert keyed.ask("GET", path, Authorization="Bearer secret").status == (
        405 if "completions" in path else 404 if path == "/own" else 200
    )


@table("path", dict.fromkeys(path for _, path in [*ROUTES, *PAGES, ("GET", "/")]))
@table("method", ["PUT", "PATCH", "OPTIONS", "GET", "HEAD", "POST", "DELETE", "TRACE"])
@table("slash", ["", "/"])
def test_a_wrong_method_learns_all_right_ones(gateway: scripted.Gateway, path: str, method: str, slash: str) -> None:
    right = {known for known, of in [*ROUTES, *PAGES, ("GET", "/")] if of == path}
    right |= {"HEAD"} if "GET" in right else set()
    answer = gateway.ask(method, named(path).rstrip("/") + (slash or "/" * (path == "/")))
    assert (answer.status == 405) == (method not in right)
    assert answer.headers.get("allow") == (None if method in right else ", ".join(sorted(right)))
