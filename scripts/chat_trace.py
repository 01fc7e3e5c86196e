"""Follow one streamed chat with an image through the gateway, and count its way: `make trace`.

A real gateway answers over HTTP on loopback; its one worker is scripted (tests/support/workers/scripted.py) and sends six deltas,
the next when the last one has been taken. Calls of Python functions of Saccade are counted on all threads of the process;
comprehensions and lambdas belong to the function around them. Decode processes and the engine are not followed.

A move is a call in another file than the call before it on that thread. The preparation ends when the worker is asked for
its first delta. A request is sent in one piece, because each further piece of a body is another way through the server.
Background tasks add to one chat, so each phase is the shortest of up to twelve chats. Exits 1 if a budget is passed.

The kinds of values are the classes of Saccade that the functions entered construct by name, on whatever branch: what a
reader of these functions has to know. Frozen dataclasses and named tuples have a budget. Messages (msgspec's structs, and
all of saccade.protocol) and objects with a state are printed apart. Errors and enumerations do not count.
"""

import ast
import dataclasses
import enum
import importlib
import json
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import msgspec

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), *map(str, (ROOT / "tests" / "support").iterdir())]

import chats  # noqa: E402
import scripted  # noqa: E402
from PIL import Image  # noqa: E402

from saccade.protocol.output import FinishReason, TokenDelta  # noqa: E402

SOURCE = f"{ROOT}/src/saccade/"
MODEL = ROOT / "src/saccade/cli/bundled/model"
NUM_DELTAS = 6
MOST_CHATS = 12
PROTOCOL = "saccade.protocol."
INNER = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>"})


@dataclass(frozen=True)
class Budget:
    """The functions entered, the calls made and the kinds of values built in a phase: what a reader has to follow.

    A phase may have a fiftieth more. Whoever needs more than that finds out why before raising a figure.
    """

    functions: int
    calls: int
    values: int

    def allows(self, phase: "Phase") -> bool:
        """Whether no figure of *phase* is more than a fiftieth above this budget."""
        figures = (
            (len(phase.functions), self.functions),
            (phase.num_calls, self.calls),
            (len(built(phase.functions).values), self.values),
        )
        return all(50 * figure <= 51 * budget for figure, budget in figures)


PREPARATION = Budget(functions=431, calls=792, values=30)
LATER_DELTA = Budget(functions=23, calls=23, values=1)


@dataclass
class Phase:
    """The calls of one phase: a list of (file, function) for each stay in a file, in order."""

    stays: list[tuple[str, list[str]]] = field(default_factory=list)
    num_calls: int = 0
    functions: set[tuple[str, str, int]] = field(default_factory=set)

    @property
    def moves(self) -> int:
        """How often a call was in another file than the one before."""
        return len(self.stays)

    @property
    def files(self) -> set[str]:
        """The files that were entered, below src/saccade."""
        return {file for file, _ in self.stays}

    @property
    def returns(self) -> int:
        """How many moves went to a file that had been left before."""
        return self.moves - len(self.files)

    def __str__(self) -> str:
        return (
            f"{len(self.files)} files, {len({Path(file).parent for file in self.files})} folders, {len(self.functions)} "
            f"functions, {self.num_calls} calls, {self.moves} moves, {self.returns} of them back; "
            f"{built(self.functions)} are built"
        )


@dataclass(frozen=True)
class Built:
    """The classes that functions construct: immutable values, messages of a wire, and objects with a state."""

    values: frozenset[type]
    messages: frozenset[type]
    stateful: frozenset[type]

    def __str__(self) -> str:
        return (
            f"{len(self.values)} kinds of values, {len(self.messages)} of messages, {len(self.stateful)} with a state"
        )


def built(functions: Iterable[tuple[str, str, int]]) -> Built:
    """Return the classes that *functions*, each a file, a qualified name and its first line, construct by name."""
    classes = {one for function in functions for one in _constructed(*function)}
    messages = {one for one in classes if issubclass(one, msgspec.Struct) or one.__module__.startswith(PROTOCOL)}
    values = {one for one in classes - messages if _is_value(one)}
    return Built(frozenset(values), frozenset(messages), frozenset(classes - messages - values))


def _is_value(kind: type) -> bool:
    if dataclasses.is_dataclass(kind):
        return bool(getattr(kind, "__dataclass_params__").frozen)  # noqa: B009 - typeshed does not know it
    return issubclass(kind, tuple)


@cache
def _constructed(file: str, name: str, line: int) -> frozenset[type]:
    module = importlib.import_module(f"saccade.{file.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__"))
    function = _functions(file).get(line)
    calls = [] if function is None else [node.func for node in _own_nodes(function) if isinstance(node, ast.Call)]
    owner = name.rpartition(".")[0]
    found = (_named(module, owner if ast.unparse(called) == "cls" else ast.unparse(called)) for called in calls)
    return frozenset(
        one
        for one in found
        if isinstance(one, type)
        and one.__module__.startswith("saccade.")
        and not issubclass(one, BaseException | enum.Enum)
    )


