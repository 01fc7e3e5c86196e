"""A template's losses are found at its load. F13"""

from checkpoints import templates
from tables import table

from saccade.tokenization.chat_template import ChatTemplate
from saccade.tokenization.written_turns import WrittenTurns


def of(source: str) -> WrittenTurns:
    return ChatTemplate(source, [], {"bos_token": "", "eos_token": ""}).turns


EVERY_PLACE = WrittenTurns().late_systems
TEXT = "{{ m.content if m.content is string else m.content | map(attribute='text') | join }}"
WRITES_ALL = "{% for m in messages %}{{ m.role }}: " + TEXT + "{{ m.tool_calls or '' }}\n{% endfor %}"
LINE = "{% if %s %}{{ m.role }}: " + TEXT + "{{ m.tool_calls or '' }}\n{% endif %}"
FIRST_ONLY = "{% for m in messages %}" + LINE.replace("%s", "m.role != 'system' or loop.first") + "{% endfor %}"
NOT_AFTER_RESULTS = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first and loop.previtem.role == 'tool' %}{{ raise_exception('no') }}"
    "{% endif %}{{ m.role }}: " + TEXT + "{{ m.tool_calls or '' }}\n{% endfor %}"
)
NO_SYSTEMS = "{% for m in messages if m.role != 'system' %}{{ m.role }}: " + TEXT + "\n{% endfor %}"
AT_THE_END = (
    "{% for m in messages if m.role != 'system' %}" + TEXT + "{% endfor %}"
    "{% for m in messages if m.role == 'system' %}" + TEXT + "{% endfor %}"
)


@table(
    "source, systems, leading, late",
    [
        (WRITES_ALL, True, True, EVERY_PLACE),
        (FIRST_ONLY, True, False, frozenset()),
        (NOT_AFTER_RESULTS, True, True, frozenset(place for place in EVERY_PLACE if place[0] != "tool")),
        (NO_SYSTEMS, False, False, frozenset()),
        (AT_THE_END, True, True, EVERY_PLACE),
        (templates.QWEN3, True, False, frozenset()),
        (templates.QWEN3_5, True, False, frozenset()),
    ],
    ["all", "the first", "none after results", "none", "all at the end", "Qwen3-VL", "Qwen3.5"],
)
def test_system_turns(source: str, systems: bool, leading: bool, late: frozenset[object]) -> None:
    turns = of(source)
    assert (turns.systems, turns.leading_systems, turns.late_systems) == (systems, leading, late)


EVERY_ROLE = frozenset(("system", "user", "assistant", "tool"))
AS_PYTHON = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls or '' }}\n{% endfor %}"
AS_JSON = AS_PYTHON.replace("m.content }}", "m.content | tojson }}")
FIRST_TEXT = WRITES_ALL.replace(TEXT, "{{ m.content if m.content is string else m.content[0].text }}")
STRINGS_ONLY = WRITES_ALL.replace(TEXT, "{{ '' + m.content }}")
LISTS_ONLY = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
FIRST_OF_LISTS = "{% for m in messages %}{{ m.content[0]['text'] }}{% endfor %}"


@table(
    "source, joined",
    [
        (WRITES_ALL, frozenset()),
        (AS_PYTHON, EVERY_ROLE),
        (AS_JSON, EVERY_ROLE),
        (FIRST_TEXT, EVERY_ROLE),
        (STRINGS_ONLY, EVERY_ROLE),
        (LISTS_ONLY, frozenset()),
        (FIRST_OF_LISTS, EVERY_ROLE),
        (templates.MISTRAL3, frozenset(("system", "assistant"))),
        (templates.LLAVA_NEXT, frozenset(("system", "assistant"))),
        (templates.QWEN3_5, frozenset()),
    ],
    [
        "all",
        "as Python",
        "as JSON",
        "the first",
        "strings",
        "lists",
        "first of lists",
        "Mistral",
        "LLaVA-NeXT",
        "Qwen3.5",
    ],
)
def test_lists_of_texts(source: str, joined: frozenset[str]) -> None:
    assert of(source).joined == joined


@table("source, results_first", [(WRITES_ALL, False), (templates.QWEN3_5, False), (templates.GEMMA4, True)])
def test_place_of_results(source: str, results_first: bool) -> None:
    assert of(source).results_first == results_first


OBJECTS_ONLY = WRITES_ALL.replace(
    "{{ m.tool_calls or '' }}",
    "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments | items %}{{ k }}{{ v }}{% endfor %}{% endfor %}",
)


@table(
    "source, takes_texts",
    [(WRITES_ALL, True), (OBJECTS_ONLY, False), (templates.QWEN3, True), (templates.QWEN3_5, False)],
)
def test_arguments_that_are_a_text(source: str, takes_texts: bool) -> None:
    assert of(source).argument_texts == takes_texts


def test_declared_tools_may_change_what_is_written() -> None:
    source = (
        FIRST_ONLY.replace("loop.first", "loop.first or not tools") + "{% for t in tools or [] %}{{ t }}{% endfor %}"
    )
    assert of(source).late_systems == frozenset()
