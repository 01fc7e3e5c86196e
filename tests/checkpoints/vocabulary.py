"""Vocabularies trained on one short text, in the three shapes that the releases' tokenizers have."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "The quick brown fox jumps over the lazy dog. What is in this image? Describe the picture in detail. Compare the "
    "two images, please. What does it say? What colour is the text? def main(args): return sum(x ** 2 for x in y)\n"
    "You are a helpful assistant. user assistant system 0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZ !\"#$%&'()*+,-./:;<=>?@\n"
    "Héllo wörld, naïve café. 你好，世界！这张图片里有什么？ こんにちは 안녕하세요 \U0001f600\n"
)
BORDERS = (
    "你好abc中文mixed混合 text123456《书》，世界 CamelCaseHTTPServer iPhone ǅ STRASSE it's we'll I'LL don't they've DON'T "
    "a1b22c333d4444 1,000,000 3.14159 2024-01-01 e\u0301 A\u030a o\u0302\u0323 हिन्दी क्षमा x² (y) ?!\n\n\tz\r\nカタカナ テ  \n\nend.\n\n  \nx\n\ny\n\nz"
)
"""Where patterns that split text differ. Tokens that reach over a border show who splits there and who does not."""

WINDOW = 4
UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"


def write_json(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    """Write *content* as the releases do: indented, characters as they are."""
    (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False))


def added(content: str, special: bool = True, rstrip: bool = False) -> dict[str, Any]:
    """Return an added token's entry, as it stands in both tokenizer files."""
    flags = {"single_word": False, "lstrip": False, "rstrip": rstrip, "normalized": False}
    return {"content": content, **flags, "special": special}


def byte_level(pattern: str, vocab_size: int = 600, nfc: bool = True, over_borders: bool = False) -> Tokenizer:
    """Return a BPE over bytes whose text is split by *pattern*; *over_borders* if its tokens are to know no pattern."""
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_only])
    tokenizer.pre_tokenizer = bytes_only if over_borders else split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    text = BORDERS * 4 + CORPUS
    windows = [text[start : start + WINDOW] for start in range(len(text))]
    tokenizer.train_from_iterator(windows if over_borders else [CORPUS] * 4, trainer)
    tokenizer.pre_tokenizer = split
    return tokenizer


def byte_ranks(pattern: str, vocab_size: int = 1200) -> list[bytes]:
    """Return the tokens of a tiktoken file in the order of their ranks, every single byte first."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}
    vocabulary = byte_level(pattern, vocab_size, nfc=False, over_borders=True).get_vocab()
    tokens = [
        bytes(byte_of[character] for character in token) for token in sorted(vocabulary, key=vocabulary.__getitem__)
    ]
    return sorted(tokens, key=lambda token: (len(token) > 1, token if len(token) == 1 else b""))


def byte_fallback(vocab_size: int = 1200) -> dict[str, Any]:
    """Return a parsed tokenizer.json like Llama 2's: spaces as ▁, one before all text, unknown characters as bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    first = [UNKNOWN, BEGIN, END, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, special_tokens=first)
    spaces = [" " * count for count in (1, 3, 7, 15)]
    tokenizer.train_from_iterator([*re.findall(r"\S+|\n", CORPUS * 4), *spaces * 8], trainer)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN}:1 $B:1", special_tokens=[(BEGIN, 1)]
    )
    parsed: dict[str, Any] = json.loads(tokenizer.to_str())
    return parsed


def write_llama_like(folder: Path, tokens: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, int]:
    """Write the tokenizer files of byte_fallback() with added *tokens*; return the ids of all that are added."""
    parsed = byte_fallback()
    entries = [added(UNKNOWN), added(BEGIN), added(END)]
    numbered = dict(enumerate(entries)) | dict(enumerate(tokens, start=len(parsed["model"]["vocab"])))
    parsed["added_tokens"] = [{"id": number, **entry} for number, entry in numbered.items()]
    write_json(folder, "tokenizer.json", parsed)
    names = {"bos_token": BEGIN, "eos_token": END, "unk_token": UNKNOWN, "tokenizer_class": "LlamaTokenizer"}
    shared = {
        "add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False, "sp_model_kwargs": {},
        "use_default_system_prompt": False, "model_max_length": 4096, "padding_side": "left",
        "added_tokens_decoder": {str(number): entry for number, entry in numbered.items()},
    }  # fmt: skip
    write_json(folder, "tokenizer_config.json", {**shared, **names, **settings})
    return {entry["content"]: number for number, entry in numbered.items()}
