"""Write docs/models.md from what the families declare: `python scripts/model_docs.py`; with `--check`, only compare."""

import argparse
import ast
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import get_args

from saccade import models
from saccade.engine.config import KvCacheDtype
from saccade.engine.executor.loader import DTYPES
from saccade.engine.executor.weight_formats import METHODS
from saccade.models.family import Family
from saccade.nn.backends import BACKENDS, VISION_BACKENDS

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "models.md"
INTRODUCTION = """# Models

This page is written by `scripts/model_docs.py` from the declarations in `src/saccade/models`.

A model is found by the exact string in `architectures` of its config.json, or by its `model_type` if config.json names
none. Any other architecture belongs to the family [any_architecture](#any_architecture), if the library `transformers` is
installed and config.json names the token for images. Otherwise the start is refused with the list of known ones. The gateway prepares
prompts and images of every family. *engine* says whether Saccade's own engine runs the family. *other wires* names the grid
that is sent with an image to SGLang and TokenSpeed workers; a family without one cannot be sent to them. A family with neither is not
served by any worker; `saccade inspect` shows its prompts and pixels.
"""
ENGINE = """## What the engine computes with

{backends}

Both flags are `auto` by default: the last installed one that can compute on the device, in the dtype, with the sizes of the heads. The summary of
the start says why. Nothing of this has run on a GPU.

- `--dtype`: `auto`, {dtypes}.
- Formats of quantised weights, by `quant_method` in config.json: {formats} ([formats](formats.md)).
- `--kv-cache-dtype`: {cache_dtypes}.
"""
RELEASES = """## Releases known to fit

`make real` reads the config.json of these releases, from the package `aiconfigurator-core`. The network has as many parameters as the name says, and
every layer that the configuration quantises has a place in it:

- Qwen3-VL: Qwen3-VL-2B-Instruct, Qwen3-VL-4B-Instruct, Qwen3-VL-8B-Instruct, Qwen3-VL-32B-Instruct, Qwen3-VL-32B-Thinking,
  Qwen3-VL-30B-A3B-Instruct, Qwen3-VL-235B-A22B-Instruct;
- Qwen3.5: Qwen3.5-27B, Qwen3.5-35B-A3B, Qwen3.5-122B-A10B, Qwen3.5-397B-A17B, Qwen3.5-122B-A10B-NVFP4, Qwen3.5-397B-A17B-NVFP4;
- Qwen3.6: Qwen3.6-27B-NVFP4, Qwen3.6-35B-A3B-NVFP4;
- Kimi: Kimi-K2.5, Kimi-K2.5-NVFP4, Kimi-K2.6-NVFP4, Kimi-K2.7-Code-NVFP4;
- Gemma 4: gemma-4-26B-A4B, Gemma-4-26B-A4B-NVFP4, Gemma-4-31B-IT-NVFP4.

The same tests compare token ids from the vocabularies of Qwen3 and Qwen3.6 with those of tiktoken. The names, shapes and formats of all 208,550 tensors of
Kimi-K2.5 are in `tests/conformance/test_release_headers.py`. GLM-4.5V, PaddleOCR-VL, InternVL3.5-8B, InternViT-6B and Mistral Small 3.1 have as
many parameters as their names say. The tests of their networks write the configurations down. No weights of a release were loaded by a test: weights, layers and logits are those
of tiny checkpoints in the releases' form.
"""
FILES = """## Files of a model

A folder in hub layout holds `config.json`, `generation_config.json` and `preprocessor_config.json`. It holds a tokenizer (`tokenizer.json`, or
`tiktoken.model` if the release has that), `tokenizer_config.json`, and a chat template (`chat_template.jinja`, `chat_template.json`, or inside
`tokenizer_config.json`). For the engine it holds `*.safetensors`, sharded or not. `preprocessor_config.json` may be the `image_processor` of
`processor_config.json` instead, as transformers 5 writes it. In a folder with both, the latter counts, as in transformers; so it is with
`video_processor` and `video_preprocessor_config.json`. A folder with neither lacks the settings of its image processor and is refused.
Pickled weights (`*.bin`, `*.pt`) and code are never read.

A key that a section of `config.json` or an image processor leaves out has the default of its class in transformers 5.23. Sizes of patches and
views are the tower's. `norm_topk_prob: false` is refused for Qwen3-VL's and Qwen3.5's experts, because transformers ignores it and vLLM does not.

The chat template is the checkpoint's own, used unchanged; Kimi-K3's releases have none, and its family brings one. Start-up refuses a template that does not write exactly one placeholder for one
image. The tests use synthetic checkpoints, and no release's own file is in the repository. Their templates are reconstructed from descriptions
of the releases' templates, and the tests train their vocabularies. The reference for pixels and token ids is transformers. For Kimi-K2.5, Kimi-K3 and
Phi-3-vision it is a second implementation (`tests/references/`), written for this project from a description of the releases' code. Kimi-K3's
agrees with that code ([kimi_k3](#kimi_k3)).

`generation_config.json` gives the defaults of sampling, as in vLLM: temperature, `top_p`, `top_k`, `min_p`, `repetition_penalty`,
`presence_penalty`, `frequency_penalty`, and `max_new_tokens` as `max_tokens`. `do_sample: false` means temperature 0. A request overrides each of
them, `--override-generation-config` replaces them, and `--hf-overrides` does so for `config.json`.

An answer ends at each token that a file names for this. These are `eos_token_id` of `generation_config.json`, `config.json` and its
text section, and `eos_token` of `tokenizer_config.json`. If that key is absent, the default of the tokenizer's class counts, such as
`<|endoftext|>` of `Qwen2Tokenizer`; with null there is none. If no file names a token, that of the text network's class in transformers
counts, such as 2 of Llama's. Workers of vLLM and SGLang get all these ids as stop ids.

`saccade inspect MODEL IMAGE...` shows a model's input: sizes, grids, token ids, hashes.

## The bundled model

`src/saccade/cli/bundled/model`: a Qwen3-VL of 8 million parameters, trained from scratch by `scripts/train_demo` with transformers' own classes on
images drawn on the fly. It reads 1 to 4 capitals and digits, names six shapes, and names the colour of either, one of eight, on a light
background. Its answers to anything else are meaningless. The model card is in its folder; [figures](figures.md) has its accuracy.
"""


