"""The operator's port: its key opens it and nothing else does; what it says reaches every worker."""

import asyncio
import contextlib
import hashlib
import http.client
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import encoded
import pytest
import scripted
import uvicorn
from chats import data_url, random_image
from tables import table
from waiting import wait_until

from saccade.errors import StartupError
from saccade.fleet.settings import SourceConfig
from saccade.gateway import app
from saccade.gateway.admin import HOST, MAX_BODY_BYTES, Admin
from saccade.gateway.config import GatewayConfig
from saccade.gateway.server.access_log import AccessLog
from saccade.gateway.siblings import Siblings
from saccade.gateway.state.settings import StateSettings
from saccade.transport import lasting_task

RESETS = {"/reset_prefix_cache": (True, False), "/reset_mm_cache": (False, True)}


class Port:
    """The operator's port of a gateway."""

    def __init__(self, gateway: scripted.Gateway) -> None:
        self.listener = app.listen(HOST, 0)
        self.gateway = gateway
        self.port = self.listener.getsockname()[1]
        self.done = asyncio.Event()

    async def serve(self) -> None:
        gateway = self.gateway
        async with app.administered(gateway.application, ("admin",), self.listener, AccessLog()):
            await self.done.wait()

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=20)
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        answer = response.status, response.read()
        connection.close()
        return answer


@contextmanager
def opened(served: scripted.Gateway) -> Iterator[Port]:
    port = Port(served)
    serving = asyncio.run_coroutine_threadsafe(port.serve(), served.loop)
    yield port
    served.loop.call_soon_threadsafe(port.done.set)
    serving.result(20)


