"""A request that waits for others' servers, for memory or for its client holds up nobody. # F11"""

import base64
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grammar_trials
import images
import scripted
from waiting import wait_until

from saccade.gateway.config import GatewayConfig
from saccade.gateway.server.body import STEP_BYTES
from saccade.media.fetch import FetchConfig
from saccade.protocol.output import FinishReason, TokenDelta

HERE = FetchConfig(allowed_networks=("127.0.0.0/8",))
IMAGE = base64.b64encode(images.encode(images.random_image(400, 300), "PNG")).decode()


class Tarpit:
    """An image host that accepts and never answers; *connections* are those that were opened."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self.connections: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/image.png"

    def __enter__(self) -> "Tarpit":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        for connection in self.connections:
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.connections.append(self._listener.accept()[0])

    @property
    def num_left(self) -> int:
        """Connections that the fetcher has closed."""
        return sum(_is_closed(connection) for connection in self.connections)


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while data := connection.recv(1 << 16):
            assert data
        return True
    return False


def image(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


@contextlib.contextmanager
def asking(gateway: scripted.Gateway, *urls: str, text: str = "") -> Iterator[http.client.HTTPConnection]:
    """Ask about images and do not wait for the answer."""
    content = [*map(image, urls), {"type": "text", "text": text}]
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": content}]})
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=20)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        yield connection
    finally:
        connection.close()


def test_slow_image_hosts_hold_up_no_chat(tiny_qwen3_vl: Path) -> None:
    """They hold neither the turns of the event loop nor the places of requests."""
    config = GatewayConfig(max_requests=2, fetch=HERE)
    with (
        Tarpit() as tarpit,
        scripted.running(tiny_qwen3_vl, config) as gateway,
        contextlib.ExitStack() as open_requests,
    ):
        for number in range(8):
            open_requests.enter_context(asking(gateway, f"{tarpit.url}?{number}"))
        wait_until(lambda: len(tarpit.connections) == 8)
        gateway.answer_two_tokens()
        assert gateway.chat().status == 200
        assert gateway.chat([image(f"data:image/png;base64,{IMAGE}")]).status == 200
        open_requests.close()
        wait_until(lambda: tarpit.num_left == 8)


def test_one_failed_image_ends_the_fetches_of_its_siblings(tiny_qwen3_vl: Path) -> None:
    patient = FetchConfig(allowed_networks=("127.0.0.0/8",), timeout_seconds=60.0)
    with (
        Tarpit() as tarpit,
        Shelf(b"no image", wait=lambda: len(tarpit.connections) == 4) as shelf,
        scripted.running(tiny_qwen3_vl, GatewayConfig(fetch=patient)) as gateway,
    ):
        urls = [*(f"{tarpit.url}?{number}" for number in range(4)), shelf.url]
        answer = gateway.chat([image(url) for url in urls])
        assert (answer.status, answer.json["error"]["param"]) == (400, "messages[0].content[4].image_url.url")
        wait_until(lambda: tarpit.num_left == 4)


def test_an_image_over_a_limit_is_refused_before_its_siblings_are_there(tiny_qwen3_vl: Path) -> None:
    patient = FetchConfig(allowed_networks=("127.0.0.0/8",), timeout_seconds=60.0)
    config = GatewayConfig(fetch=patient, max_image_pixels=10_000)
    with Tarpit() as tarpit, scripted.running(tiny_qwen3_vl, config) as gateway:
        answer = gateway.chat([image(tarpit.url), image(f"data:image/png;base64,{IMAGE}")])
        error = answer.json["error"]
        assert (error["code"], error["param"]) == ("image_too_large", "messages[0].content[1].image_url.url")


def test_bytes_go_back_before_the_answer_is_whole(tiny_qwen3_vl: Path) -> None:
    with scripted.running(tiny_qwen3_vl) as gateway:
        gateway.worker.script = [30.0]
        memory = gateway.application.limits.memory
        with asking(gateway, f"data:image/png;base64,{IMAGE}", text="a" * 1000):
            wait_until(lambda: gateway.worker.requests)
            wait_until(lambda: memory.num_bytes == 0)
            assert gateway.metric("saccade_requests_in_flight") == 1
        wait_until(lambda: gateway.worker.num_aborted)


def test_bodies_wait_for_memory_and_time_out_with_429(tiny_qwen3_vl: Path) -> None:
    # The model is not there: an answer would need memory, too.
    body = json.dumps({"model": "absent", "prompt": "a " * 100_000}).encode()
    config = GatewayConfig(max_request_memory_bytes=2 * len(body), memory_wait_seconds=0.2)
    with scripted.running(tiny_qwen3_vl, config) as gateway:
        memory = gateway.application.limits.memory
        memory.take_bytes("a fetch that goes on", 1)
        refused = gateway.ask("POST", "/tokenize", body, Content_Type="application/json")
        assert (refused.status, refused.json["error"]["code"]) == (429, "queue_full")
        assert gateway.metric("saccade_requests_in_flight") == 0
        gateway.answer_two_tokens()
        assert gateway.chat().status == 200  # a small body needs no reservation
        gateway.loop.call_soon_threadsafe(memory.give_back, "a fetch that goes on", 1)
        wait_until(lambda: memory.num_bytes == 0)
        assert gateway.ask("POST", "/tokenize", body, Content_Type="application/json").status == 404
        wait_until(lambda: memory.num_bytes == 0)


def test_paused_body_releases_its_reservation(tiny_qwen3_vl: Path) -> None:
    """Else a few clients that announce much and send little would keep out everybody's images."""
    config = GatewayConfig(max_body_bytes=8 << 20, max_request_memory_bytes=16 << 20)
    body = json.dumps({"prompt": "a " * (2 << 20), "model": "other"}).encode()  # an answer to it would be long
    head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with (
        scripted.running(tiny_qwen3_vl, config) as gateway,
        socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as slow,
    ):
        memory = gateway.application.limits.memory
        slow.sendall(f"{head}\r\n".encode() + body[:1000])
        wait_until(lambda: memory.num_bytes == 2 * STEP_BYTES)
        num_sent = STEP_BYTES + 1000
        slow.sendall(body[1000:num_sent])
        wait_until(lambda: memory.num_bytes == 2 * len(body))
        wait_until(lambda: memory.num_bytes == 2 * (num_sent + STEP_BYTES))
        slow.sendall(body[num_sent:])
        assert slow.recv(1 << 16).startswith(b"HTTP/1.1 404")
        wait_until(lambda: memory.num_bytes == 0)


