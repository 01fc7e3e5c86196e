"""Calls as models write them: tags in values, missing end tags, calls behind broken ones. # F13"""

from collections.abc import Callable

import pytest
from tables import table
from written_answers import FORMS, TOOLS, Call, Form, choice_of, ids_of, read

from saccade.gateway.output.call_reader import declared
from saccade.gateway.output.tool_calls import ToolCallReader
from saccade.gateway.served_models.served_model import ServedModel
from saccade.models.tool_formats.call_scanner import MAX_HEAD
from saccade.protocol.output import FinishReason, TokenDelta

Models = Callable[[str], ServedModel]
SECOND: Call = ("look", {"count": 7})


def values_of(form: Form) -> dict[str, str]:
    """Values with tags in them; one of Gemma 4 has no quotes."""
    opening, closing = form.tags
    section_begin, section_end = form.section
    values = {
        "opening": f"Put it behind {opening} and wait.",
        "opening first": f"{opening} and wait",
        "closing": f"Put it before {closing} and wait.",
        "closing last": f"and then {closing}",
        "both": f"between {opening} and {closing} it stands",
        "pair": f"{opening}{closing}",
        "the wrong way round": f"after {closing} comes {opening}",
        "reasoning": "first <think> and then </think> it is",
        "section": f"in {section_begin}{opening}x{closing}{section_end}",
    }
    if form.model != "gemma4":
        values["a whole call"] = f"as in:\n{form.calls(SECOND)}\nis one"
        values["a whole call of another function"] = f"as in:\n{form.write('book', {'a': 'b', 'c': 1})}\nis one"
        values["whole calls"] = f"{form.calls(SECOND)}\n{form.calls(SECOND)}"
    return values


@pytest.mark.ci
@table("name", FORMS)
@table("value", values_of(FORMS["hermes"]))
@table("others", ["none", "before", "behind", "text behind"])
def test_tags_in_values_belong_to_the_values(name: str, value: str, others: str, models: Models) -> None:
    form = FORMS[name]
    if value not in values_of(form):
        return
    call: Call = ("look", {"text": values_of(form)[value], "count": 3})
    calls = {"before": [SECOND, call], "behind": [call, SECOND]}.get(others, [call])
    after = "\nDone." if others == "text behind" else ""
    seen = read(models(name), f"I look.\n\n{form.calls(*calls)}{after}")
    assert seen[:4] == ("", f"I look.{after.strip()}", calls, "tool_calls")


@table(
    ("name", "value"),
    [
        ("qwen3_coder", "See <parameter=other> there"),
        ("qwen3_coder", "See <parameter=count> there"),
        ("qwen3_coder", "<function=look> begins one"),
        ("qwen3_coder", "<function=look>\n<parameter=text>\nx\n</parameter>\n</function>"),
        ("qwen3_coder", "as in\n<function=look>\n</function>\nof course"),
        ("qwen3_coder", "ends with </function> and"),
        ("qwen3_coder", "ends with </function>\n</tool_call> and"),
        ("qwen3_coder", "ends with </parameter> and </function>"),
        ("qwen3_coder", "a\n<parameter=count>\n3\n</parameter>\nb"),
        ("qwen3_coder", "\nfirst line\n"),
        ("qwen3_coder", "a < b > c <"),
        ("glm45", "<arg_key>other"),
        ("glm45", "a</arg_value> b"),
        ("glm45", "<arg_key>list</arg_key>\n<arg_value>[1]</arg_value>"),
        ("glm45", "a < b > c <"),
        ("glm45", "\nfirst line\n"),
        ("gemma4", 'a "b" {c} [d], e:f'),
        ("hermes", 'a "b" \\ {c} \\" [d'),
        ("kimi_k2", 'a "b" \\ {c} \\" [d'),
        ("kimi_k2", "x<|tool_call_argument_begin|>y"),
    ],
)
@table("others", [[], [SECOND]])
def test_whole_values_with_marks_of_the_form_stay_whole(
    name: str, value: str, others: list[Call], models: Models
) -> None:
    calls: list[Call] = [("look", {"text": value}), *others]
    assert read(models(name), FORMS[name].calls(*calls))[1:4] == ("", calls, "tool_calls")


def missing(name: str) -> list[tuple[str, str, int]]:
    """The end tags of a call with two values: the form's name, the tag, and which one of its kind."""
    return [(name, tag, number) for tag in FORMS[name].end_tags for number in range(FORMS[name].calls(TWO).count(tag))]


TWO: Call = ("look", {"text": "a b", "count": 3})


