"""The description of the API allows what clients send."""

import re
from typing import Any

import jsonschema
import pytest

from saccade.gateway.apis.openapi import describe

PARAMETERS = {
    "type": "object",
    "properties": {"at": {"type": "array"}},
    "required": ["at"],
    "additionalProperties": False,
}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": PARAMETERS, "strict": True}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        ("ChatRequest", {**CHAT, "tools": [{"type": "function", "function": FUNCTION}]}),
        (
            "MessagesRequest",
            {**CHAT, "max_tokens": 1, "tools": [{"name": "look", "input_schema": PARAMETERS, "strict": True}]},
        ),
        ("ResponseRequest", {"model": "m", "input": "hi", "tools": [{"type": "function", **FUNCTION}]}),
    ],
)
def test_tools_are_described(schema: str, body: dict[str, Any]) -> None:
    described = {"$ref": f"#/components/schemas/{schema}", "components": describe(["m"])["components"]}
    jsonschema.validate(body, described)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**body, "tools": ["look"]}, described)


def test_descriptions_are_markdown() -> None:
    schemas = describe()["components"]["schemas"]
    descriptions = [schema.get("description", "") for schema in schemas.values()]
    assert not [one for one in descriptions if re.search(r"\*\w+\*|\n {2}", one)]
    assert "`input_modalities` lists" in schemas["ModelCard"]["description"]
