"""Finds how much memory this process may use, and how much of it is free."""

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
MEMORY_INFO = Path("/proc/meminfo")
LIMITS_AND_USES = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
"""The file with a group's use, by the name of that with its limit: version 2, and 1."""

IF_UNKNOWN = 2 << 30
"""The memory that is assumed if nothing tells the machine's."""

CACHES = ("file", "total_cache")
"""The names of the pages of files in memory.stat, in both versions. They include shared memory, which stays."""


def allowed_bytes() -> int:
    """Return the machine's memory in bytes, or the limit of this process's control group if that is less."""
    return min([*_of_machine("MemTotal"), *(limit for _, limit in _limits())], default=IF_UNKNOWN)


def free_bytes() -> int:
    """Return how many bytes more this process can use; those that hold files count, as they can be read again.

    0 if it is not known.
    """
    return min([*_of_machine("MemAvailable"), *(max(0, limit - _used(path)) for path, limit in _limits())], default=0)


def _of_machine(name: str) -> list[int]:
    return [int(line.split()[1]) * 1024 for line in _lines(MEMORY_INFO) if line.startswith(f"{name}:")]


def _limits() -> Iterator[tuple[Path, int]]:
    """Yield the files with memory limits of this process's control groups and of those above, and the limits."""
    for line in _lines(OWN_CGROUPS):
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, file = (CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (CGROUPS, "memory.max")
        group = Path(name.lstrip("/"))
        for path in (root / part / file for part in (group, *group.parents)):
            yield from ((path, int(text)) for text in _lines(path)[:1] if text.strip().isdigit())


def _used(limit: Path) -> int:
    """Return the bytes that a control group uses, without those of files; *limit* is the file with its limit."""
    used = sum(int(text) for text in _lines(limit.with_name(LIMITS_AND_USES[limit.name]))[:1])
    counts = dict(line.split() for line in _lines(limit.with_name("memory.stat")))
    shared = int(counts.get("total_shmem", counts.get("shmem", 0)))
    return used - sum(int(counts.get(name, 0)) for name in CACHES) + shared


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
