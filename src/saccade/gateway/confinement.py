"""Confines a process that reads hostile bytes: no files, no sockets, no other processes, no secrets.

Decode processes and LimitedChild use it. Each process starts in its own session, without the gateway's terminal, and
with only the allowed environment variables. It calls confine() after its imports. No measure needs privileges. Any
measure may be missing in an old kernel, or in a container that forbids it, so confine() returns those in force. The
limits on memory, files and core dumps always apply.
"""

import ctypes
import os
import resource
import struct
import sys
from collections.abc import Iterable, Mapping

from saccade.gateway.seccomp import restrict

NO_NEW_PRIVILEGES, NO_CAPABILITIES, LANDLOCK, SECCOMP = "no_new_privs", "no_capabilities", "landlock", "seccomp"
LEFT_OPEN = {
    NO_NEW_PRIVILEGES: "a decode process is confined by limits only",
    NO_CAPABILITIES: "a decode process keeps the gateway's capabilities",
    LANDLOCK: "the trial of a model or a grammar can read every file of the gateway's user",
    SECCOMP: (
        "a decode process can make sockets and processes, signal processes of the gateway's user if Landlock has no "
        "scopes (before Linux 6.12), and make every other system call"
    ),
}
"""What a process can do if a measure is missing and the others hold."""

MEASURES = tuple(LEFT_OPEN)
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
PR_CAPBSET_READ, PR_CAPBSET_DROP = 23, 24
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
CAPABILITY_VERSION_3 = 0x20080522
CAPABILITY_SETS = struct.Struct("=6I")
"""Effective, permitted and inheritable, of the first 32 capabilities and of the rest (capset(2))."""

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
    """Return those of *variables* that are allowed, and others that keep libraries from starting threads."""
    allowed = {
        name: value for name, value in variables.items() if name in ALLOWED_VARIABLES or name.startswith(ALLOWED_PREFIX)
    }
    return allowed | ONE_THREAD


def confine(memory_bytes: int, may_import: bool = False) -> tuple[str, ...]:
    """Confine this process for good; return the MEASURES in force. Open descriptors stay usable.

    The process may take *memory_bytes* more memory. If it *may_import*, it may read the folders of Python modules and,
    without Landlock, every file that its user may read. Otherwise Landlock and seccomp each keep it from opening any
    file.
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
        NO_CAPABILITIES: _drop_capabilities(libc),
        # Last, because it refuses the calls of all others.
        SECCOMP: restrict(may_import),
    }
    return tuple(measure for measure in MEASURES if holds[measure])


def _drop_capabilities(libc: ctypes.CDLL) -> bool:
    """Drop all capabilities, which root has; return whether the kernel agreed."""
    capability = 0
    while libc.prctl(PR_CAPBSET_READ, capability, 0, 0, 0) >= 0:
        # Without a capability this is refused, and changes nothing: no_new_privs bars what the set allows.
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        capability += 1
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    # The process 0 is this one.
    header, none = struct.pack("=Ii", CAPABILITY_VERSION_3, 0), bytes(CAPABILITY_SETS.size)
    return bool(libc.capset(header, none) == 0)


def _module_folders() -> list[str]:
    """Return the folders that hold modules, without sys.path[0], where the program only happens to have started."""
    return [folder for folder in (sys.prefix, sys.base_prefix, *sys.path[1:]) if os.path.isdir(folder)]


def landlock_abi(libc: ctypes.CDLL) -> int:
    """Return the kernel's Landlock version, or a number below 1 if it has none."""
    return int(libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), LANDLOCK_VERSION_FLAG))


def _landlock(libc: ctypes.CDLL, readable: Iterable[str]) -> bool:
    """Deny everything that this kernel's Landlock covers, except reads below *readable*. Return whether it worked."""
    abi = landlock_abi(libc)
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
