"""Web pages drive no keyless server unless its operator allows them."""

import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scripted
from tables import table

from saccade.errors import HostNotAllowed, OriginNotAllowed
from saccade.gateway.config import GatewayConfig
from saccade.gateway.server.origins import AllowedOrigins
from saccade.protocol.output import FinishReason, TokenDelta

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}


def check(host: str | None, origin: str | None = None, **rules: Any) -> None:
    """Check a POST to a keyless server of these rules."""
    headers = [(b"host", host.encode())] if host is not None else []
    headers += [(b"origin", origin.encode())] if origin is not None else []
    rules = {"allowed_origins": (), "allowed_hosts": (), "keyless": True, **rules}
    AllowedOrigins(**rules).check_request("POST", headers)


@table(
    "host",
    [
        "localhost", "localhost:8000", "LOCALHOST.", "a.localhost:1", "127.0.0.1:8000", "127.8.9.1", "[::1]:8000", "[::1]",
        "host.docker.internal:8000", "10.1.2.3:8000", "0.0.0.0:8000", "[2001:db8::1]:80", None,
    ],
)  # fmt: skip
def test_own_hosts_pass(host: str | None) -> None:
    check(host)


@table(
    "host",
    [
        "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "notlocalhost", "", " ",
        "localhost@evil.example", "localhost:8000@evil.example", "[::1].evil.example", "evil.example/localhost", "::1",
        "127.1", "localhost:80:80", "localhost:", "\xff.localhost\r",
    ],
)  # fmt: skip
def test_unknown_hosts_are_refused(host: str) -> None:
    with pytest.raises(HostNotAllowed, match="--allowed-hosts"):
        check(host)


def test_configured_hosts_pass() -> None:
    check("models.example:443", allowed_hosts=("Models.Example",))
    check("models.example:8000", allowed_hosts=("models.example:443",))
    check("a.b.example", allowed_hosts=("*.b.example",))
    check("anything.example", allowed_hosts=("*",))
    for strange in ("b.example", "xb.example", "c.example"):
        with pytest.raises(HostNotAllowed):
            check(strange, allowed_hosts=("*.b.example", "models.example"))


@table("origin", ["https://evil.example", "null", "NULL", "", "http://localhost:3000", "http://localhost"])
def test_unknown_origins_are_refused(origin: str) -> None:
    with pytest.raises(OriginNotAllowed, match="--allowed-origins"):
        check("localhost:8000", origin)
    check("localhost:8000", origin, allowed_origins=("*",))


def test_allowed_origins_pass_and_so_do_pages_of_the_server_itself() -> None:
    check("localhost:8000", "https://chat.example", allowed_origins=("https://chat.example",))
    check("localhost:8000", "http://localhost:8000")
    with pytest.raises(OriginNotAllowed):
        check("localhost:8000", "https://chat.example.evil", allowed_origins=("https://chat.example",))
    with pytest.raises(OriginNotAllowed):
        check("localhost:8000", "null", allowed_origins=("null",))
    # A page whose name was pointed at this machine is of the server's origin; its name gives it away.
    with pytest.raises(HostNotAllowed):
        check("evil.example:8000", "http://evil.example:8000")
    with pytest.raises(OriginNotAllowed):
        check(None, "http://evil.example")


@pytest.mark.parametrize("name", [b"host", b"origin"])
def test_headers_sent_twice_are_refused(name: bytes) -> None:
    twice = [(b"host", b"localhost"), (name, b"localhost"), (b"origin", b"http://localhost")]
    with pytest.raises((HostNotAllowed, OriginNotAllowed)):
        AllowedOrigins(("*",), (), keyless=True).check_request("GET", twice)


def test_servers_with_keys_take_any_host_and_origin() -> None:
    check("evil.example", "https://evil.example", keyless=False)


