"""Measure an interactive client's time to the first token, alone and beside a batch, in turn.

    python -m benchmarks.reliability.beside_batch [--pairs 5] [--requests 40] [--state postgresql://...]

A gateway with a database, and a worker of the bundled model. The client asks about one new image after the other. In
the second half of each pair a batch about other images is open the whole time, and is cancelled afterwards.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import openai

from benchmarks.fleet.running import NotMeasured, gateway, workers
from benchmarks.measured import end_with_what_was_started
from benchmarks.reliability.killed_batch import CHATS, ENDED, POLL_SECONDS, Line, lines_about
from benchmarks.reliability.processes import provenance
from saccade.cli.bundled import bundled

BATCH_LINES = 1500
"""More than are answered while the interactive client asks, so that the batch is open the whole time."""


@dataclass(frozen=True)
class Pair:
    """Seconds to each first token, alone and beside a batch, and how many lines of the batch were answered."""

    alone: Sequence[float]
    beside: Sequence[float]
    answered: int

    def row(self, number: int) -> str:
        """Return the pair as a row of a Markdown table: medians, their ratio, and the slowest of each."""
        alone, beside = statistics.median(self.alone), statistics.median(self.beside)
        figures = (alone, beside, max(self.alone), max(self.beside))
        first, second, third, fourth = (f"{1000 * seconds:.1f}" for seconds in figures)
        return f"| {number} | {first} | {second} | {beside / alone:.2f} | {third} | {fourth} | {self.answered} |"


def first_token_seconds(client: openai.OpenAI, lines: Sequence[Line]) -> list[float]:
    """Ask for each of *lines*, one after the other, and return the seconds until a first token came."""
    seconds = []
    for line in lines:
        body = msgspec.json.decode(line.text)["body"]
        begin = time.monotonic()
        with client.chat.completions.create(**body, stream=True) as stream:
            first = next(time.monotonic() for chunk in stream if chunk.choices and chunk.choices[0].delta.content)
            for _ in stream:
                pass
        seconds.append(first - begin)
    return seconds


def measure_pair(client: openai.OpenAI, lines: Iterator[Line], num_requests: int) -> Pair:
    """Ask *num_requests* times alone and as often beside a batch. Raises NotMeasured if the batch ends before."""

    def take(number: int) -> list[Line]:
        return [next(lines) for _ in range(number)]

    alone = first_token_seconds(client, take(num_requests))
    content = b"\n".join(line.text for line in take(BATCH_LINES))
    file = client.files.create(file=("lines.jsonl", content), purpose="batch").id
    batch_id = client.batches.create(input_file_id=file, endpoint=CHATS, completion_window="24h").id
    while not (before := answered(client, batch_id)):
        time.sleep(POLL_SECONDS)
    beside = first_token_seconds(client, take(num_requests))
    after = answered(client, batch_id)
    if client.batches.retrieve(batch_id).status != "in_progress":
        raise NotMeasured("the batch ended while the interactive client asked")
    client.batches.cancel(batch_id)
    while client.batches.retrieve(batch_id).status not in ENDED:
        time.sleep(POLL_SECONDS)
    return Pair(alone, beside, after - before)


def answered(client: openai.OpenAI, batch_id: str) -> int:
    """Return how many lines of a batch have their answers."""
    counts = client.batches.retrieve(batch_id).request_counts
    return counts.completed if counts else 0


def main() -> None:
    """Measure the pairs, and print their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--state", default="", help="a URL of PostgreSQL; by default SQLite")
    arguments = parser.parse_args()
    end_with_what_was_started()
    number = arguments.pairs * (2 * arguments.requests + BATCH_LINES) + 1
    lines = iter(lines_about(sorted(bundled("images").glob("texts/*.png")), number))
    with tempfile.TemporaryDirectory() as name, workers(bundled("model"), 1, Path(name)) as urls:
        folder = Path(name)
        flags = ("--state", arguments.state or str(folder / "state"), "--state-key-file", str(folder / "key"))
        with gateway(urls, "auto", folder / "gateway.log", flags) as running:
            client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
            # The first answer also pays for what is loaded once.
            first_token_seconds(client, [next(lines)])
            pairs = [measure_pair(client, lines, arguments.requests) for _ in range(arguments.pairs)]
    print(
        "\n".join([*provenance(), f"- {arguments.requests} requests a half, medians and slowest in milliseconds", ""])
    )
    print("| pair | alone | beside a batch | ratio | slowest alone | slowest beside | lines of the batch answered |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(pair.row(number) for number, pair in enumerate(pairs, 1)))


if __name__ == "__main__":
    main()
