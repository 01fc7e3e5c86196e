"""The gate of exact routing, over real workers of tiny models: `python -m benchmarks.fleet`, from the repository.

For each --family: workers, then three gateways in turn over them, each beginning with empty caches. The first one
chooses by cost and must pass the gate; the second lets workers take turns; the keys of the third are not the workers'.
Rows go to --out as JSON and Markdown; rows of other families and parts that are there stay. Ends with 1 where anything
fails, or could not be measured.
"""

import argparse
import contextlib
import json
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fleet import gate, report
from benchmarks.fleet.load import chats, photos
from benchmarks.fleet.plan import Plan
from benchmarks.fleet.running import BROKEN, SACCADE, Gateway, NotMeasured, gateway, workers
from benchmarks.measured import ROOT, commit, end_with_what_was_started, machine

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "qwen2_vl", "phi3_v", "kimi_k25", "qwen3_5")
PARTS = {"gate": "auto", "round_robin": "round_robin", "broken": "auto"}
NUM_WORKERS = 4
CONTEXT_TOKENS = 2048
KV_CACHE_BYTES = 384 << 20
"""Of each worker: room for all prompts of a plan, so that nothing is evicted and the best possible rate is known."""

WORKER_FLAGS = (
    "--max-model-len", str(CONTEXT_TOKENS), "--kv-cache-memory-bytes", str(KV_CACHE_BYTES),
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One part over the workers at *urls*, with logs in *work*."""

    urls: Sequence[str]
    plan: Plan
    bodies: Sequence[dict[str, Any]]
    work: Path

    def part(self, name: str) -> dict[str, Any]:
        """Run a part, a key of PARTS, and return its row: figures, and why it failed, [] where it passed."""
        began = time.monotonic()
        try:
            with self._gateway(name) as running:
                outcome = gate.measure(running, self.plan, self.bodies)
                failures = self._judge(name, running, outcome)
        except NotMeasured as error:
            return {"part": name, "failures": [str(error)]}
        return {
            "part": name,
            "repeats": outcome.num_repeats,
            "rate": outcome.rate,
            "cached_rate": outcome.cached_rate,
            "best_rate": outcome.best_rate,
            "simulated_rate": self._simulated(name, outcome),
            "seconds": round(time.monotonic() - began, 1),
            "failures": failures,
        }

    @contextlib.contextmanager
    def _gateway(self, part: str) -> Iterator[Gateway]:
        log = self.work / f"{part}.log"
        with gateway(self.urls, PARTS[part], log, program=BROKEN if part == "broken" else SACCADE) as running:
            running.reset()
            yield running

    def _judge(self, part: str, running: Gateway, outcome: gate.Outcome) -> list[str]:
        if part == "gate":
            return gate.failures(outcome) + gate.overlap_failures(running, self.bodies[0], self.bodies[-1])
        if part == "round_robin":
            return gate.round_robin_failures(outcome, self.plan)
        return gate.broken_failures(outcome)

    def _simulated(self, part: str, outcome: gate.Outcome) -> float | None:
        if part != "round_robin":
            return None
        return self.plan.round_robin_rate(len(self.urls), outcome.best_rate, outcome.unseen_rate)


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=tuple(PARTS))
    parser.add_argument("--workers", type=int, default=NUM_WORKERS)
    parser.add_argument("--images", type=int, default=Plan.num_images)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "saccade-benchmark-fleet")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/fleet.json")
    return parser.parse_args()


def checkpoint(family: str, work: Path) -> Path:
    """Return the folder of a tiny model of *family*, written where it is not there."""
    folder = work / "models" / family
    if not (folder / "model.safetensors").exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers warns about its own deprecations at import
            from checkpoints import NETWORKS
            from torchvision_schemas import import_torchvision

            import_torchvision()  # before anything imports transformers, which would fail and remember it
            NETWORKS[family](folder)
    return folder


def main() -> int:
    """Run what was asked for, print every row as it comes, and write the results; return the exit code."""
    options = arguments()
    end_with_what_was_started()
    plan = Plan(num_images=options.images)
    # Where things lie on this machine is nobody's business.
    words = ["--family", *options.family, "--part", *options.part]
    command = shlex.join(["python", "-m", "benchmarks.fleet", *words])
    facts = {"machine": machine(), "commit": commit(), "command": command}
    has_failed = False
    for family in options.family:
        work = options.work / family
        work.mkdir(parents=True, exist_ok=True)
        bodies = chats(photos(options.work, plan), system=family != "phi3_v")
        folder = checkpoint(family, options.work)
        with workers(folder, options.workers, work, WORKER_FLAGS) as urls:
            for part in options.part:
                row = {
                    "family": family,
                    "workers": options.workers,
                    **Run(urls, plan, bodies, work).part(part),
                    **facts,
                }
                print(json.dumps(row), flush=True)
                report.add(options.out, row)
                has_failed = has_failed or bool(row["failures"])
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