@table(("name", "tag", "number"), [row for name in FORMS for row in missing(name)])
@table("others", ["none", "before", "behind"])
def test_one_end_tag_may_be_missing(name: str, tag: str, number: int, others: str, models: Models) -> None:
    form = FORMS[name]
    pieces = form.calls(TWO).split(tag)
    damaged = tag.join(pieces[: number + 1]) + tag.join(pieces[number + 1 :])
    text = {"before": f"{form.calls(SECOND)}\n{damaged}", "behind": f"{damaged}\n{form.calls(SECOND)}"}
    calls = {"before": [SECOND, TWO], "behind": [TWO, SECOND]}.get(others, [TWO])
    assert read(models(name), text.get(others, damaged))[1:4] == ("", calls, "tool_calls")


CODER = "<tool_call>\n<function=look>\n<parameter=text>\n"
GLM = "<tool_call>look\n<arg_key>text</arg_key>\n<arg_value>"


@table(
    ("name", "text", "arguments"),
    [
        ("qwen3_coder", f"{CODER}a\n<parameter=count>\n3\n<parameter=list>\n[1]\n</function>\n</tool_call>",
         {"text": "a", "count": 3, "list": [1]}),
        ("qwen3_coder", "<tool_call><function=look><parameter=text>a<parameter=count>3</parameter></function></tool_call>",
         {"text": "a", "count": 3}),
        ("qwen3_coder", f"{CODER}a\n</tool_call>", {"text": "a"}),
        ("qwen3_coder", f"{CODER}a\n<parameter=other>\nb\n</parameter>\n</function>\n</tool_call>",
         {"text": "a\n<parameter=other>\nb"}),
        ("qwen3_coder", f"{CODER}a\n</parameter>\n<parameter=other>\nb\n</parameter>\n</function>\n</tool_call>",
         {"text": "a", "other": "b"}),
        ("qwen3_coder", f"{CODER}a\n<parameter=count>\n3\n</parameter>\n<parameter=count>\n4\n</parameter>\n</function>\n</tool_call>",
         {"text": "a\n<parameter=count>\n3", "count": 4}),
        ("qwen3_coder", "<tool_call>\n<function=look>\n</function>", {}),
        ("glm45", f"{GLM}a\n<arg_key>count</arg_key>\n<arg_value>3\n<arg_key>list</arg_key><arg_value>[1]</tool_call>",
         {"text": "a", "count": 3, "list": [1]}),
        ("glm45", f"{GLM}a\n<arg_key>other</arg_key>\n<arg_value>b</arg_value></tool_call>",
         {"text": "a\n<arg_key>other</arg_key>\n<arg_value>b"}),
        ("glm45", f"{GLM}a</arg_value><arg_key>other</arg_key><arg_value>b</arg_value></tool_call>",
         {"text": "a", "other": "b"}),
        ("glm45", "<tool_call>look\n<arg_key>text</arg_key>\na</arg_value>\n</tool_call>", {"text": "a"}),
        ("glm45", "<tool_call>look\ntext</arg_key>\n<arg_value>a</arg_value>\n</tool_call>", {"text": "a"}),
        ("glm45", f"{GLM}a</arg_value>\ncount</arg_key>\n<arg_value>3</arg_value>\n</tool_call>", {"text": "a", "count": 3}),
        ("glm45", "<tool_call>look</tool_call>", {}),
    ],
)  # fmt: skip
def test_values_end_at_the_next_declared_parameter(
    name: str, text: str, arguments: dict[str, object], models: Models
) -> None:
    assert read(models(name), text)[1:4] == ("", [("look", arguments)], "tool_calls")
    calls = [("look", arguments), SECOND]
    assert read(models(name), f"{text}\n{FORMS[name].calls(SECOND)}")[1:4] == ("", calls, "tool_calls")


KIMI = {
    "S": "<|tool_calls_section_begin|>",
    "E": "<|tool_calls_section_end|>",
    "b": "<|tool_call_begin|>",
    "e": "<|tool_call_end|>",
    "c": FORMS["kimi_k2"].write(*TWO),
    "d": FORMS["kimi_k2"].write(*SECOND),
    "n": 'functions.look:0<|tool_call_argument_begin|>{"text": "a b", "count": 3}',
}


