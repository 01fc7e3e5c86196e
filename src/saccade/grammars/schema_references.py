"""Turns the references in a JSON schema into JSON pointers from its root, so that its identifiers are no longer needed.

`$id` gives a schema a URI, and the references in the schema are relative to it. `$anchor` gives it a name (JSON Schema
2020-12, section 8.2). Draft 4 uses `id` for both, and drafts 6 and 7 use `$id`. No schema is fetched.
"""

from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from saccade.errors import InvalidValue
from saccade.grammars.schema_places import (
    MAX_DEPTH,
    MAX_SCHEMAS,
    Schema,
    excerpt,
    parts,
    place_of,
    pointed_at,
    quote_pointer,
)

SAY_NOTHING: Final = ("$schema", "$id", "$anchor", "$recursiveAnchor", "$vocabulary", "$comment", "contentSchema")
"""Keywords on which no value depends once references are pointers."""


class _Base(NamedTuple):
    """What references are relative to: a schema's URI, and its pointer from the root."""

    uri: str = ""
    pointer: str = ""


class _Located(NamedTuple):
    """A *schema*, its *place* for people to read, and its *pointer* from the root.

    Its `$ref` is read relative to each of *bases*, and references in its parts relative to the first. There are two
    bases if an `$id` accompanies the `$ref`, because drafts up to 7 ignore that `$id`.
    """

    place: str
    pointer: str
    schema: Schema
    bases: tuple[_Base, ...] = (_Base(),)


def resolve_references(root: Schema, param: str) -> list[tuple[str, Schema]]:
    """Make each `$ref` in *root* a pointer, drop the identifiers, and return all its schemas with their places.

    Raises InvalidValue for a `$ref` that is not text, that is ambiguous or that leads to no schema in *root*. Too many
    schemas, or schemas nested too deeply, raise it too.
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
    """The schemas in *root* that have been *located* so far, and their identifiers."""

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
                _Located(part.place, one.pointer + part.pointer, part.schema, one.bases[:1])
                for one in named
                for part in parts(one.schema, one.place)
            ]
            if not level:
                return
        raise InvalidValue(f"`{self._param}` is nested more than {MAX_DEPTH} schemas deep.", self._param)

    def _named(self, one: _Located) -> _Located:
        """Note the identifiers of a schema, and return it with its own base, if it has one."""
        base = one.bases[0]
        uri, name = urldefrag(_joined(base.uri, one.schema.get(self._id_keyword)))
        if uri != base.uri:
            bases = (_Base(uri, one.pointer), base) if "$ref" in one.schema else (_Base(uri, one.pointer),)
            one = one._replace(bases=bases)
            self._pointers.setdefault(uri, one.pointer)
        for anchor in (name, one.schema.get("$anchor"), one.schema.get("$dynamicAnchor")):
            if anchor and isinstance(anchor, str):
                self._pointers.setdefault(f"{uri}#{anchor}", one.pointer)
        return one

    def find(self, one: _Located) -> str:
        """Return the pointer from the root to the schema that the `$ref` of *one* refers to."""
        place, reference = f"{one.place}.$ref", one.schema["$ref"]
        if not isinstance(reference, str):
            raise InvalidValue(f"`{place}` must be a text.", place)
        meanings = {pointer for base in one.bases if (pointer := self._meaning(reference, base)) is not None}
        if not meanings and reference.startswith("#/") and self._is_schema(reference[1:]):
            meanings = {reference[1:]}  # Many who give a part an `$id` mean the root all the same.
        if len(meanings) > 1:
            raise InvalidValue(
                f"`{place}` may mean two schemas, because an `$id` accompanies it; leave that out.", place
            )
        if not meanings and not reference.startswith("#"):
            raise InvalidValue(
                f"`{place}` must begin with #, or be the `$id` of a schema in `{self._param}`: no schema is fetched.",
                place,
            )
        if not meanings:
            message = f"`{place}` names no schema: nothing in `{self._param}` is at {excerpt(reference)}."
            raise InvalidValue(message, place)
        # The library takes quoted pointers only; most who write names such as `List<User>` do not quote them.
        pointer = quote_pointer(meanings.pop())
        schema = pointed_at(pointer, self._root)
        if isinstance(schema, dict) and id(schema) not in self._seen:
            self._locate(_Located(place_of(pointer, self._param), pointer, schema))
        return pointer

    def _meaning(self, reference: str, base: _Base) -> str | None:
        """Return the pointer to the schema that *reference*, relative to *base*, refers to; None if there is none."""
        uri, fragment = urldefrag(_joined(base.uri, reference))
        start = base.pointer if uri == base.uri else self._pointers.get(uri)
        if start is None:
            return None
        if fragment and not fragment.startswith("/"):
            pointer = self._pointers.get(f"{uri}#{unquote(fragment)}")
        else:
            pointer = start + fragment
        return pointer if pointer is not None and self._is_schema(pointer) else None

    def _is_schema(self, pointer: str) -> bool:
        return isinstance(pointed_at(pointer, self._root), dict | bool)


def _joined(base: str, reference: Any) -> str:
    """Resolve *reference* against *base*; return *base* if the reference is not a URI."""
    if not isinstance(reference, str):
        return base
    try:
        return base + reference if reference.startswith("#") else urljoin(base, reference)
    except ValueError:
        return base
