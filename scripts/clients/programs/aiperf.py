"""aiperf: a short run of streamed chats with images."""

# /// script
# dependencies = ["aiperf==0.13.0"]
# ///

import json
import os
import subprocess
import sys
from pathlib import Path

from questions import CALLER, KEY
from results import expect, tell

NUM_REQUESTS = 6
FLAGS = {
    "model": CALLER.model,
    "url": CALLER.root,
    "api-key": KEY,
    "endpoint-type": "chat",
    "tokenizer": os.environ["CALLER_FOLDER"],
    "image-width-mean": 96,
    "image-height-mean": 64,
    "image-format": "png",
    "image-batch-size": 1,
    "synthetic-input-tokens-mean": 20,
    "output-tokens-mean": 8,
    "concurrency": 2,
    "request-count": NUM_REQUESTS,
    "workers-max": 1,
    "ui": "none",
}


def profile() -> None:
    """All requests are answered, and their tokens counted."""
    folder = Path(os.environ["WORK_FOLDER"]) / "aiperf"
    words = [word for name, value in FLAGS.items() for word in (f"--{name}", str(value))]
    program = Path(sys.executable).with_name("aiperf")
    subprocess.run(
        [program, "profile", *words, "--streaming", "--use-server-token-count", "--artifact-dir", folder],
        check=True,
        stdout=sys.stderr,
    )
    measured = json.loads((folder / "profile_export_aiperf.json").read_text())
    expect(measured["request_count"]["avg"], NUM_REQUESTS)
    expect(measured["error_summary"], [])
    expect(measured["time_to_first_token"]["avg"] > 0, True)
    expect(measured["output_token_count"]["avg"] > 0, True)


tell("aiperf", "aiperf", {"streamed chats with images": profile})
