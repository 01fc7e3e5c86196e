"""Try a grammar in a limited child, `python -m saccade.gateway.structured_output.trial`.

A schema of a hundred bytes can take llguidance minutes: the fuel of its limits does not count all of its work, and a
thread cannot be stopped. So the gateway compiles each new grammar in a child first, confined as decode processes are,
with limits on time and memory. The child gets a Task on its standard input and writes an Outcome on its standard
output. Workers compile only what passed.
"""

import math
import os
import resource
import subprocess
import sys

import msgspec
import structlog
from llguidance import LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from saccade.errors import DeadlineExceeded, InternalError, InvalidValue, RequestError
from saccade.gateway import confinement
from saccade.gateway.structured_output.constraint import Constraint
from saccade.grammars.compiler import FIRST_TAG_ID, byte_vocabulary, compile_grammar
from saccade.grammars.json_schema import Schema, SchemaReader
from saccade.grammars.tool_calls import HeldCalls, read_parameters, write_grammar
from saccade.protocol.request import Grammar

NICENESS = 5
"""As that of decode processes: behind the gateway's event loop, but a quarter of a core where all are busy."""

START_SECONDS = 15.0
"""For the child's imports and its waits for a core of a busy machine. Its time of the CPU is limited by itself."""

PROGRAM = "saccade.gateway.structured_output.trial"

logger = structlog.get_logger(__name__)


class TrialLimits(msgspec.Struct, frozen=True):
    """What compiling a grammar may take. *memory_bytes* is beyond what the child has when it begins."""

    seconds: float = 3.0
    memory_bytes: int = 512 << 20


class Task(msgspec.Struct, frozen=True):
    """What the child compiles."""

    constraint: Constraint
    limits: TrialLimits


class Outcome(msgspec.Struct, frozen=True):
    """The grammar for workers and the places of what was dropped of it; or what is wrong, in the field *param*."""

    grammar: Grammar | None = None
    dropped: list[str] = []
    code: str = ""
    message: str = ""
    param: str | None = None


class Trial:
    """The trial of *constraint* in a child."""

    def __init__(self, constraint: Constraint, limits: TrialLimits) -> None:
        self._constraint = constraint
        self._limits = limits
        self._child: subprocess.Popen[bytes] | None = None
        self._is_unwanted = False

    def kill(self) -> None:
        """End the child, or never begin it: nobody waits for the outcome. Any thread may call it, at any time."""
        self._is_unwanted = True
        if self._child is not None:
            self._child.kill()

    def run(self) -> Outcome:
        """Return what came of it; blocks until the child has ended."""
        if self._is_unwanted:
            return _failed(self._constraint)
        command, environment = [sys.executable, "-m", PROGRAM], confinement.environment(os.environ)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
            self._child = child
            # kill() may have come before it could see the child.
            if self._is_unwanted:
                child.kill()
            return self._outcome(child)

    def _outcome(self, child: "subprocess.Popen[bytes]") -> Outcome:
        constraint, limits = self._constraint, self._limits
        try:
            answer, _ = child.communicate(
                msgspec.msgpack.encode(Task(constraint, limits)), limits.seconds + START_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            child.kill()
            # Its own limit did not end the child, so it had little of the CPU: that says nothing about the grammar.
            message = f"Trying the answer's grammar took longer than {error.timeout:g} seconds; try again shortly."
            return Outcome(code=DeadlineExceeded.code, message=message, param=constraint.param)
        if child.returncode < 0:
            return _too_large(constraint, limits)
        try:
            return msgspec.msgpack.decode(answer, type=Outcome)
        except msgspec.DecodeError:
            logger.error("trying a grammar failed", exit_code=child.returncode)
            return _failed(constraint)


def _failed(constraint: Constraint) -> Outcome:
    return Outcome(code=InternalError.code, message="Trying the answer's grammar failed.", param=constraint.param)


def _too_large(constraint: Constraint, limits: TrialLimits) -> Outcome:
    param = constraint.param
    message = (
        f"`{param}` takes more than {limits.seconds:g} seconds or {limits.memory_bytes >> 20} MiB to compile; make it "
        "simpler."
    )
    return Outcome(code=InvalidValue.code, message=message, param=param)


def try_constraint(constraint: Constraint) -> Outcome:
    """Compile *constraint*, in this process."""
    try:
        return _compiled(constraint, byte_vocabulary())
    except RequestError as error:
        return Outcome(code=error.code, message=error.message, param=error.param or constraint.param)


def _compiled(constraint: Constraint, vocabulary: LLTokenizer) -> Outcome:
    if constraint.kind == "json_schema":
        reader = SchemaReader(constraint.param, constraint.strict, lambda schema: _compiles(vocabulary, schema))
        held = reader.read(constraint.text)
        grammar, dropped = _grammar_of(held.schema), held.dropped
    elif constraint.kind == "regex":
        grammar, dropped = Grammar("regex", constraint.text), []
    elif constraint.kind == "tool_calls":
        return _calls(constraint, vocabulary)
    else:
        grammar, dropped = Grammar("lark", _lark(constraint)), []
    try:
        compile_grammar(vocabulary, grammar)
    except InvalidValue as error:
        raise InvalidValue(f"`{constraint.param}`: {error.message}", constraint.param) from error
    return Outcome(grammar, dropped)


def _calls(constraint: Constraint, vocabulary: LLTokenizer) -> Outcome:
    calls, dropped, functions = msgspec.json.decode(constraint.text, type=HeldCalls), [], []
    for function in calls.functions:
        reader = SchemaReader(function.place, function.strict, lambda schema: _compiles(vocabulary, schema))
        held = read_parameters(function, calls.tokens, reader.read)
        dropped += held.dropped
        functions.append(msgspec.structs.replace(function, parameters=held.schema))
    content = calls.content
    if content is not None:
        reader = SchemaReader(content.place, content.strict, lambda schema: _compiles(vocabulary, schema))
        held = reader.read(content.text)
        dropped += held.dropped
        content = msgspec.structs.replace(content, text=msgspec.json.encode(held.schema).decode())
    calls = msgspec.structs.replace(calls, functions=functions, content=content)
    tried = msgspec.structs.replace(calls, tokens=calls.tokens.renumbered(FIRST_TAG_ID))
    try:
        compile_grammar(vocabulary, Grammar("lark", write_grammar(tried)))
    except InvalidValue as error:
        raise InvalidValue(f"`tools`: {error.message}", "tools") from error
    return Outcome(Grammar("lark", write_grammar(calls)), dropped)


def _compiles(vocabulary: LLTokenizer, schema: Schema) -> bool:
    try:
        compile_grammar(vocabulary, _grammar_of(schema))
    except InvalidValue:
        return False
    return True


def _grammar_of(schema: Schema) -> Grammar:
    return Grammar("json_schema", msgspec.json.encode(schema).decode())


def _lark(constraint: Constraint) -> str:
    """Return a grammar in Lark's form, also where it is in the form of llama.cpp's GBNF, as vLLM takes it."""
    try:
        return any_to_lark(constraint.text)
    except GbnfToLarkError as error:
        raise InvalidValue(f"`{constraint.param}` is neither GBNF nor a Lark grammar.", constraint.param) from error


def main() -> None:
    os.nice(NICENESS)
    task = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Task)
    seconds = math.ceil(task.limits.seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    confinement.confine(task.limits.memory_bytes, may_import=True)
    try:
        outcome = try_constraint(task.constraint)
    except MemoryError:
        outcome = _too_large(task.constraint, task.limits)
    sys.stdout.buffer.write(msgspec.msgpack.encode(outcome))


if __name__ == "__main__":
    main()
