"""Calls as tags of XML without quotes: `<function=NAME><parameter=NAME>` value `</parameter></function>`."""

from collections.abc import Iterator, Sequence
from typing import Final

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.grammars.json_schema import Schema, SupportedSchema, excerpt
from saccade.grammars.property_types import property_types, typed
from saccade.models.tool_formats import form, hermes

FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"
TEXT_KEYWORDS: Final = ("pattern", "format", "minLength", "maxLength")
"""Keywords that cannot be enforced for a parameter that a model writes as bare text."""


def parse(parts: Sequence[str], functions: form.Declared) -> form.ParsedCall | None:
    """Parse `<function=NAME>`, for each argument `<parameter=NAME>` value `</parameter>`, `</function>`.

    One line break after a parameter's tag and one before its end do not belong to the value. The function's schema
    determines the type of the value.
    """
    text = "".join(parts).strip()
    name, bracket, rest = text.removeprefix(FUNCTION).partition(">")
    if not text.startswith(FUNCTION) or not bracket or name not in functions or not rest.endswith(END_FUNCTION):
        return None
    schema = functions[name].get("parameters") or {}
    values = _parameters(rest.removesuffix(END_FUNCTION))
    if values is None:
        return None
    return form.ParsedCall(name, form.to_json({key: typed(value, key, schema) for key, value in values.items()}))


def _parameters(text: str) -> dict[str, str] | None:
    """Return the values by name. A value ends at the first end tag that another parameter or nothing follows."""
    parameters: dict[str, str] = {}
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
        parameters[name] = rest[:end].removeprefix("\n").removesuffix("\n")
        text = after
    return parameters


def limits(function: form.FunctionConstraint, enforced: SupportedSchema) -> SupportedSchema:
    """Refuse or drop what bare text cannot enforce. Raises InvalidValue and UnsupportedParameter."""
    for name, schema in _properties(enforced.schema).items():
        place = f"{function.place}.properties.{excerpt(name)}"
        if not name or set(name) & set("<>\n\r"):
            raise InvalidValue(f"`{function.place}.properties`: a parameter's name has no <, > or line break.", place)
        refused = [keyword for keyword in TEXT_KEYWORDS if _is_text(name, enforced.schema) and keyword in schema]
        if refused and function.strict:
            raise UnsupportedParameter(
                f"`{place}.{refused[0]}` cannot be enforced, because this model writes texts without quotes; leave it "
                "out, or do not set `strict`.",
                f"{place}.{refused[0]}",
            )
        enforced.dropped.extend(f"{place}.{keyword}" for keyword in refused)
    return enforced


def _rules(index: int, function: form.FunctionConstraint, tokens: form.ToolCallTokens) -> Iterator[str]:
    schema = function.parameters
    required = schema.get("required") if isinstance(schema.get("required"), list) else []
    names = [f"parameter_{index}_{number}" for number in range(len(_properties(schema)))]
    rules = " ".join(
        rule if name in (required or []) else f"{rule}?" for rule, name in zip(names, _properties(schema), strict=True)
    )
    opening, closing = form.quoted(f"\n<function={function.name}>\n"), form.quoted("</function>\n")
    yield f"call_{index}: {form.tag(tokens.begin_id)} {opening} {rules} {closing} {form.tag(tokens.end_id)}"
    definitions: Schema = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    for rule, (name, declared) in zip(names, _properties(schema).items(), strict=True):
        opening, closing = form.quoted(f"<parameter={name}>\n"), "\n</parameter>\n"
        if not _is_text(name, schema):
            yield f"{rule}: {opening} {rule}_value {form.quoted(closing)}"
            yield f"{rule}_value: {form.json_rule({**definitions, **declared})}"
        elif texts := _texts(declared):
            yield f"{rule}: {opening} ({' | '.join(map(form.quoted, texts))}) {form.quoted(closing)}"
        else:
            yield f"{rule}: {opening} {rule}_value"
            yield f"{rule}_value[suffix={form.quoted(closing)}]: /(?s:.*)/"


def _properties(schema: Schema) -> dict[str, Schema]:
    properties = schema.get("properties")
    items = properties.items() if isinstance(properties, dict) else ()
    return {name: declared if isinstance(declared, dict) else {} for name, declared in items}


def _is_text(name: str, schema: Schema) -> bool:
    """Return whether the property *name* of *schema* is read as bare text."""
    return not property_types(name, schema) - {"string"}


def _texts(declared: Schema) -> list[str]:
    """Return the only texts that *declared* allows; none if it allows others."""
    allowed = [declared["const"]] if "const" in declared else declared.get("enum")
    return [text for text in allowed if isinstance(text, str)] if isinstance(allowed, list) else []


FORMAT = form.ToolFormat(hermes.TAGS, parse, _rules, limits)
