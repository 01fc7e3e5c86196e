"""Faults, struck at a running `saccade serve` while it answers; used by the tests and by benchmarks/reliability/faults.py.

Each fault is a function that does the harm. What came of it is an Observation: no answer may be wrong, service must
return, and nothing may be left behind.
"""

import contextlib
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import openai
import psutil
from chats import openai_messages, random_image
from server import Server, slots
from wire_fuzz import send_malformed

FLAGS = ("--max-model-len", "1024", "--max-num-seqs", "8", "--mm-processor-cache-gb", "0.01")
NUM_RUNNING = 4
LONG_TOKENS, CROWD_TOKENS, SHORT_TOKENS = 300, 220, 8
NUM_BLOCKS = 64
"""KV blocks: what the longest sequence may need, and fewer than the long requests need together."""
WAIT_SECONDS = 60.0
FULL_BYTES = 512 << 10
IN_SMALL_SHARED_MEMORY = (
    *("unshare", "--map-root-user", "--mount", "sh", "-c"),
    *(f'mount -t tmpfs -o size={FULL_BYTES} none /dev/shm && exec "$@"', "sh"),
)
"""Runs a command whose /dev/shm is soon full; nobody else's is."""
RIGHT = "right answer"


class WrongAnswer(Exception):
    """An answer was given, and it is not that of the quiet server."""


@dataclass(frozen=True)
class Ask:
    """A greedy request, the same every time. *width* makes the image's size, *seed* its content; 0: text alone."""

    seed: int
    max_tokens: int
    width: int = 96
    stream: bool = False

    def text(self, server: Server, on_first: Callable[[], object] = bool) -> str:
        """Return the answer; call *on_first* when a stream has begun. Raises what the client raises."""
        parts = (random_image(self.width, 96, self.seed),) if self.seed else ()
        # An exception keeps this frame, and so the client, alive; its socket must not wait for the collector.
        with server.client(timeout=WAIT_SECONDS) as client:
            answer = client.chat.completions.create(
                model=server.name,
                messages=openai_messages(*parts, "What is it?"),
                max_tokens=self.max_tokens,
                temperature=0,
                stream=self.stream,
                extra_body={"ignore_eos": True},
            )
            if self.stream:
                chunks = iter(answer)
                text = next(chunks).choices[0].delta.content or ""
                on_first()
                return text + "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            return str(answer.choices[0].message.content)


LONG = tuple(Ask(seed, LONG_TOKENS, stream=bool(seed % 2)) for seed in range(NUM_RUNNING))
CROWD = tuple(Ask(seed, CROWD_TOKENS) for seed in range(20, 27))
MANY_IMAGES = tuple(Ask(seed, SHORT_TOKENS, width=480) for seed in range(50, 58))
PROBE = Ask(11, SHORT_TOKENS)


class Quiet:
    """What the server answers when nothing else happens; asked once, one by one."""

    def __init__(self, server: Server, known: Mapping[Ask, str] | None = None) -> None:
        self._server = server
        self._known = dict(known or {})

    def __getitem__(self, ask: Ask) -> str:
        if ask not in self._known:
            self._known[ask] = ask.text(self._server)
        return self._known[ask]

    def of(self, server: Server) -> "Quiet":
        """Return the same answers as the measure for another server of the same model."""
        return Quiet(server, self._known)

    def learn(self, *asks: Ask) -> None:
        """Ask now, while it is quiet."""
        for ask in asks:
            self[ask]


@dataclass
class Observation:
    """What users saw: of the requests that ran, and of those that came after; and how long until all was well."""

    running: Counter[str] = field(default_factory=Counter)
    later: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    left: tuple[str, ...] = ()


def outcome(server: Server, ask: Ask, expected: str, on_first: Callable[[], object] = bool) -> str:
    """Return in words what came of *ask*. Raises WrongAnswer."""
    try:
        text = ask.text(server, on_first)
    except openai.APIStatusError as error:
        return f"{error.status_code} {error.code}"
    except openai.APIConnectionError:
        return "broken connection"
    except openai.APIError as error:
        return f"error event {error.code}"
    except Exception as error:
        return f"broken stream ({type(error).__name__})"
    if text != expected:
        raise WrongAnswer(f"{ask}: {text!r} instead of {expected!r}")
    return RIGHT


