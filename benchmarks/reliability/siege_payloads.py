"""The bytes that attackers of a siege send: heads, chats, maximal bodies and bombs."""

import base64
import itertools
import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attacks
import encoded
import images
import pdfs

PATH = "/v1/chat/completions"
WRONG_KEY = "wrong key"
MAX_BODY_BYTES = 16 << 20
"""Of the besieged server: `--max-body-bytes`."""

LARGE_BYTES = 8 << 20
ENCODED_MIB = 1024
NUM_EMPTY_MESSAGES = 100_000
TOO_MANY_IMAGES = 100
NUM_SIBLINGS = 15
READER_TOKENS, READER_SAMPLES = 600, 4
"""With 20 log probabilities a token, 3 MB of answer: socket buffers of loopback hold 2.3 MB."""

MOST_SAMPLES = 128
STOPS = ["a" * 1023 + chr(98 + number) for number in range(16)]
MAX_JSON_BYTES = 12 << 20
"""Of a body beside its images."""

FILE_BYTES = 8 << 20
FORM_TYPE = "multipart/form-data; boundary=B"
MAX_CONNECTIONS = 512
"""Of the besieged server: `--max-connections`."""

SLOW_FILLS = 4000
"""Of a page of a PDF, with a blend mode that PDFium draws slowly: some seconds."""

BOMBS = (
    *("jpeg 1000 scans", "jpeg tables", "jpeg tiny segments"),
    *("png 200 000 chunks", "png split", "png profiles", "png text bomb", "png 9000 x 9000"),
    *("apng of 10 000 frames", "gif of 10 000 frames", "gif small blocks", "gif 5000 x 5000 of one tile"),
    *("webp 1 000 000 chunks", "webp 5000 x 5000 cut short", "avif associations"),
)
"""Names of tests/support/media/attacks.py."""


def data_url(encoded: bytes, kind: str = "png", what: str = "image") -> str:
    """Return *encoded* as a data: URL."""
    return f"data:{what}/{kind};base64,{base64.b64encode(encoded).decode()}"


def image_parts(*urls: str) -> list[dict[str, Any]]:
    """Return the content of a message that names images and asks about them."""
    named = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*named, {"type": "text", "text": "What is it?"}]


def chat(model: str, content: object, **fields: object) -> bytes:
    """Return the body of a chat of one message."""
    return json.dumps({"model": model, "messages": [{"role": "user", "content": content}], **fields}).encode()


def head(
    body_bytes: int | None,
    key: str | None = None,
    path: str = PATH,
    content_type: str = "application/json",
    port: int = 80,
    coding: str | None = None,
    method: str = "POST",
    closes: bool = True,
) -> bytes:
    """Return a request's head; None announces a chunked body. *coding* is its Content-Encoding."""
    length = "Transfer-Encoding: chunked" if body_bytes is None else f"Content-Length: {body_bytes}"
    lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Content-Type: {content_type}"]
    lines += ["Connection: close"] if closes else []
    lines += [f"Authorization: Bearer {key}"] if key else []
    lines += [f"Content-Encoding: {coding}"] if coding else []
    return "\r\n".join([*lines, length, "", ""]).encode()


def endless_head() -> Iterator[bytes]:
    """Yield a head byte by byte, with a header that never ends."""
    for byte in itertools.chain(
        f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Padding: ".encode(), itertools.repeat(97)
    ):
        yield bytes([byte])


def huge_png() -> bytes:
    """Return a sound grey PNG of 20000 x 20000 in 388 KB."""
    compressor = zlib.compressobj(9)
    row = bytes(1 + 20_000)
    data = b"".join(compressor.compress(row) for _ in range(20_000)) + compressor.flush()
    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 0, 0, 0, 0)
    return images.PNG_SIGNATURE + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    )


def small_png() -> bytes:
    """Return an image that costs nothing."""
    return images.encode(images.random_image(32, 32))


def padded_jpeg(nbytes: int) -> bytes:
    """Return a tiny JPEG with megabytes behind its end."""
    tiny = images.encode(images.random_image(64, 48), "JPEG")
    return tiny + bytes(nbytes - len(tiny))


