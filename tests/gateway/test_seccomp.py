"""The filter's program, run by hand for both architectures: what it allows, and by which arguments."""

import errno
import fcntl
import mmap
import os
import signal

from tables import table

from saccade.gateway import seccomp

PROCESS = 4711
NULL, SOMEWHERE = 0, 0x7FFF00000000
NEEDED = {
    "mmap": "glibc: malloc; Python: slots", "mprotect": "glibc: malloc's arenas", "munmap": "glibc: free",
    "mremap": "glibc: realloc", "madvise": "NumPy: huge pages; glibc: free", "brk": "glibc: malloc",
    "read": "Python", "write": "Python: the answer of a child; all: messages", "readv": "Rust", "writev": "Rust",
    "pread64": "Python: a slot's header", "pwrite64": "Python", "lseek": "Python", "close": "Python",
    "fstat": "glibc from 2.39, musl", "newfstatat": "glibc up to 2.38: fstat", "fcntl": "Python: the copy in mmap",
    "recvfrom": "Python: jobs", "recvmsg": "Python: slots", "sendto": "Python: answers", "poll": "Python: sockets",
    "ppoll": "glibc on aarch64: poll", "clock_gettime": "Python: time; where the vDSO has no clock",
    "clock_getres": "Python: time.get_clock_info", "gettimeofday": "FFmpeg; where the vDSO has no clock",
    "time": "PDFium; where the vDSO has no clock", "nanosleep": "glibc up to 2.30", "clock_nanosleep": "Python: sleep",
    "restart_syscall": "the kernel, after a process was stopped", "futex": "glibc: locks; Rust",
    "sched_yield": "Rust: spin locks", "getrandom": "Python and Rust: seeds of tables", "rt_sigaction": "Python",
    "rt_sigprocmask": "glibc: abort", "rt_sigreturn": "the kernel: the end of a handler", "sigaltstack": "Rust",
    "tgkill": "glibc: abort", "getpid": "glibc: abort up to 2.39", "gettid": "glibc: abort",
    "sched_getaffinity": "OpenBLAS and Rust: cores", "getcpu": "glibc: malloc's arenas", "sysinfo": "glibc: qsort",
    "prlimit64": "glibc: the size of a stack", "getrlimit": "glibc: the size of a stack", "exit": "glibc",
    "exit_group": "glibc",
}  # fmt: skip
"""Each call that a decode process may make, and what needs it."""

NEEDED_TO_IMPORT = {
    "open": "musl", "openat": "Python: modules", "getdents64": "Python: os.listdir", "stat": "musl; glibc up to 2.32",
    "lstat": "musl; glibc up to 2.32", "statx": "Rust; glibc on other machines", "access": "the loader of libraries",
    "faccessat": "Python: os.access", "readlink": "Python: os.path.realpath", "readlinkat": "glibc on aarch64",
    "getcwd": "Python: relative paths", "fadvise64": "Rust: tokenizers reads files", "uname": "Python: platform",
    "getuid": "Python: os.path.expanduser", "geteuid": "the loader of libraries", "getgid": "the loader of libraries",
    "getegid": "the loader of libraries",
}  # fmt: skip
"""What a process may call besides that loads more modules, and what needs it."""

ALLOWED, REFUSED, UNKNOWN = seccomp.ALLOW, seccomp.ERROR | errno.EPERM, seccomp.ERROR | errno.ENOSYS
ARGUMENTS = {
    "a copy": ("fcntl", (3, fcntl.F_DUPFD_CLOEXEC, 0), ALLOWED),
    "flags of a descriptor": ("fcntl", (3, fcntl.F_SETFD, 1), ALLOWED),
    "flags of a file": ("fcntl", (3, fcntl.F_SETFL, os.O_ASYNC), REFUSED),
    "an owner": ("fcntl", (3, fcntl.F_SETOWN, 1), REFUSED),
    "an owner of a kind": ("fcntl", (3, 15, SOMEWHERE), REFUSED),
    "a signal": ("fcntl", (3, 10, signal.SIGKILL), REFUSED),
    "notices of a folder": ("fcntl", (3, fcntl.F_NOTIFY, 1), REFUSED),
    "a lease": ("fcntl", (3, fcntl.F_SETLEASE, 0), REFUSED),
    "a lock": ("fcntl", (3, fcntl.F_SETLK, SOMEWHERE), REFUSED),
    "a seal": ("fcntl", (3, 1033, 1), REFUSED),
    "a larger pipe": ("fcntl", (3, 1031, 1 << 20), REFUSED),
    "a command with bits that the kernel ignores": ("fcntl", (3, 1 << 32 | fcntl.F_SETOWN, 1), REFUSED),
    "its abort": ("tgkill", (PROCESS, PROCESS, signal.SIGABRT), ALLOWED),
    "its own kill": ("tgkill", (PROCESS, PROCESS, signal.SIGKILL), REFUSED),
    "its stop": ("tgkill", (PROCESS, PROCESS, signal.SIGSTOP), REFUSED),
    "another's abort": ("tgkill", (PROCESS + 1, PROCESS + 1, signal.SIGABRT), REFUSED),
    "everyone's abort": ("tgkill", (-1 % (1 << 64), PROCESS, signal.SIGABRT), REFUSED),
    "its limits": ("prlimit64", (0, 7, NULL, SOMEWHERE), ALLOWED),
    "its limits by its id": ("prlimit64", (PROCESS, 7, NULL, SOMEWHERE), ALLOWED),
    "a new limit": ("prlimit64", (0, 7, SOMEWHERE, NULL), REFUSED),
    "a new limit at a low address": ("prlimit64", (0, 7, 4096, NULL), REFUSED),
    "another's limits": ("prlimit64", (PROCESS + 1, 7, NULL, SOMEWHERE), REFUSED),
    "its cores": ("sched_getaffinity", (0, 128, SOMEWHERE), ALLOWED),
    "another's cores": ("sched_getaffinity", (PROCESS + 1, 128, SOMEWHERE), REFUSED),
    "memory": ("mmap", (NULL, 4096, mmap.PROT_READ | mmap.PROT_WRITE), ALLOWED),
    "a guard": ("mprotect", (SOMEWHERE, 4096, 0), ALLOWED),
    "a page of code": ("mmap", (NULL, 4096, mmap.PROT_READ | mmap.PROT_EXEC), REFUSED),
    "code in a page": ("mprotect", (SOMEWHERE, 4096, mmap.PROT_EXEC), REFUSED),
}
IMPORTS = {
    "code of a library": ("mmap", (NULL, 4096, mmap.PROT_READ | mmap.PROT_EXEC), ALLOWED),
    "a module": ("openat", (0, SOMEWHERE, os.O_RDONLY | os.O_CLOEXEC), ALLOWED),
    "a folder": ("openat", (0, SOMEWHERE, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK), ALLOWED),
    "a file to write": ("openat", (0, SOMEWHERE, os.O_WRONLY), REFUSED),
    "a file to change": ("openat", (0, SOMEWHERE, os.O_RDWR), REFUSED),
    "a new file": ("openat", (0, SOMEWHERE, os.O_CREAT), REFUSED),
    "an empty file": ("openat", (0, SOMEWHERE, os.O_TRUNC), REFUSED),
    "a nameless file": ("openat", (0, SOMEWHERE, os.O_TMPFILE | os.O_RDWR), REFUSED),
}


