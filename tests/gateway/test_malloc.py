"""Memory that the process no longer needs goes back to the system."""

import subprocess
import sys

import pytest


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