def random_png(nbytes: int) -> bytes:
    """Return an image of about *nbytes*, which no codec makes smaller."""
    return images.encode(images.random_image(1600, nbytes // (3 * 1600)))


def form(content: bytes) -> bytes:
    """Return the body of an upload of an image; FORM_TYPE is its type."""
    part = b"--B\r\nContent-Disposition: form-data; name="
    head = part + b'"purpose"\r\n\r\nvision\r\n' + part + b'"file"; filename="a.png"\r\n\r\n'
    return head + content + b"\r\n--B--\r\n"


def detokenize(model: str) -> bytes:
    """Return a request for the text of as many token ids as a body of 2 MiB has."""
    return json.dumps({"model": model, "tokens": [300] * ((2 << 20) // 5)}).encode()


def completion(model: str, prompts: Sequence[str], **fields: object) -> bytes:
    """Return the body of a completion of several prompts."""
    return json.dumps({"model": model, "prompt": prompts, **fields}).encode()


def response(model: str, image_url: str, **fields: object) -> bytes:
    """Return the body of a Responses request about an image."""
    content = [{"type": "input_image", "image_url": image_url}, {"type": "input_text", "text": "What is it?"}]
    spoken = [{"role": "user", "content": content}]
    return json.dumps({"model": model, "input": spoken, "max_output_tokens": 1, "store": True, **fields}).encode()


def schema(number: int) -> dict[str, object]:
    """Return the fields that ask for JSON of a schema; another number is another schema."""
    properties = {f"field_{number}_{each}": {"type": "string", "maxLength": 100} for each in range(50)}
    described = {"type": "object", "properties": properties, "required": list(properties)}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": described}}}


def filled_pdf(num_fills: int) -> bytes:
    """Return a PDF of a page that is filled so many times with the blend mode Luminosity."""
    content = zlib.compress(b"/G gs " + b"0.1 0.2 0.3 rg 0 0 595 842 re f " * num_fills, 9)
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 595 842]/Contents 3 0 R/Resources 4 0 R>>"
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Count 1/Kids[5 0 R]>>"]
    objects += [pdfs.stream(content, b"/Filter/FlateDecode"), b"<</ExtGState<</G<</ca 0.5/BM/Luminosity>>>>>>", page]
    return pdfs.written(objects)


def without_strings(model: str, nbytes: int) -> dict[str, tuple[str, bytes]]:
    """Return bodies of *nbytes* that are full of empty objects, lists and numbers, each with its path."""
    named = b'{"model":' + json.dumps(model).encode()
    message = named + b',"max_tokens":1,"messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}'
    use = b',{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":{"a":['
    call = (
        b',{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"{\\"a\\":['
    )
    parts = {
        "responses, objects": ("/v1/responses", named + b',"input":[{}', b",{}", b"]}"),
        "completions, lists": ("/v1/completions", named + b',"prompt":["a"', b",[]", b"]}"),
        "completions, numbers": ("/v1/completions", named + b',"prompt":["a"', b",0", b"]}"),
        "messages, a call's lists": ("/v1/messages", message + use + b"0", b",[]", b"]}}]}]}"),
        "chat, a call's arguments": (PATH, message + call + b"0", b",[]", b']}"}}]}]}'),
        "chat, metadata": (PATH, message + b'],"metadata":{"a":[0', b",0", b"]}}"),
        "chat, logit_bias": (PATH, message + b'],"logit_bias":{"1":[0', b",{}", b"]}}"),
    }
    return {
        name: (path, start + item * ((nbytes - len(start) - len(end)) // len(item)) + end)
        for name, (path, start, item, end) in parts.items()
    }


def bombs(model: str) -> dict[str, bytes]:
    """Return chats with one bomb each."""
    encoded = {name: attacks.CORPUS[name][0]() for name in BOMBS}
    encoded["png 20000 x 20000"] = huge_png()
    encoded["png 7000 x 7000"] = images.bomb(7000, 7000)
    encoded["jpeg with 4 MiB behind its end"] = padded_jpeg(4 << 20)
    return {name: chat(model, image_parts(data_url(one)), max_tokens=1) for name, one in encoded.items()}


def encoded_bombs() -> dict[str, tuple[str, bytes]]:
    """Return small bodies that decode to a gibibyte or take long to decode, each with its coding."""
    whole = {coding: (coding, build(ENCODED_MIB)) for coding, build in encoded.BOMBS.items()}
    return (
        whole
        | {
            f"{coding}, almost the limit": (coding, build(MAX_BODY_BYTES >> 20))
            for coding, build in encoded.BOMBS.items()
        }
        | {
            "gzip, 1 MiB of empty blocks": ("gzip", encoded.empty_blocks(1 << 20)),
            "zstd, 1 MiB of empty frames": ("zstd", encoded.empty_frames(1 << 20)),
        }
    )


def _around(model: str, field: str, inside: bytes) -> bytes:
    body = chat(model, "hi", max_tokens=1)
    return body[:-1] + f', "{field}": '.encode() + inside + b"}"


def maximal(model: str) -> dict[str, bytes]:
    """Return the longest bodies of every kind."""
    keys = b",".join(b'"k%d":0' % number for number in range(LARGE_BYTES // 13))
    tool_calls = b"[" + b"[]," * (LARGE_BYTES // 3) + b"[]]"
    message = b'{"role":"assistant","content":"","tool_calls":' + tool_calls + b"}"
    empty = b",".join([b'{"role":"user","content":""}'] * NUM_EMPTY_MESSAGES)
    named = json.dumps(model).encode()
    return {
        "data: URL of the largest body": chat(
            model, image_parts(data_url(padded_jpeg((MAX_BODY_BYTES - 4096) // 4 * 3), "jpeg")), max_tokens=1
        ),
        "nested brackets": _around(model, "x", b"[" * (LARGE_BYTES // 2) + b"]" * (LARGE_BYTES // 2)),
        "flat brackets": _around(model, "x", tool_calls),
        "tool_calls": b'{"model":' + named + b',"messages":[' + message + b"]}",
        "unknown keys": chat(model, "hi", max_tokens=1)[:-1] + b"," + keys + b"}",
        "empty messages": b'{"model":' + named + b',"messages":[' + empty + b"]}",
        "1 MiB of text": chat(model, "word " * ((1 << 20) // 5), max_tokens=1),
    }


def refused(model: str) -> Mapping[str, Callable[[str | None, int], bytes]]:
    """Return whole requests that are refused, by what is wrong with them: functions of key and port."""
    good = chat(model, "hi", max_tokens=1)
    stranger = chat("gpt-9", "hi", max_tokens=1)
    crowd = chat(model, image_parts(*[data_url(small_png())] * TOO_MANY_IMAGES), max_tokens=1)
    return {
        "wrong model": lambda key, port: head(len(stranger), key, port=port) + stranger,
        "unknown route": lambda key, port: head(len(good), key, "/v1/nothing", port=port) + good,
        "bad JSON": lambda key, port: head(5, key, port=port) + b"{nope",
        "100 images": lambda key, port: head(len(crowd), key, port=port) + crowd,
        "wrong content type": lambda key, port: head(len(good), key, content_type="text/plain", port=port) + good,
        WRONG_KEY: lambda key, port: head(len(good), "wrong", port=port) + good,
    }
