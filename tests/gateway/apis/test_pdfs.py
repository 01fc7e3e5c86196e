"""PDFs in every API: each becomes its pages as images, in the place of its part."""

import base64
from typing import Any

import pdfs
import scripted
from chats import data_url, random_image
from tables import table

from saccade.errors import UnsupportedParameter
from saccade.gateway.chat import Chat
from saccade.gateway.prompt.draft import why_not_as_chat

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


def uploaded(gateway: scripted.Gateway, content: bytes = FILE) -> str:
    form = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n--x\r\n'
    form += b'Content-Disposition: form-data; name="file"; filename="a.pdf"\r\n\r\n' + content + b"\r\n--x--\r\n"
    answer = gateway.ask("POST", "/v1/files", form, **{"Content-Type": "multipart/form-data; boundary=x"})
    return str(answer.json["id"])


def test_pages_are_images_in_the_place_of_the_part(gateway: scripted.Gateway) -> None:
    known_as = uploaded(gateway)
    document = {"type": "base64", "media_type": "application/pdf", "data": DATA}
    asked = [
        chat({"type": "file", "file": {"file_data": URL, "filename": "a.pdf"}}),
        chat({"type": "file", "file": {"file_id": known_as}}),
        chat({"type": "image_url", "image_url": {"url": URL}}),
        response({"type": "input_file", "file_data": URL, "filename": "a.pdf"}),
        response({"type": "input_file", "file_id": known_as}),
        response({"type": "input_file", "file_url": URL}),
        message({"type": "document", "source": document, "title": "a"}),
        message({"type": "document", "source": {"type": "file", "file_id": known_as}}),
    ]
    gateway.worker.requests.clear()
    for path, body in asked:
        answer = gateway.ask("POST", path, body)
        assert answer.status == 200, answer.body
    gateway.ask("DELETE", f"/v1/files/{known_as}")
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
