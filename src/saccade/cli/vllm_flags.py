"""The flags of `vllm serve` and Saccade's support for each, from vllm_flags.toml.

docs/from-vllm.md is generated from the same file.

A flag that would change an answer is never accepted without effect, unless its value requests Saccade's own behaviour
(`same_values`).
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

Takes = Literal["nothing", "one", "many"]
COMMANDS = frozenset({"serve", "worker", "gateway", "compile"})
"""The commands that take flags of `vllm serve`."""


JSON_FLAGS = frozenset(
    {
        "--default-chat-template-kwargs",
        "--hf-overrides",
        "--limit-mm-per-prompt",
        "--media-io-kwargs",
        "--mm-processor-kwargs",
        "--override-generation-config",
        "--speculative-config",
    }
)
"""Our flags that take a JSON object, or its keys one by one."""


TABLE = tomllib.loads((Path(__file__).parent / "vllm_flags.toml").read_text())


class Support(StrEnum):
    """How Saccade handles a flag."""

    SERVED = "served as"
    NO_EFFECT = "accepted without effect"
    REFUSED = "refused"


@dataclass(frozen=True)
class VllmFlag:
    """A flag of `vllm serve`, with all its *names* and a *sentence* about what Saccade does with it.

    *ours* is Saccade's name for a SERVED flag. *same_values* are accepted without effect, whatever the *support*.
    *becomes* is what replaces the flag, with {} standing for its value; *values* maps vLLM's spellings to Saccade's.
    """

    names: tuple[str, ...]
    support: Support
    sentence: str
    takes: Takes = "one"
    same_values: tuple[str, ...] = ()
    ours: str = ""
    becomes: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def may_change(self) -> bool:
        """Whether Saccade replaces or drops the flag for some of its values."""
        is_plain = self.support is Support.SERVED and not self.same_values and self.takes != "many"
        return self.is_translated or not is_plain

    @property
    def is_translated(self) -> bool:
        """Whether the flag or some of its values have another spelling here."""
        return bool(self.becomes or self.values)

    def translate(self, name: str, value: str) -> list[str]:
        """Return Saccade's words for the flag, given as *name*, with *value*."""
        spelt = self.values.get(value, value)
        return [word.replace("{}", spelt) for word in self.becomes] or [name, spelt]


def _flag(support: Support, row: Mapping[str, Any]) -> VllmFlag:
    first, *others = row["names"].split()
    takes = row.get("takes", "nothing" if support is Support.NO_EFFECT else "one")
    becomes = tuple(row.get("becomes", "").split())
    ours = row.get("ours", first if support is Support.SERVED else "")
    same = tuple(row.get("same", "").split())
    return VllmFlag((first, *others), support, row["sentence"], takes, same, ours, becomes, row.get("values", {}))


FLAGS = tuple(_flag(support, row) for support in Support for row in TABLE[support.name.lower()])
SWITCHES = tuple(flag for flag in FLAGS if flag.takes == "nothing")


@dataclass(frozen=True)
class Arguments:
    """A command line in Saccade's words without flags that have no effect, and the names of the removed flags."""

    arguments: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)


def find(name: str) -> VllmFlag | None:
    """Return vLLM's flag with *name*, as on a command line, or without its dashes as in a settings file.

    As in vLLM, `_` is the same as `-`, `--flag.key` sets a key of a JSON value, and `--no-flag` negates a flag without
    a value.
    """
    dashed = name if name.startswith("-") else f"--{name}"
    spelt = dashed.partition(".")[0].replace("_", "-")
    switch = spelt.replace("--no-", "--", 1)
    exact = (flag for flag in FLAGS if spelt in flag.names)
    return next(exact, None) or next((flag for flag in SWITCHES if switch in flag.names), None)


