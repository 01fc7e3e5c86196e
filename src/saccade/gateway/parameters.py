"""Reads the parameters of a request's body.

Parameters are supported, refused by name, accepted without effect, or unknown. Every top-level value stays raw until
its length is checked, and is then decoded as its field's type. If a name occurs twice, the last value counts.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.gateway.body_bounds import (
    MAX_COMMAS,
    MAX_TOOLS_BYTES,
    FindImage,
    check_bounds,
    check_commas,
    check_tools,
    find_data_url,
)
from saccade.gateway.chat_request import AnswerFields
from saccade.gateway.field_schemas import MAX_TOKENS
from saccade.gateway.json_body import decode, parse
from saccade.gateway.known_parameters import LATER, SPELLINGS, WITHOUT_EFFECT
from saccade.gateway.unknown_fields import UnknownFields
from saccade.json_counts import num_items, num_marks

MAX_PARAMETERS: Final = 256
MAX_SEARCHED: Final = 8192
"""Objects of a body whose fields are looked for on the event loop, in 2 microseconds each; agents send hundreds."""

NOT_SEARCHED: Final = f"fields are not named: the body has more than {MAX_SEARCHED} objects"
MAX_VALUE_BYTES: Final = 256 * 2**10
"""Limit of a top-level value outside LONG and SHORT."""

SHORT: Final = {
    "chat_template": 64 * 2**10,
    "chat_template_kwargs": 16 * 2**10,
    "media_io_kwargs": 16 * 2**10,
    "mm_processor_kwargs": 16 * 2**10,
    "tools": MAX_TOOLS_BYTES,
    "tool_choice": 4 * 2**10,
}
"""Limits of values whose structure is not checked while they are decoded."""

LONG: Final = ("messages", "system", "prompt", "input", "instructions", "allowed_token_ids", "tokens")
"""Values that only the bounds of the whole body limit."""

TOKEN_IDS: Final = ("allowed_token_ids", "tokens")
"""Those of them that are arrays of up to MAX_TOKENS numbers, which are counted before they are decoded."""

MAX_HARMLESS_BYTES: Final = 256
MAX_NAMES: Final = 8
MAX_NAME_CHARACTERS: Final = 64
S = TypeVar("S", bound=Struct)
_PARAMETERS: Final = msgspec.json.Decoder(dict[str, Raw])


@dataclass(frozen=True)
class Parameters:
    """A body's parameters, still raw, and *rest*, the body without the bytes of its images."""

    values: Mapping[str, Raw]
    rest: bytes

    @property
    def names(self) -> Collection[str]:
        """The names of the parameters that are not null."""
        return {name for name, value in self.values.items() if bytes(memoryview(value)[:5]) != b"null"}


Body = bytes | bytearray | Parameters
"""A body, or what read_parameters() has made of it."""


def read_parameters(body: bytes | bytearray, find_image: FindImage = find_data_url) -> Parameters:
    """Check the bounds of *body*, and return its parameters. Raises BodyTooLarge and InvalidValue."""
    rest = check_bounds(body, find_image)
    values = decode(body, _PARAMETERS)
    if len(values) > MAX_PARAMETERS:
        raise InvalidValue(f"The body has more than {MAX_PARAMETERS} parameters.")
    return Parameters(values, rest)


