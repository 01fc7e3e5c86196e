"""Check and time on a GPU what only a GPU can run, in the minutes that there are.

    python -m benchmarks.gpu --minutes 25 [--out build/gpu] [--model DIR]

Each part runs in a process of its own, the most important first. Its results go to --out, so the same command goes on
after an interruption. The page of all results is page.md there, and results.tgz has the page, results and logs. Models
have random weights, made on the device, unless --model names one. It has never run on a GPU; --rehearse runs every part
on a CPU, with a tiny model.

Exit status: 0; 1 if a check failed or a part broke off; 2 on a machine without CUDA.
"""

import argparse
import os
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from benchmarks.gpu import plan
from benchmarks.gpu.checks import line
from benchmarks.gpu.found import findings
from benchmarks.gpu.parts import PARTS, PREDICTED, Refused, Setting
from benchmarks.gpu.plan import BROKEN, DONE, FAILED, REFUSED, Part, Record
from benchmarks.gpu.scale import FULL, REHEARSAL
from benchmarks.measured import ROOT, end_with_what_was_started

ARCHIVE, MODELS = "results.tgz", "models"


def main() -> int:
    """Run all parts, or the one that --part names in this process."""
    arguments = _parser().parse_args()
    if not arguments.rehearse and not torch.cuda.is_available():
        print("benchmarks.gpu needs a GPU: torch finds no CUDA device here. --rehearse needs none.", file=sys.stderr)
        return 2
    end_with_what_was_started()
    found = findings()
    identity = plan.identity_of({**found, "model": arguments.model or "", "rehearse": str(arguments.rehearse)})
    if arguments.part:
        os.environ.update(_environment(rehearse=arguments.rehearse))
        setting = Setting(REHEARSAL if arguments.rehearse else FULL, arguments.out / MODELS, arguments.model)
        part = next(part for part in PARTS if part.name == arguments.part)
        _print(part, run_part(part, setting, arguments.out / f"{part.name}.json", identity))
        return 0
    for name, value in found.items():
        print(f"{name}: {value}")
    options = [
        *(["--rehearse"] if arguments.rehearse else []),
        *(["--model", arguments.model] if arguments.model else []),
    ]
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(arguments.out), *options]
    records = {}
    run = plan.run_in_process(command, arguments.out, _environment(rehearse=arguments.rehearse))
    for part, record in plan.go(tuple(PARTS), arguments.out, identity, arguments.minutes * 60, run):
        records[part] = record
        _print(part, record)
        (arguments.out / "page.md").write_text(page(found, records))
        pack_results(arguments.out)
    return 1 if has_failed(records.values()) else 0


@torch.inference_mode()
def run_part(part: Part, setting: Setting, path: Path, identity: str) -> Record:
    """Run a part, and write its rows as they come."""
    record, began = Record(identity, BROKEN, "it did not end"), time.monotonic()
    try:
        for row in PARTS[part](setting):
            record.rows.append(row)
            record.write(path)
    except Refused as error:
        record.outcome, record.reason = REFUSED, str(error)
    except torch.OutOfMemoryError as error:
        record.outcome, record.reason = REFUSED, f"the GPU's memory does not suffice: {line(error)}"
    except Exception as error:
        record.reason = line(error)
    else:
        record.outcome, record.reason = DONE, ""
    record.seconds = time.monotonic() - began
    record.write(path)
    return record


def pack_results(folder: Path) -> Path:
    """Pack what is in *folder*, without the models, as one archive, and return its path.

    It is there after each part, so a run that is ended leaves the results so far.
    """
    archive = folder / ARCHIVE
    with tarfile.open(archive.with_suffix(".part"), "w:gz") as packed:
        for path in sorted(folder.rglob("*")):
            place = path.relative_to(folder)
            if path.is_file() and place.parts[0] != MODELS and not path.name.startswith(archive.stem):
                packed.add(path, str(place))
    archive.with_suffix(".part").rename(archive)
    return archive


def page(found: Mapping[str, str], records: Mapping[Part, Record]) -> str:
    """Return the page of results."""
    lines = ["# On a GPU", "", *(f"- {name}: {value}" for name, value in found.items()), "", PREDICTED]
    for part, record in records.items():
        ending = "" if record.outcome == DONE else f" **{record.outcome}**: {record.reason}"
        lines += ["", f"## {part.name}: {part.about}", "", f"{record.seconds:.0f} s.{ending}"]
        if record.rows:
            rows = (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in record.rows)
            lines += ["", "| check or call | result | |", "|---|---|---|", *rows]
    return "\n".join([*lines, ""])


def has_failed(records: Iterable[Record]) -> bool:
    """Return whether a check failed, or a part broke off."""
    return any(record.outcome == BROKEN or any(row.result == FAILED for row in record.rows) for record in records)


def _print(part: Part, record: Record) -> None:
    print(f"\n{part.name}: {record.outcome}, {record.seconds:.0f} s {record.reason}".rstrip())
    for row in record.rows:
        print(f"  {row.name}: {row.result} {row.detail}".rstrip(), flush=True)


def _environment(*, rehearse: bool) -> Mapping[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, **({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if rehearse else {})}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0, help="when to begin no further part")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="the folder of the results")
    parser.add_argument("--model", help="a folder with a model's files, to run instead of random weights")
    parser.add_argument("--rehearse", action="store_true", help="run every part on the CPU, with a tiny model")
    parser.add_argument("--part", choices=[part.name for part in PARTS], help="run this part alone, in this process")
    return parser


if __name__ == "__main__":
    sys.exit(main())
