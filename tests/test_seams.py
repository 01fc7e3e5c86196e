"""A module holds one thought: nothing at the top of a file begins in its middle, and its parts belong together."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from parsed_sources import parsed_modules

import saccade

pytestmark = pytest.mark.guard

ROOT = Path(saccade.__file__).parent

DIVIDED = {
    "saccade": "what a package exports, and what it imports when that is asked for",
    "saccade.engine.executor.decode_graphs": "graphs, and why a model has none",
    "saccade.engine.gpu_devices": "whether there are GPUs, and how many",
    "saccade.gateway.prompt.tools": "the tools of a chat: what it declares, and what a template takes of it",
    "saccade.log_setup": "the logs of programs that configure their lines, and of those that do not",
    "saccade.metric_registry": "a registry of families, and how a family is filled",
    "saccade.models.internvl.pixels": "the two media of a family, which are found by name",
    "saccade.models.kimi_k25.pixels": "the two media of a family, which are found by name",
    "saccade.models.llava.tiles": "how tiles are chosen, counted and ordered; networks and pixels each need some of it",
    "saccade.models.positions": "positions of text, and of text with media",
    "saccade.models.preprocessing.decoded": "a decoded image, and a decoded video",
    "saccade.models.preprocessing.tiles": "the number of views, and the views",
    "saccade.models.qwen_vl.network": "the networks of four families, which are found by name",
    "saccade.models.tool_formats.json_pieces": "JSON that is cut: its characters, and what is complete of it",
    "saccade.nn.backends.compilers": "the toolkit that kernels need, and the compiler",
    "saccade.nn.backends.triton_experts": "the kernels around the products of experts, each with its own caller",
    "saccade.nn.backends.triton_kernels": "the kernels of attention, and those beside it",
    "saccade.nn.cpu": "operations for one kind of device, each with its own caller",
    "saccade.nn.gpu": "operations for one kind of device, each with its own caller",
    "saccade.nn.ops": "operations of networks, each with its own caller",
    "saccade.processes.parent_death": "a program that runs alone, and the command that starts it",
    "saccade.supervisor.tree": "a tree of processes, and how one of them says that it is ready",
}
"""Modules in several groups that neither refer to each other nor have an importer in common, and why they stay whole."""

MOST_ANNOTATION = 80
"""Characters of a text that may be an annotation."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def _modules() -> Mapping[str, ast.Module]:
    """Return the modules of Saccade by name, but for generated ones."""
    return {
        ".".join(("saccade", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): module
        for path, module in parsed_modules().items()
    }


def _bound(node: ast.stmt) -> set[str]:
    """The names that *node*, a statement at the top of a module, defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


def _used(node: ast.AST) -> Iterator[str]:
    """Yield the names that *node* refers to, those in annotations that are texts, too. Docstrings refer to nothing."""
    pending = [node]
    while pending:
        inner = pending.pop()
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield from inner.value.replace("[", " ").split() if len(inner.value) < MOST_ANNOTATION else ()
        if not (isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant)):
            pending += ast.iter_child_nodes(inner)


def _marks_a_module(node: ast.stmt) -> bool:
    """Whether *node* defines a logger or a type variable, which every part of a module may use."""
    match node:
        case ast.Assign(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
            return name in ("getLogger", "get_logger", "TypeVar")
    return False


def _late_constants(module: ast.Module) -> Iterator[str]:
    """Yield the constants below a class or function that need no name from there, nor from a constant that does."""
    defined = set[str]()
    for node in module.body:
        names = _bound(node)
        if isinstance(node, Definition):
            defined |= names
        elif names and defined:
            if defined.isdisjoint({*_used(node)} - names):
                yield from sorted(names)
            else:
                defined |= names


def test_constants_stand_above_classes_and_functions() -> None:
    found = [f"{name}.{constant}" for name, module in _modules().items() for constant in _late_constants(module)]
    assert found == [], "a constant in the middle of a module: move it up, or what follows it to another module"


def test_late_constant_is_found() -> None:
    source = "A = 1\ndef f(): ...\nB = A\nC = f()\nD = C\nlogger = get(__name__)\nclass E: ...\nF: E = 1\nG: int = 1"
    assert [*_late_constants(ast.parse(source))] == ["B", "logger", "G"]


def _imported(module: ast.Module, names: Iterable[str]) -> Mapping[str, set[str]]:
    """Return what *module* uses of each of the modules *names*."""
    names, used, aliases = set(names), defaultdict[str, set[str]](set), dict[str, str]()
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                used[node.module].add(one.name)
                if (full := f"{node.module}.{one.name}") in names:
                    aliases[one.asname or one.name] = full
    for node in ast.walk(module):
        match node:
            case ast.Attribute(value=ast.Name(id=alias), attr=name) if alias in aliases:
                used[aliases[alias]].add(name)
    return used


def _groups(module: ast.Module, uses: Iterable[set[str]]) -> list[set[str]]:
    """Return the definitions of *module* in groups: members refer to each other, or one of *uses* has both."""
    groups = list[set[str]]()
    code = set[str]()

    def join(names: set[str]) -> None:
        together = [group for group in groups if not group.isdisjoint(names)]
        for group in together:
            groups.remove(group)
        if together:
            groups.append(set().union(*together))

    for node in module.body:
        names = _bound(node)
        code |= names if isinstance(node, Definition) else set()
        if names and not _marks_a_module(node):
            groups.append(names)
    for node in module.body:
        join({*_bound(node), *_used(node)})
    for names in uses:
        join(names)
    return [group for group in groups if group & code]


def test_parts_of_a_module_belong_together() -> None:
    modules = _modules()
    uses = defaultdict[str, list[set[str]]](list)
    for name, module in modules.items():
        for used, names in _imported(module, modules).items():
            if used != name:
                uses[used].append(names)
    found = {name for name, module in modules.items() if len(_groups(module, uses[name])) > 1}
    assert sorted(found - DIVIDED.keys()) == [], "split them, or say why they stay whole"
    assert sorted(DIVIDED.keys() - found) == []


def test_groups_of_a_module_are_found() -> None:
    module = ast.parse("A = 1\ndef a(): return A\ndef b(): return a()\ndef c(): ...\ndef d(): ...")
    assert sorted(map(sorted, _groups(module, []))) == [["A", "a", "b"], ["c"], ["d"]]
    assert sorted(map(sorted, _groups(module, [{"c", "d", "other"}]))) == [["A", "a", "b"], ["c", "d"]]