def test_the_encoded_bytes_of_one_request_are_bounded(tiny_qwen3_vl: Path) -> None:
    png = base64.b64decode(IMAGE)
    padded = png + bytes(200_000)

    with Shelf(padded) as shelf:
        config = GatewayConfig(max_body_bytes=2 * len(padded) + 1000, fetch=HERE)
        with scripted.running(tiny_qwen3_vl, config) as gateway:
            gateway.answer_two_tokens()
            assert gateway.chat([image(f"{shelf.url}?{number}") for number in range(2)]).status == 200
            answer = gateway.chat([image(f"{shelf.url}?{number}") for number in range(3)])
            assert (answer.status, answer.json["error"]["code"]) == (400, "image_too_large")
            wait_until(lambda: gateway.application.limits.memory.num_bytes == 0)


class Shelf(Tarpit):
    """A host that answers every request with the same bytes, after *wait*."""

    def __init__(self, content: bytes, wait: Callable[[], object] = lambda: True) -> None:
        super().__init__()
        self._wait = wait
        self._answer = (
            f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
        )

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.recv(1 << 16)
                wait_until(self._wait)
                connection.sendall(self._answer)
                connection.close()


def test_no_key_takes_all_places(tiny_qwen3_vl: Path) -> None:
    config = GatewayConfig(api_keys=("greedy", "modest"), max_requests=4)
    with scripted.running(tiny_qwen3_vl, config) as gateway, contextlib.ExitStack() as open_requests:
        gateway.worker.script = [TokenDelta("r", [300]), 30.0]
        body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]})
        for _ in range(3):
            connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=20)
            open_requests.callback(connection.close)
            headers = {"Authorization": "Bearer greedy", "Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body, headers)
        wait_until(lambda: gateway.metric("saccade_requests_in_flight") == 3)
        refused = gateway.chat_as("greedy")
        assert (refused.status, "its share" in refused.json["error"]["message"]) == (429, True)
        gateway.worker.script = [TokenDelta("r", [300, gateway.eos], FinishReason.STOP)]
        assert gateway.chat_as("modest").status == 200


def test_disconnect_during_a_grammar_trial_is_noticed(gateway: scripted.Gateway) -> None:
    def num_left() -> float:
        return gateway.metric("saccade_http_requests_total", route="/v1/chat/completions", status="499")

    before = num_left()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "guided_regex": "left[0-9]"}
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=20)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    wait_until(grammar_trials.children)
    # It then ends only by being killed.
    (child,) = grammar_trials.children()
    child.suspend()
    connection.close()
    wait_until(lambda: num_left() == before + 1)
    wait_until(lambda: not child.is_running())


def test_disconnect_ends_the_fetches_of_count_tokens(tiny_qwen3_vl: Path) -> None:
    patient = FetchConfig(allowed_networks=("127.0.0.0/8",), timeout_seconds=60.0)
    with Tarpit() as tarpit, scripted.running(tiny_qwen3_vl, GatewayConfig(fetch=patient)) as gateway:
        block = {"type": "image", "source": {"type": "url", "url": f"{tarpit.url}?1"}}
        for path, part in (("/tokenize", image(tarpit.url)), ("/v1/messages/count_tokens", block)):
            num_before = len(tarpit.connections)
            body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": [part]}]})
            connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=20)
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            wait_until(lambda num=num_before + 1: len(tarpit.connections) == num)
            connection.close()
            wait_until(lambda num=num_before + 1: tarpit.num_left == num)
