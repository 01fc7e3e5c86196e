"""Jinja with a meter, which stops a template that loops forever or builds a huge value.

A template is a program from the model's folder that runs in the gateway. Every step that can repeat work or make a
larger value goes through the meter. Such steps are loop iterations, calls, filters, operators, comparisons, literals,
slices and outputs. The meter counts processor time and the bytes of all values made. If one step can multiply a value
(`'x' * 10**9`, `center`, `replace`, a format's width), the meter computes the size before the value is made.

The meter reads the clock every STEPS_BETWEEN_LOOKS steps, and at once after a step that may have read a long value: a
comparison of two such values takes a hundredth of a second, and a template of 64 KiB has room for 20,000 of them.

A template's value has at most MAX_VALUE_BYTES, with every part counted as often as it is reached. So nested lists that
share parts cannot make a single comparison or str() last for hours.
"""

import contextlib
import re
import string
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

import jinja2
import jinja2.ext
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

MAX_SECONDS = 2.0
"""Limit of one rendering's processor time. Templates of releases take a tenth of it for 10,000 messages."""

MAX_VALUE_BYTES = 32 << 20
MAX_MADE_BYTES = 256 << 20
MAX_INTEGER_BITS = 1 << 16
MAX_WIDTH = 1 << 16
MAX_PRECISION = 300
ELEMENT_BYTES = 64
STEPS_BETWEEN_LOOKS = 32
SHORT_CHARACTERS = 1 << 20
LONG_BYTES = 1 << 16
"""A step that reads or makes so much has the meter read the clock."""

_UNBOUNDED = ("urlize", "xmlattr", "pprint", "striptags")
"""Filters for web pages whose time is not in proportion to their text."""

_LAZY = frozenset(
    (
        "length", "count", "first", "last", "default", "d", "items", "map", "select", "reject", "selectattr",
        "rejectattr", "attr", "abs", "random",
    )
)  # fmt: skip
"""Filters that do not read the parts of their value, or read it element by element."""

_PARENTHESIS = re.compile(r"[()]")
_OPTIONS = re.compile(r"[^a-zA-Z%]*")
_WIDE_PRINTF = re.compile(r"\*|\d{5}")
_WIDE_FORMAT = re.compile(r"\{|\d{5}")
"""What makes the options of one placeholder too wide: five digits, or a width that is a value."""

COMPARING = frozenset(
    (
        "eq", "==", "equalto", "ne", "!=", "gt", ">", "greaterthan", "ge", ">=", "lt", "<", "lessthan", "le", "<=",
        "in", "lower", "upper",
    )
)  # fmt: skip
"""Tests that read all of their values."""

ITERATION, VALUE, SLICE, COMPARED = "count iteration", "count value", "count slice", "count compared"
"""Filters for the meter's own use: a template cannot contain a name with a space."""


class TooCostly(jinja2.TemplateError):
    """The template exceeds the limits of a rendering; *message* says which one."""


class Meter:
    """The time and memory that one rendering has used. Each method raises TooCostly if a limit is exceeded."""

    def __init__(self) -> None:
        self._end: float | None = None
        self._left = MAX_MADE_BYTES
        self._steps = 0

    def step(self, num_bytes: int = 0) -> None:
        """Count one step that makes *num_bytes*."""
        self._left -= num_bytes
        if self._left < 0:
            raise TooCostly(f"takes more than {MAX_MADE_BYTES >> 20} MiB of memory")
        self._steps += 1
        if num_bytes > LONG_BYTES or self._steps % STEPS_BETWEEN_LOOKS == 0:
            self.look()

    def look(self) -> None:
        """Check the time since the first look. A short rendering never does this, since it is a system call."""
        now = time.thread_time()
        self._end = self._end or now + MAX_SECONDS
        if now > self._end:
            raise TooCostly(f"takes longer than {MAX_SECONDS:g} seconds")

    def read(self, *values: Any) -> None:
        """Count a step that may read all of *values* but makes nothing."""
        self._steps += 1
        if self._steps % STEPS_BETWEEN_LOOKS == 0 or not all(map(_is_short, values)):
            self.look()

    def made(self, value: Any) -> Any:
        """Count a new value with all its parts, and return it."""
        # Most values are text: this branch saves a third of the meter's cost.
        if type(value) is str and len(value) <= SHORT_CHARACTERS:
            self.step(len(value) if value.isascii() else 4 * len(value))
        else:
            self.step(weight(value))
        return value

    def will_make(self, num_bytes: int) -> None:
        """Check the size of a value, *num_bytes*, before it is made."""
        if num_bytes > MAX_VALUE_BYTES:
            raise TooCostly(f"makes a value of more than {MAX_VALUE_BYTES >> 20} MiB")

    def will_count(self, num_bits: int) -> None:
        """Check the size of an integer, *num_bits*, before it is computed."""
        if num_bits > MAX_INTEGER_BITS:
            raise TooCostly(f"makes a number of more than {MAX_INTEGER_BITS} bits")


