"""Errors about a chat that another API's body became name that body's fields."""

import pytest
from tables import table

from saccade.errors import InvalidValue
from saccade.gateway.apis.chat_endpoint import FieldNames

NAMES = FieldNames({"messages[1]": "input[0]", "messages[1].content[0]": "input[0].source", "stop": "stop_sequences"})


@table(
    ("field", "expected"),
    [
        ("messages[1]", "input[0]"),
        ("messages[1].role", "input[0].role"),
        ("messages[1].content[0].url", "input[0].source.url"),
        ("messages[1].content[10]", "input[0].content[10]"),
        ("messages[10].role", "messages[10].role"),
        ("stop[3]", "stop_sequences[3]"),
        ("stopped", "stopped"),
        ("", ""),
    ],
)
def test_the_longest_known_field_names(field: str, expected: str) -> None:
    assert NAMES.name_of(field) == expected
    assert FieldNames().name_of(field) == field


def test_errors_are_renamed() -> None:
    with pytest.raises(InvalidValue) as raised, NAMES.in_errors():
        raise InvalidValue(
            "`messages[1].content[0].url` and `stop` are `wrong`.", "messages[1].content[0].url", reason="`stop`"
        )
    assert raised.value.message == "`input[0].source.url` and `stop_sequences` are `wrong`."
    assert raised.value.param == "input[0].source.url"
    assert raised.value.reason == "`stop_sequences`"
