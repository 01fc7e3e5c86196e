"""The filter of system calls of a confined process.

It is a short BPF program (seccomp(2), linux/filter.h) that compares the call's number with each refused one. A refused
call returns EPERM, so that a library can fall back. All other calls are allowed: a list of allowed calls would break
with every new version of a C library. To refuse one more call, add it to REFUSED with its numbers on both architectures
(arch/x86/entry/syscalls and asm-generic/unistd.h in the kernel's sources).
"""

import ctypes
import errno
import platform
import struct
from dataclasses import dataclass

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
