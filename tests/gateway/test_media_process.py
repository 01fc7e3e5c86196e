"""The fork server by itself."""

import socket
import subprocess
import sys


def test_gateway_that_is_gone_before_the_start_is_no_error() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        arguments = ["--fd", str(theirs.fileno()), "--memory-bytes", "1"]
        process = subprocess.run(
            [sys.executable, "-m", "saccade.gateway.media_process", *arguments],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            timeout=60,
            check=False,
        )
    assert (process.returncode, process.stderr) == (0, b"")