@table(
    ("text", "content", "calls"),
    [
        ("I look.{S}\nnow I call \n{c}{E}", "I look.", [TWO]),
        ("{S}{E}", "", []),
        ("I look.{S} \n{E} Done.", "I look. Done.", []),
        ("{S}{b}{e}{E}Done.", "Done.", []),
        ("{S}{b} {e}{c}{E}Done.", "Done.", [TWO]),
        ("{S}{c}{b}{e}{d}{E}", "", [TWO, SECOND]),
        ("{c}{d}", "", [TWO, SECOND]),
        ("{S}{c}{E}\n{S}{d}{E}", "", [TWO, SECOND]),
        ("{S}{c}{S}{d}{E}", "", [TWO, SECOND]),
        ("{S}{c}\nand\n{d}{E}", "and", [TWO, SECOND]),
        ("{S}{n}{e}{E}", "", [TWO]),
        ("{S}{b}{n}{E}", "", [TWO]),
        ("{S}{b}{n}{b}{n}{e}{E}", "", [TWO, TWO]),
        ("The tags are {S} and {E}.", "The tags are {S} and {E}.", []),
        ("{S} and {b} and", "{S} and {b} and", []),
        ("{S}{b}functions.book:0<|tool_call_argument_begin|>{{}}{e}{d}{E}",
         "{S}{b}functions.book:0<|tool_call_argument_begin|>{{}}{e}{E}", [SECOND]),
    ],
)  # fmt: skip
def test_sections_of_kimi(text: str, content: str, calls: list[Call], models: Models) -> None:
    seen = read(models("kimi_k2"), text.format(**KIMI), skip_special_tokens=False)
    assert seen[1:4] == (content.format(**KIMI), calls, "tool_calls" if calls else "stop")


BODY = "<function=look>\n<parameter=text>\na b\n</parameter>\n<parameter=count>\n3\n</parameter>\n</function>"
BARE = BODY.replace("\n", "")
THEN = FORMS["qwen3_coder"].calls(SECOND)


@table(
    ("text", "reasoning", "content", "calls"),
    [
        ("I look.\n\n{body}\n</tool_call>", "", "I look.", [TWO]),
        ("I look.\n\n{body}", "", "I look.", [TWO]),
        ("{body}", "", "", [TWO]),
        ("{body}</tool_call>", "", "", [TWO]),
        ("I look.{body}Done.", "", "I look.Done.", [TWO]),
        ("I look.\n{body}\nDone </b> and <i> more", "", "I look.Done </b> and <i> more", [TWO]),
        ("{body}\n</tool_call>\n{then}", "", "", [TWO, SECOND]),
        ("{body}\n{then}", "", "", [TWO, SECOND]),
        ("{body}{body}{body}", "", "", [TWO, TWO, TWO]),
        ("{body}\n{body}\n</tool_call>", "", "", [TWO, TWO]),
        ("{then}\n{body}\n</tool_call>", "", "", [SECOND, TWO]),
        ("{then}{body} </b>", "", "</b>", [SECOND, TWO]),
        ("<tool_call>\n{body}\n{body}\n</tool_call>", "", "", [TWO, TWO]),
        ("<tool_call>\n{body}\nDone.", "", "Done.", [TWO]),
        ("<tool_call>x\n{body}", "", "<tool_call>x", [TWO]),
        ("<think>\nI look.</think>\n\n{body}", "I look.", "", [TWO]),
        ("<think>\nI look.</think>{body}\n</tool_call>", "I look.", "", [TWO]),
        ("<think>\nI look.\n{body}\n</tool_call>", "I look.", "", [TWO]),
        ("<think>\nI look.{body}", "I look.", "", [TWO]),
        ("<think>\nI look.{body}{then}Done.</think>", "I look.", "Done.", [TWO, SECOND]),
        ("<think>\nI write <function=look> there.</think>{body}", "I write <function=look> there.", "", [TWO]),
    ],
)
@table("body", [BODY, BARE, f"\n{BODY}\n"])
def test_a_call_may_lack_its_opening_tag(
    text: str, reasoning: str, content: str, calls: list[Call], body: str, models: Models
) -> None:
    model, written = models("qwen3_coder"), text.format(body=body, then=THEN)
    seen = read(model, written)
    assert seen[:4] == (reasoning, content, calls, "tool_calls")
    assert seen.num_tokens == len(ids_of(model, written))


