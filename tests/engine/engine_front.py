"""A front to be played by a test, for an engine in a real process over a real socket pair."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import engines
import msgspec

from saccade.protocol.engine_ipc import EngineMessage, EngineProgress

SOURCES = str(Path(engines.__file__).parents[3] / "src")


class Front:
    """The front's end of a started engine."""

    def __init__(self, config: Any, through_stdin: bool = False, stderr: int = subprocess.DEVNULL) -> None:
        self.socket, engine = socket.socketpair()
        self.socket.settimeout(60)
        self.buffer = b""
        content = config if isinstance(config, bytes) else json.dumps(config).encode()
        arguments = ["--fd", str(engine.fileno())] + ([] if through_stdin else ["--config", os.fsdecode(content)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "saccade.engine", *arguments],
            pass_fds=[engine.fileno()],
            env={**os.environ, "PYTHONPATH": SOURCES},
            stdin=subprocess.PIPE,
            stderr=stderr,
        )
        engine.close()
        assert self.process.stdin is not None
        self.process.stdin.write(content)
        self.process.stdin.close()

    def send(self, message: Any) -> None:
        payload = msgspec.msgpack.encode(message)
        self.socket.sendall(len(payload).to_bytes(4, "little") + payload)

    def receive(self) -> Any:
        payload = self._take(int.from_bytes(self._take(4), "little"))
        return msgspec.msgpack.decode(payload, type=EngineMessage)

    def _take(self, count: int) -> bytes:
        while len(self.buffer) < count:
            received = self.socket.recv(1 << 20)
            if not received:
                raise EOFError
            self.buffer += received
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        return taken

    def until(self, kind: type) -> Any:
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return message
            assert isinstance(message, EngineProgress), message


def config_of(folder: Path) -> dict[str, str]:
    """An engine's configuration."""
    return {"model_dir": str(folder), "model": "tiny", "device": "cpu"}
