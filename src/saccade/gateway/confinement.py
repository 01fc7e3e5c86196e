"""Confines a process that reads hostile bytes: no files, no sockets, no other processes, no secrets.

Decode processes and LimitedChild use it. Each starts with an environment from an allow-list, and calls confine() after
its imports. Every measure works without privileges, and any may be missing, in an old kernel or in a container that
forbids it; confine() returns the measures in force. The limits on memory, files and core dumps always apply.

The seccomp filter is a short BPF program (seccomp(2), linux/filter.h) that compares the call's number with each refused
one. A refused call returns EPERM, so that a library can fall back. All other calls are allowed: a list of allowed calls
would break with every new version of a C library. To refuse one more call, add it to REFUSED with its numbers on both
architectures (arch/x86/entry/syscalls and asm-generic/unistd.h in the kernel's sources).
"""

import contextlib
import ctypes
import errno
import math
import os
import platform
import resource
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
ALLOW = 0x7FFF0000
REFUSE = 0x00050000 | errno.EPERM
LOAD_WORD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER_OFFSET, ARCHITECTURE_OFFSET = 0, 4
FIRST_X32_CALL = 0x40000000
INSTRUCTION = struct.Struct("=HBBI")
ABSENT = -1
REFUSED: dict[str, tuple[int, int]] = {
    # Files by name.
    "open": (2, ABSENT), "creat": (85, ABSENT), "openat": (257, 56), "openat2": (437, 437),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "memfd_create": (319, 279),
    "truncate": (76, 45), "ftruncate": (77, 46), "rename": (82, ABSENT), "renameat": (264, 38),
    "renameat2": (316, 276), "mkdir": (83, ABSENT), "mkdirat": (258, 34), "rmdir": (84, ABSENT),
    "link": (86, ABSENT), "linkat": (265, 37), "unlink": (87, ABSENT), "unlinkat": (263, 35),
    "symlink": (88, ABSENT), "symlinkat": (266, 36), "mknod": (133, ABSENT), "mknodat": (259, 33),
    "chmod": (90, ABSENT), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, ABSENT), "fchown": (93, 55), "lchown": (94, ABSENT), "fchownat": (260, 54),
    # Sockets and other ways to another process.
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242), "shmget": (29, 194), "shmctl": (31, 195), "shmat": (30, 196),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    # Other programs, and more processes or threads.
    "execve": (59, 221), "execveat": (322, 281), "fork": (57, ABSENT), "vfork": (58, ABSENT), "clone": (56, 220),
    "clone3": (435, 435),
    # Acting on another process.
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "process_madvise": (440, 440), "kcmp": (312, 272), "prlimit64": (302, 261),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    # Broad interfaces of the kernel. Calls through io_uring bypass the filter.
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "unshare": (272, 97), "setns": (308, 268),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
}  # fmt: skip
"""Name of the call: its number on x86_64, its number on aarch64."""

OPENING = frozenset(("open", "openat", "openat2"))


@dataclass(frozen=True)
class _Architecture:
    """*audit* is the kernel's constant for the architecture of a call; *column* is its place in REFUSED."""

    audit: int
    column: int


ARCHITECTURES = {"x86_64": _Architecture(0xC000003E, 0), "aarch64": _Architecture(0xC00000B7, 1)}


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def restrict(allowed: frozenset[str] = frozenset()) -> bool:
    """Install the filter in this process for good, except for the calls *allowed*; return whether the kernel took it.

    The process must have no_new_privs.
    """
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None:
        return False
    content = program(architecture, allowed)
    filter_program = _Program(len(content) // INSTRUCTION.size, content)
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filter_program), 0, 0) == 0)


