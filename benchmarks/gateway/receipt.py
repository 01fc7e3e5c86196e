"""What the workers answer: when a request was in their hands. Any gateway carries it back as the answer's text."""

import json
import re
import time
from pathlib import Path

RECEIPT = re.compile(r"t=(\d+) n=(\d+)")
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


def now_ns() -> int:
    """Return the machine's monotonic clock, which all its processes share."""
    return time.monotonic_ns()
