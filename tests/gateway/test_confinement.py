"""What code in a decode process can reach, with all measures and with each of them alone."""

import asyncio
import ctypes
import errno
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tables import table

from saccade.gateway import confinement
from saccade.gateway.images.decode_pool import server as media_server
from saccade.gateway.images.decode_pool.job import PixelJob
from saccade.gateway.images.decode_pool.server import DecodeProcess, DecodeServer
from saccade.media.header import ImageLimits
from saccade.media.video_header import VideoLimits
from saccade.protocol.media import ImageLayout
from saccade.transport.shared_memory import FOLDER, Slot, SlotPool, open_descriptor, read_slot

LAYOUT = ImageLayout(
    grid=(1, 1, 1), num_tokens=1, pixel_shape=(1000,), pixel_dtype="uint8", resized_width=1, resized_height=1
)
SECRETS = {"SACCADE_API_KEYS": "k-1", "HF_TOKEN": "hf_1", "AWS_SECRET_ACCESS_KEY": "a-1", "https_proxy": "http://u:p@h"}


@pytest.fixture(scope="module")
def server() -> Iterator[DecodeServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(media_server, "PROGRAM", "hostile_process")
        patch.setenv("PYTHONPATH", os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))))
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        server = DecodeServer(1 << 30)
        server.start()
        yield server
        server.stop()


@pytest.fixture
def process(server: DecodeServer) -> Iterator[DecodeProcess]:
    process = server.fork()
    yield process
    process.kill()


@pytest.fixture
def slots() -> Iterator[SlotPool]:
    slots = SlotPool(1 << 20)
    yield slots
    slots.close()


def acquire(slots: SlotPool) -> Slot:
    slot = slots.acquire(1000)
    assert slot is not None
    return slot


def found(process: DecodeProcess, code: str, slot: Slot | None = None) -> Any:
    """Run *code* where images are decoded; return what it left in `found`."""

    async def ask() -> Any:
        descriptor = None if slot is None else open_descriptor(slot.ref)
        try:
            ref = None if slot is None else slot.ref
            job = PixelJob(code.encode(), "none", {}, LAYOUT, ImageLimits(), VideoLimits(), slot=ref)
            answer = await asyncio.wait_for(process.exchange(job, descriptor), 20)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        assert answer.failure is not None
        return json.loads(answer.failure.message)

    return asyncio.run(ask())


TRY = """
import ctypes, os, resource, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
def outcome(attempt):
    try:
        return repr(attempt())
    except OSError as error:
        return error.errno
"""
DENIED = (1, 13)
"""EPERM of the filter, EACCES of Landlock."""

