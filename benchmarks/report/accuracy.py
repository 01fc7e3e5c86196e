"""Accuracy of the bundled model over HTTP, beside transformers on the same images.

    python -m benchmarks.report.accuracy [--images 200] [--out FILE]

Each of four questions is asked about images that are drawn for this run and were never drawn in training. Saccade gets
PNG files over HTTP; transformers gets the pixels, in this process. Both compute in float32, greedily.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.measured import ROOT, end_with_what_was_started, write

sys.path += [str(ROOT / "tests"), *map(str, (ROOT / "tests" / "support").iterdir())]
sys.path.append(str(ROOT / "scripts" / "train_demo"))

from chats import openai_messages, reference_messages
from pictures import draw
from reference import Reference
from server import Server, serving

from saccade.cli.bundled import bundled

QUESTIONS = {
    "text": "the text",
    "colour": "the text's colour",
    "shape": "the shape",
    "shape_colour": "the shape's colour",
}
SEED = 9_000_000
CLIENTS = 8


def row(kind: str, server: Server, reference: Reference, num_images: int) -> dict[str, Any]:
    """Ask both sides a question of *kind* about each of *num_images*."""
    items = [draw(kind, SEED + number) for number in range(num_images)]
    client = server.client()

    def ask(item: Any) -> str:
        messages = openai_messages(item.image, item.question)
        answer = client.chat.completions.create(model=server.name, messages=messages, max_tokens=16, temperature=0)
        return answer.choices[0].message.content or ""

    with ThreadPoolExecutor(CLIENTS) as threads:
        ours = list(threads.map(ask, items))
    theirs = [reference.complete(*reference_messages(item.image, item.question)).text for item in items]
    answers = [item.answer for item in items]
    return {
        "question": QUESTIONS[kind],
        "images": num_images,
        "saccade": sum(map(str.__eq__, ours, answers)),
        "transformers": sum(map(str.__eq__, theirs, answers)),
        "equal": sum(map(str.__eq__, ours, theirs)),
    }


def main() -> None:
    """Measure each question, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200, help="for each question")
    parser.add_argument("--out", type=Path, help="a file for the rows, which are printed anyway")
    chosen = parser.parse_args()
    end_with_what_was_started()
    reference, rows = Reference(bundled("model")), []
    with serving() as server:
        for kind in QUESTIONS:
            rows.append(row(kind, server, reference, chosen.images))
            print(rows[-1], flush=True)
    if chosen.out is not None:
        write(chosen.out, "benchmarks.report.accuracy", rows)


if __name__ == "__main__":
    main()
