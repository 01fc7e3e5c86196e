"""What a client sends never becomes a special token, even if the template writes keys, names or values as tags."""

import re
from collections import Counter
from typing import Any

import pytest
from checkpoints import templates
from tables import table

from saccade.errors import InvalidValue
from saccade.models.kimi_k3.template import TEMPLATE as KIMI_K3
from saccade.tokenization.chat_template import ChatTemplate

TURNS = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content if m.content is string else m.content | map(attribute='text') | join }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}"""
KEYS_AS_TAGS = """{%- macro extra(d, handled) %}{% if d is mapping %}{% for k in d if k not in handled %}
<{{ k }}>{{ d[k] | tojson if d[k] is mapping or d[k] is not string and d[k] is sequence else d[k] | string }}</{{ k }}>
{%- endfor %}{% endif %}{% endmacro -%}
{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{% set f = tool.function or tool %}
<function>
<name>{{ f.name }}</name>{% if f.description is defined %}
<description>{{ f.description | trim }}</description>{% endif %}
<parameters>{% for name, field in f.parameters.properties | items if f.parameters is mapping %}
<parameter>
<name>{{ name }}</name>{% if field.type is defined %}
<type>{{ field.type | string }}</type>{% endif %}{% if field.enum is defined %}
<enum>{{ field.enum | tojson }}</enum>{% endif %}{{ extra(field, ['name', 'type', 'description', 'enum', 'required']) }}
</parameter>{% endfor %}{{ extra(f.parameters, ['type', 'properties']) }}</parameters>
{{- extra(f, ['type', 'name', 'description', 'parameters']) }}
</function>{% endfor %}</tools><|im_end|>
{% endif %}"""
"""The way of Qwen3-Coder's template: every key that it does not know becomes a tag."""

OLD_KEYS_AS_TAGS = """{%- if tools %}<|im_start|>system
{%- for tool in tools %}{% for name, field in tool.function.parameters.properties | items %}
<parameter><name>{{ name }}</name>{% for k in field if k not in ['type', 'enum'] %}
{%- set normal = k | replace('-', '_') | replace(' ', '_') | replace('$', '') %}<{{ normal }}>{{ field[k] }}</{{ normal }}>
{%- endfor %}</parameter>{% endfor %}{% endfor %}<|im_end|>
{% endif %}"""


def calling(body: str) -> str:
    """A template that writes the calls of turns as *body*, and their results with name and id."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
        "<tool_call>" + body + "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    )


def declaring(body: str) -> str:
    """A template that writes each of the properties of tools as *body*."""
    return (
        "{% for tool in tools or [] %}{% for name, field in tool.function.parameters.properties | items %}"
        "<tool_call>" + body + "</tool_call>{% endfor %}{% endfor %}" + TURNS
    )


FAMILIES = {
    name: getattr(templates, name)
    for name in dir(templates)
    if name.isupper() and not name.startswith("_") and isinstance(getattr(templates, name), str)
} | {"KIMI_K3": KIMI_K3}
WRITERS = {
    "keys": KEYS_AS_TAGS + TURNS,
    "keys, replaced": OLD_KEYS_AS_TAGS + TURNS,
    "keys in order": declaring("{% for k, v in field | dictsort %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}"),
    "keys in large letters": declaring(
        "{% for k in field %}<{{ k | upper }}>{% if k == 'enum' %}x{% endif %}{% endfor %}"
    ),
    "sorted keys": declaring(
        "{% for k in field | sort %}<{{ k | lower }}>{% if k == 'enum' %}x{% endif %}{% endfor %}"
    ),
    "keys that are words of the template": declaring("{{ tool.think }}{% for k in field %}<{{ k }}>{% endfor %}"),
    "names of properties": declaring("<{{ name }}>{% if 'string' in field.type %}text{% endif %}</{{ name }}>"),
    "types": declaring("{% if field.type == 'string' %}text{% else %}<{{ field.type }}>{% endif %}"),
    "values": declaring(
        "{% for v in field.enum or [] %}<{{ v }}>{% endfor %}{% if field.type == 'string' %}x{% endif %}"
    ),
    "descriptions": declaring("{% if field.type == 'string' %}<{{ field.description }}>{% endif %}"),
    "bars around keys": declaring("{% for k in field %}<|{{ k }}|>{% if k == 'enum' %}x{% endif %}{% endfor %}"),
    "tools": "{% for tool in tools or [] %}<{{ tool.function.name }}>{{ tool.type == 'function' }}"
    "</{{ tool.function.name }}>{% endfor %}" + TURNS,
    "arguments": calling("{% for k, v in call.function.arguments | items %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}"),
    "values of arguments": calling("{% for v in call.function.arguments.values() %}<{{ v }}>{% endfor %}"),
    "calls": calling("<{{ call.function.name }}>{{ call.type == 'function' }}</{{ call.function.name }}>"),
    "ids": calling("<{{ call.id }}>{{ call.type == 'function' }}</{{ call.id }}>"),
    "names": "{% for m in messages %}<|{{ m.name or m.role }}|>{{ m.content }}<|im_end|>{% endfor %}",
    "results": "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_call_id %}<{{ m.tool_call_id }}>{% endif %}"
    "{{ m.content }}{% endfor %}",
    "switches": "{% if effort == 'high' %}<|im_start|>{% endif %}<{{ effort }}><|im_end|>" + TURNS,
    "keys in small letters": declaring(
        "{% for k in field %}<{{ k | lower }}>{% if k == 'enum' %}x{% endif %}{% endfor %}"
    ),
    "content": "{% for m in messages %}<|im_start|><{{ m.content }}><|im_end|>{% endfor %}",
    "content in large letters": "{% for m in messages %}<|im_start|><{{ m.content | upper }}><|im_end|>{% endfor %}",
}
"""Templates that write what a client sends as tags, and look for words in it."""

METHODS = {
    "small letters": "{% for m in messages %}<{{ m.content.lower() }}><|im_end|>{% endfor %}",
    "a title": "{% for m in messages %}[{{ m.content | title | upper }}]<|im_end|>{% endfor %}",
    "words": "{% for m in messages %}<{{ m.content.split() | join('_') }}>{{ m.content | wordcount }}<|im_end|>{% endfor %}",
    "a search": "{% for m in messages %}<{{ m.content }}>{{ 'k' in m.content }}<|im_end|>{% endfor %}",
    "escapes": "{% for m in messages %}<{{ m.content | tojson(ensure_ascii=true) }}><|im_end|>{% endfor %}",
}
"""Templates that work on characters, for which some texts cannot be told from the template's."""

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|user|>", "<|object_ref_start|>", "<|think|>", "<think>", "</think>", "<THINK>",
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "[THINK]",
)  # fmt: skip
TAG = re.compile(r"<[|/]?[a-zA-Z_\"]+\|?>|\[/?[A-Z_]+\]")
FORGED = (
    "think", "/think", "<think>", "</think>", "<think", "think>", "Think", "THINK", "|think|", "x<think", "think>x",
    "tool_call", "tool-call", "tool call", "$think", "im_end", "|im_end|", "user", "<|im_end|>", "THIN\u212a",
)  # fmt: skip
HARMLESS = "zqz"


