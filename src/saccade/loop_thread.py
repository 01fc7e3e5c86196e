"""Runs an event loop in a thread of its own, for callers without a loop, or with one that runs already."""

import asyncio
import atexit
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread, which is called *name*. It ends on close(), or with the program."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_live, args=(self._loop,), name=name, daemon=True)
        self._thread.start()
        self._close = weakref.finalize(self, _close, self._loop, self._thread)
        at_end_of_program(self._close)

    @property
    def is_current(self) -> bool:
        """Whether the caller is in this thread."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run *work* in the loop and return its result; an interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel what is left in the loop, and end the thread. A second call does nothing."""
        self._close()


def at_end_of_program(close: Callable[[], object]) -> None:
    """Call *close* before the interpreter ends the threads that it needs.

    The interpreter does that before it calls atexit's functions.
    """
    getattr(threading, "_register_atexit", atexit.register)(close)


def _live(loop: asyncio.AbstractEventLoop) -> None:
    # At its end the runner cancels the tasks that are left, waits for them, and closes asynchronous generators.
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.get_loop().run_forever()


def _close(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    if threading.current_thread() is not thread:
        thread.join()
