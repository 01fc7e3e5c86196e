"""The system-call filter of a confined process. It allows only listed calls, some only with certain arguments.

A list of refused calls would become incomplete, because kernels add calls and give old calls new commands. So the
filter lists the allowed calls. DECODING has the calls that loaded decoders make; IMPORTING has the calls with which
Python and the dynamic loader read more files. `strace -f` shows which calls a library's new release makes. To allow one
more, add it with its numbers on both architectures (arch/x86/entry/syscalls and asm-generic/unistd.h in the kernel's
sources).

A call that is not allowed returns an error and does not end the process, because libraries try calls and fall back:

- A call that the list leaves out fails with EPERM.
- The calls in PROBED, and calls newer than this list, fail with ENOSYS, as on an older kernel. A C library takes EPERM
  as final for these calls. After ENOSYS it makes an older call, which the filter judges separately.

The filter is a BPF program (seccomp(2), linux/filter.h).
"""

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import signal
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
ALLOW = 0x7FFF0000
ERROR = 0x00050000
"""The call fails with the error number in the lower bits."""

LOAD_WORD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_OFFSET, ARCHITECTURE_OFFSET, ARGUMENTS_OFFSET = 0, 4, 16
FIRST_X32_CALL = 0x40000000
INSTRUCTION = struct.Struct("=HBBI")
ABSENT = -1
Numbers = tuple[int, int]
"""The number of a call on x86_64, and on aarch64."""

DECODING: dict[str, Numbers] = {
    # Memory.
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "madvise": (28, 233),
    "brk": (12, 214),
    # Open descriptors: the connection, the slot, the pipe to the log.
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "lseek": (8, 62), "close": (3, 57), "fstat": (5, 80), "newfstatat": (262, 79),
    "fcntl": (72, 25), "recvfrom": (45, 207), "recvmsg": (47, 212), "sendto": (44, 206), "poll": (7, ABSENT),
    "ppoll": (271, 73),
    # Time, locks, random numbers.
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, ABSENT),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "restart_syscall": (219, 128), "futex": (202, 98),
    "sched_yield": (24, 124), "getrandom": (318, 278),
    # The process itself, its signals and its end.
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "tgkill": (234, 131), "getpid": (39, 172), "gettid": (186, 178), "sched_getaffinity": (204, 123),
    "getcpu": (309, 168), "sysinfo": (99, 179), "prlimit64": (302, 261), "getrlimit": (97, 163), "exit": (60, 93),
    "exit_group": (231, 94),
}  # fmt: skip
"""What a process may call that opens nothing more. newfstatat also tells the size and times of a file by its name."""

IMPORTING: dict[str, Numbers] = {
    "open": (2, ABSENT), "openat": (257, 56), "getdents64": (217, 61), "stat": (4, ABSENT), "lstat": (6, ABSENT),
    "statx": (332, 291), "access": (21, ABSENT), "faccessat": (269, 48), "readlink": (89, ABSENT),
    "readlinkat": (267, 78), "getcwd": (79, 17), "fadvise64": (221, 223), "uname": (63, 160), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
}  # fmt: skip
"""What a process that may import calls besides."""

PROBED: dict[str, Numbers] = {"rseq": (334, 293), "clone3": (435, 435), "faccessat2": (439, 439)}
NEWEST_KNOWN = 470
"""The last number of a call that this list knows; from 424 on, all architectures have the same numbers."""

FILE_COMMANDS = (fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL)
"""None that sets an owner or a signal: by these the kernel would signal other processes."""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Architecture:
    """A CPU architecture. *audit* is the kernel's constant for it; *column* is its place in Numbers."""

    audit: int
    column: int


ARCHITECTURES = {"x86_64": Architecture(0xC000003E, 0), "aarch64": Architecture(0xC00000B7, 1)}


class Instruction(NamedTuple):
    """A BPF instruction (struct sock_filter); a jump skips *if_true* or *if_false* instructions."""

    code: int
    if_true: int
    if_false: int
    value: int


