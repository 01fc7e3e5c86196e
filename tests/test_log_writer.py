"""Lines arrive whole and in order; what cannot be written is counted."""

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

from saccade.log_writer import LineWriter


def told(number: int) -> bytes:
    return b"%d are missing\n" % number


def test_lines_arrive_in_order() -> None:
    read, write = os.pipe()
    writer = LineWriter(write, told)
    for number in range(100):
        writer.write_line(b"%d\n" % number)
    assert writer.flush()
    assert os.read(read, 1 << 16).split() == [b"%d" % number for number in range(100)]
    assert writer.num_dropped == 0


def test_a_full_queue_drops_and_says_so() -> None:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    writer = LineWriter(write, told, max_bytes=10_000)
    for _ in range(300):
        writer.write_line(b"x" * 99 + b"\n")
    assert writer.num_dropped == 200
    assert not writer.flush(0.01)
    content = b""
    while not content.endswith(b"200 are missing\n"):
        content += os.read(read, 1 << 16)
    assert content.count(b"x\n") == 100
    writer.write_line(b"again\n")
    assert os.read(read, 1 << 16) == b"again\n"
    assert writer.flush()


def test_a_descriptor_that_does_not_block_is_waited_for() -> None:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(write, False)
    writer = LineWriter(write, told)
    writer.write_line(b"x" * 50_000 + b"\n")
    content = b""
    while not content.endswith(b"\n"):
        content += os.read(read, 1 << 16)
    assert len(content) == 50_001
    assert writer.flush()
    assert writer.num_dropped == 0


def test_lines_that_nobody_can_read_are_counted() -> None:
    read, write = os.pipe()
    os.close(read)
    writer = LineWriter(write, told)
    writer.write_line(b"lost\n")
    assert writer.flush()
    assert writer.num_dropped == 1


def test_a_thread_may_write_while_it_writes() -> None:
    read, write = os.pipe()
    writer = LineWriter(write, told)
    done = threading.Event()

    class Line(bytes):
        def __len__(self) -> int:  # write() calls it while it holds its lock, where the collector may run a finalizer
            if not done.is_set():
                done.set()
                writer.write_line(b"inner\n")
            return super().__len__()

    thread = threading.Thread(target=writer.write_line, args=[Line(b"outer\n")], daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert os.read(read, 100) == b"inner\nouter\n"


FULL_DISK = """
import os, resource, sys
from saccade.log_writer import LineWriter
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
writer = LineWriter(file, lambda number: b"%d are missing\\n" % number)
resource.setrlimit(resource.RLIMIT_FSIZE, (250, resource.RLIM_INFINITY))
for number in range(5):
    writer.write_line(b"%d" % number + b"x" * 98 + b"\\n")
assert writer.flush()
assert writer.num_dropped == 3, writer.num_dropped
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.write_line(b"again\\n")
assert writer.flush()
"""


def test_a_line_that_a_full_disk_cuts_costs_no_other(tmp_path: Path) -> None:
    """A limit on the size of files ends a write as a full disk does: after a part of it."""
    path = tmp_path / "log"
    path.touch()
    subprocess.run([sys.executable, "-c", FULL_DISK, path], check=True)
    lines = path.read_bytes().splitlines()
    assert [line[:1] for line in lines[:3]] == [b"0", b"1", b"2"]
    assert [len(line) for line in lines[:3]] == [99, 99, 50]
    assert lines[3:] == [b"again", b"3 are missing"]
