"""A checkpoint's small files. # A5"""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tables import table

from saccade import models
from saccade.errors import NotInstalled, StartupError
from saccade.models.family import Family
from saccade.models.files import (
    engine_config,
    image_processor,
    parse_json,
    read_model_files,
    video_processor,
    with_overrides,
)
from saccade.protocol.description import ModelFiles

FAMILY = models.families()["qwen3_vl"]


def test_gateway_files_are_read_without_weights(tiny_qwen3_vl: Path) -> None:
    found = read_model_files(tiny_qwen3_vl)
    assert {"config.json", "tokenizer.json", "preprocessor_config.json"} <= set(found.files)
    assert "model.safetensors" not in found.files
    assert models.family_of(parse_json(found, "config.json")) == "qwen3_vl"


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json"):
        read_model_files(tmp_path)


@table("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_adapter_alone_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(StartupError, match=rf"has {name} but no config\.json: .*merge_and_unload"):
        read_model_files(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_malformed_file_is_named(content: bytes) -> None:
    with pytest.raises(StartupError, match=r"preprocessor_config\.json"):
        parse_json(ModelFiles(files={"preprocessor_config.json": content}), "preprocessor_config.json")


def test_overrides_change_the_values_that_they_name() -> None:
    files = ModelFiles(files={"config.json": b'{"a": 1, "text_config": {"b": 2, "rope_scaling": {"c": 3}}}', "x": b"y"})
    changes = '{"text_config": {"rope_scaling": {"type": "yarn"}, "b": null}, "d": [4]}'
    changed = with_overrides(files, changes, '{"temperature": 0.5}')
    text = {"b": None, "rope_scaling": {"c": 3, "type": "yarn"}}
    assert parse_json(changed, "config.json") == {"a": 1, "text_config": text, "d": [4]}
    assert parse_json(changed, "generation_config.json") == {"temperature": 0.5}
    assert changed.files["x"] == b"y"
    assert with_overrides(files, None, None) == files
    chosen = with_overrides(files, '{"a": 1}', None, implementation="transformers")
    assert parse_json(chosen, "config.json")["model_impl"] == "transformers"


def test_defaults_of_vllm_keep_the_ids_of_the_end_alone() -> None:
    own = b'{"temperature": 0.1, "do_sample": false, "max_new_tokens": 9, "eos_token_id": [1, 2], "pad_token_id": 0}'
    files = ModelFiles(files={"config.json": b"{}", "generation_config.json": own})
    left = parse_json(with_overrides(files, None, None, "vllm"), "generation_config.json")
    assert left == {"eos_token_id": [1, 2], "pad_token_id": 0}
    changed = parse_json(with_overrides(files, None, '{"top_p": 0.5}', "vllm"), "generation_config.json")
    assert changed == {"top_p": 0.5, **left}
    without = ModelFiles(files={"config.json": b"{}"})
    assert with_overrides(without, None, None, "vllm") == without


@pytest.mark.parametrize("config", [{"architectures": ["A", "B"]}, {"architectures": "A"}, {"architectures": [1]}])
def test_exactly_one_architecture(config: dict[str, object]) -> None:
    with pytest.raises(StartupError, match="architectures"):
        models.family_of(config)


@pytest.mark.parametrize("config", [{"model_type": "qwen3_vl"}, {"architectures": [], "model_type": "qwen3_vl"}])
def test_model_type_serves_where_no_architecture_is_named(config: dict[str, object]) -> None:  # A1
    assert models.family_of(config) == "qwen3_vl"


@pytest.mark.parametrize("config", [{}, {"model_type": "gpt2"}])
def test_unknown_model_type_lists_the_known(config: dict[str, object]) -> None:  # A1
    with pytest.raises(StartupError, match=r"Supported: .*qwen3_vl"):
        models.family_of(config)


UNKNOWN = {"architectures": ["AriaForConditionalGeneration"], "image_token_index": 9}


def test_architecture_that_no_family_names_is_computed_by_an_installed_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.family_of(UNKNOWN) == "any_architecture"
    assert models.family_of({"model_type": "aria", "image_token_index": 9}) == "any_architecture"
    known = {"architectures": ["Gemma3ForConditionalGeneration"], "image_token_index": 9}
    assert models.family_of(known) == models.family_of({**known, "model_impl": "saccade"}) == "gemma3"
    assert models.family_of({**known, "model_impl": "transformers"}) == "any_architecture"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert models.family_of(known) == "gemma3"
    with pytest.raises(
        NotInstalled, match=r"'Aria.* --model-impl transformers: pip install 'saccade-vlm\[transformers\]'"
    ):
        models.family_of(UNKNOWN)


@pytest.mark.parametrize(
    "config",
    [
        {**UNKNOWN, "model_impl": "saccade"},
        {"architectures": ["AriaForConditionalGeneration"]},
        {"architectures": ["GPT2LMHeadModel"], "image_token_id": None},
    ],
)
def test_architecture_that_nothing_computes_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match=r"is not supported\. Supported: .*Qwen3VLForConditionalGeneration"):
        models.family_of(config)


@table("name", models.families())
def test_family_without_network_is_refused_with_an_alternative(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "has_network", lambda one: one in ("qwen3_vl", "phi3_v") and one != name)
    runs = ", ".join(one for one in ("phi3_v", "qwen3_vl") if one != name)
    instead = "tokenspeed://" if models.families()[name].external_grid else "No other worker"
    with pytest.raises(StartupError, match=rf"does not run .* \({name}\); it runs {runs}\. .*{instead}"):
        models.load_network(name)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"preprocessor_config.json": b'{"a": 1}', "processor_config.json": b'{"image_processor": {"a": 2}}'},
            {"a": 2},
        ),
        (
            {"preprocessor_config.json": b'{"a": 1}', "processor_config.json": b'{"image_processor": null, "b": 3}'},
            {"a": 1},
        ),
        ({"processor_config.json": b'{"image_processor": {"a": 2}}'}, {"a": 2}),
    ],
)
def test_settings_of_images_in_either_file(given: dict[str, bytes], expected: dict[str, int]) -> None:  # A3
    """With both, that of transformers 5 counts, which writes no other file and leaves an older one."""
    assert image_processor(ModelFiles(files=given), FAMILY) == expected


