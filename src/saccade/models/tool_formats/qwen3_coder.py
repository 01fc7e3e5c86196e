"""Calls as tags of XML without quotes: `<function=NAME><parameter=NAME>` value `</parameter></function>`."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Final

from saccade.grammars.property_types import typed
from saccade.models.tool_formats import bare_text, form, hermes

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER: Final = re.compile("<parameter=([^>]*)>")


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
    values = bare_text.values_in(rest.removesuffix(END_FUNCTION), PARAMETER, "</parameter>")
    if values is None:
        return None
    texts = {key: value.removeprefix("\n").removesuffix("\n") for key, value in values.items()}
    return form.ParsedCall(name, form.to_json({key: typed(text, key, schema) for key, text in texts.items()}))


SHAPE = bare_text.BareShape(("\n<function={}>\n",), ("<parameter={}>\n",), ("\n</parameter>\n",), ("</function>\n",))
FORMAT = form.ToolFormat(hermes.TAGS, parse, partial(bare_text.rules, SHAPE), bare_text.limits)
