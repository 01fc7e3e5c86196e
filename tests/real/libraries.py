"""Libraries for GPUs as they are published, unpacked and read, never imported: signatures, documents, references.

Names are dotted, such as flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan.
"""

import ast
import contextlib
import inspect
import math
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

ROOT = Path(__file__).parents[2]
NEW_SECONDS = 3 * 86400
FOLDER = Path(os.environ.get("SACCADE_REAL", ROOT / ".cache" / "real"))
KEPT = {
    "flashinfer_api", "overload", "no_grad", "register_custom_op", "backend_requirement", "classmethod",
    "_warn_on_positional_mla_arguments",
}  # fmt: skip
"""Decorators that keep a function's signature."""

SHAPE = re.compile(r"``([\[(][^`]*[\])])``")
FOR_NVFP4 = re.compile(r"For NVFP4 .*?\.(?: |$)")
DTYPE = re.compile(r"\b(u?int(?:8|16|32|64)|float32|bfloat16|float8_e4m3fn)\b")


def requirement(library: str) -> str:
    """Return the oldest release of *library* that the extra `gpu` takes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (line,) = (line for line in project["optional-dependencies"]["gpu"] if line.startswith(library))
    return str(line.partition(">=")[2])


def unpacked(library: str, release: str) -> Path:
    """Return the folder of a release's wheel, without what it requires. Of "newest", one of the last days counts."""
    name = f"{library}{'' if release == 'newest' else f'=={release}'}"
    folder = FOLDER / name
    whole = folder / ".whole-with-kernels"
    if release == "newest" and whole.exists() and time.time() - whole.stat().st_mtime > NEW_SECONDS:
        shutil.rmtree(folder)
    if not whole.exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps"]
        subprocess.run([*pip, "--only-binary", ":all:", "--dest", str(folder), name], check=True)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, filter(_is_read, archive.namelist()))
        wheel.unlink()
        whole.touch()
    return folder


def _is_read(entry: str) -> bool:
    """Whether the file *entry* of a wheel is unpacked: Python's, and kernels of the library's own."""
    return entry.endswith((".py", "METADATA")) or ("/csrc/" in entry and entry.endswith((".cu", ".cuh")))


class Documented(NamedTuple):
    """What the document of a parameter says: the shapes that it may have, as expressions, and its dtypes."""

    shapes: tuple[tuple[str, ...], ...]
    dtypes: frozenset[str]


