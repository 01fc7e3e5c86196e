"""One fork server for all the decode pools of a test process, which would each import torch again."""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

from saccade.gateway.images.decode_pool import pool
from saccade.gateway.images.decode_pool.server import DecodeServer


class SharedServer(DecodeServer):
    """A fork server that outlives the pools which use it."""

    def start(self) -> None:
        """It has been started; where it has ended since, fork() starts it again."""

    def stop(self) -> None:
        """It is stopped when the test process ends."""


@cache
def _started(memory_bytes: int, pdf_font_folder: str | None) -> SharedServer:
    server = SharedServer(memory_bytes, pdf_font_folder)
    DecodeServer.start(server)
    atexit.register(DecodeServer.stop, server)
    return server


@contextmanager
def shared() -> Iterator[None]:
    """Within it, new pools get the shared fork server; their decode processes are their own, and end with them."""
    with patch.object(pool, "DecodeServer", _started):
        yield