def verdict(program: bytes, audit: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """Run *program* for one call, as the kernel does; return what it returns."""
    steps = list(seccomp.INSTRUCTION.iter_unpack(program))
    words = {seccomp.NUMBER_OFFSET: number, seccomp.ARCHITECTURE_OFFSET: audit}
    for index, value in enumerate((*arguments, *[0] * 6)[:6]):
        offset = seccomp.ARGUMENTS_OFFSET + 8 * index
        words |= {offset: value & 0xFFFFFFFF, offset + 4: value >> 32}
    position = loaded = 0
    while True:
        code, if_true, if_false, value = steps[position]
        position += 1
        match code:
            case seccomp.LOAD_WORD:
                loaded = words[value]
            case seccomp.JUMP_IF_EQUAL:
                position += if_true if loaded == value else if_false
            case seccomp.JUMP_IF_AT_LEAST:
                position += if_true if loaded >= value else if_false
            case seccomp.JUMP_IF_ANY_BIT:
                position += if_true if loaded & value else if_false
            case seccomp.RETURN:
                return int(value)


def numbers(names: dict[str, str], name: str) -> set[int]:
    column = seccomp.ARCHITECTURES[name].column
    listed = seccomp.DECODING | seccomp.IMPORTING
    return {listed[call][column] for call in names} - {seccomp.ABSENT}


def test_only_what_a_library_needs_is_listed() -> None:
    assert set(seccomp.DECODING) == set(NEEDED)
    assert set(seccomp.IMPORTING) == set(NEEDED_TO_IMPORT)


@table("name", seccomp.ARCHITECTURES)
@table("may_import", [False, True])
def test_listed_calls_are_allowed_and_no_other(may_import: bool, name: str) -> None:  # F6
    architecture = seccomp.ARCHITECTURES[name]
    program = seccomp.program(architecture, PROCESS, may_import)
    allowed = numbers(NEEDED | NEEDED_TO_IMPORT if may_import else NEEDED, name)
    conditional = {
        (seccomp.DECODING | seccomp.IMPORTING)[call][architecture.column]
        for call in seccomp.conditions(PROCESS, may_import)
    }
    probed = {entry[architecture.column] for entry in seccomp.PROBED.values()}
    for number in range(1024):
        if number in allowed & conditional:
            continue
        is_unknown = number in probed or number > seccomp.NEWEST_KNOWN
        expected = ALLOWED if number in allowed else UNKNOWN if is_unknown else REFUSED
        assert (number, verdict(program, architecture.audit, number)) == (number, expected)


@table("name", seccomp.ARCHITECTURES)
@table("may_import, rows", [(False, ARGUMENTS), (True, IMPORTS)])
def test_arguments_decide(may_import: bool, rows: dict[str, tuple[str, tuple[int, ...], int]], name: str) -> None:
    architecture = seccomp.ARCHITECTURES[name]
    program = seccomp.program(architecture, PROCESS, may_import)
    listed = seccomp.DECODING | seccomp.IMPORTING
    for what, (call, arguments, expected) in rows.items():
        number = listed[call][architecture.column]
        assert (what, verdict(program, architecture.audit, number, arguments)) == (what, expected)


@table("name", seccomp.ARCHITECTURES)
def test_calls_of_another_architecture_are_refused(name: str) -> None:
    architecture = seccomp.ARCHITECTURES[name]
    program = seccomp.program(architecture, PROCESS, may_import=True)
    for number in range(1024):
        assert verdict(program, 0x40000003, number) == REFUSED
        assert verdict(program, architecture.audit, seccomp.FIRST_X32_CALL + number) == REFUSED


def test_no_number_is_listed_twice() -> None:
    for column in (0, 1):
        listed = [entry[column] for entry in (seccomp.DECODING | seccomp.IMPORTING | seccomp.PROBED).values()]
        present = [number for number in listed if number != seccomp.ABSENT]
        assert len(present) == len(set(present))
