"""Images by URL, through the whole gateway. # F6"""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import images
import pytest
import scripted

from saccade.gateway.config import GatewayConfig
from saccade.media.fetch import FetchConfig
from saccade.media.image_url import FILES_NOT_READ
from saccade.protocol.output import FinishReason, TokenDelta

JPEG = images.encode(images.random_image(120, 90), "JPEG")


class Shelf(ThreadingHTTPServer):
    """Serves one JPEG at every path and counts who asks."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Clerk)
        self.num_asked = 0
        self.url = f"http://127.0.0.1:{self.server_port}/image.jpg"


class Clerk(BaseHTTPRequestHandler):
    """Answers for the shelf."""

    server: Shelf

    def do_GET(self) -> None:
        self.server.num_asked += 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(JPEG)))
        self.send_header("Cache-Control", "max-age=600")
        self.end_headers()
        self.wfile.write(JPEG)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    with Shelf() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ask(gateway: scripted.Gateway, *urls: str) -> scripted.Answer:
    gateway.worker.script = [TokenDelta("r", [300, gateway.eos], FinishReason.STOP)]
    return gateway.chat([{"type": "image_url", "image_url": {"url": url}} for url in urls])


def test_same_image_is_fetched_decoded_and_sent_once(shelf: Shelf, tiny_qwen3_vl: Path) -> None:
    open_here = GatewayConfig(fetch=FetchConfig(allowed_networks=("127.0.0.0/8",)))
    with scripted.running(tiny_qwen3_vl, open_here) as gateway:
        assert ask(gateway, shelf.url, shelf.url, shelf.url).status == 200
        first = gateway.worker.requests[-1].media
        assert (shelf.num_asked, len({item.slot.name for item in first if item.slot})) == (1, 1)
        assert ask(gateway, shelf.url).status == 200
        assert shelf.num_asked == 1
        assert gateway.worker.requests[-1].media[0].content_hash == first[0].content_hash
        assert gateway.metric("saccade_stage_seconds_count", stage="decode") == 1
        assert gateway.metric("saccade_slots_in_use") == 0
        assert gateway.metric("saccade_url_cache_hits_total") == gateway.metric("saccade_url_cache_misses_total") == 1
        assert gateway.metric("saccade_url_cache_bytes") > len(JPEG)


def test_private_addresses_are_refused_like_unknown_hosts(shelf: Shelf, gateway: scripted.Gateway) -> None:
    nowhere = "http://127.0.0.1:9/image.jpg"
    errors = [ask(gateway, url).json["error"] for url in (shelf.url, nowhere, "file:///etc/passwd")]
    assert errors[0]["code"] == "invalid_image_url"
    assert errors[0]["param"] == "messages[0].content[0].image_url.url"
    assert errors[0] == errors[1]
    assert errors[2] == {**errors[0], "message": FILES_NOT_READ}
    assert shelf.num_asked == 0
    assert gateway.worker.requests == []