def program(architecture: _Architecture, allowed: frozenset[str]) -> bytes:
    """Return the BPF program for *architecture*: one comparison for each call that is refused and not *allowed*."""
    listed = (entry[architecture.column] for name, entry in REFUSED.items() if name not in allowed)
    numbers = [number for number in listed if number != ABSENT]
    comparisons = [(JUMP_IF_AT_LEAST, FIRST_X32_CALL), *((JUMP_IF_EQUAL, number) for number in numbers)]
    refuse = len(comparisons) + 1
    return b"".join(
        (
            INSTRUCTION.pack(LOAD_WORD, 0, 0, ARCHITECTURE_OFFSET),
            # Numbers of another architecture mean other calls.
            INSTRUCTION.pack(JUMP_IF_EQUAL, 0, refuse + 1, architecture.audit),
            INSTRUCTION.pack(LOAD_WORD, 0, 0, NUMBER_OFFSET),
            *(INSTRUCTION.pack(code, refuse - 1 - index, 0, value) for index, (code, value) in enumerate(comparisons)),
            INSTRUCTION.pack(RETURN, 0, 0, ALLOW),
            INSTRUCTION.pack(RETURN, 0, 0, REFUSE),
        )
    )


NO_NEW_PRIVILEGES, LANDLOCK, SECCOMP = "no_new_privs", "landlock", "seccomp"
MEASURES = (NO_NEW_PRIVILEGES, LANDLOCK, SECCOMP)
ALLOWED_VARIABLES = frozenset(
    (
        "PATH", "HOME", "USER", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH",
        "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONSAFEPATH", "PYTHONPLATLIBDIR", "PYTHONUTF8",
        "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONUNBUFFERED", "PYTHONHASHSEED",
    )
)  # fmt: skip
"""Variables that Python needs to find the same modules, and those for language and temporary files. No secrets."""

ALLOWED_PREFIX = "LC_"
ONE_THREAD = {
    # A fork must not inherit threads, and the system-call filter allows no new ones.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}
MAX_OPEN_FILES = 16
"""Standard streams, the connection, one slot, and some to spare."""

PR_SET_NO_NEW_PRIVS = 38
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_PATH_BENEATH = 1
LANDLOCK_READ_RIGHTS = 1 << 2 | 1 << 3
"""To read files, and to list folders."""

LANDLOCK_VERSION_FLAG = 1
LANDLOCK_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""From each ABI on: all rights over files that this ABI knows."""

LANDLOCK_NETWORK_ABI, LANDLOCK_NETWORK_RIGHTS = 4, 0b11
LANDLOCK_SCOPE_ABI, LANDLOCK_SCOPES = 6, 0b11
"""Abstract Unix sockets, and signals to processes outside."""


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the allowed ones of the environment's *variables*, and settings that prevent threads."""
    allowed = {
        name: value for name, value in variables.items() if name in ALLOWED_VARIABLES or name.startswith(ALLOWED_PREFIX)
    }
    return allowed | ONE_THREAD


def confine(memory_bytes: int, may_import: bool = False) -> tuple[str, ...]:
    """Confine this process for good; return the MEASURES in force. Open descriptors stay usable.

    *memory_bytes* is how much more memory it may take. If it *may_import*, it may read the folders of Python's modules
    and, without Landlock, every file that its user may read; else it can open no file at all.
    """
    _limit(resource.RLIMIT_AS, _address_space_bytes() + memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    # Shared memory is written through a mapping, which this does not limit.
    _limit(resource.RLIMIT_FSIZE, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return ()
    readable = _module_folders() if may_import else []
    holds = {
        NO_NEW_PRIVILEGES: True,
        LANDLOCK: _landlock(libc, readable),
        SECCOMP: restrict(OPENING if may_import else frozenset()),
    }
    return tuple(measure for measure in MEASURES if holds[measure])


def _module_folders() -> list[str]:
    """Return the folders of modules; the first entry of sys.path is only the folder that the program started in."""
    return [folder for folder in (sys.prefix, sys.base_prefix, *sys.path[1:]) if os.path.isdir(folder)]


def _landlock(libc: ctypes.CDLL, readable: Iterable[str]) -> bool:
    """Deny everything that this kernel's Landlock covers, except reading below *readable*; return whether it did."""
    abi = libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), LANDLOCK_VERSION_FLAG)
    if abi < 1:
        return False
    files = max(rights for since, rights in LANDLOCK_FILE_RIGHTS.items() if since <= abi)
    network = LANDLOCK_NETWORK_RIGHTS if abi >= LANDLOCK_NETWORK_ABI else 0
    scopes = LANDLOCK_SCOPES if abi >= LANDLOCK_SCOPE_ABI else 0
    # An older kernel accepts a longer structure if the fields that it does not know are zero.
    attributes = struct.pack("=QQQ", files, network, scopes)
    ruleset = libc.syscall(LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return False
    for folder in readable:
        descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", LANDLOCK_READ_RIGHTS, descriptor)
        libc.syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_PATH_BENEATH, rule, 0)
        os.close(descriptor)
    holds = libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return bool(holds)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (allowed, allowed))


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


