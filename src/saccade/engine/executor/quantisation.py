"""Finds the quantisation format of a checkpoint's modules by name."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from saccade.nn.formats.fp8 import Fp8
from saccade.nn.formats.quantised import WeightFormat

REGEX = "re:"


@dataclass(frozen=True)
class ModuleList:
    """The modules whose name is in *names*, or begins with a match of *expression*.

    A name stands for all modules within it. It may lack its first parts, since some lists are relative to the text
    model.
    """

    names: frozenset[str] = frozenset()
    expression: re.Pattern[str] | None = None

    @classmethod
    def of(cls, patterns: Iterable[str]) -> "ModuleList":
        """Read patterns. Raises re.error.

        "re:" begins a regular expression, as in compressed-tensors. Otherwise * is a wildcard, as in Model Optimizer's
        lists.
        """
        names, expressions = set(), []
        for pattern in patterns:
            if pattern.startswith(REGEX):
                expressions.append(re.compile(pattern.removeprefix(REGEX)).pattern)
            elif "*" in pattern:
                expressions.append(rf"(?:.*\.)?{re.escape(pattern).replace(re.escape('*'), '.*')}(?:\..*)?$")
            else:
                names.add(pattern)
        joined = "|".join(f"(?:{expression})" for expression in expressions)
        return cls(frozenset(names), re.compile(joined) if joined else None)

    def __contains__(self, module: str) -> bool:
        is_named = any(name in self.names for name in _names(module))
        return is_named or (self.expression is not None and self.expression.match(module) is not None)


def _names(module: str) -> Iterator[str]:
    """Yield the names of *module* and of its parents, as a list may write them."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        for first in range(end):
            yield ".".join(parts[first:end])


class Rule(NamedTuple):
    """The *format* of *modules*; None if they are plain."""

    modules: ModuleList
    format: WeightFormat | None


class Quantisation(NamedTuple):
    """The *format* of quantised weights, except in *ignored* modules, or the formats of *layers*, by name.

    The first of *rules* that names a module decides its format. If *only* has entries, the name of a quantised module
    contains one of them. *source* names the configuration in error messages.
    """

    format: WeightFormat | None
    ignored: ModuleList
    source: str
    layers: Mapping[str, WeightFormat] = MappingProxyType({})
    rules: tuple[Rule, ...] = ()
    only: tuple[str, ...] = ()

    def format_of(self, module: str) -> WeightFormat | None:
        """Return the format that *module* may have; None if it must be plain."""
        if module in self.ignored or (self.only and not any(part in module for part in self.only)):
            return None
        rule = next((rule for rule in self.rules if module in rule.modules), None)
        if rule is not None:
            return rule.format
        name = next((name for name in _names(module) if name in self.layers), None) if self.layers else None
        return self.format if name is None else self.layers[name]

    def is_excluded(self, name: str) -> bool:
        """Return whether the tensor *name* would belong to a quantised weight, but its module must be plain."""
        module, _, end = name.rpartition(".")
        ends = {name for format in self._every for name in (*format.fields, *format.unused, *format.derived)}
        return end in ends - {"weight"} and self.format_of(module) is None

    @property
    def formats(self) -> str:
        """The names of all formats, for error messages."""
        return ", ".join(dict.fromkeys(format.name for format in self._every))

    @property
    def is_fp8(self) -> bool:
        """Whether all formats are FP8."""
        return all(isinstance(format, Fp8) for format in self._every)

    @property
    def _every(self) -> list[WeightFormat]:
        every = (self.format, *(rule.format for rule in self.rules), *self.layers.values())
        return [format for format in every if format is not None]
