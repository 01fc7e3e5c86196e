"""References within a JSON schema, as JSON pointers from its root; then nothing needs its identifiers.

`$id` gives a schema a URI, to which the references in it are relative, and `$anchor` a name (JSON Schema 2020-12,
section 8.2). Draft 4 has `id` for both, drafts 6 and 7 have `$id`. No schema is fetched.
"""

from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

from saccade.errors import InvalidValue
from saccade.grammars.schema_places import MAX_DEPTH, MAX_SCHEMAS, Schema, excerpt, parts, place_of, pointed_at

SAY_NOTHING: Final = ("$schema", "$id", "$anchor", "$recursiveAnchor", "$vocabulary", "$comment", "contentSchema")
"""Keywords on which no value depends once references are pointers."""


@dataclass(frozen=True)
class _Located:
    """A *schema*, its *place* for people and its *pointer* from the root. It belongs to a schema with a URI."""

    place: str
    pointer: str
    schema: Schema
    uri: str = ""
    uri_pointer: str = ""


def resolve_references(root: Schema, param: str) -> list[tuple[str, Schema]]:
    """Make each `$ref` in *root* a pointer, drop the identifiers, and return all its schemas with their places.

    Raises InvalidValue for a `$ref` whose schema is not in *root*, and for too many schemas or too deep ones.
    """
    document = _Document(root, param)
    for one in document.located:  # which grows: references may lead to places that no keyword has
        if "$ref" in one.schema:
            one.schema["$ref"] = "#" + document.find(one)
    for one in document.located:
        for keyword in SAY_NOTHING:
            one.schema.pop(keyword, None)
        if isinstance(one.schema.get("$dynamicAnchor"), str):
            del one.schema["$dynamicAnchor"]
    return [(one.place, one.schema) for one in document.located]


class _Document:
    """The schemas of a *root* that have been *located*, and their identifiers."""

    def __init__(self, root: Schema, param: str) -> None:
        self._root = root
        self._param = param
        self._id_keyword = "id" if "draft-04" in str(root.get("$schema")) else "$id"
        self._pointers: dict[str, str] = {}
        self._seen = set[int]()
        self.located: list[_Located] = []
        self._locate(_Located(param, "", root))

    def _locate(self, top: _Located) -> None:
        """Add *top* and all schemas in it."""
        level = [top]
        for _ in range(MAX_DEPTH + 1):
            named = [self._named(one) for one in level if id(one.schema) not in self._seen]
            self._seen.update(id(one.schema) for one in named)
            self.located += named
            if len(self.located) > MAX_SCHEMAS:
                raise InvalidValue(f"`{self._param}` has more than {MAX_SCHEMAS} schemas in it.", self._param)
            level = [
                _Located(part.place, one.pointer + part.pointer, part.schema, one.uri, one.uri_pointer)
                for one in named
                for part in parts(one.schema, one.place)
            ]
            if not level:
                return
        raise InvalidValue(f"`{self._param}` is nested more than {MAX_DEPTH} schemas deep.", self._param)

    def _named(self, one: _Located) -> _Located:
        """Note the identifiers of a schema, and return it with its own URI, if it has one."""
        uri, name = urldefrag(_joined(one.uri, one.schema.get(self._id_keyword)))
        if uri != one.uri:
            one = _Located(one.place, one.pointer, one.schema, uri, one.pointer)
            self._pointers.setdefault(uri, one.pointer)
        for anchor in (name, one.schema.get("$anchor"), one.schema.get("$dynamicAnchor")):
            if anchor and isinstance(anchor, str):
                self._pointers.setdefault(f"{one.uri}#{anchor}", one.pointer)
        return one

    def find(self, one: _Located) -> str:
        """Return the pointer from the root to the schema that the `$ref` of *one* means."""
        place, reference = f"{one.place}.$ref", one.schema["$ref"]
        if not isinstance(reference, str):
            raise InvalidValue(f"`{place}` must be a text.", place)
        uri, fragment = urldefrag(_joined(one.uri, reference))
        start = one.uri_pointer if uri == one.uri else self._pointers.get(uri)
        if start is None:
            raise InvalidValue(
                f"`{place}` must begin with #, or be the `$id` of a schema in `{self._param}`: no schema is fetched.",
                place,
            )
        if fragment and not fragment.startswith("/"):
            candidates = [self._pointers.get(f"{uri}#{unquote(fragment)}")]
        else:
            # Many who set `$id` in a part mean the root all the same.
            candidates = [start + fragment, fragment]
        for pointer in candidates:
            schema = None if pointer is None else pointed_at(pointer, self._root)
            if pointer is not None and isinstance(schema, dict | bool):
                if isinstance(schema, dict) and id(schema) not in self._seen:
                    self._locate(_Located(place_of(pointer, self._param), pointer, schema))
                return pointer
        raise InvalidValue(f"`{place}` names no schema: nothing in `{self._param}` is at {excerpt(reference)}.", place)


def _joined(base: str, reference: Any) -> str:
    """Return the URI of *reference*, which is relative to *base*; *base* if it is no URI."""
    if not isinstance(reference, str):
        return base
    try:
        return base + reference if reference.startswith("#") else urljoin(base, reference)
    except ValueError:
        return base
