"""The description of the API allows what clients send."""

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