@dataclass(frozen=True)
class Among:
    """Requires one half of a call's argument to be among *values*.

    The kernel reads 32-bit numbers from the lower half.
    """

    argument: int
    values: tuple[int, ...]
    is_upper: bool = False

    def instructions(self) -> list[Instruction]:
        """Return the instructions that refuse the call if the condition does not hold."""
        count = len(self.values)
        tests = [Instruction(JUMP_IF_EQUAL, count - index, 0, value) for index, value in enumerate(self.values)]
        return [_argument(self.argument, self.is_upper), *tests, _failing(errno.EPERM)]


@dataclass(frozen=True)
class Without:
    """Requires that none of *bits* is set in the lower half of an argument."""

    argument: int
    bits: int

    def instructions(self) -> list[Instruction]:
        """Return the instructions that refuse the call if the condition does not hold."""
        return [_argument(self.argument), *_if(JUMP_IF_ANY_BIT, self.bits, [_failing(errno.EPERM)])]


def conditions(process: int, may_import: bool) -> Mapping[str, tuple[Among | Without, ...]]:
    """Return the conditions on the arguments of calls; *process* is the id of the process that makes the calls."""
    no_code = () if may_import else (Without(2, mmap.PROT_EXEC),)
    return {
        "fcntl": (Among(1, FILE_COMMANDS),),
        # A library's abort() ends this process, and tells the gateway so. No other thread or process gets a signal.
        "tgkill": (Among(0, (process,)), Among(2, (signal.SIGABRT,))),
        # To read its own limits: the new limit is a null pointer.
        "prlimit64": (Among(0, (0, process)), Among(2, (0,)), Among(2, (0,), is_upper=True)),
        "sched_getaffinity": (Among(0, (0, process)),),
        "mmap": no_code,
        "mprotect": no_code,
        "open": (Without(1, WRITING),),
        "openat": (Without(2, WRITING),),
    }


class _Program(ctypes.Structure):
    """A BPF program (struct sock_fprog)."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def restrict(may_import: bool = False) -> bool:
    """Install the filter in this process for good; return whether that succeeded.

    The process must have no_new_privs set and only one thread.
    """
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None:
        return False
    content = program(architecture, os.getpid(), may_import)
    filter_program = _Program(len(content) // INSTRUCTION.size, content)
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filter_program), 0, 0) == 0)


def program(architecture: Architecture, process: int, may_import: bool) -> bytes:
    """Return the BPF program for *architecture*: a test for each allowed call, then its conditions."""
    required = conditions(process, may_import)
    calls = DECODING | IMPORTING if may_import else DECODING
    instructions = [
        Instruction(LOAD_WORD, 0, 0, ARCHITECTURE_OFFSET),
        # Numbers of another architecture mean other calls.
        Instruction(JUMP_IF_EQUAL, 1, 0, architecture.audit),
        _failing(errno.EPERM),
        Instruction(LOAD_WORD, 0, 0, NUMBER_OFFSET),
        *_if(JUMP_IF_AT_LEAST, FIRST_X32_CALL, [_failing(errno.EPERM)]),
        *_if(JUMP_IF_AT_LEAST, NEWEST_KNOWN + 1, [_failing(errno.ENOSYS)]),
    ]
    for numbers in PROBED.values():
        instructions += _if(JUMP_IF_EQUAL, numbers[architecture.column], [_failing(errno.ENOSYS)])
    for name, numbers in calls.items():
        if numbers[architecture.column] != ABSENT:
            checks = [one for condition in required.get(name, ()) for one in condition.instructions()]
            allowed = [*checks, Instruction(RETURN, 0, 0, ALLOW)]
            instructions += _if(JUMP_IF_EQUAL, numbers[architecture.column], allowed)
    instructions.append(_failing(errno.EPERM))
    return b"".join(INSTRUCTION.pack(*instruction) for instruction in instructions)


def _if(jump: int, value: int, then: list[Instruction]) -> list[Instruction]:
    return [Instruction(jump, 0, len(then), value), *then]


def _failing(error: int) -> Instruction:
    return Instruction(RETURN, 0, 0, ERROR | error)


def _argument(number: int, is_upper: bool = False) -> Instruction:
    # Both architectures are little-endian, so the lower half comes first.
    return Instruction(LOAD_WORD, 0, 0, ARGUMENTS_OFFSET + 8 * number + 4 * is_upper)