@table(
    "text",
    [
        "Write <function=look> and then its parameters.",
        "`<function=look>` or `<function=look><parameter=text>`",
        "<function=look_further>\n</function>",
        BODY.replace("look", "book"),
        BODY[: BODY.index("count")],
        BODY[:-12],
        "a < b, <b>, <func, <function, <function=, <function=loo",
        "<<<<function=look",
    ],
)
@table("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_text_about_calls_stays_text(text: str, finish: FinishReason, models: Models) -> None:
    model = models("qwen3_coder")
    assert read(model, f"I say {text}", finish=finish)[:4] == ("", f"I say {text}", [], finish.value)
    assert read(model, f"<think>\nI say {text}", finish=finish)[:4] == (f"I say {text}", "", [], finish.value)
    assert read(model, BODY, tools=())[:4] == ("", BODY, [], "stop")


@table("name", sorted({*FORMS} - {"qwen3_coder"}))
def test_other_forms_need_their_opening_tag(name: str, models: Models) -> None:
    """JSON, or a name and a line, are text as any other."""
    model, form = models(name), FORMS[name]
    text = form.write(*TWO).removeprefix(form.tags[0])
    seen = read(model, text, skip_special_tokens=False)
    assert seen[:4] == ("", text.strip(), [], "stop")


@table(
    ("text", "stop", "content", "calls", "rest"),
    [
        ("I look STOP\n{body}", "STOP", "I look", [], "\n{body}"),
        ("I look.{body}", ".", "I look", [], "{body}"),
        ("{body}\nDone STOP more", "STOP", "Done", [TWO], " more"),
        ("{body}STOP more", "STOP", "", [TWO], " more"),
        ("{body}", "</parameter>", "", [TWO], ""),
        ("{body}</tool_call>", "</function>", "", [TWO], ""),
        ("Write <function=look> STOP there", "STOP", "Write <function=look>", [], " there"),
        ("<function=look><parameter=text>a STOP b", "STOP", "<function=look><parameter=text>a", [], " b"),
    ],
)
def test_stop_strings_end_the_text_around_calls(
    text: str, stop: str, content: str, calls: list[Call], rest: str, models: Models
) -> None:
    model, written = models("qwen3_coder"), text.format(body=BODY)
    seen = read(model, written, stop=stop)
    assert seen[1:4] == (content, calls, "tool_calls" if calls else "stop")
    most = len(ids_of(model, written)) - len(ids_of(model, rest.format(body=BODY)))
    assert most - 1 <= seen.num_tokens <= most + 1


BROKEN = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"text": "a b',
    "qwen3_coder": f"{CODER}a b",
    "glm45": f"{GLM}a b",
    "gemma4": '<|tool_call>call:look{text:<|"|>a b',
    "kimi_k2": '<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"text": "a b',
}


@table("name", FORMS)
@table("length", [1, 2, 3, 5, 8, 13, 100])
@table("num_broken", [1, 2, 3])
def test_a_call_behind_broken_ones_is_read(name: str, length: int, num_broken: int, models: Models) -> None:
    model, form = models(name), FORMS[name]
    broken = model.tokenizer.decode(ids_of(model, BROKEN[name])[:length])
    text = f"I look. {f'{broken} '.join([''] * (num_broken + 1))}"
    seen = read(model, f"{text}\n{form.calls(TWO)}\nDone.")
    hidden = {model.tokenizer.decode([one]) for one in model.tokenizer.hidden_ids}
    for tag in hidden:
        text = text.replace(tag, "")
    assert seen[1:4] == (f"{text.strip()}Done.", [TWO], "tool_calls")


@table("name", FORMS)
@table(
    "text",
    [
        "{0}",
        "{0} and {1}",
        "{1}",
        "`{0}`",
        "{0}{0}",
        "a {0}x{1}{1}",
        "{0}look",
        "{0}\n",
        "{0}{{",
        "{0}<function=look>`",
    ],
)
@table("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_tags_that_are_only_mentioned_are_text(name: str, text: str, finish: FinishReason, models: Models) -> None:
    model, form = models(name), FORMS[name]
    written = f"I say {text.format(*form.tags)}. And more."
    seen = read(model, written, finish=finish, skip_special_tokens=False)
    assert seen[1:4] == (written, [], finish.value)
    assert seen.num_tokens == len(ids_of(model, written))


@table("name", FORMS)
def test_a_mentioned_tag_holds_back_little(name: str, models: Models) -> None:
    """What cannot become a call is shown at once, and not at the end of the answer."""
    model, form = models(name), FORMS[name]
    ids = ids_of(model, f"{form.tags[0]} begins one, and this is the text that follows it for some time. " * 4)
    choice, shown = choice_of(model, skip_special_tokens=False), ""
    for number, token_id in enumerate(ids, start=1):
        shown += choice.take_delta(TokenDelta("r", [token_id])).content
        assert len(model.tokenizer.decode(ids[:number])) - len(shown) <= 2 * MAX_HEAD


@pytest.mark.ci
@table("name", FORMS)
def test_the_time_for_calls_that_never_end_does_not_grow_with_the_square(name: str, models: Models) -> None:
    model = models(name)
    ids = ids_of(model, BROKEN[name]) * 1000
    reader = ToolCallReader(model.tool_calls, model.tokenizer, declared(TOOLS))  # type: ignore[arg-type]
    pieces = [*reader.take_tokens(ids), *reader.finish_answer(is_cut=False)]
    assert [token for piece in pieces for token in piece] == ids  # type: ignore[union-attr]
