"""One message, one answer, in whatever segments it arrives. # F11"""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import scripted
from segments import Answer, Reads, answers, exchange, read_all
from tables import table

from saccade.gateway import app
from saccade.gateway.admin import HOST
from saccade.gateway.server.access_log import AccessLog

LAST = b"GET /version HTTP/1.1\r\nHost: localhost\r\nUpgrade: h2c\r\nConnection: close, Upgrade\r\n\r\n"
"""A request behind the one that is tried. The head of an upgrade is only read whole."""

UPGRADES = {
    "none": b"",
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
    "websocket": (
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        b"Sec-WebSocket-Version: 13\r\n"
    ),
    "TLS/1.0": b"Upgrade: TLS/1.0, HTTP/2.0\r\nConnection: Upgrade\r\n",
    "keep-alive": b"Connection: keep-alive, Upgrade\r\nUpgrade: h2c\r\n",
    "odd casing": b"CONNECTION:uPGRADE\r\nuPgRaDe:H2C\r\n",
    "in two lines": b"Upgrade: h2c\r\nConnection: keep-alive\r\nUpgrade: websocket\r\nConnection: upgrade\r\n",
    "empty": b"Upgrade:\r\nConnection: Upgrade\r\n",
    "without Connection": b"Upgrade: h2c\r\n",
    "without Upgrade": b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
}

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.pdf"\r\n\r\n%PDF-1.4\r\n\r\n\r\n--b--\r\n'
)
TOKENIZE = b'{"prompt":"a b"\r\n\r\n}'
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
"""A body that is a whole request."""

ROUTES: dict[str, tuple[bytes, int]] = {
    "/v1/chat/completions": (json.dumps(CHAT).encode(), 200),
    "/v1/completions": (b'{"model": "tiny", "prompt": "hi"}', 200),
    "/v1/messages": (json.dumps(CHAT).encode(), 200),
    "/v1/messages/count_tokens": (json.dumps(CHAT).encode(), 200),
    "/v1/responses": (b'{"model": "tiny", "input": "hi"}', 200),
    "/invocations": (json.dumps(CHAT).encode(), 200),
    "/v1/files": (FORM, 200),
    "/v1/batches": (b'{"input_file_id": "file-a"}', 400),
    "/v1/batches/batch_a/cancel": (b"", 400),
    "/tokenize": (TOKENIZE, 200),
    "/detokenize": (b'{"tokens": [300]}', 200),
    "/pdf_pages/1": (b"%PDF-1.4", 400),
    "/ping": (b"{}", 200),
    "/v1/models": (b"{}", 405),
    "/nothing": (SMUGGLED, 404),
}
"""Every path that takes POST and two that do not, with a body and the status of the answer."""

ADMIN_ROUTES: dict[str, tuple[bytes, int]] = {
    "/workers": (b'{"url": "here"}', 400),
    "/route": (json.dumps(CHAT).encode(), 200),
    "/reset_prefix_cache": (b"", 200),
    "/reset_mm_cache": (b"{}", 200),
    "/usage": (SMUGGLED, 405),
}


def sized(body: bytes) -> bytes:
    return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def chunked(body: bytes) -> bytes:
    half = len(body) // 2 or 1
    chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in (body[:half], body[half:]) if piece)
    return b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\nX-Trailer: a\r\n\r\n"


def bare(body: bytes) -> bytes:
    return b"\r\n"


BODIES: dict[str, Callable[[bytes], bytes]] = {"sized": sized, "chunked": chunked, "none": bare}


def post(path: str, upgrade: bytes, body: bytes, headers: bytes = b"") -> bytes:
    """Return the bytes of a request; *body* begins with its framing and the end of the head."""
    kind = b"multipart/form-data; boundary=b" if b"form-data" in body else b"application/json"
    start = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: %b\r\n" % (path.encode(), kind)
    return start + headers + upgrade + body


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


class Served(NamedTuple):
    """A port, its paths that take POST, and a header with its key."""

    port: int
    routes: dict[str, tuple[bytes, int]]
    key: bytes = b""


@contextmanager
def administered(gateway: scripted.Gateway) -> Iterator[int]:
    """The port of an operator of *gateway*."""
    listener, done = app.listen(HOST, 0), asyncio.Event()

    async def serve() -> None:
        async with app.administered(gateway.application, ("admin",), listener, AccessLog()):
            await done.wait()

    serving = asyncio.run_coroutine_threadsafe(serve(), gateway.loop)
    yield listener.getsockname()[1]
    gateway.loop.call_soon_threadsafe(done.set)
    serving.result(20)


