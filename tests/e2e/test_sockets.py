"""The sockets between the processes of `saccade serve` are their user's alone."""

import os
import stat
from pathlib import Path

from server import Server


def test_worker_of_serve_is_reached_by_its_user_alone(tiny_server: Server) -> None:
    words = next(process.cmdline() for process in tiny_server.tree() if "worker" in process.cmdline()[:5])
    socket = Path(words[words.index("--uds") + 1])
    paths = (socket.parent, socket, Path(f"{socket}.stream"))
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o700, 0o600, 0o600]
    assert {path.stat().st_uid for path in paths} == {os.geteuid()}
