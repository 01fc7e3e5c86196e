"""Start processes, end them within a time limit, and keep them running with back-off.

`saccade serve` uses this module for its programs, and a worker for its engine. It does not start the gateway's fork
server. Several threads start that, and the parent-death signal is tied to the thread. So the fork server ends when its
control socket closes.
"""

import asyncio
import contextlib
import logging
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence

from saccade.processes.parent_death import tied
from saccade.transport.backoff import Backoff

logger = logging.getLogger(__name__)


async def start_process(
    command: Sequence[str],
    *,
    signal_at_parents_death: signal.Signals,
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> Process:
    """Start *command* with empty standard input, in its own process group. Raises OSError.

    The process gets *signal_at_parents_death* when this one dies. If *environment* is None, it inherits this process's
    own.
    """
    return await asyncio.create_subprocess_exec(
        *tied(command, signal_at_parents_death), stdin=DEVNULL, pass_fds=tuple(pass_fds), env=environment
    )


def send_signal(process: Process, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


async def end_process(process: Process, seconds: float) -> None:
    """Wait at most *seconds* for a process to end after its signal, then kill it. If cancelled, kill it at once."""
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        send_signal(process, signal.SIGKILL)
        await process.wait()


def ending(code: int | None) -> str:
    """Return how a process with this return code ended, as the predicate of a sentence."""
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


async def keep_running(live: Callable[[], Awaitable[str | None]]) -> None:
    """Run *live*, one life of a process, again and again with back-off until it returns None.

    *live* returns why the process ended, a sentence for the log.
    """
    backoff = Backoff()
    while True:
        backoff.started()
        sentence = await live()
        if sentence is None:
            return
        wait_seconds = backoff.after_failure()
        logger.error("%s It is started again in %.1f s.", sentence, wait_seconds)
        await asyncio.sleep(wait_seconds)