ATTEMPTS = {
    "a TCP socket": "socket.socket(socket.AF_INET)",
    "a Unix socket": "socket.socket(socket.AF_UNIX)",
    "a file": "open('/etc/hostname').read()",
    "a new file": "open('/tmp/saccade-test-new', 'w')",
    "a folder": "os.mkdir('/tmp/saccade-test-folder')",
    "the gateway's environment": "open('/proc/{gateway}/environ').read()",
    "the gateway's memory": "open('/proc/{gateway}/mem', 'rb').read(1)",
    "another slot": "open('/dev/shm/{other}', 'rb').read()",
    "another slot's end": "os.unlink('/dev/shm/{other}')",
    "a signal to the gateway": "os.kill({gateway}, 0)",
    "the gateway's limits": "resource.prlimit({gateway}, resource.RLIMIT_NOFILE)",
    "a child": "os.fork()",
    "a program": "os.execv('/bin/true', ['true'])",
}
CALLS = {
    "a letter typed into a terminal": "16, 2, 0x5412, b'x'",  # TIOCSTI
    "a selection pasted into a console": "16, 2, 0x541C, bytes([3, 0])",  # TIOCLINUX
    "a terminal of its own": "16, 2, 0x540E, 0",  # TIOCSCTTY
    "signals of a descriptor": "16, 2, 0x5452, bytes([1, 0, 0, 0])",  # FIOASYNC
    "the owner of a descriptor": "16, 2, 0x8901, bytes(4)",  # FIOSETOWN
    "the owner of a socket": "16, 3, 0x8902, bytes(4)",  # SIOCSPGRP
    "the owner of a file": "72, 2, 8, {gateway}",  # F_SETOWN
    "the owner of a file by its kind": "72, 2, 15, bytes(8)",  # F_SETOWN_EX
    "the signal of a file": "72, 2, 10, 9",  # F_SETSIG
    "the flags of a file": "72, 2, 4, 0x2000",  # F_SETFL, O_ASYNC
    "notices of a folder": "72, 2, 1026, 1",  # F_NOTIFY
    "a lease": "72, 2, 1024, 0",  # F_SETLEASE
    "a signal to a thread of the gateway": "234, {gateway}, {gateway}, 6",
    "a signal to any thread": "200, {gateway}, 6",
    "a signal with a value": "129, {gateway}, 6, bytes(128)",
    "the gateway as a descriptor": "434, {gateway}, 0",
    "a descriptor of the gateway": "438, 0, 0, 0",
    "a signal by a descriptor": "424, 0, 9, 0, 0",
    "reading the gateway": "310, {gateway}, bytes(16), 1, bytes(16), 1, 0",
    "writing to the gateway": "311, {gateway}, bytes(16), 1, bytes(16), 1, 0",
    "tracing the gateway": "101, 16, {gateway}, 0, 0",
    "comparing with the gateway": "312, {gateway}, {gateway}, 0, 0, 0",
    "advice to the gateway": "440, 0, bytes(16), 1, 4, 0",
    "limits of the gateway": "302, {gateway}, 7, 0, bytes(16)",
    "new limits of its own": "302, 0, 7, bytes(16), 0",
    "the gateway's priority": "141, 0, {gateway}, 0",
    "the gateway's input and output": "251, 1, {gateway}, 0",
    "the gateway's cores": "203, {gateway}, 8, bytes([1, 0, 0, 0, 0, 0, 0, 0])",
    "the gateway's scheduling": "144, {gateway}, 0, bytes(4)",
    "a key": "248, b'user', b'saccade', b'x', 1, -3",
    "a keyring": "250, 0, -3, 1",
    "page faults": "323, 0",
    "a ring of calls": "425, 1, bytes(120)",
    "a program in the kernel": "321, 0, bytes(72), 72",
    "performance events": "298, bytes(128), 0, -1, -1, 0",
    "a file in memory": "319, b'x', 0",
    "a secret file": "447, 0",
    "a program by a descriptor": "322, 2, b'', 0, 0, 0x1000",
    "messages": "68, 1, 0o1600",
    "semaphores": "64, 1, 1, 0o1600",
    "shared memory": "29, 1, 4096, 0o1600",
    "shared memory of others": "30, 0, 0, 0",
    "a queue": "240, b'saccade', 0o102, 0o600, 0",
    "an attribute": "188, b'/tmp', b'user.x', b'1', 1, 0",
    "an attribute of a descriptor": "190, 2, b'user.x', b'1', 1, 0",
    "the times of a file": "280, -100, b'/tmp', 0, 0",
    "notices of files": "253",
    "notices of all files": "300, 0, 0",
    "another personality": "135, 0x0400000",
    "a mount": "165, b'none', b'/tmp', b'tmpfs', 0, 0",
    "a file system": "430, b'tmpfs', 0",
    "a namespace": "272, 0x10000000",
    "another's namespace": "308, 0, 0",
    "another root": "161, b'/tmp'",
    "another folder": "80, b'/tmp'",
    "a thread": "56, 0x10900, 0, 0, 0, 0",
    "its own end of the trace of its parent": "157, 1, 0, 0, 0, 0",  # PR_SET_PDEATHSIG
    "capabilities": "126, bytes(8), bytes(24)",
    "another user": "105, 1",
    "a second filter": "317, 1, 0, bytes(16)",
    "a module of the kernel": "175, 0, 0, b''",
    "another kernel": "246, 0, 0, 0, 0",
    "another name of the machine": "170, b'x', 1",
    "another clock": "227, 0, bytes(16)",
    "memory with code": "9, 0, 4096, 5, 0x22, -1, 0",
}
"""System calls of x86_64 that no decoder makes: number and arguments."""


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS.keys())
def test_code_in_a_decode_process_reaches_nothing(process: DecodeProcess, slots: SlotPool, attempt: str) -> None:  # F6
    other, own = acquire(slots), acquire(slots)
    code = attempt.format(gateway=os.getpid(), other=other.ref.name)
    assert found(process, f"{TRY}found = outcome(lambda: {code})", own) in DENIED
    assert (FOLDER / other.ref.name).exists()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86_64")
@table("arguments", CALLS.values(), ids=CALLS)
def test_code_in_a_decode_process_calls_nothing_else(process: DecodeProcess, arguments: str) -> None:  # F6
    code = arguments.format(gateway=os.getpid())
    assert found(process, f"{TRY}found = outcome(lambda: call({code}))") == errno.EPERM


def test_process_has_its_own_session_and_no_terminal(process: DecodeProcess) -> None:
    assert os.getsid(process.pid) == process.pid
    kinds = [os.readlink(f"/proc/{process.pid}/fd/{number}").partition(":")[0] for number in range(3)]
    assert kinds == [os.devnull, "pipe", "pipe"]


