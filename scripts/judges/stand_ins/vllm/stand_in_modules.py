"""Modules that are not installed: any of their names can be imported, and fails when it is used.

A suite imports much of a project that its tests here do not need. What they need, stand-ins put in its place.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar

Find = Callable[[str, str], Any]
"""Returns what a module's name has in the place of a thing of that name; raises LookupError for what is not here."""


class NotHere(Exception):
    """A part of the project's inside that has no counterpart."""


class _Absent(type):
    """The type of what is not here: any use of it fails."""

    def __call__(cls, *given: Any, **named: Any) -> Any:
        raise NotHere(f"{cls.__module__}.{cls.__name__}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or name == "_pytestfixturefunction":
            raise AttributeError(name)
        raise NotHere(f"{cls.__module__}.{cls.__name__}.{name}")


class StandIn(ModuleType):
    """A module in whose place others stand."""

    __path__: ClassVar[list[str]] = []

    def __init__(self, name: str, find: Find) -> None:
        super().__init__(name)
        self.__dict__["__find"] = find

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.__dict__["__find"](self.__name__, name)
        except LookupError:
            if name[0].islower():
                raise AttributeError(name) from None  # so that the import looks for a module of that name
            return _Absent(name, (), {"__module__": self.__name__})

    def __call__(self, *given: Any, **named: Any) -> Any:
        raise NotHere(self.__name__)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module of the projects."""

    def __init__(self, is_replaced: Callable[[str], bool], find: Find) -> None:
        self._is_replaced = is_replaced
        self._find = find

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """Take names of the projects."""
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if self._is_replaced(name) else None

    def create_module(self, spec: Any) -> ModuleType:
        """Make the module."""
        return StandIn(spec.name, self._find)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs."""


def replace_modules(is_replaced: Callable[[str], bool], find: Find) -> None:
    """Import stand-ins for the modules whose names *is_replaced* takes."""
    sys.meta_path.insert(0, _Finder(is_replaced, find))
