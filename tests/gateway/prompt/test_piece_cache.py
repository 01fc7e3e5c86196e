"""Parts of long prompts are encoded once for each tenant."""

import json
from functools import partial
from pathlib import Path

import pytest
from tables import table

from saccade.errors import InvalidValue
from saccade.gateway.admission import Admission
from saccade.gateway.apis.chat.reader import parse_chat
from saccade.gateway.prompt.piece_cache import PIECE_BYTES, PieceCache
from saccade.gateway.prompt.prompt_builder import PromptBuilder
from saccade.gateway.served_models.served_model import ServedModel
from saccade.gateway.work_threads import WorkThreads
from saccade.media.header import MediaLimits
from saccade.models.files import read_model_files
from saccade.telemetry import Metrics


class Encoder:
    """Encodes a text to the codes of its characters, and notes it."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.texts.append(text)
        if "!" in text:
            raise InvalidValue("no")
        return [ord(character) for character in text]


def test_known_texts_are_not_encoded_again() -> None:
    cache, encoder = PieceCache(1 << 20), Encoder()
    encode = partial(cache.encode, b"salt", b"tokenizer")
    assert encode(["ab", "c"], encoder) == [97, 98, 99]
    assert encode(["ab", "d", "c"], encoder) == [97, 98, 100, 99]
    assert encoder.texts == ["ab", "c", "d"]


@table(("salt", "tokenizer"), [(b"other", b"tokenizer"), (b"salt", b"other")])
def test_another_tenant_or_tokenizer_knows_nothing(salt: bytes, tokenizer: bytes) -> None:
    cache, encoder = PieceCache(1 << 20), Encoder()
    cache.encode(b"salt", b"tokenizer", ["ab"], encoder)
    cache.encode(salt, tokenizer, ["ab"], encoder)
    assert encoder.texts == ["ab", "ab"]


def test_texts_used_least_recently_are_forgotten() -> None:
    cache, encoder = PieceCache(2 * (PIECE_BYTES + 8)), Encoder()
    encode = partial(cache.encode, b"salt", b"tokenizer")
    for text in ("ab", "cd", "ab", "ef", "ab", "cd"):
        encode([text], encoder)
    assert encoder.texts == ["ab", "cd", "ef", "cd"]


def test_text_that_is_refused_is_not_kept() -> None:
    cache, encoder = PieceCache(1 << 20), Encoder()
    for _ in range(2):
        with pytest.raises(InvalidValue):
            cache.encode(b"salt", b"tokenizer", ["!"], encoder)
    assert encoder.texts == ["!", "!"]


async def test_next_turn_of_a_long_chat_encodes_what_is_new(tiny_qwen3_vl: Path) -> None:
    class Counting(PieceCache):
        num_encoded = 0

        def encode(self, salt, tokenizer, texts, encode):  # type: ignore[no-untyped-def]
            def counting(text: str) -> list[int]:
                self.num_encoded += len(text)
                return list(encode(text))

            return super().encode(salt, tokenizer, texts, counting)

    served = ServedModel.from_files("m", read_model_files(tiny_qwen3_vl), 1 << 20)
    cache, threads = Counting(1 << 20), WorkThreads(Admission(1))
    prompts = PromptBuilder(MediaLimits(), Metrics(), threads, pieces=cache)
    plain = PromptBuilder(MediaLimits(), Metrics(), threads, pieces=PieceCache(0))
    turns = [
        {"role": role, "content": f"{word} {number}, " * 300}
        for number in range(30)
        for role, word in (("user", "why"), ("assistant", "so"))
    ]
    last = {"role": "user", "content": "and now?"}
    spent = []
    for messages in ([*turns, last], [*turns, last, {"role": "assistant", "content": "yes"}, last]):
        request, _ = parse_chat(json.dumps({"model": "m", "messages": messages}).encode())
        before = cache.num_encoded
        chat = prompts.read_chat(served, request)
        built = await prompts.build_prompt(served, request, chat, salt=b"tenant")
        assert built == await plain.build_prompt(served, request, chat)
        spent.append(cache.num_encoded - before)
    threads.close()
    assert spent[0] > 100_000
    assert spent[1] < 10_000