@contextlib.contextmanager
def asked(
    server: Server, asks: tuple[Ask, ...], quiet: Quiet, on_first: Callable[[], object] = bool
) -> Iterator[list[Future[str]]]:
    """Ask all at once, in threads."""
    with ThreadPoolExecutor(max(1, len(asks))) as threads:
        yield [threads.submit(outcome, server, ask, quiet[ask], on_first) for ask in asks]


def strike(server: Server, quiet: Quiet, harm: Callable[[Server, Quiet], None]) -> Observation:
    """Do *harm* while requests run; return what they saw, and what was left once a right answer came again."""
    quiet.learn(PROBE, *LONG, *CROWD)
    before = census(server)
    seen = Observation()
    begun = threading.Semaphore(0)
    with asked(server, LONG, quiet, begun.release) as running:
        for _ in filter(lambda ask: ask.stream, LONG):
            begun.acquire(timeout=WAIT_SECONDS)
        began = time.monotonic()
        harm(server, quiet)
        while (what := outcome(server, PROBE, quiet[PROBE])) != RIGHT:
            seen.later[what] += 1
            if time.monotonic() - began > WAIT_SECONDS:
                raise TimeoutError(f"no service for {WAIT_SECONDS:.0f} s: {seen.later}")
            time.sleep(0.05)
        seen.later[what] += 1
        seen.seconds = time.monotonic() - began
        seen.running.update(request.result() for request in running)
    seen.left = left_behind(server, before)
    return seen


def wait_for(condition: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
    """Return when *condition* holds; a server that cannot be asked counts as no. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, LookupError, psutil.NoSuchProcess):
            if condition():
                return
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


def roles(server: Server) -> dict[str, list[psutil.Process]]:
    """Return the server's processes by what they do."""
    found: dict[str, list[psutil.Process]] = {}
    for process in server.tree():
        with contextlib.suppress(psutil.NoSuchProcess):
            found.setdefault(_role(process), []).append(process)
    return found


def _role(process: psutil.Process) -> str:
    words = process.cmdline()
    if "saccade.gateway.images.decode_pool.process" in words:
        forked = "saccade.gateway.images.decode_pool.process" in psutil.Process(process.ppid()).cmdline()
        return "decode process" if forked else "fork server"
    if "saccade.engine" in words:
        return "engine"
    return next((word for word in ("gateway", "worker", "serve") if word in words), "other")


def only(server: Server, role: str) -> psutil.Process:
    """Return the one process of *role*, as soon as there is one: it may have just been started. Raises TimeoutError."""
    try:
        wait_for(lambda: len(roles(server)[role]) == 1)
    except TimeoutError:
        raise TimeoutError(f"there is not one {role}: {roles(server)}") from None
    (process,) = roles(server)[role]
    return process


@dataclass(frozen=True)
class Census:
    """How many processes of each role there are, how many descriptors those of it have at most, and all their ids."""

    processes: dict[str, int]
    descriptors: dict[str, int]
    pids: frozenset[int]


def census(server: Server) -> Census:
    """Count processes and descriptors."""
    found = roles(server)
    return Census(
        {role: len(processes) for role, processes in found.items()},
        {role: max(process.num_fds() for process in processes) for role, processes in found.items()},
        frozenset(process.pid for processes in found.values() for process in processes),
    )


def left_behind(server: Server, before: Census, seconds: float = 15.0) -> tuple[str, ...]:
    """Return in words what is there after *seconds* that was not there before the harm, or () as soon as nothing is."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, LookupError, psutil.NoSuchProcess):
            left = _left(server, before)
            if not left or time.monotonic() > deadline:
                return left
        time.sleep(0.2)


def _left(server: Server, before: Census) -> tuple[str, ...]:
    now = census(server)
    dead = {str(pid) for pid in before.pids - now.pids}
    left = []
    if now.processes != before.processes:
        left.append(f"processes {now.processes} instead of {before.processes}")
    for role, count in now.descriptors.items():
        # A connection of the probing client, or of the metrics request, may be closing still.
        if count > before.descriptors.get(role, 0) + 2:
            left.append(f"{count} descriptors in the {role} instead of {before.descriptors.get(role, 0)}")
    if orphans := {name for name in segments(server) if name.split("-")[1] in dead}:
        left.append(f"segments {sorted(orphans)}")
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "saccade_slots_in_use"):
        if value := server.metric(name):
            left.append(f"{name} = {value:.0f}")
    return tuple(left)


def segments(server: Server) -> set[str]:
    """Return the names of the segments in the server's own view of /dev/shm."""
    folder = Path(f"/proc/{server.process.pid}/root/dev/shm")
    return {path.name for path in folder.glob("saccade-*")}


# What is done to the server.


def kill(role: str, server: Server, _: Quiet) -> None:
    """End the process of *role* as the kernel does when memory runs out."""
    only(server, role).kill()


def kill_fork_server(server: Server, _: Quiet) -> None:
    """End the server that decode processes are forked from, and they with it; then bring images that were not seen."""
    fork_server = only(server, "fork server")
    forked = fork_server.children()
    fork_server.kill()
    # If one of them still decoded the images, nothing would start others.
    wait_for(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in forked))
    fresh = [Ask(time.monotonic_ns() % 10**9 + number, SHORT_TOKENS) for number in range(4)]
    with ThreadPoolExecutor(len(fresh)) as threads:
        texts = list(threads.map(lambda ask: ask.text(server), fresh))
    if texts != [ask.text(server) for ask in fresh]:
        raise WrongAnswer("an image was answered in two ways")


