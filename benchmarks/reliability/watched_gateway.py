"""`saccade gateway`, whose event loop notes its long callbacks in the file of the first argument.

A line of the file is a callback in JSON: the processor time of the thread, in seconds, and what ran. The loop is
asyncio's own, since uvloop calls its callbacks outside Python.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from saccade.cli.main import main

SHORTEST_SECONDS = 0.005


def watch_callbacks(file: Path) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Return a substitute for uvloop.run, with which long callbacks are written to *file*."""
    run_callback = asyncio.Handle._run

    def run_watched(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run_callback(handle)
        spent = time.thread_time() - began
        if spent >= SHORTEST_SECONDS:
            with file.open("a") as lines:
                lines.write(json.dumps({"seconds": spent, "what": _what(handle)}) + "\n")

    def run(main: Coroutine[Any, Any, Any]) -> Any:
        asyncio.Handle._run = run_watched  # type: ignore[method-assign]
        return asyncio.run(main)

    return run


def _what(handle: asyncio.Handle) -> str:
    """Return the coroutine of a task's step and where it waits now, or the name of another callback."""
    callback: Any = handle._callback  # type: ignore[attr-defined]
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return str(getattr(callback, "__qualname__", callback))
    stack = task.get_stack()
    places = [f"{frame.f_code.co_qualname}:{frame.f_lineno}" for frame in stack[-1:]]
    return " at ".join([getattr(task.get_coro(), "__qualname__", "?"), *places])


if __name__ == "__main__":
    file, *arguments = sys.argv[1:]
    uvloop.run = watch_callbacks(Path(file))
    sys.argv[1:] = arguments
    sys.exit(main())
