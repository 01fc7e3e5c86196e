"""Tries a grammar in a limited child.

A schema of a hundred bytes can keep llguidance busy for minutes, because its fuel limit does not count all of its work.
So the gateway first compiles each new grammar in a child, and workers compile only grammars that passed. The child
reads a Constraint and writes an Outcome.
"""

import os
import sys

import msgspec
import structlog
from llguidance import LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from saccade.errors import DeadlineExceeded, InternalError, InvalidValue, RequestError
from saccade.gateway.limited_child import ChildLimits, LimitedChild, begin_task
from saccade.gateway.structured_output.constraint import Constraint
from saccade.grammars.compiler import FIRST_TAG_ID, byte_vocabulary, compile_grammar
from saccade.grammars.json_schema import SchemaReader
from saccade.grammars.schema_places import Schema
from saccade.models.tool_formats import FORMATS, write_grammar
from saccade.models.tool_formats.form import CallConstraint, FunctionConstraint
from saccade.protocol.request import Grammar
from saccade.tracebacks import hide_messages

NICENESS = 5
"""As for decode processes: below the event loop, but still a quarter of a core if all are busy."""

START_SECONDS = 15.0
"""For the child's imports and its waits for a core of a busy machine; its CPU time has its own limit."""

PROGRAM = "saccade.gateway.structured_output.trial"
LIMITS = ChildLimits(seconds=3.0, memory_bytes=512 << 20)
MAX_OUTCOME_BYTES = 256 << 20
"""A grammar is a few times as long as the body that it comes from."""

logger = structlog.get_logger(__name__)


class Outcome(msgspec.Struct, frozen=True):
    """The grammar for workers and the places of its dropped keywords, or else the error in the field *param*."""

    grammar: Grammar | None = None
    dropped: list[str] = []
    code: str = ""
    message: str = ""
    param: str | None = None


class Trial:
    """The trial of *constraint* in a child. Any thread may call kill() if nobody waits for the outcome any more."""

    def __init__(self, constraint: Constraint, limits: ChildLimits) -> None:
        self._constraint = constraint
        self._limits = limits
        self._child = LimitedChild(PROGRAM, constraint, limits)
        self.kill = self._child.stop

    def run_child(self) -> Outcome:
        """Block until the child has ended, and return the outcome."""
        if self._child.is_stopped:
            return _failed(self._constraint)
        wait_seconds = self._limits.seconds + START_SECONDS
        output, status, in_time, was_killed = self._child.run_child(wait_seconds, MAX_OUTCOME_BYTES)
        if not in_time:
            # The child did not reach its CPU limit, so it was starved: that says nothing about the grammar.
            message = f"Trying the answer's grammar took longer than {wait_seconds:g} seconds; try again shortly."
            return Outcome(code=DeadlineExceeded.code, message=message, param=self._constraint.param)
        if was_killed:
            logger.error("the trial of a grammar was killed")
            return _failed(self._constraint)
        if status < 0:
            return _too_large(self._constraint, self._limits)
        try:
            return msgspec.msgpack.decode(output, type=Outcome)
        except msgspec.DecodeError:
            logger.error("trying a grammar failed", exit_code=status)
            return _failed(self._constraint)


def _failed(constraint: Constraint) -> Outcome:
    return Outcome(code=InternalError.code, message="Trying the answer's grammar failed.", param=constraint.param)


def _too_large(constraint: Constraint, limits: ChildLimits) -> Outcome:
    param = constraint.param
    message = (
        f"`{param}` takes more than {limits.seconds:g} seconds or {limits.memory_bytes >> 20} MiB to compile; make it "
        "simpler."
    )
    return Outcome(code=InvalidValue.code, message=message, param=param)


def try_constraint(constraint: Constraint) -> Outcome:
    """Compile *constraint* in this process, and return the outcome."""
    try:
        return _compiled(constraint, byte_vocabulary())
    except RequestError as error:
        return Outcome(code=error.code, message=error.message, param=error.param or constraint.param)


def _compiled(constraint: Constraint, vocabulary: LLTokenizer) -> Outcome:
    if constraint.kind == "json_schema":
        reader = SchemaReader(constraint.param, constraint.strict, lambda schema: _compiles(vocabulary, schema))
        result = reader.read_schema(constraint.text)
        grammar, dropped = _grammar_of(result.schema), result.dropped
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
    calls, dropped, functions = msgspec.json.decode(constraint.text, type=CallConstraint), [], []
    form = FORMATS[calls.tokens.format]
    for function in calls.functions:
        reader = SchemaReader(function.place, function.strict, lambda schema: _compiles(vocabulary, schema))
        result = form.limits(function, reader.read_schema(msgspec.json.encode(function.parameters).decode()))
        dropped += result.dropped
        functions.append(msgspec.structs.replace(function, parameters=result.schema))
    content = calls.content
    if content is not None:
        reader = SchemaReader(content.place, content.strict, lambda schema: _compiles(vocabulary, schema))
        result = reader.read_schema(content.text)
        if form.structural_tag is not None:
            result = form.limits(FunctionConstraint("", {}, content.place, content.strict), result)
        dropped += result.dropped
        content = msgspec.structs.replace(content, text=msgspec.json.encode(result.schema).decode())
    calls = msgspec.structs.replace(calls, functions=functions, content=content)
    if form.structural_tag is not None:
        return Outcome(Grammar("structural_tag", form.structural_tag(calls)), dropped)
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
    """Return a grammar in Lark's format, converted if it is in llama.cpp's GBNF, which vLLM accepts too."""
    try:
        return any_to_lark(constraint.text)
    except MemoryError:
        raise
    except Exception as error:  # the library raises nothing narrower for a rule that is missing or is there twice
        message = (
            f"`{constraint.param}` is neither a Lark grammar nor GBNF, which begins with the rule `root` and defines "
            "each rule that it names, once."
        )
        raise InvalidValue(message, constraint.param) from error


def main() -> None:
    hide_messages()
    os.nice(NICENESS)
    limits, constraint = begin_task(Constraint)
    try:
        outcome = try_constraint(constraint)
    except MemoryError:
        outcome = _too_large(constraint, limits)
    sys.stdout.buffer.write(msgspec.msgpack.encode(outcome))


if __name__ == "__main__":
    main()
