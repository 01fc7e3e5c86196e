"""Makes every system call of x86_64, each in a fresh confined process, and prints what became of them as JSON.

    python confined_calls.py USER ABI MODE

*USER* is an id to run as, *ABI* the version of Landlock that the kernel is taken to have, *MODE* "decode" or "import".
A call that the filter refuses fails by an error number that no kernel has, so that nothing else is taken for it.
"""

import ctypes
import json
import mmap
import os
import signal
import struct
import sys
from types import SimpleNamespace
from unittest.mock import patch

from saccade.gateway import confinement, seccomp

EPERM, ENOSYS = 1234, 1235
NUM_CALLS = 512
REPORT = struct.Struct("=iii")
BY_INTERRUPT = bytes.fromhex(
    "53 89f8"  # push rbx; mov eax, edi
    "bbffffffff b9ffffffff baffffffff beffffffff bfffffffff"  # -1 in ebx, ecx, edx, esi, edi
    "cd80 5b c3"  # int 0x80; pop rbx; ret
)
"""A function of the number of a call of i386, whose arguments are all -1."""


def interrupt() -> ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int):
    """Return BY_INTERRUPT as a function."""
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(BY_INTERRUPT)
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    function.code = code
    return function


def outcomes(libc: ctypes.CDLL, by_interrupt: ctypes.CFUNCTYPE, may_import: bool, number: int) -> tuple[int, ...]:
    """Return the errors of call *number* as one of i386, of x32 and of this architecture; 0 for none."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(5)
        confinement.confine(1 << 30, may_import)
        found = [-by_interrupt(number)]
        for native in (seccomp.FIRST_X32_CALL + number, number):
            os.write(writer, REPORT.pack(*found, *[0] * (3 - len(found))))
            ctypes.set_errno(0)
            found.append(ctypes.get_errno() if libc.syscall(native, *[ctypes.c_long(-1)] * 6) == -1 else 0)
        os.write(writer, REPORT.pack(*found))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as reports:
        content = reports.read()
    os.waitpid(pid, 0)
    # Only the last report has all three; a call that ended the process passed the filter.
    return REPORT.unpack(content[-REPORT.size :])


def status(may_import: bool) -> dict[str, str]:
    """Return what the kernel says of a confined process."""
    ready, told = os.pipe()
    ends, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end)
        os.write(told, json.dumps(confinement.confine(1 << 30, may_import)).encode())
        os.read(ends, 1)
        os._exit(0)
    os.close(ends)
    measures = os.read(ready, 1000).decode()
    with open(f"/proc/{pid}/status") as file:
        fields = [line.partition(":") for line in file]
    os.close(end)
    os.waitpid(pid, 0)
    return {name: value.strip() for name, _, value in fields} | {"measures": measures}


def main() -> None:
    user, abi, mode = sys.argv[1:]
    may_import = mode == "import"
    libc = ctypes.CDLL(None, use_errno=True)
    if int(user) != os.geteuid():
        os.setgroups([])
        os.setresgid(int(user), int(user), int(user))
        os.setresuid(int(user), int(user), int(user))
    with patch.object(confinement, "landlock_abi", lambda _: int(abi)):
        told = status(may_import)
        with patch.object(seccomp, "errno", SimpleNamespace(EPERM=EPERM, ENOSYS=ENOSYS)):
            by_interrupt = interrupt()
            found = [outcomes(libc, by_interrupt, may_import, number) for number in range(NUM_CALLS)]
    print(json.dumps({"status": told, "found": found}))


if __name__ == "__main__":
    main()
