"""What Saccade does under faults and under long load, on a real server: the programs .faults, .soak and .siege."""

import sys

from benchmarks.measured import ROOT

# The faults, and the server they are struck at, are those of the tests.
sys.path[:0] = [str(ROOT / "tests"), *map(str, (ROOT / "tests" / "support").iterdir())]
