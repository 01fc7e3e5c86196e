"""Hold the shape of the code against the budgets of docs/architecture.md: `python scripts/measure.py src/saccade`.

Prints one line per budget and exits 1 where one is passed. Counted like this:
function lines run from `def` to the last line, docstring included; branches are if, for, while, except, conditional
expressions and match cases; parameters leave out self and cls, and functions that a compiler turns into a kernel (jit).
Imports are modules of Saccade that a file imports; those of COMPOSING put a process together, and have no budget.
Generated files (*_pb2*) are left out.
"""

import ast
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)


COMPOSING = ("engine/startup.py", "gateway/application.py")


@dataclass
class Shape:
    """Figures of a codebase, each with the place it was found."""

    file_lines: list[tuple[float, str]] = field(default_factory=list)
    function_lines: list[tuple[float, str]] = field(default_factory=list)
    branches: list[tuple[float, str]] = field(default_factory=list)
    parameters: list[tuple[float, str]] = field(default_factory=list)
    imports: list[tuple[float, str]] = field(default_factory=list)
    undocumented: list[tuple[float, str]] = field(default_factory=list)
    asserts: list[tuple[float, str]] = field(default_factory=list)


def _functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, FunctionNode]]:
    """Yield methods and functions; those nested in a function count inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")


def _lines(node: FunctionNode) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _measure_function(shape: Shape, place: str, node: FunctionNode) -> None:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    shape.function_lines.append((_lines(node), place))
    shape.branches.append((sum(isinstance(child, BRANCHES) for child in ast.walk(node)), place))
    if not any(ast.unparse(one).partition("(")[0].endswith("jit") for one in node.decorator_list):
        shape.parameters.append((sum(argument.arg not in ("self", "cls") for argument in arguments), place))


def _measure_file(shape: Shape, path: Path) -> None:
    source = path.read_text()
    tree = ast.parse(source)
    shape.file_lines.append((source.count("\n"), str(path)))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    if not str(path).endswith(COMPOSING):
        shape.imports.append((sum(module.startswith("saccade.") for module in imported), str(path)))
    shape.asserts += [(1, f"{path}:{node.lineno}") for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    if ast.get_docstring(tree) is None:
        shape.undocumented.append((1, str(path)))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and ast.get_docstring(node) is None:
            shape.undocumented.append((1, f"{path}:{node.name}"))
    for name, function in _functions(tree):
        _measure_function(shape, f"{path}:{function.lineno} {name}", function)


def _percentile(values: list[tuple[float, str]], share: float) -> tuple[float, str]:
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _report(shape: Shape) -> bool:
    rows = [
        ("file lines p90", *_percentile(shape.file_lines, 0.9), 300),
        ("file lines max", *max(shape.file_lines), 500),
        ("function lines p90", *_percentile(shape.function_lines, 0.9), 28),
        ("function lines max", *max(shape.function_lines), 80),
        ("branches max", *max(shape.branches), 15),
        ("parameters max", *max(shape.parameters), 8),
        ("imports max", *max(shape.imports), 25),
        ("undocumented modules and classes", len(shape.undocumented), " ".join(p for _, p in shape.undocumented), 0),
        ("assert statements", len(shape.asserts), " ".join(p for _, p in shape.asserts), 0),
    ]
    passed = True
    for name, value, place, budget in rows:
        within = value <= budget
        passed &= within
        print(f"{'ok  ' if within else 'OVER'} {name}: {value:g} (budget {budget}) {place}")
    return passed


def main() -> int:
    """Measure the folder that the first argument names."""
    shape = Shape()
    for path in sorted(Path(sys.argv[1]).rglob("*.py")):
        if "_pb2" not in path.name:
            _measure_file(shape, path)
    return 0 if _report(shape) else 1


if __name__ == "__main__":
    sys.exit(main())