@pytest.fixture(scope="module")
def keyed(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    """A gateway with a key, metrics that need none, and no origin."""
    with scripted.running(tiny_qwen3_vl, GatewayConfig(api_keys=("one",), metrics_without_key=True)) as gateway:
        gateway.worker.script = [TokenDelta("r", [300], FinishReason.LENGTH)]
        yield gateway


@table("path", ["/v1/models", "/metrics", "/load", "/nothing", "/v1/chat/completions"])
@table("method", ["GET", "POST", "OPTIONS", "DELETE"])
def test_a_page_reaches_nothing_of_a_keyless_server(method: str, path: str, gateway: scripted.Gateway) -> None:
    for headers, code in (
        ({"Origin": "https://evil.example"}, "origin_not_allowed"),
        ({"Host": "evil.example"}, "host_not_allowed"),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, "host_not_allowed"),
    ):
        if method == "OPTIONS" and "Origin" in headers:
            code = "origin_not_allowed"
        answer = gateway.ask(method, path, CHAT if method == "POST" else None, **headers)
        assert (answer.status, answer.json["error"]["code"]) == (403, code)
    assert not gateway.worker.requests


def test_an_allowed_page_is_served_and_no_other(tiny_qwen3_vl: Path) -> None:
    origin = "https://chat.example"
    config = GatewayConfig(allowed_origins=(origin,), allowed_hosts=("models.example",))
    with scripted.running(tiny_qwen3_vl, config) as gateway:
        gateway.worker.script = [TokenDelta("r", [300], FinishReason.LENGTH)]
        assert gateway.ask("OPTIONS", "/v1/chat/completions", Origin=origin, **PREFLIGHT).status == 200
        for host in ("localhost:8000", "models.example"):
            answer = gateway.ask("POST", "/v1/chat/completions", CHAT, Host=host, Origin=origin)
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, origin)
        for host, other in (("localhost:8000", "https://evil.example"), ("evil.example", origin)):
            assert gateway.ask("POST", "/v1/chat/completions", CHAT, Host=host, Origin=other).status == 403


@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/ping"])
def test_probes_are_open_to_any_host(path: str, gateway: scripted.Gateway) -> None:
    assert gateway.ask("GET", path, Host="saccade.default.svc:8000").status == 200


def test_prometheus_may_ask_by_address(gateway: scripted.Gateway) -> None:
    assert gateway.ask("GET", "/metrics", Host="10.2.3.4:8000").status == 200


def test_a_host_sent_twice_is_refused(gateway: scripted.Gateway) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=10)
    connection.putrequest("GET", "/v1/models")  # sends a Host of its own
    connection.putheader("Host", "localhost")
    connection.endheaders()
    assert connection.getresponse().status == 403
    connection.close()


def test_refused_preflight_names_the_flag(gateway: scripted.Gateway, keyed: scripted.Gateway) -> None:
    for server in (gateway, keyed):
        answer = server.ask("OPTIONS", "/v1/chat/completions", Origin="https://chat.example", **PREFLIGHT)
        assert (answer.status, answer.json["error"]["code"]) == (403, "origin_not_allowed")
        assert "`--allowed-origins ORIGIN`" in answer.json["error"]["message"]


def test_metrics_without_key_are_open(keyed: scripted.Gateway) -> None:
    assert keyed.ask("GET", "/metrics").status == 200
    assert keyed.ask("GET", "/load").status == 401
    assert keyed.ask("GET", "/load", Authorization="Bearer one").json == {"server_load": 0}


@table("path", ["/v1/chat/completions", "/tokenize", "/detokenize"])
@table("kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonx", "text/json"])
def test_body_needs_the_json_content_type(
    kind: str, path: str, gateway: scripted.Gateway, keyed: scripted.Gateway
) -> None:
    for server, key in ((gateway, {}), (keyed, {"Authorization": "Bearer one"})):
        answer = server.ask("POST", path, CHAT, Content_Type=kind, **key)
        assert (answer.status, answer.json["error"]["code"]) == (415, "unsupported_media_type")
        assert "-H 'Content-Type: application/json'" in answer.json["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/json;v=1"])
def test_json_may_have_parameters(kind: str, gateway: scripted.Gateway) -> None:
    assert gateway.ask("POST", "/v1/chat/completions", CHAT, Content_Type=kind).status == 200


def test_a_body_without_a_type_is_refused(gateway: scripted.Gateway) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=10)
    connection.request("POST", "/tokenize", b'{"prompt": "a"}')
    assert connection.getresponse().status == 415
    connection.close()
