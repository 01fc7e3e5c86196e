"""Memory of freed tensors is kept for the next ones."""

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes
import sys

from saccade.engine.executor.malloc import keep_freed_memory

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    )]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype, libc.malloc.restype = Info, ctypes.c_void_p
if sys.argv[1] == "kept":
    keep_freed_memory()
before = libc.mallinfo2()
block = libc.malloc(ctypes.c_size_t(100 << 20))
used = libc.mallinfo2()
libc.free(ctypes.c_void_p(block))
print(used.hblkhd - before.hblkhd >= 100 << 20, libc.mallinfo2().fordblks >= 100 << 20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
@pytest.mark.parametrize(("how", "said"), [("kept", "False True"), ("default", "True False")])
def test_a_freed_block_stays_for_the_next_tensor(how: str, said: str) -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == said
