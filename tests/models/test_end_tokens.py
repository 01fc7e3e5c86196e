"""Every place where a release can name a token that ends an answer counts. # A2 E1"""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from checkpoints import CHECKPOINTS, texts
from tables import table

from saccade import models
from saccade.engine.vocabulary import has_vocabulary, read_vocabulary
from saccade.errors import StartupError
from saccade.models.end_tokens import OF_CLASS, end_token_ids
from saccade.models.files import parse_json, read_model_files, token_id
from saccade.protocol.description import ModelFiles

NESTED = ("text_config", "llm_config")


def family_of(files: ModelFiles) -> models.Family:
    return models.families()[models.family_of(parse_json(files, "config.json"))]


def changed(files: ModelFiles, name: str, section: str | None = None, **values: object) -> ModelFiles:
    """Return *files* with *values* in the file *name*, or in its *section*; `...` removes a key."""
    parsed: dict[str, Any] = dict(parse_json(files, name))
    target = parsed if section is None else parsed.setdefault(section, {})
    target.update(values)
    for key in [key for key, value in values.items() if value is ...]:
        del target[key]
    return ModelFiles(files={**files.files, name: json.dumps(parsed).encode()})


def without_ends(files: ModelFiles) -> ModelFiles:
    """Return *files* of which none names an end token."""
    files = ModelFiles(
        files={name: content for name, content in files.files.items() if name != "generation_config.json"}
    )
    files = changed(files, "config.json", eos_token_id=...)
    for section in NESTED:
        if isinstance(parse_json(files, "config.json").get(section), dict):
            files = changed(files, "config.json", section, eos_token_id=...)
    return changed(files, "tokenizer_config.json", eos_token=None)


def of_text_class(files: ModelFiles) -> tuple[int, ...]:
    """Return the `eos_token_id` of the text network's class in transformers, if the vocabulary has it."""
    config = parse_json(files, "config.json")
    text = next((config[key] for key in NESTED if key in config), config)
    kind = text.get("model_type") or config["model_type"]
    if kind.startswith("kimi_k3"):
        return ()
    made = transformers.CONFIG_MAPPING[{"kimi_k2": "deepseek_v3", "phi3_v": "phi3"}.get(kind, kind)]()
    end = getattr(made.get_text_config(), "eos_token_id", None)
    return () if end is None or end >= text.get("vocab_size", end + 1) else (end,)


@table("name", tuple(CHECKPOINTS))
def test_each_place_counts_in_every_family(name: str, checkpoint: Callable[[str], Path]) -> None:
    files = read_model_files(checkpoint(name))
    family = family_of(files)
    silent = without_ends(files)
    assert end_token_ids(silent, family) == of_text_class(files)
    assert has_vocabulary(silent) == bool(of_text_class(files))
    own = parse_json(files, "tokenizer_config.json")["eos_token"]
    number = token_id(files, family, own)
    assert number is not None
    named = {"__type": "AddedToken", "content": own, "lstrip": False, "special": True}
    everywhere = changed(silent, "generation_config.json", eos_token_id=[7, 8, 7])
    everywhere = changed(everywhere, "config.json", eos_token_id=9)
    for section in NESTED:
        everywhere = changed(everywhere, "config.json", section, eos_token_id=[8, 10])
    for eos_token in (own, named):
        alone = changed(silent, "tokenizer_config.json", eos_token=eos_token)
        assert end_token_ids(alone, family) == (number,)
        assert has_vocabulary(alone)
        assert read_vocabulary(alone, 5000).eos_token_ids == [number]
        together = changed(everywhere, "tokenizer_config.json", eos_token=eos_token)
        assert end_token_ids(together, family) == tuple(dict.fromkeys((7, 8, 9, 10, number)))