def translate(arguments: Sequence[str]) -> Arguments:
    """Return a command line with vLLM's flags in Saccade's words, and without those that have no effect.

    A flag takes several values only after the model, which would be one of them otherwise.
    """
    if not arguments or arguments[0] not in COMMANDS:
        return Arguments(list(arguments))
    split = Arguments()
    rest = list(arguments)
    has_model = not "".join(rest[1:2]).startswith("-") or any(word.partition("=")[0] == "--model" for word in rest)
    while rest:
        token = rest.pop(0)
        name, equals, value = token.partition("=")
        flag = find(name) if token.startswith("-") else None
        if flag is None or not flag.may_change:
            split.arguments.append(token)
            continue
        values = [value] if equals else _values(flag, rest)
        if _has_no_effect(flag, name, values):
            split.without_effect.append(name)
        elif flag.is_translated and (values or flag.takes == "nothing"):
            split.arguments.extend(flag.translate(name, *values[:1] or [""]))
        elif flag.support is Support.SERVED and has_model and len(values) > 1:
            split.arguments.extend(word for one in values for word in (name, one))
        else:
            split.arguments.append(token)
            continue
        del rest[: 0 if equals else len(values)]
    return split


def translate_setting(name: str, value: object) -> dict[str, object] | None:
    """Return the settings that stand for *name* with *value*, which come from a settings file.

    None if translate() would remove the flag.
    """
    flag = find(name)
    if flag is None:
        return {name: value}
    if value is False and flag.takes == "nothing" and (flag.support is not Support.SERVED or flag.becomes):
        return None
    values = [str(one) for one in (value if isinstance(value, list) else [value])]
    if (flag.support is not Support.SERVED or flag.same_values) and _has_no_effect(flag, f"--{name}", values):
        return None
    if not flag.is_translated:
        return {name: value}
    words = fold_keys(flag.translate(f"--{name}", json.dumps(value) if isinstance(value, dict) else values[0]))
    return {word.removeprefix("--"): _object_or_text(text) for word, text in zip(words[::2], words[1::2], strict=True)}


def _object_or_text(text: str) -> object:
    return json.loads(text) if text.startswith("{") else text


def fold_keys(arguments: Sequence[str]) -> list[str]:
    """Return *arguments* with the keys of each JSON flag gathered in one object, as vLLM reads them.

    `--limit-mm-per-prompt.image 4` becomes `--limit-mm-per-prompt {"image": 4}`. A value that is not JSON is a string.
    A later value replaces an earlier one.
    """
    folded: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        flag, *keys = name.split(".")
        flag = "--speculative-config" if flag == "-sc" else flag.replace("_", "-")
        if flag not in JSON_FLAGS or not keys:
            folded.append(word)
            continue
        value = value if equals else next(words, "")
        place = objects.setdefault(flag, {})
        for key in keys[:-1]:
            if not isinstance(place.get(key), dict):
                place[key] = {}
            place = place[key]
        try:
            place[keys[-1]] = json.loads(value)
        except ValueError:
            place[keys[-1]] = value
    return folded + [word for flag, place in objects.items() for word in (flag, json.dumps(place))]


def _values(flag: VllmFlag, rest: Sequence[str]) -> list[str]:
    """Return the values of *flag* at the start of *rest*."""
    if flag.takes == "one":
        return list(rest[:1])
    if flag.takes == "nothing":  # as in older releases
        return [word for word in rest[:1] if flag.support is Support.NO_EFFECT and word.lower() in ("true", "false")]
    following = next((place for place, token in enumerate(rest) if token.startswith("-")), len(rest))
    return list(rest[:following])


def _has_no_effect(flag: VllmFlag, name: str, values: Sequence[str]) -> bool:
    if flag.support is Support.NO_EFFECT:
        return True
    if flag.takes == "nothing":  # `--no-` and the name of another flag
        return name.replace("_", "-") not in flag.names
    return bool(values) and all(leaf in flag.same_values for value in values for leaf in _leaves(value))


def _leaves(value: str) -> list[str]:
    """Return the values of a JSON object, or *value* itself."""
    if not value.startswith("{"):
        return [value]
    try:
        return [str(leaf) for leaf in json.loads(value).values()] or [value]
    except ValueError:
        return [value]


def explanation(name: str) -> str | None:
    """Explain a vLLM flag that the command lacks. Return None if vLLM has no such flag."""
    flag = find(name)
    if flag is None:
        return None
    same = f" Accepted values: {', '.join(flag.same_values)}." if flag.same_values else ""
    match flag.support:
        case Support.REFUSED:
            return f"{name} is not supported. {flag.sentence}{same}"
        case Support.NO_EFFECT:
            return f"{name} has no effect here. {flag.sentence}"
        case _:
            return f"{name} is not a flag of this command. {flag.sentence}"