@cache
def _functions(file: str) -> dict[int, ast.AST]:
    """Return the functions of *file* by their first lines, decorators included, as code objects have them."""
    return {
        min([node.lineno, *(one.lineno for one in node.decorator_list)]): node
        for node in ast.walk(ast.parse(Path(SOURCE, file).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of *function* without those of functions in it, which are entered for themselves."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from _own_nodes(node)


def _named(module: ModuleType, dotted: str) -> object:
    """Return what *dotted*, an expression without its type arguments, names in *module*, None if nothing."""
    found: object = module
    for name in dotted.partition("[")[0].split("."):
        found = getattr(found, name, None)
    return found


class Tracer:
    """Counts calls while a chat runs. Made before the gateway's threads are started."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self._last: dict[int, str] = {}
        self._is_on = False
        threading.setprofile(self._profile)

    def begin(self) -> None:
        """Count from now on, with a new list of phases."""
        self.phases, self._last, self._is_on = [Phase()], {}, True

    def next_phase(self) -> None:
        """What is called from now on belongs to another phase."""
        self.phases.append(Phase())
        self._last = {}

    def end(self) -> list[Phase]:
        """Stop counting, and return the phases."""
        self._is_on = False
        return self.phases

    def close(self) -> None:
        """Have new threads followed no longer."""
        threading.setprofile(None)  # type: ignore[arg-type]

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._is_on or event != "call":
            return
        code = frame.f_code
        if not code.co_filename.startswith(SOURCE) or code.co_name in INNER:
            return
        file, phase, thread = code.co_filename[len(SOURCE) :], self.phases[-1], threading.get_ident()
        phase.num_calls += 1
        phase.functions.add((file, code.co_qualname, code.co_firstlineno))
        if self._last.get(thread) != file:
            self._last[thread] = file
            phase.stays.append((file, []))
        phase.stays[-1][1].append(code.co_qualname)


def deltas(gateway: scripted.Gateway) -> list[TokenDelta]:
    """Return the answer of the scripted worker: a token a delta, the end with the last."""
    ids = [gateway.tokenizer.encode([scripted.Segment(letter, False)])[0] for letter in "ABCDE"]
    return [*(TokenDelta("r", [one]) for one in ids), TokenDelta("r", [gateway.eos], FinishReason.STOP)]


def chat(gateway: scripted.Gateway, tracer: Tracer, seed: int) -> list[Phase]:
    """Return the phases of one chat with a new image: preparation, a phase for each delta."""

    def script(steps: Iterable[TokenDelta]) -> Iterator[TokenDelta]:
        for step in steps:
            tracer.next_phase()
            yield step

    gateway.worker.script = script(deltas(gateway))  # type: ignore[assignment]
    url = chats.data_url(Image.new("RGB", (224, 224), (seed, 80, 90)))
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    fields = {"model": "tiny", "stream": True, "max_tokens": NUM_DELTAS}
    body = json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    tracer.begin()
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    phases = tracer.end()
    if b"data: [DONE]" not in answer or len(phases) != NUM_DELTAS + 1:
        raise RuntimeError(f"the chat failed: {answer!r}")
    return phases


def trace() -> tuple[Phase, list[Phase]]:
    """Return the preparation and the deltas, each the shortest of several chats; two chats before them warm up."""
    tracer = Tracer()
    best: list[Phase] = []
    try:
        with scripted.running(MODEL) as gateway:
            for number in range(2 + MOST_CHATS):
                phases = chat(gateway, tracer, seed=number)
                if number >= 2:
                    best = [
                        min(pair, key=lambda phase: phase.num_calls)
                        for pair in zip(best or phases, phases, strict=True)
                    ]
                if best and number >= 4 and not passed_budgets(best[0], best[1:]):
                    break
    finally:
        tracer.close()
    return best[0], best[1:]


def passed_budgets(preparation: Phase, answer: list[Phase]) -> list[str]:
    """Return a sentence for each budget that is passed. The first and the last delta, which do more, have none."""
    later = answer[1:-1]
    found = [("preparation", preparation, PREPARATION), *(("a later delta", phase, LATER_DELTA) for phase in later)]
    return [
        f"{name}: {phase}; the budget is {budget.functions} functions, {budget.calls} calls and {budget.values} kinds of "
        "values, and a fiftieth more"
        for name, phase, budget in found
        if not budget.allows(phase)
    ]


def main() -> int:
    """Print the way in order, and the figures."""
    preparation, answer = trace()
    for name, phase in (("Preparation", preparation), ("A delta", answer[2])):
        print(f"{name}: {phase}\n")
        for file, functions in phase.stays:
            print(f"    {file:45} {', '.join(dict.fromkeys(functions))}")
        kinds = built(phase.functions)
        for title, classes in (
            ("Values", kinds.values),
            ("Messages", kinds.messages),
            ("With a state", kinds.stateful),
        ):
            print(f"\n{title}: {', '.join(sorted(one.__qualname__ for one in classes))}")
        print()
    for number, phase in enumerate(answer):
        print(f"Delta {number}: {phase}")
    everything = Phase([], sum(phase.num_calls for phase in (preparation, *answer)))
    for phase in (preparation, *answer):
        everything.stays += phase.stays
        everything.functions |= phase.functions
    print(f"In all: {everything}")
    problems = passed_budgets(preparation, answer)
    print("\n".join(problems))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
