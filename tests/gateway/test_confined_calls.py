"""Every system call, made in a process that is confined as decode processes and limited children are."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import confined_calls
import pytest
from confined_calls import ENOSYS, EPERM

from saccade.gateway import confinement, seccomp

NOBODY = 65534
USERS = [0, NOBODY] if os.geteuid() == 0 else [os.geteuid()]
ROWS = [(user, abi, mode) for user in USERS for abi in (0, 5, 6) for mode in ("decode", "import")]
EVERYDAY = {(USERS[0], 6, "decode")}
EXEMPT = {335, 336}
"""uretprobe and uprobe: the kernel asks no filter, and does nothing unless they come from its own trampoline."""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86_64")
@pytest.mark.parametrize(
    ("user", "abi", "mode"), [pytest.param(*row, marks=[] if row in EVERYDAY else pytest.mark.ci) for row in ROWS]
)
def test_only_listed_calls_pass(user: int, abi: int, mode: str) -> None:  # F6
    program = Path(confined_calls.__file__)
    told = subprocess.run(
        [sys.executable, program, str(user), str(abi), mode], capture_output=True, text=True, timeout=300, check=False
    )
    assert told.returncode == 0, told.stderr
    said = json.loads(told.stdout)
    listed = seccomp.DECODING | (seccomp.IMPORTING if mode == "import" else {})
    # Their arguments, here all -1, are not those that they are allowed with.
    refused = {listed[name][0] for name in seccomp.conditions(1, mode == "import") if name in listed}
    refused -= {listed["mmap"][0], listed["mprotect"][0]} if mode == "import" else set()
    passing = {numbers[0] for numbers in listed.values()} - refused
    unknown = {numbers[0] for numbers in seccomp.PROBED.values()} | {*range(seccomp.NEWEST_KNOWN + 1, 512)}
    for number, (of_i386, of_x32, native) in enumerate(said["found"]):
        assert (number, of_i386, of_x32) == (number, EPERM, EPERM)
        if number in passing | EXEMPT:
            assert number in EXEMPT or (number, native in (EPERM, ENOSYS)) == (number, False)
        else:
            assert (number, native) == (number, ENOSYS if number in unknown else EPERM)
    status = said["status"]
    capabilities = [status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")]
    assert {int(one, 16) for one in capabilities} == {0}
    assert user != 0 or int(status["CapBnd"], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"], status["Threads"]) == ("1", "2", "1")
    expected = [measure for measure in confinement.MEASURES if abi or measure != confinement.LANDLOCK]
    assert json.loads(status["measures"]) == expected