@dataclass(frozen=True)
class Call:
    """The signature of a function or method, and the documents of its parameters."""

    name: str
    signature: inspect.Signature
    documents: Mapping[str, Documented]

    def bind(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments by parameter. Raises TypeError if the library would refuse them.

        Of a function that takes any names, those in its document count.
        """
        try:
            bound = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self.name}{self.signature}: {error}") from error
        more = {name: value for name, value in kwargs.items() if name not in self.signature.parameters}
        if unknown := more.keys() - self.documents.keys():
            raise TypeError(f"{self.name} has no parameters {sorted(unknown)}")
        return {name: value for name, value in bound.items() if name in self.documents} | more

    def check(self, arguments: Mapping[str, Any], known: dict[str, int]) -> int:
        """Assert that tensors have a documented shape and dtype, and return how many have.

        *known* are sizes by their names in documents, such as batch_size; those that the arguments show are added.
        """
        known.update({name: value for name, value in arguments.items() if type(value) is int})
        num_checked = 0
        for name, value in arguments.items():
            if name not in self.documents:
                continue
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, torch.Tensor):
                    num_checked += self._check(name, tensor, known)
        return num_checked

    def _check(self, name: str, tensor: torch.Tensor, known: dict[str, int]) -> bool:
        shapes, dtypes = self.documents[name]
        what = f"{self.name}: {name} is {list(tensor.shape)} {tensor.dtype}"
        if dtypes:
            assert str(tensor.dtype).removeprefix("torch.") in dtypes, f"{what}, not {sorted(dtypes)}"
        fitting = [shape for shape in shapes if len(shape) == tensor.ndim]
        if not fitting:
            assert not shapes, f"{what}, not {shapes}"
            return bool(dtypes)
        found = [_solved(shape, tensor.shape, known) for shape in fitting]
        assert any(one is not None for one in found), f"{what}, not {fitting} with {known}"
        known.update(next(one for one in found if one is not None))
        return True


def _solved(shape: tuple[str, ...], sizes: torch.Size, known: Mapping[str, int]) -> dict[str, int] | None:
    """Return the sizes that *shape* names; None if *sizes* contradict what is *known*."""
    names = dict(known)
    for dimension, size in zip(shape, sizes, strict=True):
        if not re.fullmatch(r"[\w +*/()-]+", dimension):
            continue  # such as qo_indptr[-1]
        unknown = [name for name in re.findall(r"[A-Za-z_]\w*", dimension) if name not in names]
        if not unknown:
            if eval(dimension, {"__builtins__": {}}, names) != size:
                return None
        elif dimension == unknown[0]:
            names[dimension] = size
        elif re.fullmatch(rf"{unknown[0]} \+ 1", dimension):
            names[unknown[0]] = size - 1
    return names


@dataclass(frozen=True)
class Library:
    """A library below *root*, as `unpacked` leaves it."""

    root: Path

    def call(self, name: str) -> Call:
        """Return a function's or a method's signature. Raises LookupError if there is none of this name."""
        function = self._function(name)
        for decorator in function.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if ast.unparse(called).rpartition(".")[2] not in KEPT:
                raise LookupError(f"{name}: the decorator {ast.unparse(called)} may change the signature")
        parameters = list(_parameters(function.args))
        parts = name.split(".")
        if parts[-2][:1].isupper():
            parameters = parameters[1:]
        return Call(name, inspect.Signature(parameters), dict(_documents(ast.get_docstring(function) or "")))

    def run(self, name: str) -> Callable[..., Any]:
        """Return a function that needs torch, and functions and enumerations of the library."""
        module, _, function = name.rpartition(".")
        needed: dict[str, ast.stmt] = {}
        self._collect(module, function, needed, {function})
        future = ast.parse("from __future__ import annotations").body
        namespace: dict[str, Any] = {"torch": torch, "F": functional, "math": math, "Enum": Enum, "IntEnum": IntEnum}
        # Enumerations, then constants, which may be their members; then functions, whose defaults may be either.
        ranks = {ast.ClassDef: 0, ast.FunctionDef: 2}
        body = sorted(needed.values(), key=lambda node: ranks.get(type(node), 1))
        exec(compile(ast.Module([*future, *body], []), module, "exec"), namespace)
        return namespace[function]  # type: ignore[no-any-return]

    def _collect(self, module: str, name: str, needed: dict[str, ast.stmt], seen: set[str]) -> None:
        """Add the definition of *name* in *module* to *needed*, after those that it uses."""
        module, node = self._member(module, self._module(module), name)
        own = {one for statement in _statements(self._module(module)) for one in _defined(statement)}
        for used in sorted({one.id for one in ast.walk(node) if isinstance(one, ast.Name)} & own - seen):
            seen.add(used)
            self._collect(module, used, needed, seen)
        needed[name] = node

    def _function(self, name: str) -> ast.FunctionDef:
        module, node = "", ast.parse("")
        for number, part in enumerate(name.split(".")):
            if number == 0 or (isinstance(node, ast.Module) and self._path(f"{module}.{part}") is not None):
                module = f"{module}.{part}".lstrip(".")
                node = self._module(module)
            else:
                module, node = self._member(module, node, part)
        if not isinstance(node, ast.FunctionDef):
            raise LookupError(f"{name} is no function")
        return node

    def _member(self, module: str, node: ast.AST, name: str) -> tuple[str, Any]:
        """Return the member *name* of a module or class, and the module that defines it; imports are followed."""
        found: tuple[str, Any] | None = None
        for statement in _statements(node):
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*" and found is None:
                source = self._source(module, statement)
                with contextlib.suppress(LookupError):
                    found = self._member(source, self._module(source), name)
            if name not in _defined(statement):
                continue
            if isinstance(statement, ast.ImportFrom):
                source = self._source(module, statement)
                alias = next(alias for alias in statement.names if (alias.asname or alias.name) == name)
                found = self._member(source, self._module(source), alias.name)
            else:
                found = module, statement  # the last one: overloads come before
        if found is None:
            raise LookupError(f"{module} has no {name}")
        return found

    def _source(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        path = self._path(module)
        up = statement.level - (path is not None and path.name == "__init__.py")
        package = module.split(".")[: len(module.split(".")) - up]
        return ".".join([*package, *([statement.module] if statement.module else [])])

    def _module(self, module: str) -> ast.Module:
        path = self._path(module)
        if path is None:
            raise LookupError(f"there is no module {module}")
        return ast.parse(path.read_text())

    def _path(self, module: str) -> Path | None:
        stem = self.root.joinpath(*module.split("."))
        return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.exists()), None)


def _defined(statement: ast.AST) -> set[str]:
    """Return the names that a statement defines, or imports from the same library."""
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.ImportFrom(names=names, level=level) if level:
            return {alias.asname or alias.name for alias in names}
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a module or class, in blocks of conditions and attempts too."""
    for statement in ast.iter_child_nodes(node):
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from _statements(statement)
        else:
            yield statement


def _parameters(arguments: ast.arguments) -> Iterator[inspect.Parameter]:
    kinds = inspect.Parameter
    places = [*((one, kinds.POSITIONAL_ONLY) for one in arguments.posonlyargs),
              *((one, kinds.POSITIONAL_OR_KEYWORD) for one in arguments.args)]  # fmt: skip
    first = len(places) - len(arguments.defaults)
    for number, (argument, kind) in enumerate(places):
        default = ast.unparse(arguments.defaults[number - first]) if number >= first else kinds.empty
        yield kinds(argument.arg, kind, default=default)
    if arguments.vararg is not None:
        yield kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL)
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield kinds(argument.arg, kinds.KEYWORD_ONLY, default=kinds.empty if value is None else ast.unparse(value))
    if arguments.kwarg is not None:
        yield kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD)


def _documents(text: str) -> Iterator[tuple[str, Documented]]:
    """Yield what a docstring in numpy's form says of each parameter."""
    section = text.partition("Parameters\n----------\n")[2]
    section = re.split(r"\n\w[\w ]*\n-{3,}", section)[0]
    for entry in re.split(r"\n(?=\*{0,2}\w)", section):
        head, _, rest = entry.partition("\n")
        # A sentence about one format says nothing of the others.
        rest = FOR_NVFP4.sub("", " ".join(rest.split()))
        shapes = tuple(
            tuple(part.strip() for part in shape[1:-1].rstrip(",").split(","))
            for shape in SHAPE.findall(rest)
            if "shape" in rest and shape[1:2].isalnum()
        )
        yield head.partition(":")[0].strip(), Documented(shapes, frozenset(DTYPE.findall(rest)))
