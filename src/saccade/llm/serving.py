"""serve(): runs `saccade serve` as a child of this process, for tests, notebooks and programs."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from typing import Any, Self

from saccade import config
from saccade.engine.installed import require_engine
from saccade.errors import StartupError
from saccade.gateway.config import ServerSettings
from saccade.llm.settings import read_settings
from saccade.processes.parent_death import tied

POLL_SECONDS = 0.1
STOP_SECONDS = 10.0
"""Beyond the time that running requests get to finish."""


class Server:
    """A running `saccade serve`. *url* is the base URL of its API. As a context manager, it stops after the block."""

    def __init__(self, process: "subprocess.Popen[bytes]", settings: ServerSettings) -> None:
        self.url = api_url(reachable(settings.host), settings)
        self._process = process
        self._settings = settings

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def model(self) -> str:
        """The name of the model. Raises StartupError if GET /v1/models fails, for example without a key."""
        status, body = _get(self._settings, "/v1/models")
        if status != http.client.OK:
            raise StartupError(f"The server answers {status} to GET /v1/models; pass one of its keys as api_key.")
        return str(json.loads(body)["data"][0]["id"])

    def close(self) -> None:
        """Stop the server. It first lets running requests finish, within its limit. A second call does nothing."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(self._settings.shutdown_timeout_seconds + STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(model: str | os.PathLike[str] | None = None, **settings: Any) -> Server:
    """Start `saccade serve` on *model*, a folder or a hub id, and return it when it is ready.

        with saccade.serve("./model", max_model_len=4096) as server:
            client = openai.OpenAI(base_url=server.url, api_key="none")

    Without *model*, it serves the small model that ships with Saccade. Without *port*, it listens on a free port. Other
    *settings* are flags of `saccade serve` by name; SACCADE_ variables in the environment have no effect. The server
    ends with the thread that started it, at the latest. Raises NotInstalled if the engine is not installed, or
    StartupError if a setting is wrong or the server does not start.
    """
    require_engine()
    read = read_settings({"port": free_port(), **settings}, has_server=True)
    if read.server.uds is not None or read.server.tls.certfile is not None:
        raise StartupError("A server from Python has a port with plain HTTP: leave out uds and ssl_certfile.")
    if _get(read.server, "/ready")[0]:
        raise StartupError(f"A server answers at {read.server.host}:{read.server.port} already: choose another port.")
    names = [] if model is None else [os.fspath(model)]
    command, environment = config.program("serve", "--no-summary", *names, settings=read)
    # Its own process group: a terminal's Ctrl-C reaches this process alone, which then stops the server.
    process = subprocess.Popen(tied(command, signal.SIGINT), stdin=subprocess.DEVNULL, env=environment)
    server = Server(process, read.server)
    try:
        while _get(read.server, "/ready")[0] != http.client.OK:
            if (code := process.poll()) is not None:
                raise StartupError(f"`saccade serve` ended with exit code {code} before it was ready. It said why.")
            time.sleep(POLL_SECONDS)
    except BaseException:
        server.close()
        raise
    return server


def _get(settings: ServerSettings, path: str) -> tuple[int, bytes]:
    """Return the status and the body of the answer to GET *path*; the status is 0 if no server answers."""
    headers = {"Authorization": f"Bearer {settings.api_keys[0]}"} if settings.api_keys else {}
    connection = http.client.HTTPConnection(reachable(settings.host), settings.port, timeout=2)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    return 0, b""


def api_url(host: str, settings: ServerSettings) -> str:
    """Return the base URL of the API of a server with *settings*, under the name *host*."""
    scheme = "http" if settings.tls.certfile is None else "https"
    port = f":{settings.port}" if settings.uds is None else ""
    return f"{scheme}://[{host}]{port}/v1" if ":" in host else f"{scheme}://{host}{port}/v1"


def reachable(host: str) -> str:
    """Return an address at which a program on this machine reaches a server on *host*."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
