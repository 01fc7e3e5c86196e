"""What the workers answer: when a request was in their hands. Any gateway carries it back as the answer's text."""

import json
import re
import time
from pathlib import Path

RECEIPT = re.compile(r"t=(\d+) n=(\d+)")
RECEIPT_TOKENS = 64
"""Requests for at most so many tokens get the receipt alone, in one delta."""

STEP_SECONDS = 0.01
"""Requests for more get a token in every step of so long, as an engine would send them."""

SPACE = "Ġ"
"""The space, as byte-level tokenizers write it."""


class Receipts:
    """Receipts as token ids of the model in *folder*, whose tokenizer has one for every byte."""

    def __init__(self, folder: Path) -> None:
        vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        self._ids = {character: vocabulary[character] for character in "0123456789tn="} | {" ": vocabulary[SPACE]}

    def ids(self, received_ns: int, num_bytes: int) -> list[int]:
        """Return the text `t=... n=...`: CLOCK_MONOTONIC at receipt, and the bytes of message and pixels."""
        return [self._ids[character] for character in f"t={received_ns} n={num_bytes}"]

    def streamed(self, received_ns: int, num_bytes: int, num_tokens: int) -> list[int]:
        """Return *num_tokens* ids that begin with the receipt."""
        receipt = [*self.ids(received_ns, num_bytes), self._ids[" "]]
        return [*receipt, *([self._ids["="]] * num_tokens)][:num_tokens]


def now_ns() -> int:
    """Return the machine's monotonic clock, which all its processes share."""
    return time.monotonic_ns()