T = TypeVar("T")


class ChildLimits(msgspec.Struct, frozen=True):
    """*seconds* of CPU time, and *memory_bytes* on top of the child's memory after its imports."""

    seconds: float
    memory_bytes: int


class Ending(NamedTuple):
    """How a child ended: its *output*, its exit *status*, negative for a signal, and whether it ended *in_time*.

    *was_killed*: by something else, such as the kernel if the machine has no memory left. The child's own limits end it
    by other signals, so its task is not the cause.
    """

    output: bytes
    status: int
    in_time: bool
    was_killed: bool = False


class LimitedChild:
    """One child, `python -m MODULE`, that runs *module* on *task*, a value that msgpack can encode.

    Native code can use a core without end, take gigabytes for a file of kilobytes, or crash its process, and a thread
    cannot be stopped. So a child first tries the input of two tasks: the files of a model and the grammar of a request.
    It reads its limits and its task as one message from standard input, and writes its result to standard output.
    """

    def __init__(self, module: str, task: object, limits: ChildLimits) -> None:
        self._module = module
        self._message = msgspec.msgpack.encode((limits, task))
        self._process: subprocess.Popen[bytes] | None = None
        self.is_stopped = False

    def stop(self) -> None:
        """End the child. Any thread may call this at any time; a child that starts later ends at once."""
        self.is_stopped = True
        if self._process is not None:
            self._process.kill()

    def run(self, wait_seconds: float, max_bytes: int) -> Ending:
        """Block until the child has ended, has written *max_bytes*, or *wait_seconds* have passed; then kill it."""
        descriptor = os.memfd_create("saccade-child-task")
        with open(descriptor, "wb") as file:
            file.write(self._message)
            file.flush()
            os.lseek(descriptor, 0, os.SEEK_SET)
            process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=descriptor,
                stdout=subprocess.PIPE,
                env=environment(os.environ),
            )
        with process:
            self._process = process
            try:
                # stop() may have run before the child was visible to it.
                if self.is_stopped:
                    process.kill()
                output, in_time = _output_of(process, time.monotonic() + wait_seconds, max_bytes)
                was_killed = process.poll() == -signal.SIGKILL and not self.is_stopped
            finally:
                process.kill()
        return Ending(output, process.returncode, in_time, was_killed)


def _output_of(process: subprocess.Popen[bytes], end: float, max_bytes: int) -> tuple[bytes, bool]:
    """Return the output of *process*, *max_bytes* at most, and whether it ended before the time *end*."""
    output = bytearray()
    if process.stdout is None:
        return b"", True
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while len(output) < max_bytes and poll.poll(max(0.0, end - time.monotonic()) * 1000):
        piece = os.read(process.stdout.fileno(), max_bytes - len(output))
        if not piece:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
                return bytes(output), True
            break
        output += piece
    return bytes(output), len(output) == max_bytes


def begin(kind: type[T]) -> tuple[ChildLimits, T]:
    """Return the limits and the task of this child, and confine it; all its modules must be imported."""
    limits, task = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[ChildLimits, kind])  # type: ignore[valid-type]
    seconds = math.ceil(limits.seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    # Libraries load more of their parts at first use.
    confine(limits.memory_bytes, may_import=True)
    return limits, task
