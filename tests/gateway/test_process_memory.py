"""The budget of request bodies follows what the machine, or the control group, allows."""

import subprocess
import sys
from pathlib import Path

import pytest
from tables import table

from saccade.gateway import process_memory as memory

GIB = 1 << 30


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
    (tmp_path / "own").write_text(own)
    (tmp_path / "meminfo").write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1 kB\n")
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "MEMORY_INFO", tmp_path / "meminfo")
    assert memory.allowed_bytes() == expected
    assert memory.default_request_memory_bytes() == max(GIB // 4, expected // 8)


@pytest.mark.parametrize("is_asked", [False, True])
def test_large_blocks_go_back_to_the_system(is_asked: bool) -> None:
    """glibc keeps them once a larger one has been freed: the body of one request would stay for ever."""
    program = f"""
from saccade.gateway.malloc import give_back_large_blocks
if {is_asked}:
    give_back_large_blocks()
def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
raises_the_threshold = b"a" * (24 << 20)
del raises_the_threshold
before = resident_bytes()
body = b"a" * (16 << 20)
behind_it = [b"a" * 4096 for _ in range(64)]
del body
print(resident_bytes() - before)
"""
    kept = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert (kept < 8 << 20) is is_asked