def pause(seconds: float, server: Server, _: Quiet) -> None:
    """Stop the engine, and let it go on after *seconds*."""
    engine = only(server, "engine")
    engine.suspend()
    time.sleep(seconds)
    engine.resume()


def hang(server: Server, _: Quiet) -> None:
    """Stop the engine for good."""
    only(server, "engine").suspend()


def lose_slots(server: Server, _: Quiet) -> None:
    """Unlink every segment under a request that waits for the engine, and under those that are kept for later."""
    engine = only(server, "engine")
    engine.suspend()
    victim = Ask(int(time.monotonic_ns() % 10**9), SHORT_TOKENS)
    held = server.metric("saccade_slots_in_use")
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(outcome, server, victim, "nobody knows")
        wait_for(lambda: server.metric("saccade_slots_in_use") > held)
        for name in slots(server.tree()):
            Path("/dev/shm", name).unlink()
        engine.resume()
        if (what := waiting.result()) != "500 worker_failed":
            raise WrongAnswer(f"a request without its pixels got: {what}")
    victim.text(server)  # what is gone is made again, not looked for for ever


def crowd(server: Server, quiet: Quiet) -> None:
    """Ask for more at once than the KV cache holds, and for one answer that can never fit."""
    before = server.metric("vllm:num_preemptions_total")
    with asked(server, CROWD, quiet) as answers:
        if seen := {answer.result() for answer in answers} - {RIGHT}:
            raise WrongAnswer(f"a crowd got: {seen}")
    wait_for(lambda: server.metric("vllm:num_preemptions_total") > before)
    with server.client() as client, contextlib.suppress(openai.BadRequestError):
        client.chat.completions.create(model=server.name, messages=openai_messages("word " * 3000), max_tokens=9)
        raise WrongAnswer("a prompt over the capacity was taken")


def fill(server: Server, quiet: Quiet) -> None:
    """Send more pixels than /dev/shm has room for; of a server that has a small one."""
    with asked(server, MANY_IMAGES, quiet) as answers:
        if seen := {answer.result() for answer in answers} - {RIGHT}:
            raise WrongAnswer(f"with /dev/shm full: {seen}")
    folder = Path(f"/proc/{server.process.pid}/root/dev/shm")
    sizes = [(folder / name).stat().st_size for name in segments(server)]
    if sum(sizes) > FULL_BYTES or len(sizes) >= len(MANY_IMAGES):
        raise WrongAnswer(f"/dev/shm was not full: {sizes}")


def fuzz(count: int, server: Server, _: Quiet) -> None:
    """Send *count* malformed commands to the worker, beside the gateway's own."""
    words = only(server, "worker").cmdline()
    send_malformed(f"unix:{words[words.index('--uds') + 1]}", count)


FAULTS: dict[str, Callable[[Server, Quiet], None]] = {
    "kill -9 engine": functools.partial(kill, "engine"),
    "kill -9 worker's front": functools.partial(kill, "worker"),
    "kill -9 gateway": functools.partial(kill, "gateway"),
    "kill -9 fork server": kill_fork_server,
    "missing slots": lose_slots,
    "worker out of blocks": crowd,
    "malformed frames": functools.partial(fuzz, 300),
}
