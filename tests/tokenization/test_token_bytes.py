"""Decoders of tokenizer.json that are known, and those that are refused by name."""

from typing import Any

import pytest
from tables import table

from saccade.errors import StartupError
from saccade.tokenization.token_bytes import ByteFallback, ByteLevel, read_token_bytes

REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
FALLBACK, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
VOCAB = {"▁a": 0, "<0x0A>": 1, "<0xfF>": 2, "<0x0>": 3}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(parts)}


@pytest.mark.parametrize(
    ("decoder", "kind"),
    [
        ({"type": "ByteLevel", "use_regex": True}, ByteLevel),
        (sequence({"type": "ByteLevel"}), ByteLevel),
        (sequence(REPLACE, FALLBACK, FUSE, STRIP), ByteFallback),
        (sequence(REPLACE, FALLBACK, FUSE), ByteFallback),
    ],
)
def test_known_decoders(decoder: dict[str, Any], kind: type) -> None:
    assert isinstance(read_token_bytes(decoder, VOCAB), kind)


@table(
    ("decoder", "sentence"),
    [
        (None, "None"),
        ({"type": "Metaspace"}, "Metaspace"),
        ({"type": "WordPiece"}, "WordPiece"),
        (sequence(REPLACE, FALLBACK), "ByteFallback"),
        (sequence(REPLACE, FALLBACK, FUSE, STRIP | {"stop": 1}), "Strip"),
        (sequence(REPLACE | {"content": "_"}, FALLBACK, FUSE, STRIP), "Replace"),
    ],
)
def test_other_decoders_are_refused_by_name(decoder: dict[str, Any] | None, sentence: str) -> None:
    with pytest.raises(StartupError, match=f"{sentence}.*is not supported"):
        read_token_bytes(decoder, VOCAB)


@pytest.mark.parametrize(
    ("token", "meaning"),
    [("▁a▁", b" a "), ("<0x0A>", b"\n"), ("<0xfF>", b"\xff"), ("<0x0>", b"<0x0>"), ("é", "é".encode())],
)
def test_tokens_with_byte_fallback(token: str, meaning: bytes) -> None:
    assert read_token_bytes(sequence(REPLACE, FALLBACK, FUSE, STRIP), VOCAB).to_bytes(token) == meaning


@pytest.mark.parametrize(
    ("num_stripped", "pushed", "shown"),
    [
        (1, [b"  a"], [" a"]),
        (1, [b" ", b" ", b"a"], ["", " ", "a"]),
        (2, [b" ", b" ", b" a"], ["", "", " a"]),
        (0, [b" a"], [" a"]),
        (2, [b"a", b" b"], ["a", " b"]),
    ],
)
def test_leading_spaces_are_taken_once(num_stripped: int, pushed: list[bytes], shown: list[str]) -> None:
    stream = ByteFallback({}, num_stripped).stream(dict(enumerate(pushed)), continues=False)
    assert [stream.push_token(position) for position in range(len(pushed))] == shown


def test_rows_of_byte_tokens_are_held_until_they_end() -> None:
    row = {number: byte.encode("latin-1") for number, byte in enumerate("\xe4\xbd\xa0\xe4")}
    token_bytes = ByteFallback({f"<0x{value[0]:02X}>": number for number, value in row.items()} | {"<0xE4>": 0}, 1)
    pieces = {**row, 9: b"."}
    stream = token_bytes.stream(pieces, continues=False)
    assert [stream.push_token(number) for number in (0, 1, 2, 9)] == ["", "", "", "你."]
    assert [stream.push_token(number) for number in (0, 1, 2, 0, 9)] == ["", "", "", "", "\ufffd" * 4 + "."]