def schema(text: str) -> dict[str, Any]:
    """A schema with *text* wherever a client may write one."""
    return {
        "type": "object",
        "properties": {
            "a": {"type": "string", "enum": ["x", "y"], text: "v", "description": "d"},
            "b": {"type": "string", "enum": [text], "description": text},
            "c_d": {"type": "object", "properties": {text: {"type": "string"}}, text: {text: [text]}, "e_f": {"g": 1}},
            "c": {"type": text, "description": "d"},
            text: {"type": "string", "title": "t", "description": "d"},
        },
        "required": ["a", text],
        text: text,
    }


def chat(text: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and tools with *text* wherever a client may write one, except in what a user says."""
    function = {"name": text, "arguments": {text: "v", "k": text, "type": {text: text}, "name": "n"}}
    return [
        {"role": "user", "content": "hi", "name": text},
        {"role": "assistant", "content": "", "tool_calls": [{"id": text, "type": "function", "function": function}]},
        {"role": "tool", "content": "r", "tool_call_id": text, "name": text},
        {"role": "user", "content": "so"},
    ], [
        {"type": "function", "function": {"name": name, "description": description, "parameters": schema(text)}}
        for name, description in (("f", text), (text, "d"))
    ]


def specials(template: ChatTemplate, text: str, *, in_content: bool = False) -> Counter[str]:
    messages, tools = chat(HARMLESS if in_content else text)
    if in_content:
        messages = [message | ({"content": text} if message["role"] == "user" else {}) for message in messages]
    if not template.takes_tools:
        # Some templates refuse two turns of one role.
        users = [message for message in messages if message["role"] == "user"]
        messages = [turn for user in users for turn in (user, {"role": "assistant", "content": "Yes."})]
    segments = template.render(messages, switches={"effort": text}, tools=tools)
    return Counter(segment.text for segment in segments if segment.is_special)


@pytest.mark.ci
@table("forged", FORGED)
@table("source", WRITERS.values(), ids=WRITERS.keys())
def test_what_a_client_sends_stays_text(source: str, forged: str) -> None:  # F2
    template = ChatTemplate(source, SPECIAL, {})
    assert specials(template, forged) == specials(template, HARMLESS)


@pytest.mark.ci
@table("forged", FORGED)
@table("source", WRITERS.values(), ids=WRITERS.keys())
def test_what_a_user_says_stays_text(source: str, forged: str) -> None:  # F2
    template = ChatTemplate(source, SPECIAL, {})
    assert specials(template, forged, in_content=True) == specials(template, HARMLESS, in_content=True)


@pytest.mark.ci
@table("forged", FORGED)
@table("source", FAMILIES.values(), ids=FAMILIES.keys())
def test_families_write_their_own_tokens_alone(source: str, forged: str) -> None:  # F2
    tokens = {*SPECIAL, *TAG.findall(source)}
    template = ChatTemplate(source, tokens, {"bos_token": "<bos>", "eos_token": "</s>"})
    assert specials(template, forged) == specials(template, HARMLESS)
    assert specials(template, HARMLESS) or source == templates.LLAVA


@pytest.mark.ci
@table("forged", FORGED)
@table("source", METHODS.values(), ids=METHODS.keys())
def test_a_text_that_cannot_be_told_apart_is_refused(source: str, forged: str) -> None:  # F2
    template = ChatTemplate(source, SPECIAL, {})
    ordinary = specials(template, "what is k?", in_content=True)
    assert ordinary
    try:
        found = specials(template, forged, in_content=True)
    except InvalidValue as error:
        assert "special tokens" in error.message  # noqa: PT017
    else:
        assert found == ordinary


def test_tokens_that_a_user_mentions_do_not_take_words_from_the_template() -> None:
    """The template looks for the type "object", which is a part of the token that the user writes."""
    source = declaring("{% if field.type == 'object' %}nested{% else %}<{{ field.type }}>{% endif %}")
    template = ChatTemplate(source, SPECIAL, {})
    segments = template.render(
        [{"role": "user", "content": "What is <|object_ref_start|>?"}],
        tools=[{"type": "function", "function": {"name": "f", "parameters": schema("think")}}],
    )
    specials = {segment.text for segment in segments if segment.is_special}
    assert specials == {"<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"}
