"""Renders messages with the checkpoint's chat template.

To distinguish the template's text from the users', the chat is rendered again with the users' text in disguise
(provenance.py).
"""

import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from itertools import count
from typing import Any

from saccade.errors import InvalidValue, StartupError
from saccade.tokenization.image_tag import ImageTag
from saccade.tokenization.messages import Message, Tool
from saccade.tokenization.provenance import Disguise, Provenance
from saccade.tokenization.template_limits import TooCostly
from saccade.tokenization.template_program import TemplateProgram
from saccade.tokenization.tokenizer import Segment
from saccade.tokenization.written_turns import RESULT, calling, find_written_turns, has_texts

TEXT_FIELDS = ("name", "reasoning_content", "tool_call_id")
CALL_KEYS = frozenset(("id", "type", "function", "name", "arguments"))
TOOL_KEYS = frozenset(("type", "function", "name", "description", "parameters", "strict"))
"""Keys of the API's own objects: of a call or a tool, and of the function in it. Keys within those are a user's."""

_PROBE = "3141592653589793"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": f"f{_PROBE}",
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
_RESULT = {**RESULT, "content": _PROBE}


class ChatTemplate:
    """One checkpoint's chat template.

    - special_tokens: strings that become single ids if the template writes them.
    - variables: bos_token and the like.
    - image_tag: for a template that takes only strings. Content becomes one string, with a tag for each image.
    - tool_variables: returns the template's variables for tools, by default `tools`.

    A template that takes only lists is detected, and gets each string as a list. Raises StartupError if the source is
    not a template, or exceeds a rendering's limits for one short message.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Collection[str],
        variables: Mapping[str, str],
        image_tag: ImageTag | None = None,
        tool_variables: Callable[[Sequence[Tool]], Mapping[str, Any]] | None = None,
    ) -> None:
        self._program = TemplateProgram(source, special_tokens)
        self._special_tokens = special_tokens
        self._variables = variables
        self._tag = image_tag
        self._tool_variables = tool_variables or (lambda tools: {"tools": list(tools)})
        self._provenance = Provenance(special_tokens, image_tag, self._program.words)
        self._loses_strings = False
        self._loses_strings = image_tag is None and not self._shows(_PROBE) and self._shows(_text_part(_PROBE))
        self.takes_tools = self._shows("", (_PROBE_TOOL,)) or self._shows(_text_part("a"), (_PROBE_TOOL,))
        """Whether the template writes the tools that it is given."""
        self.loses_calls = self._loses(calling(f"1{_PROBE}", f"2{_PROBE}"), (f"1{_PROBE}", f"2{_PROBE}"))
        """Whether the template silently leaves out calls of earlier turns."""
        self.loses_results = self._loses([*calling("a"), _RESULT], (_PROBE,))
        """Whether the template silently leaves out results of tools."""
        tools = ((), (_PROBE_TOOL,)) if self.takes_tools else ((),)
        self.turns = find_written_turns([partial(self._prompt_of, declared) for declared in tools])
        """The turns and texts that the template writes."""

    @cached_property
    def loses_result_images(self) -> bool:
        """Whether the template refuses images in tool results, or leaves them out."""
        tokens = self._special_texts({**_RESULT, "content": [*_text_part(_PROBE), {"type": "image"}]})
        return not tokens or tokens == self._special_texts(_RESULT)

    def replaced_by(self, source: str) -> "ChatTemplate":
        """Return the template that a request brings for the same model. Raises InvalidValue if it is not a template."""
        try:
            return ChatTemplate(source, self._special_tokens, self._variables, self._tag, self._tool_variables)
        except StartupError as error:
            raise InvalidValue(f"`chat_template`: {error.message}", "chat_template") from error

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        switches: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
        *,
        continues: bool = False,
    ) -> list[Segment]:
        """Return the prompt in segments; image tags count as special.

        If the prompt *continues* the last message, it ends after that message's text. *switches* are additional
        variables that the family declares: numbers, strings, true, false or null. *tools* reach the template through
        *tool_variables*. Raises InvalidValue if a switch has another type, or if the template cannot render the
        messages. It also does so if the template leaves out the text to continue, or if its text cannot be told from
        the users'.
        """
        user_variables = switches or {}
        for name, value in user_variables.items():
            if not isinstance(value, str | int | float | None):
                raise InvalidValue(f"`{name}` must be a string, a number, true, false or null.", "chat_template_kwargs")
        # All renderings use the same time, so that they cannot differ in it.
        now = datetime.now()
        tool_variables = self._tool_variables(tools) if tools else {"tools": None}
        mark = f"{secrets.token_hex(8)} " if continues else ""

        def render(encode: Disguise) -> str:
            variables = {name: encode(v) if isinstance(v, str) else v for name, v in user_variables.items()} | {
                **self._variables,
                "messages": _marked(self._rewrite(messages, encode), mark),
                "add_generation_prompt": add_generation_prompt,
                **{name: _map_strings(value, encode, TOOL_KEYS) for name, value in tool_variables.items()},
                "documents": None,
                "strftime_now": now.strftime,
            }
            prompt = self._program.render(encode, variables)
            return _cut(prompt, mark, encode(_last_text(messages))) if continues else prompt

        return self._provenance.split(render)

    def tagged(self, messages: Sequence[Message]) -> list[Message]:
        """Return *messages* with one text each, in which tags stand for the images; the image parts follow the text.

        A server that renders this chat keeps the order of images and text. Without an *image_tag*, the messages are
        returned unchanged.
        """
        if self._tag is None:
            return list(messages)
        return [
            message
            if isinstance(message["content"], str)
            else {
                **message,
                "content": _text_part(tagged["content"]) + [part for part in message["content"] if "text" not in part],
            }
            for message, tagged in zip(messages, self._rewrite(messages, str), strict=True)
        ]

    def _shows(self, content: object, tools: Sequence[Tool] = ()) -> bool:
        """Return whether the template writes the text of *content*, or the names of *tools*."""
        messages = [{"role": "user", "content": content}]
        try:
            return has_texts(self._prompt_of(tools, messages), _PROBE)
        except InvalidValue as error:
            if isinstance(error.__cause__, TooCostly):
                raise StartupError(f"The chat template {error.__cause__.message} for one short message.") from error
            return False

    def _prompt_of(self, tools: Sequence[Tool], messages: Sequence[Message]) -> str:
        return "".join(segment.text for segment in self.render(messages, tools=tools))

    def _loses(self, messages: Sequence[Message], probes: Sequence[str]) -> bool:
        """Return whether the template accepts *messages* but does not write all of *probes*."""
        try:
            text = self._prompt_of((), messages)
        except InvalidValue:
            return False
        return not all(probe in text for probe in probes)

    def _special_texts(self, result: Message) -> list[str]:
        """Return the special tokens that the template writes for a call and its *result*, or [] if it refuses them."""
        try:
            segments = self.render([*calling("a"), result])
        except InvalidValue:
            return []
        return [segment.text for segment in segments if segment.is_special]

    def _rewrite(self, messages: Sequence[Message], encode: Callable[[str], str]) -> list[dict[str, Any]]:
        """Return a new copy of *messages*, with users' text encoded, because a template may keep its input."""
        copies = []
        numbers = count(1)
        for message in messages:
            copy = dict(message)
            for field in TEXT_FIELDS:
                if copy.get(field) is not None:
                    copy[field] = encode(copy[field])
            if "tool_calls" in copy:
                copy["tool_calls"] = [_map_strings(call, encode, CALL_KEYS) for call in copy["tool_calls"]]
            content = message["content"]
            if isinstance(content, str):
                copy["content"] = _text_part(encode(content)) if self._loses_strings else encode(content)
            elif self._tag is not None:
                parts = (
                    encode(part["text"]) if "text" in part else self._tag.write_tag(next(numbers)) for part in content
                )
                copy["content"] = "".join(parts)
            else:
                copy["content"] = [
                    part | {"text": encode(part["text"])} if "text" in part else dict(part) for part in content
                ]
            copies.append(copy)
        return copies