@table("name", ("qwen2_vl", "qwen3_5", "internvl", "kimi_k25", "kimi_k3"))
@pytest.mark.parametrize("tokenizer_class", ["OwnTokenizer", None, ...])
def test_tokenizer_without_an_end_has_that_of_its_class(
    name: str, tokenizer_class: object, checkpoint: Callable[[str], Path]
) -> None:
    files = read_model_files(checkpoint(name))
    family = family_of(files)
    silent = changed(without_ends(files), "tokenizer_config.json", eos_token=..., tokenizer_class=tokenizer_class)
    assert family.text_end is not None
    number = token_id(files, family, family.text_end)
    assert number is not None
    assert end_token_ids(silent, family) == (number,)
    other = changed(silent, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    assert end_token_ids(other, family) == of_text_class(files)


@pytest.mark.parametrize("name", ["llava", "mistral3", "gemma3"])
def test_null_in_the_text_section_is_no_end(name: str, checkpoint: Callable[[str], Path]) -> None:
    files = without_ends(read_model_files(checkpoint(name)))
    config = parse_json(files, "config.json")
    section = next((key for key in NESTED if key in config), None)
    assert end_token_ids(files, family_of(files)) != ()
    silent = changed(files, "config.json", section, eos_token_id=None)
    assert end_token_ids(silent, family_of(silent)) == ()


@table(("architecture", "own"), texts.CONFIGS.values())
def test_networks_of_texts_have_the_ends_of_their_classes(architecture: str, own: dict[str, Any]) -> None:
    config = json.dumps({"architectures": [architecture], "model_type": own["model_type"]}).encode()
    files = changed(ModelFiles(files={"config.json": config}), "tokenizer_config.json", eos_token=None)
    assert end_token_ids(files, family_of(files)) == of_text_class(files)


@table("vocab_size", [151_645, 151_646, None])
def test_end_of_the_class_must_be_in_the_vocabulary(vocab_size: int | None) -> None:
    config = {} if vocab_size is None else {"vocab_size": vocab_size}
    files = ModelFiles(files={"config.json": json.dumps(config).encode()})
    ends = end_token_ids(changed(files, "tokenizer_config.json", eos_token=None), models.families()["qwen2_vl"])
    assert ends == (() if vocab_size == 151_645 else (151_645,))


def test_classes_have_the_ends_of_the_reference() -> None:
    qwen = models.families()["qwen3_5"].text_end
    for name, content in {**OF_CLASS, "Qwen3_5Tokenizer": qwen}.items():
        parameter = inspect.signature(getattr(transformers, name).__init__).parameters.get("eos_token")
        assert (None if parameter is None else parameter.default) == content


@table("vocabulary", ({"a": 3, "</s>": 5}, [["a", 0], *[["b", -1.0]] * 4, ["</s>", 0]]))
def test_token_of_the_vocabulary_needs_no_entry_among_the_added_ones(vocabulary: object) -> None:
    family = models.families()["llava"]
    tokenizer = json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}).encode()
    files = ModelFiles(files={"config.json": b"{}", "tokenizer.json": tokenizer})
    assert end_token_ids(changed(files, "tokenizer_config.json", eos_token="</s>"), family) == (5,)
    assert end_token_ids(changed(files, "tokenizer_config.json", eos_token="<nobody>"), family) == (family.text_end_id,)
    assert end_token_ids(changed(files, "tokenizer_config.json", tokenizer_class="LlamaTokenizer"), family) == (5,)


@table("eos_token", (5, True, {"text": "</s>"}, ["</s>"]))
def test_end_of_another_form_is_refused(eos_token: object) -> None:
    files = changed(ModelFiles(files={"config.json": b"{}"}), "tokenizer_config.json", eos_token=eos_token)
    with pytest.raises(StartupError, match=r"tokenizer_config\.json: eos_token must be"):
        end_token_ids(files, models.families()["llava"])


@table("file", ("generation_config.json", "config.json"))
@pytest.mark.parametrize("number", [[1, None], -1, "2", True])
def test_wrong_id_names_its_file(file: str, number: object) -> None:
    files = changed(ModelFiles(files={"config.json": b"{}"}), file, eos_token_id=number)
    with pytest.raises(StartupError, match=rf"^{file}: eos_token_id"):
        end_token_ids(files, models.families()["llava"])
