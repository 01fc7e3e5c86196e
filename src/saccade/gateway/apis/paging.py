"""Pages of a list, as in OpenAI's API."""

from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

from saccade.errors import InvalidValue
from saccade.whole_numbers import read_whole_number

T = TypeVar("T")


class Page(NamedTuple, Generic[T]):
    """A page of a list. *has_more* says whether more follow *last_id*."""

    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page_of(items: Mapping[str, T], query: Mapping[str, str], *, default: int, most: int) -> Page[T]:
    """Return the page of *items*, by their ids, that `after` and `limit` of a request's *query* ask for.

    A page has *default* items if the query does not say how many, and never more than *most*. Raises InvalidValue.
    """
    limit = read_whole_number(query.get("limit", str(default)), most)
    if not limit:
        raise InvalidValue(f"`limit` must be a whole number from 1 to {most}.", "limit")
    ids = list(items)
    if (after := query.get("after")) is not None:
        if after not in items:
            raise InvalidValue("`after` is not the id of something in this list; leave it out to begin again.", "after")
        ids = ids[ids.index(after) + 1 :]
    page = ids[:limit]
    first_id, last_id = (page[0], page[-1]) if page else (None, None)
    return Page([items[one] for one in page], first_id, last_id, len(ids) > len(page))
