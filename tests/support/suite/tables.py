"""A table of inputs is one test: a failure names its row, and the rows after it still run."""

import inspect
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple

import pytest


class Part(NamedTuple):
    """What one table gives a row: its values by parameter, and what a failure calls them."""

    values: Mapping[str, Any]
    name: str | None = None


Row = tuple[Part, ...]


def table(names: str | Sequence[str], rows: Iterable[Any], ids: Iterable[str] = ()) -> Callable[[Any], Any]:
    """Run a test once for each of *rows*, as subtests of one test; `pytest.mark.parametrize` makes a test of each.

    Tables above one another are multiplied. Each row has its own `tmp_path` and `monkeypatch`; other fixtures are
    shared by the rows. Rows that need their own fixtures, or a mark, are parameters.
    """
    fields = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    named = iter(ids)
    parts = [_part(fields, values, next(named, None)) for values in rows]

    def decorate(test: Any) -> Any:
        body, below = getattr(test, "table", (test, [()]))
        return _test(test, body, [(part, *row) for part in parts for row in below])

    return decorate


def _part(fields: Sequence[str], values: Any, name: str | None) -> Part:
    if isinstance(values, type(pytest.param())):
        assert not values.marks
        values, name = values.values, values.id
    elif len(fields) == 1:
        values = (values,)
    return Part(dict(zip(fields, values, strict=True)), name)


def _test(test: Any, body: Any, rows: Sequence[Row]) -> Any:
    """Return the test that runs *body* for each of *rows*, with the marks of *test*."""

    @wraps(test)
    def run(subtests: pytest.Subtests, **fixtures: Any) -> None:
        __tracebackhide__ = True
        for number, row in enumerate(rows):
            with subtests.test(_label(row)), _own(fixtures, number) as own:
                body(**own, **_values(row))

    @wraps(test)
    async def run_async(subtests: pytest.Subtests, **fixtures: Any) -> None:
        __tracebackhide__ = True
        for number, row in enumerate(rows):
            with subtests.test(_label(row)), _own(fixtures, number) as own:
                await body(**own, **_values(row))

    made: Any = run_async if inspect.iscoroutinefunction(body) else run
    kept = [one for name, one in inspect.signature(body).parameters.items() if name not in _values(rows[0])]
    subtests = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    made.__signature__ = inspect.Signature([subtests, *kept])
    made.table = body, rows
    return made


def _values(row: Row) -> dict[str, Any]:
    return {name: value for part in row for name, value in part.values.items()}


class _Short(reprlib.Repr):
    """Shows the beginning of long values; of bytes, without writing out all of them."""

    def repr_bytes(self, value: bytes, _: int) -> str:
        return repr(value[: self.maxstring])


def _label(row: Row) -> str:
    short = _Short().repr
    return " ".join(
        part.name or " ".join(f"{name}={short(value)}" for name, value in part.values.items()) for part in row
    )


@contextmanager
def _own(fixtures: Mapping[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Yield the fixtures of one row."""
    own = dict(fixtures)
    with ExitStack() as stack:
        if "tmp_path" in own:
            own["tmp_path"] = own["tmp_path"] / f"row{number}"
            own["tmp_path"].mkdir()
        if "monkeypatch" in own:
            own["monkeypatch"] = stack.enter_context(own["monkeypatch"].context())
        yield own
