"""Compiles and renders a chat template in the Jinja environment of `transformers`.

The environment is that of transformers' utils/chat_template_utils.py: trimmed blocks, loop controls, `tojson` without
escapes, `raise_exception` and `strftime_now`.

Templates search for tags in text, as in `'</think>' in content`, and write the same tags themselves. The tags that they
search for become variables, so that a rendering with disguised text (provenance.py) can disguise these tags too; the
tags that they write do not change. Filters that sort texts or change their case ignore the disguise.

Renderings are metered (template_limits), so a template that loops forever or builds a huge value fails only one
request.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.visitor

from saccade.errors import InvalidValue, StartupError
from saccade.tokenization.provenance import Disguise
from saccade.tokenization.template_limits import MeteredEnvironment, TooCostly
from saccade.tokenization.template_tree import meter_tree

MAX_RENDERED_CHARACTERS = 4 * 2**20

_FAULTS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError,
    MemoryError,
)  # fmt: skip
"""Exceptions of a template's code for messages that it does not support."""

_NO_PROGRAM = (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError)
"""Exceptions of compiling a template that is nested too deeply or too large, in addition to Jinja's errors."""

_METHODS = frozenset(
    (
        "split", "rsplit", "partition", "rpartition", "startswith", "endswith", "replace", "find", "rfind", "index",
        "count", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix",
    )
)  # fmt: skip
"""Methods of text whose first argument is a text to search for."""

_FILTERS = frozenset(("replace",))

_DISGUISE = "disguise of texts"
"""A variable for the filters' own use: a template cannot name it."""


class _Refusal(jinja2.TemplateError):
    """The template called raise_exception; the message is the template's."""


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks answers for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class TemplateProgram:
    """One compiled chat template, which may search text for *special_tokens* and for strings with a `<`.

    *words* are the names and strings in its code, such as the keys and types of a schema that it looks for. Raises
    StartupError if the source is not a template.
    """

    def __init__(self, source: str, special_tokens: Collection[str]) -> None:
        environment = _environment()
        try:
            tree = environment.parse(source)
            looked_for = _LookedFor(special_tokens)
            looked_for.visit(tree)
            self._looked_for = looked_for.names
            self.words = frozenset(_words(tree))
            meter_tree(tree)
            tree.set_environment(environment)
            self._template = environment.from_string(tree)
            # Jinja copies them for each rendering, and a ChainMap slowly.
            self._template.globals = dict(self._template.globals)
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(f"The chat template is not valid Jinja (line {error.lineno}).") from error
        except _NO_PROGRAM as error:
            raise StartupError("The chat template cannot be compiled: it is nested too deeply or too large.") from error
        self._environment = environment

    def render(self, disguise: Disguise, variables: Mapping[str, Any]) -> str:
        """Return the template's text for *variables*, whose strings from users have all been passed through *disguise*.

        Raises InvalidValue if the template refuses the variables, fails, exceeds the meter's limits, or writes more
        than MAX_RENDERED_CHARACTERS. These are errors of the request: the same request would fail again.
        """
        looked_for = {name: disguise.searched(text) for name, text in self._looked_for.items()}
        chunks: list[str] = []
        num_characters = 0
        context = self._template.new_context({**variables, **looked_for, _DISGUISE: disguise})
        try:
            for chunk in self._environment.metered(lambda: self._template.root_render_func(context)):
                chunks.append(chunk)
                num_characters += len(chunk)
                if num_characters > MAX_RENDERED_CHARACTERS:
                    raise InvalidValue(f"The prompt has more than {MAX_RENDERED_CHARACTERS} characters.", "messages")
        except _Refusal as error:
            refusal = "The model's chat template refuses the messages"
            raise InvalidValue(f"{refusal}: {error.message}", "messages", reason=f"{refusal}.") from error
        except TooCostly as error:
            raise InvalidValue(
                f"The model's chat template {error.message} for these messages. Send fewer or shorter ones.", "messages"
            ) from error
        except _FAULTS as error:
            raise InvalidValue("The model's chat template cannot render these messages.", "messages") from error
        finally:
            # The template's macros and their context hold each other, and the context holds the messages.
            for names in (context.parent, context.vars, context.exported_vars):
                names.clear()
        return "".join(chunks)


