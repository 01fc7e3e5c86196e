"""POST /pdf_pages/{number}: a page as an image, as a model gets it, and what is refused."""

import io
from pathlib import Path

import numpy as np
import pdfs
import scripted
from drawn_pdfs import drawn
from PIL import Image
from tables import table

from saccade.gateway.config import GatewayConfig
from saccade.gateway.images.pdf_drawer import MAX_SIDE

FILE = pdfs.pdf(pdfs.TEXT, pdfs.SQUARE)
WRONG = {
    "page 0": ("0", FILE, "`number` must be a whole number"),
    "a page after the last": ("3", FILE, "The PDF has 2 pages"),
    "no number": ("first", FILE, "`number` must be a whole number"),
    "an image": ("1", b"\x89PNG\r\n\x1a\n", "The body is not a PDF"),
    "JSON": ("1", b"{}", "The body is not a PDF"),
    "nothing": ("1", b"", "The body is not a PDF"),
}


@table("number", [1, 2])
def test_page_is_drawn_as_a_model_gets_it(number: int, gateway: scripted.Gateway) -> None:
    answer = gateway.ask("POST", f"/pdf_pages/{number}", FILE, Content_Type="application/pdf")
    assert (answer.status, answer.headers["content-type"]) == (200, "image/png")
    assert answer.headers["x-saccade-num-pages"] == "2"
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(answer.body))), drawn(FILE, number - 1))
    assert gateway.application.limits.memory.num_bytes == 0


def test_large_page_has_the_size_of_a_screen(gateway: scripted.Gateway) -> None:
    answer = gateway.ask("POST", "/pdf_pages/1", pdfs.pdf(pdfs.TEXT, box=b"0 0 1600 800"))
    assert Image.open(io.BytesIO(answer.body)).size == (MAX_SIDE, MAX_SIDE // 2)


@table("name", WRONG)
def test_wrong_request_is_refused(name: str, gateway: scripted.Gateway) -> None:
    number, body, beginning = WRONG[name]
    answer = gateway.ask("POST", f"/pdf_pages/{number}", body)
    assert answer.status == 400
    assert answer.json["error"]["message"].startswith(beginning)


@table("name", pdfs.BROKEN)
def test_broken_pdf_is_refused_as_in_a_chat(name: str, gateway: scripted.Gateway) -> None:
    encoded, beginning = pdfs.BROKEN[name]
    answer = gateway.ask("POST", "/pdf_pages/1", encoded)
    assert answer.status == 400
    assert answer.json["error"]["message"].startswith(beginning)


def test_page_needs_the_key_and_counts_as_a_request(tiny_qwen3_vl: Path) -> None:
    with scripted.running(tiny_qwen3_vl, GatewayConfig(api_keys=("secret",), max_requests=1)) as gateway:
        assert gateway.ask("POST", "/pdf_pages/1", FILE).status == 401
        with gateway.application.limits.admission.admit(b""):
            assert gateway.ask("POST", "/pdf_pages/1", FILE, Authorization="Bearer secret").status == 429
        assert gateway.ask("POST", "/pdf_pages/1", FILE, Authorization="Bearer secret").status == 200


def test_other_web_pages_draw_nothing(gateway: scripted.Gateway) -> None:
    answer = gateway.ask("POST", "/pdf_pages/1", FILE, Origin="https://evil.example", Content_Type="text/plain")
    assert answer.status == 403
