"""Finds how much memory this process may use, and how much of it request bodies may take."""

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
MEMORY_INFO = Path("/proc/meminfo")
REQUEST_SHARE = 8
"""Request bodies and fetched images may take one part in this many of the memory."""


MIN_REQUEST_MEMORY_BYTES = 256 << 20
MAX_REQUEST_MEMORY_BYTES = 4 << 30


def allowed_bytes() -> int:
    """Return the machine's memory in bytes, or the limit of this process's control group if that is less."""
    limits = [int(line.split()[1]) * 1024 for line in _lines(MEMORY_INFO) if line.startswith("MemTotal:")]
    limits += [int(text) for path in _cgroup_limits() for text in _lines(path)[:1] if text.strip().isdigit()]
    return min(limits, default=MIN_REQUEST_MEMORY_BYTES * REQUEST_SHARE)


def default_request_memory_bytes() -> int:
    """Return the default budget in bytes for the bodies and encoded images of all requests."""
    share = allowed_bytes() // REQUEST_SHARE
    return max(MIN_REQUEST_MEMORY_BYTES, min(share, MAX_REQUEST_MEMORY_BYTES))


def _cgroup_limits() -> Iterator[Path]:
    """Yield the files with memory limits of this process's control groups, version 1 or 2, and of all groups above."""
    for line in _lines(OWN_CGROUPS):
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, file = (CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (CGROUPS, "memory.max")
        group = Path(name.lstrip("/"))
        yield from (root / part / file for part in (group, *group.parents))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