@pytest.fixture(scope="module", params=["port", "admin port"])
def served(request: pytest.FixtureRequest, shared_gateway: scripted.Gateway) -> Iterator[Served]:
    """Each port of a gateway."""
    shared_gateway.answer_two_tokens()
    if request.param == "port":
        yield Served(shared_gateway.port, ROUTES)
        for file in shared_gateway.ask("GET", "/v1/files").json["data"]:
            shared_gateway.ask("DELETE", f"/v1/files/{file['id']}")
    else:
        with administered(shared_gateway) as port:
            yield Served(port, ADMIN_ROUTES, b"Authorization: Bearer admin\r\n")


def shape(answer: Answer) -> tuple[int, Any]:
    """The status of an answer and the names in its body, which has ids and times of its own."""
    parsed = json.loads(answer.body or b"{}")
    return answer.status, sorted(parsed)


def one_answer(port: int, message: bytes) -> Answer:
    """Send *message* with LAST behind it, and return the one answer to it."""
    first, last = answers(exchange(port, message + LAST))
    assert b"version" in last.body or b"There is no /version" in last.body or last.status == 401
    return first


def test_every_path_that_takes_post_is_in_the_table(gateway: scripted.Gateway) -> None:
    paths = gateway.ask("GET", "/openapi.json").json["paths"]
    examples = {"{number}": "1", "{batch_id}": "batch_a"}
    posts = {
        re.sub(r"{\w+}", lambda name: examples[name[0]], path) for path, methods in paths.items() if "post" in methods
    }
    assert posts <= ROUTES.keys()


