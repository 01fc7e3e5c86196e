"""A plugin of pytest: what vLLM's tests of parsers import of vLLM, in front of Saccade's reader of answers.

The protocol's classes hold what they are given. Parser classes feed the reader. Everything else of vLLM can be
imported, and fails when it is used.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

import pytest
import stand_in_parsers
import stand_in_protocol
import transformers
from stand_in_tokenizer import detokenized, tokenizer_of

CONSTANTS = {
    "TOOL_CALL_START": {"gemma4": "<|tool_call>", "": "<tool_call>"},
    "TOOL_CALL_END": {"gemma4": "<tool_call|>", "": "</tool_call>"},
    "STRING_DELIM": {"": '<|"|>'},
    "THINK_START": {"": "<think>"},
    "THINK_END": {"": "</think>"},
}
FUNCTIONS = {"get_tokenizer": tokenizer_of, "detokenize_incrementally": detokenized}


class NotHere(Exception):
    """A part of vLLM's inside that has no counterpart."""


class _Absent(type):
    """The type of what is not here: any use of it fails."""

    def __call__(cls, *given: Any, **named: Any) -> Any:
        raise NotHere(f"{cls.__module__}.{cls.__name__}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or name == "_pytestfixturefunction":
            raise AttributeError(name)
        raise NotHere(f"{cls.__module__}.{cls.__name__}.{name}")


class StandIn(ModuleType):
    """A module of vLLM's."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for source in (stand_in_protocol, stand_in_parsers):
            if hasattr(source, name):
                return getattr(source, name)
        if name in FUNCTIONS:
            return FUNCTIONS[name]
        if name in CONSTANTS:
            by_module = CONSTANTS[name]
            return by_module.get(self.__name__.rpartition(".")[2], by_module[""])
        if name[0].islower():
            raise AttributeError(name)  # so that the import looks for a module of that name
        return _Absent(name, (), {"__module__": self.__name__})

    def __call__(self, *given: Any, **named: Any) -> Any:
        raise NotHere(self.__name__)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module of vLLM's."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """Take names of vllm."""
        if name.partition(".")[0] in ("vllm", "xgrammar"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        """Make the module."""
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs; the engines can be found by going through their module."""
        if module.__name__.endswith(".registered_adapters"):
            module.__dict__.update(stand_in_parsers.ENGINES)


sys.meta_path.insert(0, Finder())
transformers.AutoTokenizer.from_pretrained = staticmethod(tokenizer_of)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Let traces be built without a trial: one that fails would end the collection, and the tests try all."""
    if collector.nodeid.endswith("test_replay.py"):
        from tests.parser.engine import trace_builder  # of vLLM's suite

        trace_builder._validate_sample = lambda *given, **named: None