def document() -> str:
    """Return the whole page."""
    families = models.families()
    rows = [_row(name, family) for name, family in families.items()]
    header = ("family", "architectures", "model_type", "placeholder", "switches", "engine", "other wires")
    table = [_line(header), _line(["---"] * len(header)), *rows]
    sections = map(_section, sorted({models.folder_of(name) for name in families}))
    return "\n".join((INTRODUCTION, "\n".join(table), "", _limits(families), RELEASES, _engine(), FILES, *sections))


def _limits(families: Mapping[str, Family]) -> str:
    lines = [f"- {name}: {' '.join(family.limits)}" for name, family in families.items() if family.limits]
    videos = ", ".join(name for name in models.families() if models.takes_videos(name))
    texts = ", ".join(name for name, family in families.items() if not family.takes_images)
    first = (
        f"Videos are taken by {videos}. Text only is taken by {texts}. All others take images. The sound of a video is "
        "ignored. Beyond that:"
    )
    return "\n".join(("## Limits", "", first, "", *lines, ""))


def _engine() -> str:
    """Return what the engine computes with: backends of attention, formats of weights and caches, dtypes."""
    header = ("flag", "value", "device", "what it is")
    rows = [
        (f"`--{flag}`", f"`{name}`", entry.device_type or "any", _first_sentence(entry.module))
        for flag, entries in (("attention-backend", BACKENDS), ("mm-encoder-attn-backend", VISION_BACKENDS))
        for name, entry in entries.items()
    ]
    return ENGINE.format(
        backends="\n".join(map(_line, (header, ["---"] * len(header), *rows))),
        dtypes=_values(DTYPES),
        formats=_values(METHODS),
        cache_dtypes=_values(get_args(KvCacheDtype)),
    )


def _values(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _first_sentence(module: str) -> str:
    """Return the first sentence of a module's docstring, without importing what it needs."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise LookupError(module)
    docstring = ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split()).partition(". ")[0].removesuffix(".") + "."


def _row(name: str, family: Family) -> str:
    return _line(
        (
            f"[{name}](#{name})",
            ", ".join(f"`{architecture}`" for architecture in family.architectures),
            ", ".join(f"`{kind}`" for kind in family.model_types),
            f"`{family.placeholder}`".replace("|", "\\|") if family.takes_images else "",
            ", ".join(f"`{switch}`" for switch in family.template_switches),
            "yes" if models.has_network(name) else "",
            f"`{family.external_grid}`" if family.external_grid else "",
        )
    )


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _section(folder: str) -> str:
    readme = (ROOT / "src" / "saccade" / "models" / folder / "README.md").read_text()
    _, _, body = readme.partition("\n")
    return f"## {folder}\n{body.replace(chr(10) + '#', chr(10) + '##')}"


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
