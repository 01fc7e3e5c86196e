"""What the two hops (engine to front, front to gateway) add to a step, in ms: `python benchmarks/hops.py`.

An echo engine, a real process, stamps every step with the machine's monotonic clock just before it sends it; the
gateway's client reads the clock when the delta is in the caller's hands. No model runs, so this is all transport.
The first line is the machine's own floor: one message through a socket pair to a process that waits for it.
"""

import argparse
import asyncio
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from saccade.connectors.native.client import WorkerClient
from saccade.connectors.sink import SendPixels
from saccade.errors import InternalError
from saccade.protocol.output import TokenDelta
from saccade.protocol.request import EngineRequest, SamplingParams
from saccade.worker.engine_process import Timeouts
from saccade.worker.service import WorkerConfig, WorkerFront

ECHO_ENGINE = Path(__file__).parents[1] / "tests" / "worker" / "echo_engine.py"


def report(what: str, times_ms: list[float]) -> None:
    """Print the median and the 99th percentile."""
    percentiles = statistics.quantiles(times_ms, n=100)
    print(f"{what}: p50 {percentiles[49]:.3f} ms, p99 {percentiles[98]:.3f} ms", flush=True)


def floor(step_ms: float, num_steps: int) -> list[float]:
    """Return the milliseconds that a message needs to wake another process, *num_steps* times."""
    ours, theirs = socket.socketpair()
    program = (
        "import socket, sys, time\nend = socket.socket(fileno=int(sys.argv[1]))\n"
        "for _ in range(int(sys.argv[2])):\n"
        "    time.sleep(float(sys.argv[3]))\n    end.send(time.monotonic_ns().to_bytes(8, 'big'))"
    )
    arguments = (str(theirs.fileno()), str(num_steps), str(step_ms / 1000))
    with subprocess.Popen((sys.executable, "-c", program, *arguments), pass_fds=(theirs.fileno(),)):
        return [(-int.from_bytes(ours.recv(8), "big") + time.monotonic_ns()) / 1e6 for _ in range(num_steps)]


class _Arrivals:
    """A sink that takes the milliseconds between a step's stamp and its arrival."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def delta(self, delta: TokenDelta) -> None:
        self.milliseconds.append((time.monotonic_ns() - delta.token_ids[1]) / 1e6)
        if delta.finish_reason is not None:
            self.ended.set_result(None)

    def pixels_wanted(self, media: Sequence[int], worker: str, send: SendPixels) -> None:
        raise InternalError("This request has no images.")

    def fail(self, error: BaseException) -> None:
        self.ended.set_exception(error)


async def ask(client: WorkerClient, number: int, num_steps: int) -> list[float]:
    """Return the milliseconds between a step's stamp and its arrival, for every step of one request."""
    request = EngineRequest(
        request_id=f"r{number}",
        token_ids=list(range(num_steps)),
        sampling=SamplingParams(max_tokens=2 * num_steps),
    )
    arrivals = _Arrivals()
    stream = client.generate(request, arrivals)
    await arrivals.ended
    await stream.close()
    return arrivals.milliseconds


async def gateway(url: str, num_requests: int, num_steps: int) -> None:
    """Run *num_requests* at once, print p50 and p99 over all deltas."""
    client = WorkerClient(url)
    await client.start()
    while not client.ready:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    answers = await asyncio.gather(*(ask(client, number, num_steps) for number in range(num_requests)))
    added_ms = [ms for answer in answers for ms in answer]
    report(f"{num_requests:3d} requests, added to a step", added_ms)
    await client.close()


async def main(step_ms: float, num_steps: int) -> None:
    """The worker's front runs in a process of its own, as it does when served."""
    report("one wakeup of a process", floor(step_ms, num_steps))
    with tempfile.TemporaryDirectory() as folder:
        url = f"unix:{folder}/worker.sock"
        command = (sys.executable, __file__, "--front", url, "--step-ms", str(step_ms))
        front = await asyncio.create_subprocess_exec(*command)
        try:
            for num_requests in (1, 8, 64):
                await gateway(url, num_requests, num_steps)
        finally:
            front.terminate()
            await front.wait()


async def front(url: str, step_ms: float) -> None:
    """Be the worker, until terminated."""
    config = f'{{"stamped": true, "step_seconds": {step_ms / 1000}}}'
    command = (sys.executable, str(ECHO_ENGINE), "--config", config)
    await WorkerFront(WorkerConfig(url, command, Timeouts()), lambda _: None).run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=10.0, help="how long the engine pretends to work")
    parser.add_argument("--num-steps", type=int, default=300)
    parser.add_argument("--front", help=argparse.SUPPRESS)
    options = parser.parse_args()
    uvloop.run(front(options.front, options.step_ms) if options.front else main(options.step_ms, options.num_steps))
