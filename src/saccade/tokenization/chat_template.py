"""Render messages.

The template is the checkpoint's own Jinja program; it runs in the environment that `transformers` gives it
(utils/chat_template_utils.py): trimmed blocks, loop controls, `tojson` without escapes, `raise_exception` and
`strftime_now`.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from saccade.errors import InvalidValue, StartupError
from saccade.tokenization.provenance import Provenance
from saccade.tokenization.tokenizer import Segment

MAX_RENDERED_CHARACTERS = 4 * 2**20

Message = Mapping[str, Any]
"""{"role": str, "content": str | list of {"type": "text", "text": str} and {"type": "image"}}; "name" where given."""

_TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
"""What a template's own code can raise over messages that it was not written for."""


class _Refusal(jinja2.TemplateError):
    """The template called raise_exception: its author's own words."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks answers for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """One checkpoint's chat template.

    *special_tokens* are the strings that become single ids where the template writes them; *variables* are bos_token
    and the like. Raises StartupError where the source is no template.
    """

    def __init__(self, source: str, special_tokens: Collection[str], variables: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(f"The chat template is not valid Jinja (line {error.lineno}).") from error
        self._variables = variables
        self._provenance = Provenance(special_tokens)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[Segment]:
        """Return the prompt in segments. Raises InvalidValue where the template refuses the messages."""
        # One clock for both renderings: they must not differ by what time it is.
        now = datetime.now()

        def render(written: Callable[[str], str]) -> str:
            return self._expand(
                messages=[_rewrite(message, written) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                strftime_now=now.strftime,
                **self._variables,
            )

        return self._provenance.split(render)

    def _expand(self, **variables: Any) -> str:
        chunks: list[str] = []
        num_characters = 0
        try:
            for chunk in self._template.generate(**variables):
                chunks.append(chunk)
                num_characters += len(chunk)
                if num_characters > MAX_RENDERED_CHARACTERS:
                    raise InvalidValue(f"The prompt has more than {MAX_RENDERED_CHARACTERS} characters.", "messages")
        except _Refusal as error:
            raise InvalidValue(f"The model's chat template refuses this: {error.message}", "messages") from error
        except (*_TEMPLATE_FAULTS, RecursionError) as error:
            raise InvalidValue("The model's chat template cannot render these messages.", "messages") from error
        return "".join(chunks)


def find_source(jinja: bytes | None, template_json: bytes | None, tokenizer_config: Mapping[str, Any]) -> str:
    """Return the template of a checkpoint: chat_template.jinja, else chat_template.json, else tokenizer_config.json's.

    Raises StartupError where there is none.
    """
    if jinja is not None:
        return jinja.decode(errors="replace")
    given = _read_json(template_json) if template_json is not None else tokenizer_config.get("chat_template")
    match given:
        case str(source):
            return source
        case list(named):
            for entry in named:
                match entry:
                    case {"name": "default", "template": str(source)}:
                        return source
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


def _rewrite(message: Message, written: Callable[[str], str]) -> dict[str, Any]:
    """Copy a message; a fresh copy each time, since a template may hold on to what it is given."""
    copy = dict(message)
    content = message["content"]
    if isinstance(content, str):
        copy["content"] = written(content)
    else:
        copy["content"] = [part | {"text": written(part["text"])} if "text" in part else dict(part) for part in content]
    if "name" in message:
        copy["name"] = written(message["name"])
    return copy


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(str(message))
