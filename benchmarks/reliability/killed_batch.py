"""Kill the gateway that works on a batch, again and again, and count the answers and how often each line was asked.

    python -m benchmarks.reliability.killed_batch [--lines 1000] [--kills 2] [--state postgresql://...] [--seed 1]

Two gateways over one database, and a worker of the bundled model. A killed gateway starts again at once; the batch
goes on at whichever has the lease after it has lapsed. Ends with an error if a line was lost, was answered twice, or
was asked more than once more for each kill.
"""

import argparse
import contextlib
import io
import json
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import openai
from blake3 import blake3
from PIL import Image

from benchmarks.fleet.running import NotMeasured, gateway, workers
from benchmarks.measured import MODEL, end_with_what_was_started, png_url
from benchmarks.reliability.processes import provenance
from saccade.cli.bundled import bundled
from saccade.gateway.apis.batches.store import LEASE_SECONDS

QUESTION = "Read the text."
CHATS = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
POLL_SECONDS = 0.05
BATCH_SECONDS = 3600.0


@dataclass(frozen=True)
class Line:
    """A request of the batch, and the hash by which gateways note it."""

    name: str
    text: bytes
    hash: str


@dataclass
class Outcome:
    """What came of a batch: how often each line was answered and asked, and how many were asked before each kill."""

    lines: Sequence[Line]
    status: str = ""
    answers: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    kills: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def violations(self) -> list[str]:
        """Return what must not be, in words."""
        most = 1 + len(self.kills)
        wrong = [f"the batch is {self.status}"] if self.status != "completed" else []
        wrong += [f"{line.name}: {n} answers" for line in self.lines if (n := self.answers[line.name]) != 1]
        wrong += [
            f"{line.name}: asked {n} times" for line in self.lines if not 1 <= (n := self.asked[line.hash]) <= most
        ]
        return wrong

    def report(self) -> list[str]:
        """Return the figures as lines of Markdown."""
        again = sum(self.asked.values()) - len(self.asked)
        return [
            f"- {len(self.lines)} lines, kill -9 after {' and '.join(map(str, self.kills))} of them were asked",
            f"- {len(self.answers)} lines answered, {sum(self.answers.values())} answers",
            f"- {again} lines asked again, a line at most {max(self.asked.values(), default=0)} times",
            f"- {self.seconds:.0f} s from the upload to the last answer",
        ]


def lines_about(images: Sequence[Path], number: int) -> list[Line]:
    """Return requests about *number* different images, which are made from *images*."""
    lines = []
    for index in range(number):
        image = Image.open(images[index % len(images)]).convert("RGB")
        image.putpixel((0, 0), (index % 256, index // 256, 0))
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        parts = [
            {"type": "image_url", "image_url": {"url": png_url(buffer.getvalue())}},
            {"type": "text", "text": QUESTION},
        ]
        body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 16})
        text = f'{{"custom_id": "{index}", "method": "POST", "url": "{CHATS}", "body": {body}}}'
        lines.append(Line(str(index), text.encode(), blake3(body.encode()).hexdigest(8)))
    return lines


class NotingGateway:
    """A gateway over the database at *location*, which notes in *notes* what it asks for. It can be killed."""

    def __init__(self, folder: Path, name: str, urls: Sequence[str], location: str, lease_seconds: int) -> None:
        self.notes = folder / f"{name}.asked"
        self._log = folder / f"{name}.log"
        self._urls = urls
        self._flags = ("--state", location, "--state-key-file", str(folder / "key"))
        words = ("-m", "benchmarks.reliability.noting_gateway", str(self.notes), str(lease_seconds))
        self._program = (sys.executable, *words)
        self._running = contextlib.ExitStack()
        self._pid = 0
        self.start()

    def start(self) -> None:
        """Start the gateway, and wait until it is ready."""
        started = gateway(self._urls, "auto", self._log, self._flags, program=self._program)
        running = self._running.enter_context(started)
        self._pid = running.pid
        self.client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)

    def kill(self) -> None:
        """End the gateway by kill -9."""
        os.kill(self._pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        """End the gateway, if it runs."""
        self.client.close()
        self._running.close()

    @property
    def num_asked(self) -> int:
        """How many requests it has asked for."""
        return sum(self.asked().values())

    def asked(self) -> Counter[str]:
        """Return how often it has asked for each request."""
        asked = Counter[str]()
        for line in self.notes.read_text().split() if self.notes.exists() else ():
            asked[line[1:]] += 1 if line[0] == "+" else -1
        return asked


@contextlib.contextmanager
def two_gateways(folder: Path, urls: Sequence[str], location: str, lease_seconds: int) -> Iterator[list[NotingGateway]]:
    """Run two gateways of one database until the block ends."""
    gateways: list[NotingGateway] = []
    try:
        for name in ("one", "two"):
            gateways.append(NotingGateway(folder, name, urls, location, lease_seconds))
        yield gateways
    finally:
        for one in gateways:
            one.stop()


def run_batch(gateways: Sequence[NotingGateway], lines: Sequence[Line], moments: Sequence[int]) -> Outcome:
    """Run *lines* as a batch. Kill the gateway that works on it once as many lines are asked as *moments* say.

    Raises NotMeasured if it does not end.
    """
    outcome, begin = Outcome(lines), time.monotonic()
    client = gateways[0].client
    file = client.files.create(file=("lines.jsonl", b"\n".join(line.text for line in lines)), purpose="batch").id
    batch_id = client.batches.create(input_file_id=file, endpoint=CHATS, completion_window="24h").id
    for moment in moments:
        before = [one.num_asked for one in gateways]
        while sum(one.num_asked for one in gateways) < moment:
            _wait(begin)
        grown = [one.num_asked - number for one, number in zip(gateways, before, strict=True)]
        working = gateways[grown.index(max(grown))]
        working.kill()
        outcome.kills.append(sum(one.num_asked for one in gateways))
        working.start()
    client = gateways[0].client
    while (batch := client.batches.retrieve(batch_id)).status not in ENDED:
        _wait(begin)
    outcome.status, outcome.seconds = batch.status, time.monotonic() - begin
    for number in (batch.output_file_id, batch.error_file_id):
        if number is not None:
            content = client.files.content(number).content
            outcome.answers.update(json.loads(line)["custom_id"] for line in content.splitlines())
    for one in gateways:
        outcome.asked.update(one.asked())
    return outcome


def _wait(begin: float) -> None:
    if time.monotonic() - begin > BATCH_SECONDS:
        raise NotMeasured("the batch does not end")
    time.sleep(POLL_SECONDS)


def main() -> None:
    """Run a batch whose gateways are killed, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--state", default="", help="a URL of PostgreSQL; by default SQLite")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    arguments = parser.parse_args()
    end_with_what_was_started()
    moments = sorted(random.Random(arguments.seed).sample(range(1, arguments.lines), arguments.kills))
    lines = lines_about(sorted(bundled("images").glob("texts/*.png")), arguments.lines)
    with tempfile.TemporaryDirectory() as name, workers(bundled("model"), 1, Path(name)) as urls:
        folder = Path(name)
        with two_gateways(folder, urls, arguments.state or str(folder / "state"), LEASE_SECONDS) as gateways:
            outcome = run_batch(gateways, lines, moments)
    print("\n".join([*provenance(), f"- seed: {arguments.seed}", *outcome.report()]))
    if wrong := outcome.violations():
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
