"""Calls as a name, then pairs of tags: `<arg_key>NAME</arg_key><arg_value>` value `</arg_value>`."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Final

from saccade.grammars.property_types import typed
from saccade.models.tool_formats import bare_text, form, hermes

KEY = "<arg_key>"
PARAMETER: Final = re.compile(rf"{KEY}([^<]*)</arg_key>\s*<arg_value>")


def parse(parts: Sequence[str], functions: form.Declared) -> form.ParsedCall | None:
    """Parse the function's name, then for each argument its name and its value, typed by the function's schema."""
    text = "".join(parts)
    border = text.find(KEY)
    name = (text if border < 0 else text[:border]).strip()
    values = {} if border < 0 else bare_text.values_in(text[border:], PARAMETER, "</arg_value>")
    if values is None or name not in functions:
        return None
    schema = functions[name].get("parameters") or {}
    return form.ParsedCall(name, form.to_json({key: typed(value, key, schema) for key, value in values.items()}))


TAGS = hermes.TAGS._replace(key_begin=KEY, key_end="</arg_key>", value_begin="<arg_value>", value_end="</arg_value>")
SHAPE = bare_text.BareShape(
    ("{}\n",), ("key_begin_id", "{}", "key_end_id", "\n", "value_begin_id"), ("value_end_id", "\n")
)
FORMAT = form.ToolFormat(TAGS, parse, partial(bare_text.rules, SHAPE), bare_text.limits)
