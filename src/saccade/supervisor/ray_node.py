"""Ends a replica with its node: if Ray's own process there is killed, it leaves the processes of its actors alone."""

import logging
import os
import threading
import time

LOOK_SECONDS = 1.0

logger = logging.getLogger(__name__)


def end_with_node() -> None:
    """End this process as soon as its parent, which is Ray's process on this node, has ended."""
    threading.Thread(target=_end_without, args=(os.getppid(),), name="node", daemon=True).start()


def _end_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    logger.error("Ray has ended on this node, and so does this replica.")
    os._exit(1)