def test_process_has_no_capability(process: DecodeProcess) -> None:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    sets = {name: int(value, 16) for name, _, value in (line.partition(":") for line in lines) if name[:3] == "Cap"}
    if os.geteuid() != 0:
        sets.pop("CapBnd")
    assert len(sets) >= 4
    assert set(sets.values()) == {0}


def test_process_writes_to_the_slot_of_its_job(process: DecodeProcess, slots: SlotPool) -> None:  # A7
    own = acquire(slots)
    code = f"""
from saccade.protocol.media import SlotRef
from saccade.transport.shared_memory import write_slot
with write_slot(slot, SlotRef(name={own.ref.name!r}, generation={own.ref.generation}, nbytes=1000)) as memory:
    memory[:] = bytes([7]) * 1000
found = "written"
"""
    assert found(process, code, own) == "written"
    assert read_slot(own.ref) == bytes([7]) * 1000


def test_process_has_no_descriptor_but_its_connection(process: DecodeProcess, slots: SlotPool) -> None:
    code = """
import os, stat
found = []
for number in range(3, 64):
    try:
        found.append(stat.S_IFMT(os.fstat(number).st_mode) == stat.S_IFSOCK)
    except OSError:
        pass
"""
    found(process, code, acquire(slots))
    assert found(process, code) == [True]


def test_process_has_no_secret(process: DecodeProcess) -> None:
    seen = found(process, "import os; found = dict(os.environ)")
    assert not [name for name in seen if name in SECRETS or name.startswith("SACCADE_")]
    assert not set(SECRETS.values()) & set(seen.values())
    assert not set(SECRETS) & set(psutil.Process(process.pid).environ())


def test_limits_hold(process: DecodeProcess) -> None:
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    values = {line[:26].strip(): line[26:].split()[:2] for line in limits.splitlines()}
    assert values["Max open files"] == [str(confinement.MAX_OPEN_FILES)] * 2
    assert values["Max file size"] == ["0", "0"]
    assert values["Max core file size"] == ["0", "0"]
    assert values["Max address space"][0] != "unlimited"


def test_environment_keeps_variables_that_imports_need() -> None:
    given = {
        "PATH": "/bin",
        "PYTHONPATH": "/src",
        "LC_ALL": "C.UTF-8",
        "TMPDIR": "/t",
        "LD_PRELOAD": "/x.so",
        **SECRETS,
    }
    kept = confinement.environment(given)
    assert {name: kept[name] for name in given if name in kept} == {
        name: given[name] for name in ("PATH", "PYTHONPATH", "LC_ALL", "TMPDIR")
    }


def test_an_answer_longer_than_any_is_not_read(process: DecodeProcess) -> None:
    code = "found = 'x' * (1 << 20)"
    with pytest.raises(ConnectionResetError):
        found(process, code)


ALONE = """
import ctypes, json, os, socket, sys
from saccade.gateway import confinement
{without}
listener = socket.create_server(("127.0.0.1", 0))
holds = confinement.confine(1 << 30)
found = {{"holds": holds}}
for name, attempt in {{
    "socket": lambda: socket.socket(),
    "connect": lambda: socket.create_connection(listener.getsockname()),
    "file": lambda: open("/etc/hostname"),
    "signal": lambda: os.kill(os.getppid(), 0),
    "fork": lambda: os.fork() or os._exit(0),
}}.items():
    try:
        attempt()
        found[name] = 0
    except OSError as error:
        found[name] = error.errno
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("without", "holds", "denied"),
    [
        ("", {"no_new_privs", "landlock", "seccomp"}, {"socket", "connect", "file", "signal", "fork"}),
        ("confinement.restrict = lambda *_: False", {"no_new_privs", "landlock"}, {"connect", "file", "signal"}),
        (
            "confinement._landlock = lambda *_: False",
            {"no_new_privs", "seccomp"},
            {"socket", "connect", "file", "signal", "fork"},
        ),
        ("confinement._landlock = lambda *_: False; confinement.restrict = lambda *_: False", {"no_new_privs"}, set()),
    ],
    ids=["all", "landlock", "seccomp", "neither"],
)
def test_each_measure_by_itself(without: str, holds: set[str], denied: set[str]) -> None:
    program = ALONE.format(without=without)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    measures = set(said.pop("holds"))
    abi = landlock_abi()
    holds |= {"no_capabilities"}
    assert measures == (holds if abi else holds - {"landlock"})
    if "seccomp" not in measures:
        # What is left is Landlock's, as far as this kernel has it.
        known = {"file": 1, "connect": 4, "signal": 6}
        denied = {name for name in denied if known[name] <= abi}
    assert {name for name, error in said.items() if error in DENIED} == denied


def landlock_abi() -> int:
    """The kernel's Landlock, 0 where it has none."""
    return max(0, ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1))
