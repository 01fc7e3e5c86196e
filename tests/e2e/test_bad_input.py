"""Bad input is a 4xx with a code and a sentence that names the field; the next request works. Contract 8."""

import base64
import io
import json
import struct
import urllib.error
import urllib.request
import zlib
from typing import Any

import attacks
import pytest
from chats import data_url, openai_messages, random_image
from server import Server
from tables import table


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds next to nothing."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def encoded(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def truncated() -> str:
    buffer = io.BytesIO()
    random_image(200, 200, 1).save(buffer, "JPEG")
    return encoded(buffer.getvalue()[: len(buffer.getvalue()) // 2])


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "MODEL", "messages": [{"role": "user", "content": content}], **fields}


def image(url: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]


NO_TOOL = {"type": "function", "function": {"name": "g"}}
URL_FIELD = "messages[0].content[0].image_url.url"
CASES: dict[str, tuple[dict[str, Any] | bytes, int, str, str | None]] = {
    "not JSON": (b"{nope", 400, "invalid_value", None),
    "wrong type": (chat(7), 400, "invalid_value", "messages[0].content"),
    "temperature out of range": (chat("hi", temperature=9), 400, "invalid_value", "temperature"),
    "unknown model": ({**chat("hi"), "model": "gpt-9"}, 404, "model_not_found", "model"),
    "no messages": ({"model": "MODEL", "messages": []}, 400, "invalid_value", "messages"),
    "a call of no tool": (
        chat("hi", tools=[{"type": "function", "function": {"name": "f"}}], tool_choice=NO_TOOL),
        *(400, "invalid_value", "tool_choice"),
    ),
    "a tool that cannot be strict": (
        chat("hi", tools=[{"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}]),
        *(400, "unsupported_parameter", "tools[0].function.parameters.not"),
    ),
    "no image": (chat(image(encoded(b"hello, I am a text"))), 400, "unsupported_image_format", URL_FIELD),
    "TIFF": (chat(image(encoded(b"II*\0" + bytes(64)))), 400, "unsupported_image_format", URL_FIELD),
    "truncated image": (chat(image(truncated())), 400, "invalid_image", URL_FIELD),
    "20000 x 20000 PNG": (chat(image(encoded(png_header(20000, 20000)))), 400, "image_too_large", URL_FIELD),
    "100 images": (chat(image(data_url(random_image(32, 32, 2))) * 100), 400, "too_many_images", "messages"),
    "base64 garbage": (chat(image("data:image/png;base64,@@@@")), 400, "invalid_base64", URL_FIELD),
    "http URL": (chat(image("http://example.com/cat.png")), 400, "invalid_image_url", URL_FIELD),
    "private URL": (chat(image("http://10.0.0.1:9/cat.png")), 400, "invalid_image_url", URL_FIELD),
    "file URL": (chat(image("file:///etc/passwd")), 400, "invalid_image_url", URL_FIELD),
    "prompt over the context": (chat("word " * 6000), 400, "context_length_exceeded", "messages"),
}


def post(server: Server, body: dict[str, Any] | bytes, key: str | None = None) -> tuple[int, dict[str, Any]]:
    raw = body if isinstance(body, bytes) else json.dumps(body).replace('"MODEL"', json.dumps("tiny")).encode()
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", raw, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@table(("body", "status", "code", "param"), CASES.values(), ids=CASES.keys())
def test_bad_request_is_refused_by_name_and_the_next_one_works(
    tiny_server: Server, body: dict[str, Any] | bytes, status: int, code: str, param: str | None
) -> None:
    answer = post(tiny_server, body, "one")
    error = answer[1]["error"]
    assert (answer[0], error["code"], error["param"]) == (status, code, param), error
    assert error["message"].endswith((".", "?"))
    good = {"model": "MODEL", "messages": openai_messages(random_image(64, 64, 3), "hi"), "max_tokens": 2}
    assert post(tiny_server, good, "two")[0] == 200


WORST = (
    *("jpeg exif", "jpeg exif directory", "jpeg photoshop", "jpeg tables", "jpeg 1000 scans", "png split"),
    *("png text bomb", "png 9000 x 9000", "gif 1000 comments", "gif small blocks", "webp 5000 x 5000 cut short"),
    *("bmp short rows", "bmp long moves", "bmp without runs", "bmp 16000 x 16000"),
    *("apng of 10 000 frames", "avif associations", "svg", "zeros"),
)


@pytest.mark.ci
def test_attacks_leave_the_engine_and_the_decode_processes_as_they_were(tiny_server: Server) -> None:  # F6
    before = {process.pid for process in tiny_server.tree()}
    for name in WORST:
        make, sound = attacks.CORPUS[name]
        status, body = post(tiny_server, chat(image(encoded(make())), max_tokens=1), "one")
        assert status == (200 if sound else 400), (name, body)
        if not sound:
            codes = ("invalid_image", "image_too_large", "unsupported_image_format")
            assert (body["error"]["code"] in codes, body["error"]["param"]) == (True, URL_FIELD), (name, body)
    good = {"model": "MODEL", "messages": openai_messages(random_image(64, 64, 3), "hi"), "max_tokens": 2}
    assert post(tiny_server, good, "two")[0] == 200
    assert {process.pid for process in tiny_server.tree()} == before


@pytest.mark.parametrize("key", [None, "three", "on", "one "])
def test_wrong_key(tiny_server: Server, key: str | None) -> None:
    status, body = post(tiny_server, chat("hi"), key)
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")


def test_no_slot_stays_in_use(tiny_server: Server) -> None:
    assert tiny_server.metric("saccade_slots_in_use") == 0
