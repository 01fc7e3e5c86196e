"""Write docs/from-vllm.md from vllm_flags.toml: `python scripts/vllm_flags.py`; with `--check`, only compare."""

import argparse
import sys
from pathlib import Path

from saccade.cli.vllm_flags import FLAGS, Support, VllmFlag

DOCUMENT = Path(__file__).parents[1] / "docs" / "from-vllm.md"
INTRODUCTION = """# From vLLM

Type the same line with another first word:

    vllm serve ./Qwen3-VL-2B --max-model-len 32k --limit-mm-per-prompt '{"image": 4}' --api-key KEY

    saccade serve ./Qwen3-VL-2B --max-model-len 32k --limit-mm-per-prompt '{"image": 4}' --api-key KEY

Clients stay as they are: the port is 8000, and the [API](api/index.md) has OpenAI's fields and vLLM's. A YAML file for
`--config` works too. If a flag cannot be served, the start fails and says why. `LLM.chat` is there too:
[Python](python.md#from-vllm).

## What differs

| subject | vLLM | Saccade |
| --- | --- | --- |
| address | every interface | 127.0.0.1; `--host 0.0.0.0` opens the server to a network |
| web pages of other origins | all may call | none may, unless `--allowed-origins` names them |
| images in a request | 999 | 16; `--limit-mm-per-prompt` |
| images by URL | every host | public hosts only; `--allowed-media-networks` allows private ones |
| unknown fields of a request | ignored | ignored, and named in the header `x-saccade-warning` |
| `priority` of a request without `--scheduling-policy priority` | 400 | ignored, and named in the same header |
| metrics | `vllm:*` | the same names if they mean the same, and `saccade_*` ([metrics](metrics.md)) |
| copies of a model on several machines | `--data-parallel-size` | one `saccade worker` a copy and one `saccade gateway` ([fleet](fleet.md)) |

[Models](models.md) lists the families that Saccade's engine runs. A Saccade gateway also serves [vLLM's own
workers](workers.md#vllm), so the engine can stay vLLM.

## Flags

`saccade serve MODEL` handles the flags of `vllm serve` in three ways. A flag that would change an answer is never
accepted without effect. All flags of vLLM 0.33 are here, and some of older releases. `saccade serve --help-all` and
[configuration](configuration.md) list Saccade's flags. `scripts/vllm_flags.py` writes this page from
`src/saccade/cli/vllm_flags.toml`, which the command line uses too. The variable VLLM_API_KEY is read if
SACCADE_API_KEY is not set.
"""
SECTIONS = {
    Support.SERVED: (
        "Served",
        "The second column has what the flag stands for. If it names no flag of `saccade serve`, vLLM's flag is refused with\n"
        "the note as the error.",
        ("flag of vLLM", "Saccade's flag", "note"),
    ),
    Support.NO_EFFECT: (
        "Accepted without effect",
        "One line at the start lists those that were given. The answers are the same with and without them.",
        ("flag of vLLM", "why it has no effect"),
    ),
    Support.REFUSED: (
        "Refused",
        "With one of these the start fails, with exit code 2 and the note as the error. Values that request Saccade's own\n"
        "behaviour are accepted: those of the second column, and `--no-` before a flag without a value.",
        ("flag of vLLM", "accepted values", "note"),
    ),
}


def document() -> str:
    """Return the whole page."""
    return "\n".join((INTRODUCTION, *(_section(support) for support in SECTIONS)))


def _section(support: Support) -> str:
    title, sentence, header = SECTIONS[support]
    names: dict[tuple[str, ...], list[str]] = {}  # flags with the same note share a row
    for name, *rest in (_cells(flag) for flag in FLAGS if flag.support is support):
        names.setdefault(tuple(rest), []).append(name)
    rows = [_line((", ".join(ones), *rest)) for rest, ones in names.items()]
    return "\n".join((f"## {title}\n\n{sentence}\n", _line(header), _line(("---",) * len(header)), *rows, ""))


def _cells(flag: VllmFlag) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in flag.names)
    sentence = flag.sentence.replace("|", "\\|")
    match flag.support:
        case Support.SERVED:
            ours = " ".join(flag.becomes).replace("{}", "VALUE") or flag.ours
            spellings = [f"`{theirs}` means `{value}`" for theirs, value in flag.values.items()]
            note = " ".join([sentence, *([f"{', '.join(spellings)}."] if spellings else [])])
            return names, "the same" if ours in flag.names else f"`{ours}`", note
        case Support.NO_EFFECT:
            return names, sentence
        case Support.REFUSED:
            return names, ", ".join(f"`{value}`" for value in flag.same_values), sentence


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Write the page, or fail where it is not what would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        DOCUMENT.write_text(document())
    elif DOCUMENT.read_text() != document():
        sys.exit("docs/from-vllm.md is out of date: run `python scripts/vllm_flags.py`.")


if __name__ == "__main__":
    main()
