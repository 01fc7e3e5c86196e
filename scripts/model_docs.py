"""Write docs/models.md from what the families declare: `python scripts/model_docs.py`; with `--check`, only compare."""

import argparse
import sys
from pathlib import Path

from saccade import models
from saccade.models.family import Family

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "models.md"
INTRODUCTION = """# Models

This page is written by `scripts/model_docs.py` from the declarations in `src/saccade/models`.

A model is found by the exact string in `architectures` of its config.json; where config.json names none, by its
`model_type`. A checkpoint that nobody claims is refused at start-up with the list of those served. *Engine* says whether
Saccade's own engine runs the family; the gateway serves all of them over workers that do. *Other wires* names the grid
that goes with a picture to workers of other makes; families without one are not sent there.
"""
FILES = """## Files of a model

A folder in hub layout holds `config.json`, `generation_config.json`, `preprocessor_config.json`, a tokenizer (`tokenizer.json`, or
`tiktoken.model` where the release has that), `tokenizer_config.json`, a chat template (`chat_template.jinja`, `chat_template.json`, or inside
`tokenizer_config.json`), and for the engine `*.safetensors`, sharded or not. `preprocessor_config.json` may be the `image_processor` of
`processor_config.json` instead, as transformers 5 writes it; a folder with neither has lost how its pictures are prepared, and is refused.
Pickled weights (`*.bin`, `*.pt`) and code are never read.

The chat template is the checkpoint's own. What the tests render is written anew, after descriptions of the releases' templates and not from
them (reconstructed); a release's own file is served as it is, and start-up refuses one that does not write exactly one placeholder for one
picture.

`generation_config.json` gives the defaults of sampling: `do_sample: false` means temperature 0 unless the request says otherwise.

`saccade inspect MODEL PICTURE...` shows what a model will see: sizes, grids, token ids, hashes.

## The bundled model

`src/saccade/cli/bundled/model`: a Qwen3-VL of 8 million parameters, trained from scratch by `scripts/train_demo` with transformers' own classes on
pictures drawn on the fly. It reads 1 to 4 capitals and digits, names six shapes, and names the colour of either, one of eight, on a light
background. It cannot do anything else, and does not know that. Its card lies beside it; how well it reads: `docs/figures.md`.
"""


def document() -> str:
    """Return the whole page."""
    families = models.families()
    rows = [_row(name, family) for name, family in families.items()]
    header = ("family", "architectures", "model_type", "placeholder", "switches", "engine", "other wires")
    table = [_line(header), _line(["---"] * len(header)), *rows]
    sections = [_section(name) for name in families]
    return "\n".join((INTRODUCTION, "\n".join(table), "", FILES, *sections))


def _row(name: str, family: Family) -> str:
    return _line(
        (
            f"[{name}](#{name})",
            ", ".join(f"`{architecture}`" for architecture in family.architectures),
            ", ".join(f"`{kind}`" for kind in family.model_types),
            f"`{family.placeholder}`".replace("|", "\\|"),
            ", ".join(f"`{switch}`" for switch in family.template_switches),
            "yes" if models.has_network(name) else "",
            f"`{family.foreign_grid}`" if family.foreign_grid else "",
        )
    )


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _section(name: str) -> str:
    readme = (ROOT / "src" / "saccade" / "models" / name / "README.md").read_text()
    _, _, body = readme.partition("\n")
    return f"## {name}\n{body.replace(chr(10) + '#', chr(10) + '##')}"


def main() -> None:
    """Write the page, or fail where it is not what would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        DOCUMENT.write_text(document())
    elif DOCUMENT.read_text() != document():
        sys.exit("docs/models.md is out of date: run `python scripts/model_docs.py`.")


if __name__ == "__main__":
    main()
