"""A long prompt has the same ids in pieces as it has whole."""

import random
from collections.abc import Callable, Sequence

import pytest
from tables import table
from tokenizer_needs import NEEDS

from saccade.tokenization import tiktoken_model, tokenizer_json
from saccade.tokenization.tokenizer import Segment, Tokenizer

WORDS = ("hello", " world", "\n", "  ", " ", "\t", "1234", "é", "\u4f60\u597d", "<", "|im_end|", "▁x", "'s", "\u200d")


def prompt(tokenizer: Tokenizer, chance: random.Random) -> list[Segment]:
    specials = sorted(tokenizer.special_tokens)[:40]
    return [
        Segment(chance.choice(specials), is_special=True)
        if chance.random() < 0.3
        else Segment("".join(chance.choices(WORDS, k=chance.randrange(6))), is_special=False)
        for _ in range(chance.randrange(1, 40))
    ]


@table("name", NEEDS)
def test_pieces_have_the_ids_of_the_whole(
    name: str, tokenizer_of: Callable[[str], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, chance, num_texts = tokenizer_of(name), random.Random(name), 0

    def apart(texts: Sequence[str], encode: Callable[[str], list[int]]) -> list[int]:
        nonlocal num_texts
        num_texts += len(texts)
        return [token_id for text in texts for token_id in encode(text)]

    for number in range(300):
        for module in (tokenizer_json, tiktoken_model):
            monkeypatch.setattr(module, "PIECE_CHARACTERS", number % 9)
        segments = prompt(tokenizer, chance)
        assert tokenizer.encode(segments, apart) == tokenizer.encode(segments)
    assert num_texts > 600