def _marked(messages: list[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
    """Append *mark*, in place, to the last text of the last message, and return *messages*."""
    if mark and isinstance(messages[-1]["content"], str):
        messages[-1]["content"] += mark
    elif mark:
        next(part for part in reversed(messages[-1]["content"]) if "text" in part)["text"] += mark
    return messages


def _last_text(messages: Sequence[Message]) -> str:
    content = messages[-1]["content"]
    text: str = content if isinstance(content, str) else [part["text"] for part in content if "text" in part][-1]
    return text


def _cut(prompt: str, mark: str, text: str) -> str:
    """Return *prompt* up to the *mark* after *text*; the rule is that of transformers (chat_template_utils.py).

    The mark ends in a space. If that space is missing, the template strips trailing white space, so the prompt's is
    removed too.
    """
    place = prompt.rfind(mark.strip())
    if place < 0 or text.strip() not in prompt:
        raise InvalidValue(
            "`continue_final_message`: the model's chat template leaves out the last message's text, or a part of it.",
            "continue_final_message",
        )
    return prompt[:place] if prompt.startswith(mark, place) else prompt[:place].rstrip()


def find_source(
    jinja: bytes | None, template_json: bytes | None, tokenizer_config: Mapping[str, Any], default: str | None = None
) -> str:
    """Return a checkpoint's template: chat_template.jinja, or else chat_template.json, or else tokenizer_config.json's.

    If the checkpoint has none, *default* is used.

    Raises StartupError if there is no default either.
    """
    if jinja is not None:
        return jinja.decode(errors="replace")
    template = _read_json(template_json) if template_json is not None else tokenizer_config.get("chat_template")
    match template:
        case str(source):
            return source
        case list(named):
            for entry in named:
                match entry:
                    case {"name": "default", "template": str(source)}:
                        return source
    if default is not None:
        return default
    raise StartupError(
        "The model has no chat template: none of chat_template.jinja, chat_template.json and "
        "`chat_template` in tokenizer_config.json is there."
    )


def _read_json(content: bytes) -> object:
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise StartupError("chat_template.json is not valid JSON.") from error
    return parsed.get("chat_template") if isinstance(parsed, dict) else parsed


def _map_strings(value: Any, encode: Callable[[str], str], known: Collection[str], levels: int = 2) -> Any:
    """Return a copy of the JSON *value* with its strings passed through *encode*.

    Keys among *known* stay as they are in the outermost *levels* of objects.
    """
    match value:
        case str():
            return encode(value)
        case dict():
            return {
                key if levels > 0 and key in known else encode(key): _map_strings(item, encode, known, levels - 1)
                for key, item in value.items()
            }
        case list():
            return [_map_strings(item, encode, known, levels) for item in value]
    return value


def _text_part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]
