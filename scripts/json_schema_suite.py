"""Hold grammars against the JSON Schema Test Suite: `make json-schema-suite SUITE=DIR`.

DIR is a checkout of github.com/json-schema-org/JSON-Schema-Test-Suite, or the npm package json-schema-test-suite,
unpacked. Of each schema that `strict` takes, the grammar must write every valid instance and no invalid one. Prints a
table, then every instance that is otherwise, and ends with 1 if an invalid one can be written. Drafts before 4, which
were superseded in 2013, are left out.
"""

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.gateway.structured_output.constraint import Constraint
from saccade.gateway.structured_output.trial import Outcome, try_constraint
from saccade.grammars.compiler import byte_vocabulary, compile_grammar
from saccade.protocol.request import Grammar

LEFT_OUT = frozenset({"draft3"})
MAX_ORDERS = 200
"""Of the names in an instance's objects that are tried: a grammar writes properties in the schema's order."""


@dataclass(frozen=True)
class Case:
    """A schema of the suite and its instances, each with whether it is valid."""

    name: str
    schema: Any
    instances: list[tuple[str, Any, bool]]


def cases(folder: Path) -> Iterator[Case]:
    """Yield what the files of one draft hold, without what the suite calls optional."""
    for file in sorted(folder.glob("*.json")):
        for group in json.loads(file.read_text()):
            instances = [(test["description"], test["data"], test["valid"]) for test in group["tests"]]
            yield Case(f"{file.stem}: {group['description']}", group["schema"], instances)


def writes(grammar: Grammar, instance: Any) -> bool:
    """Whether an answer held to *grammar* can be *instance*, its names in some order."""
    compiled = compile_grammar(byte_vocabulary(), grammar)
    for ordered in itertools.islice(_orders(instance), MAX_ORDERS):
        matcher, text = compiled.deep_copy(), json.dumps(ordered, ensure_ascii=False).encode()
        if matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting():
            return True
    return False


def _orders(instance: Any) -> Iterator[Any]:
    match instance:
        case dict():
            for names in itertools.permutations(instance):
                for values in itertools.product(*(_some(instance[name]) for name in names)):
                    yield dict(zip(names, values, strict=True))
        case list():
            for values in itertools.product(*map(_some, instance)):
                yield list(values)
        case _:
            yield instance


def _some(instance: Any) -> list[Any]:
    return list(itertools.islice(_orders(instance), MAX_ORDERS))


def hold(case: Case, counts: Counter[str]) -> Iterator[str]:
    """Count what becomes of *case*, and yield a line for each instance that is not as it should be."""
    grammar = tried(case).grammar
    if grammar is None:
        counts["refused"] += 1
        return
    counts["held"] += 1
    yield from wrong_instances(grammar, case, counts)


def tried(case: Case) -> Outcome:
    """The grammar of the case's schema, as a `strict` request gets it, or why it is refused."""
    return try_constraint(Constraint("json_schema", json.dumps(case.schema), "schema", strict=True))


def wrong_instances(grammar: Grammar, case: Case, counts: Counter[str]) -> Iterator[str]:
    """Count the instances of *case*, and yield a line for each that is not as it should be."""
    for name, instance, is_valid in case.instances:
        is_written = writes(grammar, instance)
        said = ("" if is_valid else "in") + "valid"
        counts[f"{said} {'written' if is_written else 'not written'}"] += 1
        if is_written != is_valid:
            yield f"{said}: {case.name} | {name} | {json.dumps(instance)} | {json.dumps(case.schema)}"


def main() -> int:
    """Print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path)
    suite = parser.parse_args().suite / "tests"
    drafts = sorted(folder for folder in suite.glob("draft*") if folder.is_dir() and folder.name not in LEFT_OUT)
    if not drafts:
        parser.error(f"{suite} has no folder of a draft.")
    columns = ("held", "refused", "valid written", "valid not written", "invalid not written", "invalid written")
    print(f"| draft | schemas: {' | '.join(columns)} |\n{'|---' * (len(columns) + 1)}|")
    lines, total = [], Counter[str]()
    for folder in drafts:
        counts = Counter[str]()
        lines += [f"{folder.name}: {line}" for case in cases(folder) for line in hold(case, counts)]
        print(f"| {folder.name} | {' | '.join(str(counts[column]) for column in columns)} |", flush=True)
        total += counts
    print("", *lines, sep="\n")
    return 1 if total["invalid written"] else 0


if __name__ == "__main__":
    sys.exit(main())
