"""Finds fields of a body that no struct reads. They are ignored, and a warning names their paths.

A struct may say more about its fields in class variables:

- *of_types* maps each value of `type` ("" if it is missing) to the fields of that type. A field that is listed for some
  types is unknown in the others; a field that no type lists belongs to all. Objects of types that are not listed are
  refused or left out as a whole, so none of their fields are named.
- *without_effect* names fields that clients send but that change no answer. A struct that has it also allows any other
  field that is empty.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

import msgspec
from msgspec import Meta, Raw, Struct

IN_MESSAGES: Final = frozenset(
    {
        "annotations",
        "cache_control",
        "caller",
        "citations",
        "created_at",
        "created_by",
        "encrypted_content",
        "id",
        "index",
        "logprobs",
        "metadata",
        "name",
        "parsed",
        "parsed_arguments",
        "partial",
        "phase",
        "status",
        "type",
        "uuid",
    }
)
"""What clients send in messages, their parts and their calls without asking for anything: marks of caches and indices,
and what SDKs and servers add to answers that are sent back."""

EMPTY: Final = frozenset({b"null", b'""', b"[]", b"{}"})
LONGEST_EMPTY: Final = 4
MAX_TYPE_BYTES: Final = 64
MAX_DEPTH: Final = 16
"""Of arrays in arrays: a search deeper than that could exhaust the stack, and no client nests so."""

_OBJECT: Final = msgspec.json.Decoder(dict[str, Raw])
_ARRAY: Final = msgspec.json.Decoder(list[Raw])


@dataclass(frozen=True)
class Shape:
    """Describes a struct's fields: the *known* ones for each value of `type`, as JSON, and the *structs* in fields."""

    fields: frozenset[str]
    known: Mapping[bytes, frozenset[str]] | None
    structs: Mapping[str, type[Struct]]
    ignores_empty: bool

    @classmethod
    def of_struct(cls, kind: type[Struct]) -> "Shape":
        """Return the shape of *kind*."""
        fields = msgspec.structs.fields(kind)
        without_effect: frozenset[str] = getattr(kind, "without_effect", frozenset())
        names = frozenset(field.name for field in fields)
        structs = {field.name: struct for field in fields if (struct := _struct_in(field.type)) is not None}
        of_types: Mapping[str, tuple[str, ...]] | None = getattr(kind, "of_types", None)
        if of_types is None:
            return cls(names | without_effect, None, structs, hasattr(kind, "without_effect"))
        typed = {name for several in of_types.values() for name in several}
        known = {
            msgspec.json.encode(type_ or None): names - (typed - set(own)) | without_effect
            for type_, own in of_types.items()
        }
        return cls(names | without_effect, known, structs, hasattr(kind, "without_effect"))


def _struct_in(annotation: Any) -> type[Struct] | None:
    """Return the struct that a field with *annotation* holds, also in a list or a union; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, Struct):
        return annotation
    if isinstance(annotation, Meta):
        return (annotation.extra or {}).get("struct")
    if getattr(annotation, "__origin__", None) is dict:
        return None
    return next((struct for inner in get_args(annotation) if (struct := _struct_in(inner)) is not None), None)


class UnknownFields:
    """Finds the fields in bodies that neither the struct *kind* nor the structs in it read."""

    def __init__(self, kind: type[Struct]) -> None:
        self._kind = kind
        self._shapes: dict[type[Struct], Shape] = {}
        pending = [kind]
        while pending:
            one = pending.pop()
            if one not in self._shapes:
                self._shapes[one] = Shape.of_struct(one)
                pending += self._shapes[one].structs.values()

    def within(self, raw: bytes | Raw, kind: type[Struct] | None = None, path: str = "") -> Iterator[tuple[str, str]]:
        """Yield (path of the object, unknown field) for *raw*, which is a body, or a value of *kind* at *path*."""
        match bytes(memoryview(raw)[:1]):
            case b"[" if path.count("[") < MAX_DEPTH:
                for index, inner in enumerate(_ARRAY.decode(raw)):
                    yield from self.within(inner, kind, f"{path}[{index}]")
                return
            case begin if path and begin != b"{":
                return
        kind = kind or self._kind
        shape, values = self._shapes[kind], _OBJECT.decode(raw)
        known = shape.fields
        if shape.known is not None:
            type_ = memoryview(values["type"]) if "type" in values else b"null"
            if len(type_) > MAX_TYPE_BYTES or (own := shape.known.get(bytes(type_))) is None:
                return
            known = own
        for name, value in values.items():
            if name in known:
                if (struct := shape.structs.get(name)) is not None:
                    yield from self.within(value, struct, f"{path}.{name}" if path else name)
            elif not (shape.ignores_empty and _is_empty(value)):
                yield path, name


def _is_empty(value: Raw) -> bool:
    content = memoryview(value)
    return len(content) <= LONGEST_EMPTY and bytes(content) in EMPTY