def test_settings_of_videos_in_either_file() -> None:  # A3
    old, new = b'{"a": 1}', b'{"video_processor": {"a": 2}}'
    both = ModelFiles(files={"video_preprocessor_config.json": old, "processor_config.json": new})
    assert video_processor(both) == {"a": 2}
    assert video_processor(ModelFiles(files={"video_preprocessor_config.json": old})) == {"a": 1}
    assert video_processor(ModelFiles(files={})) == {}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"processor_config.json": b'{"patch_size": 14}'},  # older releases: settings of the text around images only
        {"video_preprocessor_config.json": b'{"patch_size": 14}'},
    ],
)
def test_lost_settings_of_images_stop_the_start(given: dict[str, bytes]) -> None:
    files = ModelFiles(files=given)
    with pytest.raises(StartupError, match=r"has no preprocessor_config\.json"):
        image_processor(files, FAMILY)
    assert image_processor(files, dataclasses.replace(FAMILY, ships_image_settings=False)) == {}


def test_processor_config_that_holds_no_settings_is_named() -> None:
    with pytest.raises(StartupError, match=r"processor_config\.json: image_processor"):
        image_processor(ModelFiles(files={"processor_config.json": b'{"image_processor": 1}'}), FAMILY)


def test_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(StartupError, match="Qwen3VLForConditionalGeneration"):
        models.family_of({"architectures": ["Qwen3VLForConditionalGeneration2"]})


@table(
    ("files", "token_id"),
    [
        (
            {
                "config.json": b'{"image_token_id": 7}',
                "tokenizer.json": b'{"added_tokens": [{"id": 8, "content": "<P>"}]}',
            },
            7,
        ),
        ({"tokenizer.json": b'{"added_tokens": [{"id": 9, "content": "<Q>"}, {"id": 8, "content": "<P>"}]}'}, 8),
        ({"tokenizer_config.json": b'{"added_tokens_decoder": {"9": {"content": "<Q>"}, "8": {"content": "<P>"}}}'}, 8),
        ({"tokenizer.json": b'{"added_tokens": [7, {"content": "<P>"}]}', "tokenizer_config.json": b"{}"}, None),
        ({"tokenizer_config.json": b'{"added_tokens_decoder": {"x": {"content": "<P>"}, "8": 1}}'}, None),
        ({"tokenizer_config.json": b'{"added_tokens_decoder": {"%s": {"content": "<P>"}}}' % (b"9" * 5000)}, None),
        ({}, None),
    ],
)
def test_placeholder_of_the_config_or_else_the_tokenizer(files: dict[str, bytes], token_id: int | None) -> None:
    family = Family(architectures=("A",), placeholder="<P>")
    config = engine_config(ModelFiles(files={"config.json": b"{}", **files}), family, 4096)
    assert (config["placeholder_token_id"], config["max_model_len"]) == (token_id, 4096)
