"""Send the same requests to two commits of Saccade, and compare the answers: a change of shape changes none.

    python -m benchmarks.same_answers OTHER_TREE [--requests 200] [--out benchmarks/results/same-answers.md]

OTHER_TREE is a checkout of the other commit (`git worktree add`). Both serve the bundled model in float32 by
torch_sdpa. Requests go one by one: text and images, several samples, seeds, stops, log probabilities, penalties,
biases, allowed ids. Answers must be equal to the byte, but for ids, times and names of systems. The exit status is 1
where one differs.
"""

import argparse
import contextlib
import io
import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.measured import ROOT, commit, end_with_what_was_started, free_ports, machine, png_url

FLAGS = ("--dtype", "float32", "--attention-backend", "torch_sdpa", "--threads", "1", "--no-summary")
READY_SECONDS = 120.0
IGNORED = frozenset({"id", "created", "system_fingerprint"})
QUESTIONS = ("What does it say?", "What colour is the text?", "What shape is it?", "Tell a short story.")


def image_part(draw: random.Random) -> dict[str, Any]:
    """Return an image part with an image of random colours and size."""
    size = (draw.choice((64, 96, 160)), draw.choice((64, 96, 128)))
    image = Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1]))
    encoded = io.BytesIO()
    image.save(encoded, "PNG")
    return {"type": "image_url", "image_url": {"url": png_url(encoded.getvalue())}}


def bodies(model: str, number: int) -> Iterator[dict[str, Any]]:
    """Yield the requests, the same in every run."""
    draw = random.Random(0)
    extras: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 0.9, "seed": 7, "n": 3},
        {"temperature": 0, "logprobs": True, "top_logprobs": 5},
        {"temperature": 1.2, "seed": 3, "top_p": 0.8, "top_k": 20},
        {"temperature": 0, "stop": ["e", "a"]},
        {"temperature": 0.7, "seed": 1, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"temperature": 0, "repetition_penalty": 1.3, "min_tokens": 5},
        {"temperature": 1.0, "seed": 11, "allowed_token_ids": list(range(20, 200))},
        {"temperature": 0, "logit_bias": {"40": 5.0}, "prompt_logprobs": 2},
    )
    for index in range(number):
        images = [image_part(draw) for _ in range(draw.choice((0, 1, 1, 2)))]
        content = [*images, {"type": "text", "text": draw.choice(QUESTIONS)}]
        yield {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": draw.choice((4, 16, 40)),
            **extras[index % len(extras)],
        }


@contextlib.contextmanager
def served(tree: Path) -> Iterator[str]:
    """Serve the bundled model by the sources of *tree*; yield the server's root."""
    (port,) = free_ports(1)
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "saccade.cli.main", "serve", "--port", str(port), *FLAGS]
    process = subprocess.Popen(command, env=environment, cwd=tree, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/ready", timeout=5):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"{tree} does not serve")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def answers(tree: Path, number: int) -> list[Any]:
    """Return what *tree* answers to each request."""
    with served(tree) as url:
        with urllib.request.urlopen(f"{url}/v1/models") as response:
            model = json.load(response)["data"][0]["id"]
        return [_ask(url, body) for body in bodies(model, number)]


def _ask(url: str, body: dict[str, Any]) -> Any:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return {key: value for key, value in json.load(response).items() if key not in IGNORED}
    except urllib.error.HTTPError as error:
        return {"status": error.code, "body": json.load(error)}


def main() -> int:
    """Ask both, compare, write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/same-answers.md")
    options = parser.parse_args()
    end_with_what_was_started()
    ours, theirs = answers(ROOT, options.requests), answers(options.other.absolute(), options.requests)
    differing = [index for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)) if mine != other]
    refused = sum("status" in answer for answer in ours)
    describe = ["git", "-C", str(options.other), "describe", "--always", "--dirty"]
    other_commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    lines = [
        "# The same answers",
        "",
        f"- machine: {machine()}",
        f"- commits: {commit()} and {other_commit}",
        f"- command: `python -m benchmarks.same_answers OTHER_TREE --requests {options.requests}`",
        "",
        f"{options.requests} requests to each commit; {len(differing)} answers differ"
        + (
            f": numbers {differing[:20]}."
            if differing
            else f". {refused} of them are refusals, the same on both sides."
        ),
    ]
    options.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    for index in differing[:3]:
        print(json.dumps(ours[index])[:600], json.dumps(theirs[index])[:600], sep="\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
