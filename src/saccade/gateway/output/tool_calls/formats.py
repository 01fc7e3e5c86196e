"""What stands between a call's tags, as text, to the call that is meant; one function for each format.

A text that is no call of one of the request's tools is not read: None. Arguments become JSON as chat templates write it
in later turns (json.dumps), so that the turn that a client sends back begins with the tokens that the model generated.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from saccade.grammars.property_types import typed
from saccade.models.family import ToolFormat
from saccade.tokenization.chat_template import Tool

FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"

_KIMI_ID: Final = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?", re.DOTALL)


@dataclass(frozen=True)
class ParsedCall:
    """A call of the tool *name*; *arguments* are a JSON object as text. *id* is the model's own, None for none."""

    name: str
    arguments: str
    id: str | None = None


Declared = Mapping[str, Mapping[str, Any]]
"""The request's functions by name."""

Parse = Callable[[Sequence[str], Declared], ParsedCall | None]


def declared(tools: Sequence[Tool]) -> Declared:
    """Return the functions of *tools* by name."""
    return {tool["function"]["name"]: tool["function"] for tool in tools}


def parse_hermes(parts: Sequence[str], functions: Declared) -> ParsedCall | None:
    """Read `{"name": ..., "arguments": {...}}`."""
    match _json("".join(parts)):
        case {"name": str(name), "arguments": dict(arguments)} if name in functions:
            return ParsedCall(name, _written(arguments))
    return None


def parse_qwen3_coder(parts: Sequence[str], functions: Declared) -> ParsedCall | None:
    """Read `<function=NAME>`, for each argument `<parameter=NAME>` value `</parameter>`, `</function>`.

    One line break after a parameter's tag and one before its end do not belong to the value, whose type is that of the
    function's schema.
    """
    text = "".join(parts).strip()
    name, bracket, rest = text.removeprefix(FUNCTION).partition(">")
    if not text.startswith(FUNCTION) or not bracket or name not in functions or not rest.endswith(END_FUNCTION):
        return None
    schema = functions[name].get("parameters") or {}
    values = _parameters(rest.removesuffix(END_FUNCTION))
    if values is None:
        return None
    return ParsedCall(name, _written({key: typed(value, key, schema) for key, value in values.items()}))


def parse_kimi_k2(parts: Sequence[str], functions: Declared) -> ParsedCall | None:
    """Read `functions.NAME:INDEX`, which is the call's id too, and the arguments behind the separator."""
    if len(parts) != 2:
        return None
    call_id, arguments = parts[0].strip(), _json(parts[1])
    named = _KIMI_ID.fullmatch(call_id)
    if named is None or named["name"] not in functions or not isinstance(arguments, dict):
        return None
    return ParsedCall(named["name"], _written(arguments), call_id)


FORMATS: Final[Mapping[ToolFormat, Parse]] = {
    "hermes": parse_hermes,
    "qwen3_coder": parse_qwen3_coder,
    "kimi_k2": parse_kimi_k2,
}


def _parameters(text: str) -> dict[str, str] | None:
    """Return the values by name. A value ends at the first end tag that another parameter or nothing follows."""
    found: dict[str, str] = {}
    text = text.strip()
    while text:
        name, bracket, rest = text.removeprefix(PARAMETER).partition(">")
        if not text.startswith(PARAMETER) or not bracket:
            return None
        end = rest.find(END_PARAMETER)
        while end >= 0:
            after = rest[end + len(END_PARAMETER) :].lstrip()
            if not after or after.startswith(PARAMETER):
                break
            end = rest.find(END_PARAMETER, end + 1)
        else:
            return None
        found[name] = rest[:end].removeprefix("\n").removesuffix("\n")
        text = after
    return found


def _json(text: str) -> Any:
    """Return the JSON value in *text*, None for no valid JSON."""
    try:
        return msgspec.json.decode(text.strip())
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None


def _written(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)
