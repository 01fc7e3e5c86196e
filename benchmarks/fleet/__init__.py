"""Routing over a fleet of real workers of tiny models: what share of repeated prompts lands where it is cached."""

import sys

from benchmarks.measured import ROOT

# The tiny checkpoints are those of the tests.
sys.path[:0] = [str(ROOT / "tests"), *map(str, (ROOT / "tests" / "support").iterdir())]