def _is_short(value: Any) -> bool:
    """Return whether *value* is quick to read, such as a number or a short text."""
    if isinstance(value, str | bytes):
        return len(value) <= LONG_BYTES
    return value is None or isinstance(value, int | float | jinja2.Undefined)


def weight(value: Any) -> int:
    """Return the bytes that *value* takes, with shared parts counted each time they are reached. Raises TooCostly."""
    total, waiting = 0, [value]
    while waiting:
        part = waiting.pop()
        kind = type(part)
        if isinstance(part, str):
            total += len(part) if part.isascii() else 4 * len(part)
        elif isinstance(part, bytes):
            total += len(part)
        elif isinstance(part, int):
            if part.bit_length() > MAX_INTEGER_BITS:
                raise TooCostly(f"makes a number of more than {MAX_INTEGER_BITS} bits")
        elif kind in (list, tuple):
            total += ELEMENT_BYTES * (len(part) + 1)
            waiting.extend(part)
        elif kind is dict:
            total += 2 * ELEMENT_BYTES * (len(part) + 1)
            waiting.extend(part)
            waiting.extend(part.values())
        elif isinstance(part, jinja2.utils.Namespace):
            waiting.append(part._Namespace__attrs)  # the content of its repr()
        if total > MAX_VALUE_BYTES:
            raise TooCostly(f"makes a value of more than {MAX_VALUE_BYTES >> 20} MiB")
    return total


class _Running(threading.local):
    """The *meter* of this thread's rendering."""

    meter: Meter


class MeteredEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox with a meter; render within metered(). Pass a tree through meter_tree() before it is compiled."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self, **options: Any) -> None:
        # Constants must not be computed at compile time, when no meter runs.
        super().__init__(optimized=False, **options)
        self._running = _Running()
        self.finalize = self._finalized
        self.globals.pop("lipsum")
        for name in _UNBOUNDED:
            del self.filters[name]

    def close_filters(self) -> None:
        """Wrap all filters in the meter. Call this once, after the last filter has been added."""
        for name, function in self.filters.items():
            self.filters[name] = self._metered(name, function)
        counting = {ITERATION: self._count_iteration, VALUE: self._count_value, SLICE: self._count_slice}
        counting[COMPARED] = self._count_compared
        self.filters.update(counting)

    def metered(self, render: Callable[[], Iterator[str]]) -> Iterator[str]:
        """Yield the values of *render*, with a new meter. Renderings in one thread must not overlap."""
        self._running.meter = Meter()
        yield from render()

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, unless the result would be too large."""
        if operator == "*":
            self._running.meter.will_make(_product(left, right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._running.meter.will_count(left.bit_length() * right)
        elif operator == "%" and isinstance(left, str | bytes):
            _printf(self._running.meter, [left, right], {})
        return self._running.meter.made(self.binop_table[operator](left, right))

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, a method or a macro, unless the result would be too large."""
        name = getattr(__obj, "__name__", "")
        check = _METHODS.get(name)
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if check is not None:
            args = check(__self._running.meter, owner, args, kwargs)
        # Methods such as `count` and `index` read all of a text or list, and say little.
        if isinstance(owner, str | bytes | list | tuple):
            __self._running.meter.read(owner)
        return __self._running.meter.made(super().call(__context, __obj, *args, **kwargs))

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Apply a filter to one element of `map`, and count it."""
        self._running.meter.step()
        return super().call_filter(name, *args, **kwargs)

    def call_test(self, name: str, value: Any, args: Sequence[Any] | None = None, *more: Any, **kwargs: Any) -> Any:
        """Apply a test to one element of `select`, and count it."""
        if name in COMPARING:
            self._running.meter.read(value, *(args or ()))
        else:
            self._running.meter.step()
        return super().call_test(name, value, args, *more, **kwargs)

    def _count_iteration(self, num_bytes: int) -> bool:
        """Count one iteration of a loop whose body contains *num_bytes* of text."""
        self._running.meter.step(num_bytes)
        return True

    def _count_value(self, value: Any) -> Any:
        """Count a value that the template made and return it."""
        return self._running.meter.made(value)

    def _count_slice(self, value: Any) -> Any:
        """Count a slice without its elements, which are not copied, and return it."""
        self._running.meter.step(ELEMENT_BYTES * len(value) if isinstance(value, list | tuple) else weight(value))
        return value

    def _count_compared(self, value: Any) -> Any:
        """Count a value that is compared with another, and return it."""
        self._running.meter.read(value)
        return value

    @jinja2.pass_context
    def _finalized(self, context: jinja2.runtime.Context, value: Any) -> Any:
        return self._running.meter.made(value)

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        check = _FILTERS.get(name)
        # The first argument of some is the environment or the context.
        first = int(hasattr(function, "jinja_pass_arg"))

        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            arguments = list(args)
            if name not in _LAZY and len(arguments) > first:
                if isinstance(arguments[first], Iterator):
                    arguments[first] = list(arguments[first])
                self._running.meter.made(arguments[first])
            if check is not None:
                check(self._running.meter, arguments[first:], kwargs)
            return self._running.meter.made(function(*arguments, **kwargs))

        return metered


def _product(left: Any, right: Any) -> int:
    """Return how many bytes left * right takes, or 0 if it cannot grow large."""
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | bytes | list | tuple) and isinstance(times, int):
            return weight(value) * max(times, 0)
    if isinstance(left, int) and isinstance(right, int):
        return (left.bit_length() + right.bit_length()) // 8
    return 0


def _argument(position: int, name: str, args: Any, kwargs: dict[str, Any], default: Any = None) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _width(meter: Meter, width: Any, times: int = 1) -> None:
    if isinstance(width, int):
        meter.will_make(width * times)
    elif isinstance(width, str):
        meter.will_make(weight(width) * times)


def _replacement(meter: Meter, text: Any, old: Any, new: Any) -> None:
    if isinstance(text, str | bytes) and isinstance(old, type(text)) and isinstance(new, type(text)):
        meter.will_make(weight(text) + text.count(old) * weight(new))  # type: ignore[arg-type]


def _printf(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> None:
    form = args[0].decode("latin-1") if isinstance(args[0], bytes) else str(args[0])
    meter.will_make(len(form) + form.count("%") * (MAX_WIDTH // 8 + weight([*args[1:], kwargs])))
    _check_widths(_printf_options(meter, form), _WIDE_PRINTF)


def _printf_options(meter: Meter, form: str) -> Iterator[str]:
    """Yield each placeholder's flags, width and precision in *form*, in one pass over it."""
    place = form.find("%")
    while place >= 0:
        place += 1
        if form.startswith("(", place):
            place = _behind_key(meter, form, place)
        options = next(_OPTIONS.finditer(form, place))
        yield options[0]
        # A percent sign may also end a placeholder: then it begins none.
        place = form.find("%", options.end() + 1)


def _behind_key(meter: Meter, form: str, place: int) -> int:
    """Return the end of the key that begins with a parenthesis at *place*, and may contain further ones."""
    depth = 0
    for parenthesis in _PARENTHESIS.finditer(form, place):
        meter.step()
        depth += 1 if parenthesis[0] == "(" else -1
        if not depth:
            return parenthesis.end()
    return len(form)