class ParameterReader(Generic[S]):
    """Reads bodies of one *kind*.

    Fields of *related* kinds cause no warning, because clients send the same body for several kinds. *later* maps
    unsupported parameters to the values, besides null, that change nothing. Parameters in *without_effect* are ignored,
    *spellings* holds advice about names, and *find_image* finds images in bodies.
    """

    def __init__(
        self,
        kind: type[S],
        related: Iterable[type[Struct]] = (),
        *,
        later: Mapping[str, tuple[object, ...]] = LATER,
        without_effect: Collection[str] = WITHOUT_EFFECT,
        spellings: Mapping[str, str] = SPELLINGS,
        find_image: FindImage = find_data_url,
    ) -> None:
        self._kind = kind
        self._find_image = find_image
        self._spellings = spellings
        fields = msgspec.structs.fields(kind)
        self._required = [field.name for field in fields if field.required]
        self._decoders = {field.name: msgspec.json.Decoder(field.type) for field in fields}
        self._unknown = UnknownFields(kind)
        names = self._decoders.keys() | {name for other in related for name in other.__struct_fields__}
        self._later = {name: harmless for name, harmless in later.items() if name not in self._decoders}
        self._names = frozenset(names | later.keys()).union(without_effect)

    def read_parameters(self, body: Body, strict: bool) -> tuple[S, str]:
        """Parse *body*; return the request, and a warning about unknown parameters, or "" if there are none.

        Raises BodyTooLarge, InvalidValue, and UnsupportedParameter for unsupported or, if *strict*, unknown ones.
        """
        read = body if isinstance(body, Parameters) else read_parameters(body, self._find_image)
        parameters, rest = read.values, read.rest
        for name in parameters:
            if (harmless := self._later.get(name)) is not None:
                _refuse_unless_harmless(name, parameters[name], harmless, self._spellings.get(name))
        served = {name: raw for name, raw in parameters.items() if name in self._decoders}
        for name, raw in served.items():
            _check_length(name, raw)
        if num_marks(rest, b",", MAX_COMMAS) > MAX_COMMAS:
            ids = [bytes(raw) for name, raw in parameters.items() if _is_array_of_ids(name, raw)]
            check_commas(rest, ids, partial(_longest, parameters))
        values = {name: decode(raw, self._decoders[name], name) for name, raw in served.items()}
        unknown = [("", name) for name in parameters if name not in self._names]
        is_searched = strict or num_marks(rest, b"{", MAX_SEARCHED) <= MAX_SEARCHED
        if is_searched:
            unknown += [one for one in self._unknown.within(rest) if one[0] and ".".join(one) not in self._names]
        warning = "; ".join(filter(None, (self._warning(unknown, strict), "" if is_searched else NOT_SEARCHED)))
        for name in self._required:
            if name not in parameters:
                raise InvalidValue(f"`{name}` is missing.", name)
        return self._kind(**values), warning

    def _warning(self, unknown: list[tuple[str, str]], strict: bool) -> str:
        """Return a warning about *unknown* fields, or "" if there are none.

        Each is a pair: the path of its object, and its name. Raises UnsupportedParameter if *strict*.
        """
        if not unknown:
            return ""
        named = [
            (f"{path}.{printable(name)}" if path else printable(name), "" if path else self._meant(name))
            for path, name in unknown[:MAX_NAMES]
        ]
        if strict:
            name, meant = named[0]
            hint = f"did you mean `{meant}`?" if meant else "leave it out."
            raise UnsupportedParameter(f"`{name}` is not a known parameter; {hint}", name)
        hints = [f"{name} (did you mean {meant}?)" if meant else name for name, meant in named]
        return f"unknown parameters ignored: {listed(hints, len(unknown))}"

    def _meant(self, name: str) -> str:
        if len(name) > MAX_NAME_CHARACTERS:
            return ""
        return next(iter(difflib.get_close_matches(name, self._names - self._later.keys(), 1, cutoff=0.8)), "")


def _refuse_unless_harmless(name: str, raw: Raw, harmless: tuple[object, ...], advice: str | None) -> None:
    if memoryview(raw).nbytes <= MAX_HARMLESS_BYTES:
        value = parse(raw, object)
        if value is None or value in harmless:
            return
    message = f"`{name}` is not read here; {advice}." if advice else f"`{name}` is not served; leave it out."
    raise UnsupportedParameter(message, name)


def _longest(parameters: Mapping[str, Raw]) -> str | None:
    """Return the name of the parameter with the most commas."""
    return max(parameters, key=lambda name: bytes(parameters[name]).count(b","), default=None)


def _is_array_of_ids(name: str, raw: Raw) -> bool:
    """Return whether *raw* may be an array of token ids, or an array of such arrays, which have their own bound."""
    return name in (*TOKEN_IDS, "prompt") and bytes(memoryview(raw)[:1]) == b"[" and b'"' not in bytes(raw)


def _check_length(name: str, raw: Raw) -> None:
    if name in TOKEN_IDS and num_items(bytes(raw)) > MAX_TOKENS:
        raise InvalidValue(f"`{name}` must have at most {MAX_TOKENS} items.", name)
    limit = SHORT.get(name, MAX_VALUE_BYTES)
    if name not in LONG and memoryview(raw).nbytes > limit:
        raise InvalidValue(f"`{name}` must have at most {limit} bytes.", name)
    if name == "tools":
        check_tools(bytes(raw), name)


def check_stream(request: AnswerFields) -> None:
    """Raise InvalidValue for stream options without a stream, as OpenAI does, or for `prompt_logprobs` in a stream."""
    if request.stream_options is not None and not request.stream:
        raise InvalidValue(
            "`stream_options` apply to streams only; set `stream` to true, or leave them out.", "stream_options"
        )
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidValue("`prompt_logprobs` come with a whole answer only; leave out `stream`.", "prompt_logprobs")


def listed(names: Sequence[str], number: int) -> str:
    """List the first MAX_NAMES of *names* for a warning, and say how many of the *number* in all are left out."""
    more = f" and {number - MAX_NAMES} more" if number > MAX_NAMES else ""
    return f"{', '.join(names[:MAX_NAMES])}{more}"


def printable(name: str) -> str:
    """Return a name from a request, made safe for a header and a log."""
    readable = "".join(character if " " <= character <= "~" else "?" for character in name[:MAX_NAME_CHARACTERS])
    return readable if len(name) <= MAX_NAME_CHARACTERS else readable[:-3] + "..."
