"""A template that loops, or makes more than it may, is stopped; all others render as before."""

import itertools

import pytest
from tables import table

from saccade.errors import InvalidValue, StartupError
from saccade.tokenization import template_limits
from saccade.tokenization.chat_template import ChatTemplate
from saccade.tokenization.template_limits import MAX_VALUE_BYTES, Meter, TooCostly, weight

CHAT = [{"role": "user", "content": "hi"}]


def program(step: str, before: str = "", after: str = "") -> str:
    """A template that does *step* a hundred times to ns.x, ns.y."""
    start = "{% set ns = namespace(x='ab', y=[], z=[], n=10) %}"
    return start + before + "{% for i in range(100) %}" + step + "{% endfor %}" + after


LINKED = "{% set q = namespace() %}{% set q.a = ns.x %}{% set q.b = ns.x %}{% set ns.x = q %}"
LONG = "{% set long = 'x' * 1000000 %}"
WHEN_ASKED = "{% if messages|length < 4 %}{{ raise_exception('few') }}{% endif %}"
"""A start that lets a template through until it is asked for more than one message."""

FOREVER = {
    "nested loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "loops that pass nothing": "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "slow questions": "{% set long = 'x' * 30000000 %}{{ range(100000)|map('string')|select('in', long)|list }}",
    "brackets in a key": "{{ ('%' ~ '(' * 30000000) % {} }}",
}
LARGE = {
    "text": "{{ 'x' * 10**10 }}",
    "text from the right": "{{ 10**10 * 'x' }}",
    "a list": "{{ ([1] * 10**10)|length }}",
    "a number": "{{ (2 ** 10000000000) is even }}",
    "squares": program("{% set ns.n = ns.n * ns.n %}"),
    "sums": program("{% set ns.x = ns.x + ns.x %}"),
    "joined": program("{% set ns.x = ns.x ~ ns.x %}"),
    "joined with escapes": "{% autoescape true %}" + program("{% set ns.x = ns.x ~ ns.x %}") + "{% endautoescape %}",
    "captured": program("{% set a %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = a %}"),
    "its own text": "{% set a %}"
    + "{% for i in range(100000) %}" * 2
    + "y" * 9999
    + "{% endfor %}" * 2
    + "{% endset %}",
    "many values": "{% for i in range(999) %}{% set a = 'x' * 1000000 %}{% endfor %}",
    "slices": LONG + "{% set a = long * 30 %}" + "{% set b = a[1:] %}" * 99,
    "shared lists": program("{% set ns.y = [ns.y, ns.y] %}", after="{{ ns.y }}"),
    "lists compared": program("{% set ns.y = [ns.y, ns.y] %}{% set ns.z = [ns.z, ns.z] %}", after="{{ ns.y == ns.z }}"),
    "shared dicts": program("{% set ns.y = {'a': ns.y, 'b': ns.y} %}", after="{{ ns.y }}"),
    "linked": program(LINKED, after="{{ ns.x }}"),
    "linked in text": program(LINKED, after="{{ '' ~ ns.x }}"),
    "linked in a filter": program(LINKED, after="{{ ns.x|string }}"),
    "linked in a refusal": program(LINKED, after="{{ raise_exception(ns.x) }}"),
    "center": "{{ 'x'.center(10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "zfill": "{{ '1'.zfill(10**10) }}",
    "expandtabs": "{{ ('\t' * 1000).expandtabs(10**8) }}",
    "to_bytes": "{{ (1).to_bytes(10**10) }}",
    "replace": LONG + "{{ long.replace('x', long) }}",
    "replace nothing": LONG + "{{ long.replace('', long) }}",
    "join": LONG + "{{ long.join('x' * 100000) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**10, 1) }}",
    "percent often": LONG + "{{ ('%(a)s' * 1000) % {'a': long} }}",
    "percent behind a key with brackets": "{{ '%(a(b)c)10000000000d' % {'a(b)c': 1} }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "format before a fault": "{{ '{:10000000000} {'.format(1) }}",
    "format by value": "{{ '{:{}}'.format(1, 10**10) }}",
    "format_map": "{{ '{a:10000000000}'.format_map({'a': 1}) }}",
    "|center": "{{ 'x'|center(10**10) }}",
    "|indent": "{{ 'x\n'|indent(10**10) }}",
    "|replace": LONG + "{{ long|replace('x', long) }}",
    "|join": LONG + "{{ range(100000)|join(long) }}",
    "|map": LONG + "{{ range(100000)|map('replace', '1', long)|join }}",
    "|format": "{{ '%10000000000d'|format(1) }}",
    "|batch": "{{ [1]|batch(10**10, 0)|list }}",
    "|slice": "{{ [1]|slice(10**10)|list }}",
    "|tojson": "{{ [1]|tojson(indent=10**10) }}",
    "|round": "{{ 1.5|round(10**9, 'ceil') }}",
    "|sum": "{{ ([[1]] * 100000)|sum(start=[]) }}",
    "|sort": LONG + "{% set other = long ~ '' %}{{ ([long, other] * 50000)|sort }}",
}


