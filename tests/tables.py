"""A table of inputs is one test: a failure names its row, and the rows behind it still run."""

import inspect
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import pytest

Row = tuple[str, Mapping[str, Any]]
"""What a failure calls the row, and its values by parameter."""


def table(names: str | Sequence[str], rows: Iterable[Any], ids: Iterable[str] = ()) -> Callable[[Any], Any]:
    """Run a test once for each of *rows*, as subtests of one test; `pytest.mark.parametrize` makes a test of each.

    Tables above one another are multiplied. Each row has its own `tmp_path` and `monkeypatch`; other fixtures are
    shared by the rows. Rows that need their own fixtures, or a mark, are parameters.
    """
    fields = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    labels = iter(ids)
    ours = [_row(fields, values, next(labels, None)) for values in rows]

    def decorate(test: Any) -> Any:
        body, below = getattr(test, "table", (test, [("", {})]))
        rows = [(" ".join(filter(None, (a, b))), one | other) for a, one in ours for b, other in below]
        return _test(test, body, rows)

    return decorate


def _row(fields: Sequence[str], values: Any, label: str | None) -> Row:
    if isinstance(values, type(pytest.param())):
        assert not values.marks
        values, label = values.values, values.id
    elif len(fields) == 1:
        values = (values,)
    by_name = dict(zip(fields, values, strict=True))
    return label or " ".join(f"{name}={reprlib.repr(value)}" for name, value in by_name.items()), by_name


def _test(test: Any, body: Any, rows: Sequence[Row]) -> Any:
    """Return the test that runs *body* for each of *rows*, with the marks of *test*."""

    @wraps(test)
    def run(subtests: pytest.Subtests, **fixtures: Any) -> None:
        __tracebackhide__ = True
        for number, (label, values) in enumerate(rows):
            with subtests.test(label), _own(fixtures, number) as own:
                body(**own, **values)

    @wraps(test)
    async def run_async(subtests: pytest.Subtests, **fixtures: Any) -> None:
        __tracebackhide__ = True
        for number, (label, values) in enumerate(rows):
            with subtests.test(label), _own(fixtures, number) as own:
                await body(**own, **values)

    made: Any = run_async if inspect.iscoroutinefunction(body) else run
    kept = [one for name, one in inspect.signature(body).parameters.items() if name not in rows[0][1]]
    subtests = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    made.__signature__ = inspect.Signature([subtests, *kept])
    made.table = body, rows
    return made


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
