"""PDFs in every API: each becomes its pages as images, in the place of its part."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pdf_texts
import pdfs
import scripted
from chats import data_url, random_image
from tables import table

from saccade.errors import UnsupportedParameter
from saccade.gateway.chat import Chat
from saccade.gateway.config import GatewayConfig
from saccade.gateway.prompt.chat_prompt import why_not_as_chat
from saccade.media.fetch import FetchConfig

FILE = pdfs.pdf(pdfs.TEXT, pdfs.SQUARE)
DATA = base64.b64encode(FILE).decode()
URL = f"data:application/pdf;base64,{DATA}"
IMAGE = data_url(random_image(64, 64, 1))
PNG = {"type": "base64", "media_type": "image/png", "data": IMAGE.partition(",")[2]}
TEXT = {"type": "text", "text": "and"}


def user(*content: Any) -> list[Any]:
    return [{"role": "user", "content": list(content)}]


def chat(*parts: Any) -> tuple[str, Any]:
    image = {"type": "image_url", "image_url": {"url": IMAGE}}
    return "/v1/chat/completions", {"messages": user(TEXT, *parts, TEXT, image)}


def response(*parts: Any) -> tuple[str, Any]:
    text, image = {"type": "input_text", "text": "and"}, {"type": "input_image", "image_url": IMAGE}
    return "/v1/responses", {"input": user(text, *parts, text, image)}


def message(*parts: Any) -> tuple[str, Any]:
    return "/v1/messages", {"max_tokens": 9, "messages": user(TEXT, *parts, TEXT, {"type": "image", "source": PNG})}


FORM = {"Content-Type": "multipart/form-data; boundary=frontier"}


def form(content: bytes) -> bytes:
    purpose = b'--frontier\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n--frontier\r\n'
    head = b'Content-Disposition: form-data; name="file"; filename="a.pdf"\r\n\r\n'
    return purpose + head + content + b"\r\n--frontier--\r\n"


@contextmanager
def uploaded(gateway: scripted.Gateway, content: bytes) -> Iterator[str]:
    known_as = gateway.ask("POST", "/v1/files", form(content), **FORM).json["id"]
    yield known_as
    gateway.ask("DELETE", f"/v1/files/{known_as}")


def every_way(content: bytes, known_as: str) -> list[tuple[str, Any]]:
    """Return a request for each way in which the PDF *content*, uploaded as *known_as*, can come."""
    data = base64.b64encode(content).decode()
    url = f"data:application/pdf;base64,{data}"
    document = {"type": "base64", "media_type": "application/pdf", "data": data}
    return [
        chat({"type": "file", "file": {"file_data": url, "filename": "a.pdf"}}),
        chat({"type": "file", "file": {"file_id": known_as}}),
        chat({"type": "image_url", "image_url": {"url": url}}),
        response({"type": "input_file", "file_data": url, "filename": "a.pdf"}),
        response({"type": "input_file", "file_id": known_as}),
        response({"type": "input_file", "file_url": url}),
        message({"type": "document", "source": document}),
        message({"type": "document", "source": {"type": "file", "file_id": known_as}}),
    ]


def test_pages_are_images_in_the_place_of_the_part(gateway: scripted.Gateway) -> None:
    with uploaded(gateway, FILE) as known_as:
        for path, body in every_way(FILE, known_as):
            answer = gateway.ask("POST", path, body)
            assert answer.status == 200, answer.body
    [prompt, *others] = [request.token_ids for request in gateway.worker.requests]
    assert others == [prompt] * len(others)
    hashes = {tuple(item.content_hash for item in request.media) for request in gateway.worker.requests}
    [(first, second, image)] = hashes
    assert len({first, second, image}) == 3
    spans = [item.spans[0] for item in gateway.worker.requests[-1].media]
    text = gateway.tokenizer.encode_text("and")
    assert prompt[spans[0].start - 1 - len(text) : spans[0].start - 1] == text
    assert spans[1].start - spans[0].start - spans[0].length == 2  # only the marks around images
    assert prompt[spans[2].start - 1 - len(text) : spans[2].start - 1] == text


@table("name", pdfs.BEFORE)
def test_bytes_before_the_header_do_not_matter_in_any_api(name: str, gateway: scripted.Gateway) -> None:
    content = pdfs.BEFORE[name] + FILE
    with uploaded(gateway, content) as known_as:
        for path, body in every_way(content, known_as):
            answer = gateway.ask("POST", path, body)
            assert answer.status == 200, answer.body
            assert len(gateway.worker.requests[-1].media) == 3


def test_fetched_pdfs_are_recognised_in_the_same_way(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(pdfs.BEFORE["a byte order mark"] + FILE)
    (tmp_path / "b.pdf").write_bytes(b"<html>Not found")
    with scripted.running(tiny_qwen3_vl, GatewayConfig(fetch=FetchConfig(local_root=tmp_path))) as gateway:
        gateway.answer_two_tokens()
        for name, status in (("a.pdf", 200), ("b.pdf", 400)):
            url = f"file://{tmp_path}/{name}"
            for path, body in (
                chat({"type": "image_url", "image_url": {"url": url}}),
                response({"type": "input_file", "file_url": url}),
                message({"type": "document", "source": {"type": "url", "url": url}}),
            ):
                answer = gateway.ask("POST", path, body)
                assert answer.status == status, answer.body
                assert status == 200 or b"sent as a PDF, but it looks like HTML" in answer.body


def test_upload_that_is_called_a_pdf_and_is_none_is_refused_as_such(gateway: scripted.Gateway) -> None:
    error = gateway.ask("POST", "/v1/files", form(b"A text"), **FORM).json["error"]
    assert error["param"] == "file"
    assert "sent as a PDF" in error["message"]


def test_usage_and_counts_have_the_pages(gateway: scripted.Gateway) -> None:
    path, body = chat({"type": "file", "file": {"file_data": URL}})
    details = gateway.ask("POST", path, body).json["usage"]["prompt_tokens_details"]
    assert [(image["width"], image["height"]) for image in details["images"]] == [(384, 192), (384, 192), (64, 64)]
    tokens = gateway.ask("POST", "/tokenize", {"messages": body["messages"]}).json["tokens"]
    assert tokens == gateway.worker.requests[-1].token_ids


@table("name", pdfs.BROKEN)
def test_broken_pdf_is_refused_by_name(name: str, gateway: scripted.Gateway) -> None:
    encoded, beginning = pdfs.BROKEN[name]
    url = f"data:application/pdf;base64,{base64.b64encode(encoded).decode()}"
    path, body = chat({"type": "file", "file": {"file_data": url}})
    answer = gateway.ask("POST", path, body)
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, "messages[0].content[1].file.file_data")
    assert error["message"].startswith(beginning)
    path, body = response({"type": "input_file", "file_data": url})
    assert gateway.ask("POST", path, body).json["error"]["param"] == "input[0].content[1].file_data"


def test_letters_that_no_font_has_are_refused_or_omitted_as_the_operator_wants(
    gateway: scripted.Gateway, tiny_qwen3_vl: Path
) -> None:
    def asked(content: bytes, of: scripted.Gateway) -> scripted.Answer:
        url = f"data:application/pdf;base64,{base64.b64encode(content).decode()}"
        return of.ask("POST", *chat({"type": "file", "file": {"file_data": url}}))

    unknown, cyrillic = (pdf_texts.page(pdf_texts.simple(text)) for text in ("\ue000A", "Дата"))
    error = asked(unknown, gateway).json["error"]
    assert error["message"].startswith("Page 1 of the PDF cannot be drawn: the font Helvetica is not in the file")
    assert (error["code"], error["param"]) == ("invalid_image", "messages[0].content[1].file.file_data")
    assert asked(cyrillic, gateway).status == 200
    known_as = gateway.worker.requests[-1].media[0].content_hash
    with scripted.running(tiny_qwen3_vl, GatewayConfig(pdf_missing_fonts="omit")) as other:
        other.answer_two_tokens()
        assert asked(unknown, other).status == asked(cyrillic, other).status == 200
        # What draws a page is a part of its identity.
        assert other.worker.requests[-1].media[0].content_hash != known_as


def test_document_of_text_is_text(gateway: scripted.Gateway) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "A long text"}
    path, body = message({"type": "document", "source": source})
    assert gateway.ask("POST", path, body).status == 200
    assert "A long text" in gateway.tokenizer.decode(gateway.worker.requests[-1].token_ids)
    assert len(gateway.worker.requests[-1].media) == 1


def test_workers_that_take_chats_take_no_pdfs() -> None:
    parts: Any = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    before = Chat([{"role": "user", "content": parts}, {"role": "assistant", "content": "No."}], 0, [], True, {})
    paged = before.with_pages([2, 1])
    assert [part["type"] for part in paged.messages[0]["content"]] == ["image", "image", "text", "image"]
    assert [part["type"] for part in before.messages[0]["content"]] == ["image", "text", "image"]
    refusal = why_not_as_chat(None, paged, [])  # type: ignore[arg-type]
    assert isinstance(refusal, UnsupportedParameter)
