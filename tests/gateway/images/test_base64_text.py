"""Base64 as clients write it is decoded in each API; what is wrong with other text is said."""

import base64
from typing import Any

import pytest
import scripted
from images import encode, random_image
from tables import table

from saccade.errors import InvalidBase64
from saccade.gateway.images.base64_text import STEP, decode_base64

CONTENT = bytes(range(256)) * 3 + b"\xfb\xff\xfe"
ODD = CONTENT + b"!!"
PLAIN = base64.b64encode(ODD).decode()
URL_SAFE = base64.urlsafe_b64encode(ODD).decode()


@table(
    "text",
    [
        PLAIN, PLAIN.rstrip("="), URL_SAFE, URL_SAFE.rstrip("="), base64.encodebytes(ODD).decode(), f" {PLAIN}\r\n",
        "\t".join(PLAIN), PLAIN[:40] + URL_SAFE[40:], base64.encodebytes(ODD).decode().rstrip("=\n"), PLAIN[:-1],
    ],
)  # fmt: skip
def test_text_is_decoded_as_clients_write_it(text: str) -> None:
    assert decode_base64(text) == ODD


def test_long_text_is_cleaned_piece_by_piece() -> None:
    content = CONTENT * (2 * STEP // len(CONTENT))
    assert decode_base64(base64.encodebytes(content).decode()) == content
    assert decode_base64("") == b""


@table(
    "text, words",
    [
        ("%2B%2F", "other characters"), ("aGk=aGk=", "before its end"), ("aGk===", "before its end"), ("aGk\u00e9", "other characters"),
        ("aGkaa", "a character is missing"), ("aGk=,aGk=", "data:video/jpeg"),  ("a", "is missing"), ("?", "other characters"),
    ],
)  # fmt: skip
def test_what_stays_wrong_is_said(text: str, words: str) -> None:
    with pytest.raises(InvalidBase64, match=words):
        decode_base64(text)


PNG = base64.b64encode(encode(random_image(64, 48))).decode()
SPACED = "\n".join(PNG[at : at + 76] for at in range(0, len(PNG), 76)).rstrip("=")


def image(url: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def block(**source: str) -> dict[str, Any]:
    content = [{"type": "image", "source": {"type": "base64", **source}}]
    return {"max_tokens": 9, "messages": [{"role": "user", "content": content}]}


def item(url: str) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}


@table(
    "path, body",
    [
        ("/v1/chat/completions", image(f"data:image/png;base64,{SPACED}")),
        ("/v1/responses", item(f"data:image/png;base64,{SPACED}")),
        ("/v1/messages", block(media_type="image/png", data=SPACED)),
        ("/v1/messages", block(media_type="image/png", data=f"data:image/png;base64,{PNG}")),
        ("/v1/messages", block(media_type="image/png", data=f"DATA:image/jpeg;base64,{SPACED}")),
        ("/v1/messages", block(data=f"data:image/png;base64,{PNG}")),
    ],
)
def test_the_image_is_the_same(path: str, body: dict[str, Any], gateway: scripted.Gateway) -> None:
    hashes = []
    for asked, given in ((path, body), ("/v1/chat/completions", image(f"data:image/png;base64,{PNG}"))):
        gateway.answer_two_tokens()
        answer = gateway.ask("POST", asked, {"model": "tiny", **given})
        assert answer.status == 200, answer.body
        hashes.append([one.content_hash for one in gateway.worker.requests[-1].media])
    assert hashes[0] == hashes[1]
