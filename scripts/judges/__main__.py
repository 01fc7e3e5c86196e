"""Run what others test with against Saccade: `make judges`, or `make judges ARGS="NAME ..."` for some.

Each judge's tests are held against its list in scripts/judges/known. The exit code is 1 if anything is not as the list
says. docs/judges.md is made of the lists.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from judges.judge import Judge
from judges.outcomes import Comparison, compare, read_known, shrunk, write_known
from judges.page import page
from judges.registry import JUDGES

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("SACCADE_JUDGES", ROOT / ".cache" / "judges")).resolve()
PAGE = ROOT / "docs" / "judges.md"


def main(arguments: list[str]) -> int:
    """Run the judges, one after the other; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="judges", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="judges, instead of all")
    parser.add_argument(
        "--shrink", action="store_true", help="take the names of tests that pass now, or are no more, out of the lists"
    )
    options = parser.parse_args(arguments)
    chosen = [judge for judge in JUDGES if not options.names or judge.name in options.names]
    unknown = set(options.names) - {judge.name for judge in chosen}
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(one.name for one in JUDGES)}")
    held = {judge.name: hold(judge, shrink=options.shrink) for judge in chosen}
    PAGE.write_text(page(JUDGES))
    return 0 if all(comparison.holds for comparison in held.values()) else 1


def hold(judge: Judge, *, shrink: bool) -> Comparison:
    """Run a judge, say what is not as its list says, and return the comparison."""
    started = time.monotonic()
    known = read_known(judge.known)
    outcomes = list(judge.run(CACHE, known.skips))
    comparison = compare(known, outcomes)
    if shrink and comparison.is_smaller:
        known = shrunk(known, comparison)
        write_known(judge.known, known)
        comparison = compare(known, outcomes)
    for outcome in comparison.new:
        print(f"--- {judge.name}: {outcome.name} {outcome.became}, and is not listed so\n{outcome.why}")
    for name in comparison.mended:
        print(f"--- {judge.name}: {name} passes, and is listed")
    for name in comparison.missing:
        print(f"--- {judge.name}: {name} is listed, and is no test")
    if comparison.lost:
        print(f"--- {judge.name}: {comparison.lost} fewer pass than the list says")
    counts = f"{comparison.passed} passed, {comparison.failed} failed, {comparison.skipped} not applicable"
    verdict = "as listed" if comparison.holds else "NOT AS LISTED"
    print(f"{judge.name}: {counts}; {verdict}; {time.monotonic() - started:.0f} s", flush=True)
    return comparison


if __name__ == "__main__":
    # What a judge has started ends with it, also if the run is ended from outside.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
