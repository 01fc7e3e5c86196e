"""The memory of a process, from /proc: what it holds itself, apart from pages of files that it shares with others."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measured import MIB

PROC = Path("/proc")


@dataclass(frozen=True)
class Memory:
    """MiB of a process: anonymous pages, shared memory, and *pss*, its proportional set size with pages of files.

    A page that n processes map counts as 1/n of a page in each of them. So *pss* changes when another process of the
    machine maps the same library or checkpoint, or ends; the other two do not.
    """

    anonymous: float
    shared: float
    pss: float

    @property
    def own(self) -> float:
        """All but pages of files."""
        return self.anonymous + self.shared


def memory(pid: int, proc: Path = PROC) -> Memory:
    """Return the memory of a process. Raises OSError if it has ended.

    Kernels before 5.9 do not part the proportional set size; the resident sizes, in which a page counts whole for every
    process, stand in there.
    """
    rollup = _mib(proc / str(pid) / "smaps_rollup")
    if "Pss_Anon" in rollup:
        return Memory(rollup["Pss_Anon"], rollup["Pss_Shmem"], rollup["Pss"])
    status = _mib(proc / str(pid) / "status")
    return Memory(status["RssAnon"], status["RssShmem"], rollup["Pss"])


def _mib(file: Path) -> Mapping[str, float]:
    """Return the fields of *file* that are in kB, in MiB."""
    pairs = (line.partition(":") for line in file.read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 / MIB for name, _, value in pairs if value.endswith(" kB")}
