"""How much memory the process may use, and how much is free, from the machine and the control groups."""

from pathlib import Path

import pytest
from tables import table

from saccade import memory_limits as memory
from saccade.gateway.process_memory import default_request_memory_bytes

GIB = 1 << 30


def make_groups(folder: Path, own: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 16 GiB, 8 of them available."""
    (folder / "own").write_text(own)
    (folder / "meminfo").write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    for name, text in files.items():
        path = folder / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(memory, "CGROUPS", folder / "groups")
    monkeypatch.setattr(memory, "OWN_CGROUPS", folder / "own")
    monkeypatch.setattr(memory, "MEMORY_INFO", folder / "meminfo")


@table(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "max\n"}, 16 * GIB),
        ("0::/\n", {"memory.max": f"{4 * GIB}\n"}, 4 * GIB),
        (
            "0::/a/b\n",
            {"memory.max": "max\n", "a/memory.max": f"{2 * GIB}\n", "a/b/memory.max": f"{3 * GIB}\n"},
            2 * GIB,
        ),
        ("4:memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        ("9:cpu,cpuacct:/\n", {"cpu,cpuacct/memory.limit_in_bytes": "1\n"}, 16 * GIB),
        ("", {}, 16 * GIB),
    ],
    ids=["no limit", "limit", "limit above", "version 1", "another controller", "nothing known"],
)
def test_the_least_limit_counts(
    own: str, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_groups(tmp_path, own, files, monkeypatch)
    assert memory.allowed_bytes() == expected
    assert default_request_memory_bytes() == max(GIB // 4, expected // 8)


@table(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "max\n"}, 8 * GIB),
        (
            "0::/a\n",
            {
                "a/memory.max": f"{6 * GIB}\n",
                "a/memory.current": f"{5 * GIB}\n",
                "a/memory.stat": f"anon {GIB}\nfile {4 * GIB}\nshmem {GIB}\n",
            },
            4 * GIB,
        ),
        ("0::/\n", {"memory.max": f"{GIB}\n", "memory.current": f"{2 * GIB}\n"}, 0),
        (
            "4:memory:/x\n0::/\n",
            {
                "memory/x/memory.limit_in_bytes": f"{3 * GIB}\n",
                "memory/x/memory.usage_in_bytes": f"{2 * GIB}\n",
                "memory/x/memory.stat": f"cache 1\ntotal_cache {GIB}\ntotal_shmem 0\n",
            },
            2 * GIB,
        ),
    ],
    ids=["no limit", "limit", "more than the limit", "version 1"],
)
def test_files_in_memory_are_free(
    own: str, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_groups(tmp_path, own, files, monkeypatch)
    assert memory.free_bytes() == expected


def test_nothing_is_free_if_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_groups(tmp_path, "", {}, monkeypatch)
    monkeypatch.setattr(memory, "MEMORY_INFO", tmp_path / "missing")
    assert (memory.allowed_bytes(), memory.free_bytes()) == (2 * GIB, 0)