def _check_widths(options: Iterable[str], wide: re.Pattern[str]) -> None:
    if any(wide.search(one) for one in options):
        raise TooCostly("formats a value wider than it may")


def _joined(meter: Meter, separator: Any, parts: Any) -> list[Any]:
    elements = list(parts)
    meter.will_make(weight(elements) + len(elements) * weight(separator))
    return elements


def _join_method(meter: Meter, text: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return (_joined(meter, text, args[0]), *args[1:]) if args else args


def _replace_method(meter: Meter, text: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    if len(args) > 1:
        _replacement(meter, text, args[0], args[1])
    return args


def _width_method(meter: Meter, text: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    for width in (*args, *kwargs.values()):
        _width(meter, width, 1 + (text.count("\t") if isinstance(text, str) else 0))
    return args


def _format_method(meter: Meter, text: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    if isinstance(text, str):
        meter.will_make(len(text) + text.count("{") * (MAX_WIDTH // 8 + weight([args, kwargs])))
        # An invalid format fails only when it is used, after the values before its fault are made.
        with contextlib.suppress(ValueError):
            _check_widths((options or "" for _, _, options, _ in string.Formatter().parse(text)), _WIDE_FORMAT)
    return args


def _translate_method(meter: Meter, text: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    if isinstance(text, str) and args:
        meter.will_make(len(text) * max(1, weight(args[0])))
    return args


def _refusal_call(meter: Meter, text: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    meter.made(list(args))
    return args


_METHODS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "join": _join_method,
    "replace": _replace_method,
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"), _width_method),
    **dict.fromkeys(("format", "format_map"), _format_method),
    "translate": _translate_method,
    "_raise_exception": _refusal_call,
}
"""Checks before a method of text is called, by its name."""


def _join_filter(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> None:
    _joined(meter, str(_argument(1, "d", args, kwargs, "")), args[0])


def _replace_filter(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> None:
    old, new = _argument(1, "old", args, kwargs), _argument(2, "new", args, kwargs)
    _replacement(meter, str(args[0]), str(old), str(new))


def _width_filter(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> None:
    for width in (*args[1:], *kwargs.values()):
        _width(meter, width, 1 + str(args[0]).count("\n"))


def _wordwrap_filter(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> None:
    meter.will_make(len(str(args[0])) * max(1, weight(_argument(3, "wrapstring", args, kwargs, "\n"))))


def _batch_filter(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> None:
    count = args[1] if len(args) > 1 else next(iter(kwargs.values()), 0)
    meter.will_make(ELEMENT_BYTES * count if isinstance(count, int) else 0)


def _json_filter(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> None:
    options = (*args[1:], *kwargs.values())
    widest = max((option if isinstance(option, int) else weight(option) for option in options), default=0)
    num_bytes = weight(args[0])
    # With an indent every element is on a separate line.
    meter.will_make(num_bytes + num_bytes // ELEMENT_BYTES * _depth(args[0]) * widest)


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inside = (
            part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list | tuple)
        )
        level = [part for parts in inside for part in parts if isinstance(part, dict | list | tuple)]
    return depth


def _round_filter(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> None:
    precision = _argument(1, "precision", args, kwargs, 0)
    if isinstance(precision, int) and abs(precision) > MAX_PRECISION:
        raise TooCostly("rounds to more digits than it may")


def _sum_filter(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> None:
    if not isinstance(_argument(2, "start", args, kwargs, 0), int | float):
        raise TooCostly("adds up values that are not numbers")


_FILTERS: dict[str, Callable[[Meter, list[Any], dict[str, Any]], None]] = {
    "join": _join_filter,
    "replace": _replace_filter,
    "center": _width_filter,
    "indent": _width_filter,
    "format": _printf,
    "wordwrap": _wordwrap_filter,
    "batch": _batch_filter,
    "slice": _batch_filter,
    "tojson": _json_filter,
    "round": _round_filter,
    "sum": _sum_filter,
}
"""Checks before a filter runs, by its name."""
