"""A task that lasts until it is cancelled. Nothing waits for it, so an error that ends it would be seen by nobody."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


def begin(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run *work* in a task; an error that ends it is logged with its traceback, as critical."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report)
    return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("%s has ended by an unforeseen error", task.get_name(), exc_info=error)