@pytest.mark.ci
@pytest.mark.parametrize("source", FOREVER.values(), ids=FOREVER.keys())
def test_a_template_that_takes_too_long_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.25)
    with pytest.raises(InvalidValue, match=r"longer than 0\.25 seconds.*fewer or shorter"):
        ChatTemplate(WHEN_ASKED + source, (), {}).render(CHAT * 4)


READ = {
    "==": "a == b",
    "!=": "a != b",
    "<": "a < b",
    "<=": "a <= b",
    ">": "a > b",
    ">=": "a >= b",
    "a chain": "a == b == a",
    "in": "b in a",
    "not in": "b not in a",
    "a constant in": "'yy' in a",
    "in a list": "a in [b]",
    "in many": "b in [a] * 9",
    "lists": "[a] == [b]",
    "dicts": "{'k': a} == {'k': b}",
    "ranges": "0.5 in range(9)",
    "is eq": "a is eq b",
    "is equalto": "a is equalto b",
    "is ne": "a is ne b",
    "is gt": "a is gt b",
    "is ge": "a is ge b",
    "is le": "a is le b",
    "is in": "b is in a",
    "is lower": "a is lower",
    "is upper": "a is upper",
    "select": "[a]|select('==', b)|list",
    "select less": "[a]|select('<', b)|list",
    "reject": "[b]|reject('in', a)|list",
    "count": "a.count('y')",
    "find": "a.find('y')",
    "index of a list": "[1, b].index(b)",
    "startswith": "a.startswith(b)",
    "count of a list": "[a].count(b)",
    "length of a text made": "(a ~ 'y')|length",
    "a slice": "a[1:]|length",
    "a slice back": "a[::-1]|length",
    "times": "(a * 2)|length",
    "plus": "(a + b)|length",
    "percent": "('%s' % a)|length",
    "format": "'{}'.format(a)|length",
    "upper": "a|upper|length",
    "replace": "a|replace('y', 'z')|length",
    "join": "[a, b]|join|length",
    "sort": "[a, b]|sort|length",
    "unique": "[a, b]|unique|list|length",
    "groupby": "[{'k': a}]|groupby('k')|list|length",
    "min": "[a, b]|min|length",
    "wordcount": "a|wordcount",
}
"""What reads long values and may make little; *a* and *b* are equal texts of 200,000 characters."""


@pytest.mark.ci
@table("expression", READ.values(), ids=READ.keys())
def test_what_reads_a_long_value_looks_at_the_clock(expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(Meter, "look", lambda _: looks.append(1))
    before = "{% set n = 200000 %}{% set a = 'x' * n %}{% set b = 'x' * n %}"

    def count(times: int) -> int:
        template = ChatTemplate(WHEN_ASKED + before + ("{% set y = " + expression + " %}") * times, (), {})
        looks.clear()
        template.render(CHAT * 4)
        return len(looks)

    assert count(12) - count(2) >= 10


def test_ten_thousand_comparisons_in_one_expression_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(template_limits.time, "thread_time", lambda: 0.01 * next(clock))
    before = "{% set a = 'x' * 100000 %}{% set b = 'x' * 100000 %}"
    with pytest.raises(InvalidValue, match="longer than 2 seconds"):
        ChatTemplate(WHEN_ASKED + before + "{{ a" + " == b == a" * 5000 + " }}", (), {}).render(CHAT * 4)


def test_a_short_comparison_costs_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(Meter, "look", lambda _: looks.append(1))
    template = ChatTemplate("{{ messages[0].role == 'user' and messages[0].content != messages[0].role }}", (), {})
    looks.clear()
    assert template.render(CHAT)
    assert looks == []


@pytest.mark.ci
@table("source", LARGE.values(), ids=LARGE.keys())
def test_a_template_that_makes_too_much_is_stopped(source: str) -> None:
    with pytest.raises(InvalidValue, match=r"The model's chat template (makes|takes more|formats|rounds|adds)"):
        ChatTemplate(WHEN_ASKED + source, (), {}).render(CHAT * 4)


def test_a_long_form_is_read_once() -> None:
    """Two million characters that begin a placeholder: to look behind each of them would take an hour."""
    for form, message in {
        "('{' ~ ':' * 2000000).format(1)": "cannot render",
        "('%(' * 2000000) % {}": "makes a value of more than 32 MiB",
        "('%' ~ '()' * 1000000) % {'': 1}": "cannot render",
    }.items():
        with pytest.raises(InvalidValue, match=message):
            ChatTemplate(WHEN_ASKED + "{{ " + form + " }}", (), {}).render(CHAT * 4)


@pytest.mark.parametrize("source", [FOREVER["nested loops"], LARGE["text"]], ids=["time", "memory"])
def test_a_template_that_is_stopped_at_once_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.25)
    with pytest.raises(
        StartupError, match=r"chat template (takes longer than 0\.25 seconds|makes).* for one short message"
    ):
        ChatTemplate(source, (), {})


