"""What a streamed token costs from the worker's delta to the event: this tree's code and another's, in turn.

    python -m benchmarks.streamed_tokens --before FOLDER [--repeats 8]

FOLDER is a checkout of another commit; only its `src` is used. Each side is a process of its own, and they alternate.
Prints the microseconds of processor time a token of plain text and of reasoning, and the bytes of their events.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from benchmarks.gateway.model_folder import RECIPES, write_model
from benchmarks.measured import ROOT
from saccade.gateway.apis.chat.writer import ChatCompletionEvents
from saccade.gateway.chat import Chat
from saccade.gateway.chat_request import ChatRequest
from saccade.gateway.output.answer import Answer
from saccade.gateway.output.choice import choices_of
from saccade.gateway.served_models.served_model import ServedModel
from saccade.models.files import read_model_files
from saccade.protocol.output import TokenDelta

FAMILY = "thinking"
NUM_TOKENS = 2000
NUM_ROUNDS = 25


def main() -> None:
    """Measure both trees in turn, or this process's own with --one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the folder of the other tree")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--one", action="store_true", help="measure this process only, and print JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure()))
        return
    trees = {"before": options.before, "now": ROOT}
    rows: dict[str, list[dict[str, float]]] = {side: [] for side in trees}
    for repeat in range(options.repeats):
        for side in trees if repeat % 2 == 0 else reversed(trees):
            rows[side].append(child(trees[side]))
    for name in rows["now"][0]:
        before, now = ([row[name] for row in rows[side]] for side in ("before", "now"))
        ratio = statistics.median(after / first for first, after in zip(before, now, strict=True))
        print(
            name, *("  ".join(f"{value:g}" for value in values) for values in (before, now)), f"{ratio:.3f}x", sep="\n"
        )


def child(tree: Path) -> dict[str, float]:
    """Return the figures of *tree* in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "benchmarks.streamed_tokens", "--one"]
    printed = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=True).stdout
    figures: dict[str, float] = json.loads(printed)
    return figures


def measure() -> dict[str, float]:
    """Return the microseconds and bytes of a token of plain text and of reasoning."""
    recipe = RECIPES["qwen3_vl"]
    RECIPES[FAMILY] = replace(recipe, specials=(*recipe.specials, "<think>", "</think>"))
    with tempfile.TemporaryDirectory() as folder:
        model = ServedModel.from_files("m", read_model_files(write_model(Path(folder), FAMILY)), 32768)
    text = model.tokenizer.encode_text("The quick brown fox jumps over the lazy dog. " * NUM_TOKENS)[:NUM_TOKENS]
    start = model.tokenizer.token_id("<think>")
    figures: dict[str, float] = {}
    for name, first in (("plain text", text[0]), ("reasoning", start)):
        times, num_bytes = [], 0
        for _ in range(NUM_ROUNDS):
            choices = choices_of(ChatRequest(messages=[]), Chat([], 0, [], True, {}), model)
            answer = SimpleNamespace(
                id="chatcmpl-" + 32 * "0", created=1_700_000_000, served=model, choices=choices,
                request=ChatRequest(messages=[], stream=True), prompt_token_ids=[],
            )  # fmt: skip
            choice, events = choices[0], ChatCompletionEvents(cast(Answer, answer))
            events.take_chunk(choice.take_delta(TokenDelta("r", [text[0] if first is None else first])))
            deltas = [TokenDelta("r", [token_id]) for token_id in text]
            num_bytes = 0
            began = time.process_time()
            for delta in deltas:
                num_bytes += len(events.take_chunk(choice.take_delta(delta)))
            times.append(time.process_time() - began)
        figures[f"{name}, microseconds"] = round(min(times) / NUM_TOKENS * 1e6, 3)
        figures[f"{name}, bytes of an event"] = num_bytes / NUM_TOKENS
    return figures


if __name__ == "__main__":
    main()
