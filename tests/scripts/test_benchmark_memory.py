"""The memory figure of soak and siege moves with what the processes hold, not with who else maps their files."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.reliability.memory import Memory, memory
from benchmarks.reliability.processes import Holdings
from benchmarks.reliability.soak_report import METRICS, violations

pytestmark = pytest.mark.ci


ROLLUP = """5571f0648000-7ffc20b51000 ---p 00000000 00:00 0                          [rollup]
Rss:               40960 kB
Pss:               30720 kB
Pss_Anon:          10240 kB
Pss_File:          18432 kB
Pss_Shmem:          2048 kB
"""
OLD_ROLLUP = "".join(line + "\n" for line in ROLLUP.splitlines() if "Pss_" not in line)
STATUS = "Name:\tsaccade\nVmRSS:\t   40960 kB\nRssAnon:\t   11264 kB\nRssFile:\t   27648 kB\nRssShmem:\t    2048 kB\n"


def process(proc: Path, rollup: str) -> Path:
    (proc / "7").mkdir()
    (proc / "7" / "smaps_rollup").write_text(rollup)
    (proc / "7" / "status").write_text(STATUS)
    return proc


def test_pages_of_files_do_not_count(tmp_path: Path) -> None:
    found = memory(7, process(tmp_path, ROLLUP))
    assert found == Memory(anonymous=10, shared=2, pss=30)
    assert found.own == 12


def test_a_kernel_that_does_not_part_it(tmp_path: Path) -> None:
    assert memory(7, process(tmp_path, OLD_ROLLUP)) == Memory(anonymous=11, shared=2, pss=30)


HOLDER = """
import mmap
print("began", flush=True)
input()
# Pages of its own: the allocator may have as much to spare.
held = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for start in range(0, len(held), 4096):
    held[start] = 1
print("holds", flush=True)
input()
"""


def test_a_process_holds_what_it_allocates() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "began\n"
        before = memory(holder.pid).own
        print(file=holder.stdin, flush=True)
        assert holder.stdout.readline() == "holds\n"
        assert 60 < memory(holder.pid).own - before < 80
        print(file=holder.stdin, flush=True)


def test_a_soak_fails_for_memory_of_the_processes_alone() -> None:
    def looks(own: float, pss: float) -> list[Holdings]:
        return [
            Holdings(n, {"engine": 300 + own * n}, {"engine": 600 + pss * n}, {"engine": 9}, 1.0) for n in range(60)
        ]

    metrics = dict.fromkeys(METRICS, 1.0)
    assert violations(metrics, {}, looks(own=0, pss=3)) == []
    [violation] = violations(metrics, {}, looks(own=3, pss=0))
    assert "memory of the engine gained" in violation