def _words(tree: jinja2.nodes.Template) -> Iterator[str]:
    for node in tree.find_all((jinja2.nodes.Const, jinja2.nodes.Getattr)):
        word = node.attr if isinstance(node, jinja2.nodes.Getattr) else getattr(node, "value", None)
        if isinstance(word, str) and word.isidentifier():
            yield word


class _LookedFor(jinja2.visitor.NodeTransformer):
    """Replaces the strings that a template searches for in text with variables. *names* maps those to the strings."""

    def __init__(self, special_tokens: Collection[str]) -> None:
        self.names: dict[str, str] = {}
        self._special_tokens = special_tokens
        self._is_looking = False

    def visit_Const(self, node: jinja2.nodes.Const) -> jinja2.nodes.Expr:
        text = node.value
        if not self._is_looking or not isinstance(text, str):
            return node
        # Other strings are compared with roles and types too, which are not users' text.
        if "<" not in text and not any(token in text for token in self._special_tokens):
            return node
        name = f"looked_for_{len(self.names)}_"
        self.names[name] = text
        return jinja2.nodes.Name(name, "load", lineno=node.lineno)

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:
        return self._look(node, self.generic_visit)

    def visit_Test(self, node: jinja2.nodes.Test) -> jinja2.nodes.Node:
        return self._look(node, self.generic_visit)

    def visit_Call(self, node: jinja2.nodes.Call) -> jinja2.nodes.Node:
        is_method = isinstance(node.node, jinja2.nodes.Getattr) and node.node.attr in _METHODS
        return self._visit_call(node, is_method)

    def visit_Filter(self, node: jinja2.nodes.Filter) -> jinja2.nodes.Node:
        return self._visit_call(node, node.name in _FILTERS)

    def _visit_call(self, node: Any, is_search: bool) -> jinja2.nodes.Node:
        if is_search and node.args:
            node.args[0] = self._look(node.args[0], self.visit)
        visited: jinja2.nodes.Node = self.generic_visit(node)
        return visited

    def _look(self, node: jinja2.nodes.Node, visit: Callable[[Any], Any]) -> jinja2.nodes.Node:
        before, self._is_looking = self._is_looking, True
        visited: jinja2.nodes.Node = visit(node)
        self._is_looking = before
        return visited


def _environment() -> MeteredEnvironment:
    environment = MeteredEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters |= {"tojson": _tojson, "dictsort": _dictsort, "sort": _sort, "upper": _upper, "lower": _lower}
    environment.close_filters()
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


def _disguise(context: jinja2.runtime.Context) -> Disguise:
    disguise: Disguise = context.parent[_DISGUISE]
    return disguise


@jinja2.pass_context
def _upper(context: jinja2.runtime.Context, value: Any) -> str:
    return _disguise(context).in_case(str(value), str.upper)


@jinja2.pass_context
def _lower(context: jinja2.runtime.Context, value: Any) -> str:
    return _disguise(context).in_case(str(value), str.lower)


@jinja2.pass_context
def _dictsort(
    context: jinja2.runtime.Context,
    value: Mapping[Any, Any],
    case_sensitive: bool = False,
    by: str = "key",
    reverse: bool = False,
) -> list[tuple[Any, Any]]:
    if by not in ("key", "value"):
        raise jinja2.exceptions.FilterArgumentError('You can only sort by either "key" or "value"')
    order = _order(context, case_sensitive)
    return sorted(value.items(), key=lambda item: order(item[by == "value"]), reverse=reverse)


@jinja2.pass_context
def _sort(
    context: jinja2.runtime.Context,
    value: Iterable[Any],
    reverse: bool = False,
    case_sensitive: bool = False,
    attribute: str | int | None = None,
) -> list[Any]:
    order = _order(context, case_sensitive)
    key = jinja2.filters.make_multi_attrgetter(context.environment, attribute, postprocess=order)
    return sorted(value, key=key, reverse=reverse)


def _order(context: jinja2.runtime.Context, case_sensitive: bool) -> Callable[[Any], Any]:
    """Return a sort key that orders values as jinja2's filters do."""
    undo = _disguise(context).undo

    def place(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return undo(value) if case_sensitive else undo(value).lower()

    return place


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(str(message))