@pytest.mark.parametrize(
    "source",
    ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 200 + "{% endif %}" * 200],
    ids=["brackets", "blocks"],
)
def test_a_template_that_cannot_be_compiled_is_refused(source: str) -> None:
    with pytest.raises(StartupError, match="nested too deeply"):
        ChatTemplate(source, (), {})


@table(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ m.content }}{% endfor %}", "1True1hi"),
        ("{% for x in [1, 2, 3] if x > 1 %}{{ x }}{% else %}none{% endfor %}", "23"),
        ("{% for x in [] %}{{ x }}{% else %}none{% endfor %}", "none"),
        ("{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{{ [messages[0].role, 1] }}{{ (messages[0].role, 1) }}{{ {'a': messages[0].role} }}", "['user', 1]('user', 1){'a': 'user'}"),
        ("{{ 'a' ~ 1 ~ none ~ 2.5 }}{{ none }}{{ 1.50 }}{{ true }}", "a1None2.5None1.5True"),
        ("{{ '%s: %5.2f' % ('a', 1.5) }}{{ '{:>4}'.format(1) }}{{ 'a,b'.split(',')|join('; ') }}", "a:  1.50   1a; b"),
        ("{{ '%5d%%99999 %-2s|' % (1, 2) }}{{ '%(a(b))s' % {'a(b)': 3} }}{{ '{a[:12345]}{{:99999}}'.format(a={':12345': 4}) }}", "    1%99999 2 |34{:99999}"),
        ("{{ 'x' * 3 }}{{ 3 * 'x' }}{{ [1] * 2 }}{{ 2 ** 10 }}{{ 7 % 4 }}", "xxxxxx[1, 1]10243"),
        ("{{ messages|map(attribute='role')|list }}{{ range(3)|map('string')|join }}", "['user']012"),
        ("{{ {'a': [1]}|tojson(indent=2) }}{{ messages|tojson }}", '{\n  "a": [\n    1\n  ]\n}[{"role": "user", "content": "hi"}]'),
        ("{{ messages[0:] | length }}{{ 'abcdef'[1:3] }}{{ messages[::-1][0].role }}", "1bcuser"),
        ("{% macro m(x) %}<{{ x }}{{ caller() }}>{% endmacro %}{% call m(1) %}c{% endcall %}", "<1c>"),
        ("{% set a %}{{ 'x'|upper }}y{% endset %}{{ a }}{{ a|indent(2, true) }}", "Xy  Xy"),
        ("{{ 'a\nb'|indent(4) }}{{ 'ab'|center(6) }}{{ [3, 1, 2]|sort }}{{ [1, 2]|sum }}", "a\n    b  ab  [1, 2, 3]3"),
    ],
)  # fmt: skip
def test_other_templates_render_as_before(source: str, expected: str) -> None:
    assert "".join(segment.text for segment in ChatTemplate(source, (), {}).render(CHAT)) == expected


def test_a_template_renders_again_after_it_was_stopped() -> None:
    template = ChatTemplate("{{ 'x' * (messages|length) ** 30 }}", (), {})
    with pytest.raises(InvalidValue):
        template.render(CHAT * 10)
    assert template.render(CHAT)[0].text == "x"


def test_parts_weigh_as_often_as_they_are_reached() -> None:
    text = "x" * (MAX_VALUE_BYTES // 4)
    assert weight([text, text]) > 2 * len(text)
    with pytest.raises(TooCostly):
        weight([text] * 5)
    assert weight("ä") == 4 * weight("a")