@pytest.fixture(scope="module")
def served(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    with scripted.running(tiny_qwen3_vl, GatewayConfig(api_keys=("tenant",))) as gateway:
        yield gateway


@pytest.fixture
def admin(served: scripted.Gateway) -> Iterator[Port]:
    served.worker.resets.clear()
    served.worker.become(ready=True)
    with opened(served) as port:
        yield port


def test_usage_by_day_is_that_of_all_gateways_and_outlives_them(tiny_qwen3_vl: Path, tmp_path: Path) -> None:  # F20
    digest = hashlib.sha256(b"one").hexdigest()
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[tenants.acme]\n[[keys]]\ntenant = "acme"\nsha256 = "{digest}"\n')
    state = StateSettings(str(tmp_path / "state"))
    config = GatewayConfig(api_keys=("flag",), api_keys_file=keys, state=state)
    today = datetime.now(UTC).date().isoformat()

    def days(port: Port, query: str = "") -> dict[tuple[str | None, str], dict[str, int]]:
        status, body = port.ask("GET", f"/usage{query}", x_api_key="admin", Authorization="Bearer admin")
        assert status == 200
        rows = json.loads(body)["days"]
        assert {row["day"] for row in rows} <= {today, datetime.now(UTC).date().isoformat()}
        return {(row["tenant"], row["model"]): row["usage"] for row in rows}

    with scripted.running(tiny_qwen3_vl, config) as left, scripted.running(tiny_qwen3_vl, config) as right:
        for gateway, key in ((left, "one"), (right, "one"), (right, "flag")):
            gateway.answer_two_tokens()
            assert gateway.chat_as(key).status == 200
        assert left.ask("GET", "/v1/files", Authorization="Bearer one").status == 200
    with scripted.running(tiny_qwen3_vl, config) as again, opened(again) as port:
        found = days(port)
        assert {place: row["requests"] for place, row in found.items()} == {
            ("acme", "tiny"): 2,
            ("acme", ""): 1,
            (None, "tiny"): 1,
        }
        assert found["acme", "tiny"]["completion_tokens"] == 6
        assert found["acme", "tiny"]["prompt_tokens"] > 0
        assert days(port, "?since=2000-01-01&until=2000-02-01") == {}
        status, body = port.ask("GET", "/usage?since=yesterday", Authorization="Bearer admin")
        assert (status, b"`since` must be a day" in body) == (400, True)


def test_an_unforeseen_error_does_not_end_the_port(
    served: scripted.Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lasting_task, "FIRST_PAUSE_SECONDS", 0.001)
    serve, errors = uvicorn.Server.serve, [KeyError("unforeseen")]

    async def fail_once(server: uvicorn.Server, sockets: Any = None) -> None:
        if errors:
            raise errors.pop()
        await serve(server, sockets)

    monkeypatch.setattr(uvicorn.Server, "serve", fail_once)
    with opened(served) as port:
        assert port.ask("GET", "/workers", Authorization="Bearer admin")[0] == 200
    assert "admin port met an unforeseen error" in caplog.text


@pytest.mark.parametrize("path", RESETS)
def test_admin_key_resets_every_worker(path: str, admin: Port) -> None:
    assert admin.ask("POST", path, Authorization="Bearer admin") == (200, b"")
    prefix, media = RESETS[path]
    assert admin.gateway.worker.resets == [{"prefix": prefix, "media": media}]


@table("coding, encode", encoded.ENCODERS.values(), ids=encoded.ENCODERS)
def test_encoded_bodies_are_read(admin: Port, coding: str, encode: Callable[[bytes], bytes]) -> None:
    headers = {"Authorization": "Bearer admin", "Content_Type": "application/json", "Content_Encoding": coding}
    url = encode(b'{"url": "grpc://127.0.0.1:9"}')
    assert admin.ask("POST", "/workers", url, **headers)[0] == 200
    assert admin.ask("DELETE", "/workers", url, **headers)[0] == 200
    chat = encode(b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}')
    assert admin.ask("POST", "/route", chat, X_Api_Key="tenant", **headers)[0] == 200
    long = encode(b'{"url": "grpc://127.0.0.1:9"}' + b" " * MAX_BODY_BYTES)
    assert admin.ask("POST", "/workers", long, **headers)[0] == 413


@table(
    "path, methods",
    [
        ("/", "GET, HEAD"),
        ("/board", "GET, HEAD"),
        ("/metrics", "GET, HEAD"),
        ("/workers", "DELETE, GET, HEAD, PATCH, POST"),
        ("/route", "POST"),
        ("/usage", "GET, HEAD"),
        ("/reset_prefix_cache", "POST"),
        ("/reset_mm_cache", "POST"),
    ],
)
@table("slash", ["", "/"])
def test_a_wrong_method_learns_all_right_ones(admin: Port, path: str, methods: str, slash: str) -> None:
    connection = http.client.HTTPConnection(HOST, admin.port, timeout=20)
    connection.request(
        "PUT", path.rstrip("/") + (slash or "/" * (path == "/")), headers={"Authorization": "Bearer admin"}
    )
    response = connection.getresponse()
    assert (response.status, response.getheader("allow")) == (405, methods)
    connection.close()


@table("coding", encoded.BOMBS)
def test_bombs_are_refused(admin: Port, coding: str) -> None:
    headers = {"Authorization": "Bearer admin", "Content_Type": "application/json", "Content_Encoding": coding}
    for method, path, num_mib in (("POST", "/workers", 1), ("DELETE", "/workers", 1), ("POST", "/route", 80)):
        bomb = encoded.BOMBS[coding](num_mib)
        assert admin.ask(method, path, bomb, X_Api_Key="tenant", **headers)[0] == 413
        assert admin.ask(method, path, b"\1" + bomb, X_Api_Key="tenant", **headers)[0] == 400
        assert admin.ask(method, path, bomb, X_Api_Key="tenant", **{**headers, "Content_Encoding": "br"})[0] == 415


@table("path", RESETS)
@table("key", ["", "Bearer tenant", "Bearer nothing"])
def test_other_keys_reset_nothing(key: str, path: str, admin: Port) -> None:
    status, body = admin.ask("POST", path, **({"Authorization": key} if key else {}))
    assert status == 401
    assert ("This admin key" if key else "Send an admin key") in json.loads(body)["error"]["message"]
    assert not admin.gateway.worker.resets


@pytest.mark.parametrize("path", RESETS)
def test_admin_paths_do_not_exist_for_tenants(path: str, admin: Port) -> None:
    for key in ("tenant", "admin"):
        answer = admin.gateway.ask("POST", path, Authorization=f"Bearer {key}")
        assert answer.status == (404 if key == "tenant" else 401)
    assert admin.ask("GET", "/v1/models", Authorization="Bearer admin")[0] == 404
    assert admin.ask("GET", path, Authorization="Bearer admin")[0] == 405


def test_silent_connections_do_not_keep_the_operator_out(admin: Port) -> None:
    with contextlib.ExitStack() as opened:
        for _ in range(2 * app.ADMIN_CONNECTIONS.max_connections):
            opened.enter_context(socket.create_connection((HOST, admin.port), timeout=20))
        assert admin.ask("GET", "/workers", Authorization="Bearer admin")[0] == 200


def test_workers_that_cannot_reset_are_named(admin: Port) -> None:
    admin.gateway.worker.become(ready=False)
    status, body = admin.ask("POST", "/reset_prefix_cache", Authorization="Bearer admin")
    assert status == 503
    assert b"grpc://scripted:1" in body


def test_workers_are_shown(admin: Port) -> None:
    status, body = admin.ask("GET", "/workers", Authorization="Bearer admin")
    assert status == 200
    (worker,) = json.loads(body)["workers"]
    assert worker["url"] == "grpc://scripted:1"
    assert worker["model"] == "tiny"
    assert worker["fingerprint"] == (b"f" * 32).hex()
    assert (worker["ready"], worker["draining"], worker["load"]) == (True, False, None)
    assert (worker["exactness"], worker["reason"]) == ("NONE", "a fleet of one worker needs no reports")
    assert worker["holdings"] == {"blocks": 0, "states": 0}
    assert worker["booked"]["requests"] == 0
    assert admin.ask("GET", "/workers")[0] == 401
    assert admin.gateway.ask("GET", "/workers", Authorization="Bearer tenant").status == 404


def test_board_has_what_happens_now(admin: Port) -> None:
    admin.gateway.ask("GET", "/v1/models/gone", Authorization="Bearer tenant", X_Request_Id="refused")
    status, body = admin.ask("GET", "/board", Authorization="Bearer admin")
    assert status == 200
    board = json.loads(body)
    assert (board["num_processes"], board["num_requests"], board["num_waiting"]) == (1, 0, 0)
    assert (board["prefix_hit_rate"], board["encoder_hit_rate"], board["tenants"]) == (None, None, [])
    assert [worker["url"] for worker in board["workers"]] == ["grpc://scripted:1"]
    error = board["errors"][0]
    assert (error["request_id"], error["status"], error["code"]) == ("refused", 404, "model_not_found")
    assert error["route"] == "/v1/models/{model:path}"
    assert "gone" not in str(error)
    assert abs(board["time"] - error["time"]) < 600
    assert admin.ask("GET", "/board")[0] == 401


def test_board_page_needs_no_key_and_has_no_data(admin: Port) -> None:
    status, html = admin.ask("GET", "/")
    assert status == 200
    assert html.startswith(b"<!doctype html>")
    assert b"grpc://scripted:1" not in html


def test_metrics_are_on_this_port_too(admin: Port) -> None:
    status, page = admin.ask("GET", "/metrics", Authorization="Bearer admin")
    assert status == 200
    assert b"saccade_worker_ready" in page
    assert admin.ask("GET", "/metrics")[0] == 401


def route(admin: Port, content: Any = "hi", **headers: str) -> tuple[int, Any]:
    """What POST /route says of a chat with *content*."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    given = {"Authorization": "Bearer admin", "Content_Type": "application/json", "x_api_key": "tenant", **headers}
    status, body = admin.ask("POST", "/route", json.dumps(chat).encode(), **given)
    return status, json.loads(body)


def test_route_is_shown_and_nothing_is_sent(admin: Port) -> None:
    admin.gateway.worker.requests.clear()
    image = {"type": "image_url", "image_url": {"url": data_url(random_image(64, 64, 1))}}
    status, told = route(admin, [image, {"type": "text", "text": "What is it?"}])
    assert status == 200
    assert (told["model"], told["worker"], told["reason"]) == (
        "tiny",
        "grpc://scripted:1",
        "the only worker that may get it",
    )
    (place,) = told["images"]
    assert place["tokens"] == 4
    assert 0 < place["start"] < told["prompt_tokens"] - 4
    (candidate,) = told["candidates"]
    assert candidate["chosen"]
    assert candidate["cost"]["prompt_tokens"] == told["prompt_tokens"]
    assert told["excluded"] == []
    assert admin.gateway.worker.requests == []
    _, body = admin.ask("GET", "/workers", Authorization="Bearer admin")
    assert json.loads(body)["workers"][0]["booked"]["requests"] == 0
    assert admin.gateway.application.limits.admission.num_requests == 0


@pytest.mark.parametrize("key", ["", "nobody", "admin"])
def test_a_route_needs_the_key_of_a_tenant(admin: Port, key: str) -> None:
    status, told = route(admin, x_api_key=key)
    assert (status, told["error"]["param"]) == (400, "x-api-key")
    assert route(admin, Authorization="Bearer tenant")[0] == 401


def test_a_chat_that_would_be_refused_is_refused(admin: Port) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    status, told = route(admin, [image])
    assert (status, told["error"]["param"]) == (400, "messages[0].content[0].image_url.url")
    assert route(admin, Content_Type="text/plain")[0] == 415
    admin.gateway.worker.become(ready=False)
    assert route(admin)[0] == 503


def test_admin_port_needs_a_key(served: scripted.Gateway) -> None:
    with pytest.raises(StartupError, match="--admin-key"):
        Admin((), served.application, AccessLog())


OTHER = "grpc://127.0.0.1:1"
OPERATOR = {"Authorization": "Bearer admin", "Content_Type": "application/json"}


def change(admin: Port, method: str, body: object, **headers: str) -> tuple[int, Any]:
    status, answer = admin.ask(method, "/workers", json.dumps(body).encode(), **{**OPERATOR, **headers})
    return status, json.loads(answer)


def shown(admin: Port) -> set[str]:
    _, body = admin.ask("GET", "/workers", Authorization="Bearer admin")
    return {worker["url"] for worker in json.loads(body)["workers"]}


def test_a_worker_is_added_and_removed_while_the_gateway_runs(admin: Port) -> None:
    assert change(admin, "POST", {"url": OTHER}) == (200, {"url": OTHER, "sources": ["POST /workers"]})
    assert change(admin, "POST", {"url": OTHER})[0] == 200  # again, to no effect
    assert shown(admin) == {"grpc://scripted:1", OTHER}
    assert change(admin, "DELETE", {"url": OTHER}) == (200, {"url": OTHER, "sources": []})
    wait_until(lambda: shown(admin) == {"grpc://scripted:1"})
    status, told = change(admin, "DELETE", {"url": OTHER})
    assert (status, told["error"]["param"], told["error"]["code"]) == (400, "url", "invalid_value")


SCRIPTED = "grpc://scripted:1"


def traffic(admin: Port) -> dict[str, Any]:
    """The traffic and the reason to get no requests of the scripted worker."""
    _, body = admin.ask("GET", "/workers", Authorization="Bearer admin")
    (worker,) = [one for one in json.loads(body)["workers"] if one["url"] == SCRIPTED]
    return {**worker["traffic"], "excluded": worker["excluded"]}


def test_a_workers_traffic_is_changed_and_cleared(admin: Port) -> None:
    ordinary = {"cordoned": False, "weight": 1.0, "share": None}
    status, told = change(admin, "PATCH", {"url": SCRIPTED, "cordoned": True, "weight": 2})
    assert (status, told) == (
        200,
        {"url": SCRIPTED, "traffic": {**ordinary, "cordoned": True, "weight": 2.0}, "until": "the gateway ends"},
    )
    assert traffic(admin) == {**told["traffic"], "excluded": "it is cordoned"}
    assert route(admin)[0] == 503
    assert change(admin, "PATCH", {"url": SCRIPTED, "cordoned": None, "share": 0.1})[0] == 200
    assert traffic(admin) == {"cordoned": False, "weight": 2.0, "share": 0.1, "excluded": ""}
    _, told = route(admin)
    assert [(one["weight"], one["share"]) for one in told["candidates"]] == [(2.0, 0.1)]
    assert change(admin, "PATCH", {"url": SCRIPTED, "weight": None, "share": None})[1]["traffic"] == ordinary


@table(
    ("body", "param"),
    [
        ({}, "url"),
        ([], "url"),
        ({"url": OTHER, "cordoned": True}, "url"),
        ({"url": SCRIPTED, "cordoned": 1}, "url"),
        ({"url": SCRIPTED, "weights": 1}, "url"),
        ({"url": SCRIPTED, "weight": 0}, "weight"),
        ({"url": SCRIPTED, "weight": 1001}, "weight"),
        ({"url": SCRIPTED, "share": 10}, "share"),
        ({"url": SCRIPTED, "share": -0.1}, "share"),
    ],
)
def test_invalid_traffic_is_refused(admin: Port, body: object, param: str) -> None:
    status, told = change(admin, "PATCH", body)
    assert (status, told["error"]["param"]) == (400, param)
    assert traffic(admin) == {"cordoned": False, "weight": 1.0, "share": None, "excluded": ""}
    assert change(admin, "PATCH", body, Authorization="Bearer tenant")[0] == 401


def test_a_cordon_survives_a_restart_of_the_gateway(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    sources = SourceConfig(traffic_file=tmp_path / "traffic.json")
    config = GatewayConfig(api_keys=("tenant",), worker_sources=sources)
    with scripted.running(tiny_qwen3_vl, config) as gateway, opened(gateway) as port:
        assert route(port)[0] == 200
        status, told = change(port, "PATCH", {"url": SCRIPTED, "cordoned": True})
        assert (status, told["until"]) == (200, "it is cleared")
        assert route(port)[0] == 503
    # A gateway whose worker says nothing is not expected to become ready.
    with scripted.running(tiny_qwen3_vl, config, described=False) as gateway, opened(gateway) as port:
        assert traffic(port)["cordoned"]
        sources.traffic_file.unlink()  # type: ignore[union-attr]
        status, told = change(port, "PATCH", {"url": SCRIPTED, "cordoned": None})
        assert (status, told["error"]["code"]) == (500, "internal_error")
        assert "Nothing was changed. --traffic-file" in told["error"]["message"]


def test_several_processes_need_a_traffic_file(admin: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Siblings, "are_several", True)
    status, told = change(admin, "PATCH", {"url": SCRIPTED, "cordoned": True})
    assert (status, told["error"]["param"]) == (400, "url")
    assert "--traffic-file" in told["error"]["message"]


@table("body", [{}, {"url": 3}, {"url": "grpc://nowhere"}, {"url": "unix:/a b"}, {"url": OTHER, "key": 1}, []])
@table("method", ["POST", "DELETE"])
def test_invalid_worker_url_is_refused(admin: Port, method: str, body: object) -> None:
    status, told = change(admin, method, body)
    assert (status, told["error"]["param"]) == (400, "url")
    assert shown(admin) == {"grpc://scripted:1"}


def test_only_the_operator_changes_the_workers(admin: Port) -> None:
    assert change(admin, "POST", {"url": OTHER}, Authorization="Bearer tenant")[0] == 401
    assert change(admin, "POST", {"url": OTHER}, Content_Type="text/plain")[0] == 415
    assert change(admin, "POST", {"url": "grpc://" + "a" * 20_000 + ":1"})[0] == 413
    assert shown(admin) == {"grpc://scripted:1"}