@pytest.mark.ci
@table("body", BODIES)
@table("upgrade", UPGRADES)
def test_an_upgrade_is_ignored_on_every_path(
    upgrade: str, body: str, served: Served, reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    for path, (content, status) in served.routes.items():
        framed = BODIES[body](content)
        message = post(path, UPGRADES[upgrade], framed, served.key)
        reads.cut_at()
        expected = shape(one_answer(served.port, post(path, b"", framed, served.key)))
        if body != "none":
            assert expected[0] == status, path
        assert shape(one_answer(served.port, message)) == expected, path
        reads.cut_at(message.index(b"\r\n\r\n") + 4, len(message))
        assert shape(one_answer(served.port, message)) == expected, path
        reads.by_byte()
        assert shape(one_answer(served.port, message)) == expected, path
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


EMPTY_LINES = b"[" + b"\r\n" * 8 + b"]"


@pytest.mark.ci
@table(
    ("body", "content"),
    [(body, content) for body in ("sized", "chunked") for content in (TOKENIZE, SMUGGLED, EMPTY_LINES)]
    + [("none", b"")],
)
@table("upgrade", ["none", "h2c"])
def test_a_message_is_the_same_wherever_it_is_cut(
    upgrade: str, body: str, content: bytes, gateway: scripted.Gateway, reads: Reads
) -> None:
    framed = BODIES[body](content)
    expected = one_answer(gateway.port, post("/tokenize", b"", framed))
    assert (expected.status == 200) == (content == TOKENIZE)
    message = post("/tokenize", UPGRADES[upgrade], framed)
    # Every place has a cut before or behind it, and there is another cut in the request behind.
    for position in range(1, len(message) + 4, 2):
        reads.cut_at(position, position + 1, len(message) + 9)
        answer = one_answer(gateway.port, message)
        assert (answer.status, answer.body) == (expected.status, expected.body), position


@table(
    ("start", "status"),
    [
        pytest.param(b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", 405, id="CONNECT"),
        pytest.param(b"CONNECT localhost:80 HTTP/1.1\r\nContent-Length: 99\r\n\r\n", 405, id="CONNECT with a body"),
        pytest.param(b"CONNECT h:1 HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", 405, id="CONNECT, h2c"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, id="HTTP/2"),
        pytest.param(b"GET /live HTTP/2.0\r\nHost: localhost\r\n\r\n", 400, id="version 2.0"),
        pytest.param(b"GET /live HTTP/0.9\r\nHost: localhost\r\n\r\n", 400, id="version 0.9"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, id="TLS"),
        pytest.param(b"hello\r\n", 400, id="words"),
        pytest.param(b"POST /tokenize HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n", 400, id="two lengths"),
        pytest.param(b"POST /tokenize HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400, id="negative length"),
        pytest.param(b"POST /tokenize HTTP/1.1\r\nContent-Length: +2\r\n\r\n", 400, id="length with a sign"),
        pytest.param(b"POST /tokenize HTTP/1.1\r\nContent-Length: 1_0\r\n\r\n", 400, id="length with an underscore"),
        pytest.param(
            b"POST /tokenize HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", 400, id="both framings"
        ),
        pytest.param(b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 400, id="gzip and chunked"),
        pytest.param(b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: identity\r\n\r\n", 400, id="identity"),
        pytest.param(
            b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 400, id="twice"
        ),
        pytest.param(b"POST /tokenize HTTP/1.1\r\nUpgrade : h2c\r\nConnection: Upgrade\r\n\r\n", 400, id="blank before colon"),
        pytest.param(b"POST /tokenize HTTP/1.1\r\nX-A: b\r\n Upgrade: h2c\r\n\r\n", 400, id="folded line"),
        pytest.param(b"POST /tokenize HTTP/1.1\nContent-Length: 2\n\n{}", 400, id="bare LF"),
        pytest.param(b"POST /tokenize HTTP/1.1\r\nX-A: b\rX-B: c\r\n\r\n", 400, id="bare CR"),
        pytest.param(b"POST /tokenize HTTP/1.1\r\nX-A: \0\r\n\r\n", 400, id="NUL"),
        pytest.param(b"GET http://localhost:" + b"9" * 5000 + b"/live HTTP/1.1\r\n\r\n", 400, id="endless port"),
        pytest.param(b"GET http://localhost:x/live HTTP/1.1\r\nContent-Length: 9\r\n\r\n", 400, id="port of letters"),
        pytest.param(b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400, id="no chunk"),
        pytest.param(b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n", 400, id="short chunk"),
        pytest.param(b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\n\n", 400, id="chunk with bare LF"),
    ],
)  # fmt: skip
def test_a_message_whose_end_is_uncertain_ends_its_connection(
    start: bytes, status: int, gateway: scripted.Gateway, reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    """What follows is not read as a request, and a client that still sends sees the answer."""
    start = start.replace(
        b"POST /tokenize HTTP/1.1\r\n", b"POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\n"
    )
    for cut in (reads.cut_at, reads.by_byte):
        cut()
        (answer,) = answers(exchange(gateway.port, start + LAST * 3))
        assert answer.status == status
        assert answer.headers["connection"] == "close"
        is_in_body = bool(start.partition(b"chunked\r\n\r\n")[2])
        assert ("chunks" in json.loads(answer.body)["error"]["message"]) == is_in_body
    assert not caplog.records


@table(
    "rest",
    [b"5\r\nhello\rX", b"xyz\r\n", b"f" * 17 + b"\r\n", b"0\r\nno trailer\r\n\r\n", b"0\r\nContent-Length: 5\r\n\r\n"],
)
def test_an_answer_before_a_broken_body_arrives(rest: bytes, gateway: scripted.Gateway, reads: Reads) -> None:
    """Its client still sends, and would miss the answer if the connection were reset."""
    head = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    for cut in (reads.cut_at, reads.by_byte):
        cut()
        with gateway.connect() as connection:
            connection.sendall(head + b"1\r\na\r\n")
            received = connection.recv(1 << 16)
            connection.sendall(rest + LAST * 9)
            received += read_all(connection)
        (answer,) = answers(received)
        assert answer.status == 404


@table(
    "headers",
    [
        b"Connection: close\r\n",
        b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n",
        b"connection: Close\r\nUpgrade: a\r\n",
    ],
)
@table("body", BODIES)
def test_nothing_is_read_behind_the_last_message(
    headers: bytes, body: str, gateway: scripted.Gateway, reads: Reads
) -> None:
    message = post("/tokenize", headers, BODIES[body](TOKENIZE)) + LAST
    for cut in (reads.cut_at, lambda: reads.cut_at(len(message) - 9), reads.by_byte):
        cut()
        (answer,) = answers(exchange(gateway.port, message))
        assert answer.headers["connection"] == "close"


@table("path", ["/tokenize", "/nothing"])
def test_a_client_that_was_not_asked_for_its_body_sends_no_further_request(
    path: str, gateway: scripted.Gateway
) -> None:
    """It may send the body, or leave it out: what follows could be either."""
    head = post(path, b"", b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n")
    if path == "/nothing":
        (answer,) = answers(exchange(gateway.port, head + LAST))
        assert (answer.status, answer.headers["connection"]) == (404, "close")
    else:
        asked, answer, last = answers(exchange(gateway.port, head + b'{"prompt"' + LAST))
        assert [asked.status, answer.status, last.status] == [100, 400, 200]


@table("blanks", [b" ", b"   "])
def test_blanks_after_a_length_or_a_coding_are_no_part_of_it(blanks: bytes, gateway: scripted.Gateway) -> None:
    for framed in (sized(TOKENIZE), chunked(TOKENIZE)):
        answer = one_answer(gateway.port, post("/tokenize", b"", framed.replace(b"\r\n\r\n", blanks + b"\r\n\r\n", 1)))
        assert answer.status == 200
