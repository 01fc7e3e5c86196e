"""The reader of llama.cpp's cases: C++ as data."""

import pytest
from judges import cpp
from judges.cpp import Call, Name, Reader
from judges.reading import Reading
from judges.suites import llama_answers
from tables import table

pytestmark = pytest.mark.ci

SOURCE = r"""
static common_chat_tool one_tool{
    /* .name = */ "one",  // a comment with "a text"
    /* .description = */ "I'm one",
    /* .parameters = */ R"({"type": "object"})",
};
const common_chat_msg greeting = simple_assist_msg("Hello\nyou");
static void test() {
    {
        auto tst = peg_tester("models/templates/Qwen3-Coder.jinja", debug);
        tst.test("Hello\n" "you").expect(greeting).run();
        tst.test(
               "<tool_call>\n"
               "text")
            .tools({ one_tool, { "two", "", "{}" } })
            .enable_thinking(false)
            .expect_reasoning("why")
            .expect_tool_calls({
                { "one", R"({"a": "(b) "})", {} },
                { "two", "{}", "id" },
            })
            .run();
    }
    {
        auto tst = peg_tester("models/templates/Another-Family.jinja", debug);
        tst.test("Hello").expect(greeting).run();
    }
}
"""


@table(
    "source, value",
    [
        ('"a\\n\\"b\\"" "c"', 'a\n"b"c'),
        ('"\\xc3\\xa9\\u00e9"', "éé"),
        ('R"(a\\n")"', 'a\\n"'),
        ('R"xx(a)")xx"', 'a)"'),
        ("{ a::b, 1, true, {} }", [Name("a::b"), "1", True, []]),
        ("f(1, g())", Call("f", ("1", Call("g", ())))),
        ('pair{ "a", "b", }', ["a", "b"]),
    ],
)
def test_an_expression_is_data(source: str, value: object) -> None:
    assert Reader(source).expression() == value


@table("source", ["+ b", "{ a b }", "f(", "", "[1]"])
def test_anything_else_is_refused(source: str) -> None:
    with pytest.raises(cpp.NotData):
        Reader(source).expression()


def test_cases_are_read_with_their_lines() -> None:
    first, second = llama_answers.read_cases(SOURCE)
    assert (first.name, first.text) == ("Qwen3-Coder::line 11", "Hello\nyou")
    assert first.expected == Reading(content="Hello\nyou")
    assert (second.name, second.text, second.options["enable_thinking"]) == (
        "Qwen3-Coder::line 12",
        "<tool_call>\ntext",
        False,
    )
    assert [one["function"]["name"] for one in second.tools] == ["one", "two"]
    assert second.expected == Reading("why", "", (("one", '{"a": "(b) "}'), ("two", "{}")), ("", "id"))
