"""What code in a decode process can reach, with all measures and with each of them alone."""

import asyncio
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

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
        patch.setenv("PYTHONPATH", os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))))
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


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS.keys())
def test_code_in_a_decode_process_reaches_nothing(process: DecodeProcess, slots: SlotPool, attempt: str) -> None:  # F6
    other, own = acquire(slots), acquire(slots)
    code = attempt.format(gateway=os.getpid(), other=other.ref.name)
    assert found(process, f"{TRY}found = outcome(lambda: {code})", own) in DENIED
    assert (FOLDER / other.ref.name).exists()


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
    assert measures == (holds if abi else holds - {"landlock"})
    if "seccomp" not in measures:
        # What is left is Landlock's, as far as this kernel has it.
        known = {"file": 1, "connect": 4, "signal": 6}
        denied = {name for name in denied if known[name] <= abi}
    assert {name for name, error in said.items() if error in DENIED} == denied


def landlock_abi() -> int:
    """The kernel's Landlock, 0 where it has none."""
    return max(0, ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1))
