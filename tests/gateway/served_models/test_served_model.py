"""What a gateway makes of a checkpoint's files; wrong ones are named."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import msgspec
import pytest
import scripted
from tables import table

from saccade import models
from saccade.errors import StartupError
from saccade.gateway.served_models.served_model import ServedModel
from saccade.models.files import read_model_files
from saccade.models.generation_defaults import GenerationDefaults, generation_defaults
from saccade.protocol.description import Description, ModelFiles


@pytest.fixture
def description(tiny_qwen3_vl: Path) -> Description:
    return scripted.describe(tiny_qwen3_vl)


def changed(description: Description, name: str, content: bytes | None) -> Description:
    files = {**description.files.files, name: content}
    return msgspec.structs.replace(
        description, files=ModelFiles(files={key: value for key, value in files.items() if value is not None})
    )


def served_by(description: Description) -> ServedModel:
    return ServedModel.from_files(description.model, description.files, description.max_model_len)


@table(
    ("name", "content", "sentence"),
    [
        ("config.json", b"{}", "architectures"),
        ("config.json", b"nope", "config.json is not valid JSON"),
        ("config.json", b'{"architectures": ["UnknownModel"]}', "'UnknownModel'"),
        ("tokenizer.json", None, "tokenizer.json"),
        ("tokenizer.json", b"{", "tokenizer.json"),
        ("tokenizer_config.json", b"[", "tokenizer_config.json"),
        ("generation_config.json", b'{"temperature": "hot"}', "generation_config.json"),
        ("chat_template.jinja", b"{% if %}", "chat template"),
        ("chat_template.jinja", b"no images here", "one placeholder"),
        ("chat_template.jinja", b"<|image_pad|><|image_pad|>", "one placeholder"),
    ],
)
def test_wrong_files_are_named(name: str, content: bytes | None, sentence: str, description: Description) -> None:  # A9
    with pytest.raises(StartupError, match=sentence):
        served_by(changed(description, name, content))


@pytest.mark.ci
@table("name", checkpoints.CHECKPOINTS)
def test_lost_image_settings_stop_the_start(name: str, checkpoint: Callable[[str], Path]) -> None:
    """Whatever the family: with settings that are not the release's, the model would answer, and wrongly."""
    content = dict(read_model_files(checkpoint(name)).files)
    settings = json.loads(content.pop("preprocessor_config.json"))
    others = {**json.loads(content.get("processor_config.json", b"{}")), "image_processor": None}
    content["processor_config.json"] = json.dumps(others).encode()
    with pytest.raises(StartupError, match=r"preprocessor_config\.json"):
        ServedModel.from_files(name, ModelFiles(files=content), 4096)
    content["processor_config.json"] = json.dumps({**others, "image_processor": settings}).encode()
    assert ServedModel.from_files(name, ModelFiles(files=content), 4096).layout.settings


def test_missing_placeholder_id_is_named(description: Description) -> None:  # A9
    config = json.loads(description.files.files["config.json"])
    token_id = config.pop("image_token_id")
    silent = changed(description, "config.json", json.dumps(config).encode())
    assert served_by(silent).placeholder_token_id == token_id  # E2: the declared token's own
    tokenizer = description.files.files["tokenizer.json"].replace(b"<|image_pad|>", b"<|image|>")
    unnamed = changed(silent, "tokenizer.json", tokenizer)
    settings = description.files.files["tokenizer_config.json"].replace(b"<|image_pad|>", b"<|image|>")
    with pytest.raises(StartupError, match=r"image_token_id.*<\|image_pad\|>"):
        served_by(changed(unnamed, "tokenizer_config.json", settings))


def test_processor_files_are_part_of_an_images_identity(description: Description) -> None:  # F3
    served = served_by(description)
    processor = served.fingerprint(served.layout.settings)
    assert len(processor) == 32
    assert served.fingerprint({**served.layout.settings, "max_pixels": 1}) != processor
    same = served_by(changed(description, "generation_config.json", b"{}"))
    assert same.fingerprint(served.layout.settings) == processor
    config = json.loads(description.files.files["config.json"]) | {"note": "changed"}
    other = served_by(changed(description, "config.json", json.dumps(config).encode()))
    assert other.fingerprint(served.layout.settings) != processor


def defaults_of(generation: dict[str, Any], config: dict[str, Any]) -> GenerationDefaults:
    files = {"config.json": json.dumps(config).encode(), "generation_config.json": json.dumps(generation).encode()}
    return generation_defaults(ModelFiles(files=files), models.families()["llava"])


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 6}, (1.0, 1.0, 0, (5, 6))),
        ({"eos_token_id": [5, 7], "do_sample": False, "temperature": 0.7}, {}, (0.0, 1.0, 0, (5, 7))),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}, {"eos_token_id": 0}, (0.7, 0.8, 20, (0,))),
        ({}, {"text_config": {"eos_token_id": 3}}, (1.0, 1.0, 0, (3,))),
        ({}, {}, (1.0, 1.0, 0, (2,))),  # that of the class of texts
        ({}, {"eos_token_id": None}, (1.0, 1.0, 0, ())),
    ],
)
def test_generation_defaults(generation: dict[str, Any], config: dict[str, Any], expected: tuple[Any, ...]) -> None:
    defaults = defaults_of(generation, config)
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.eos_token_ids) == expected


def test_all_of_vllms_defaults_are_read() -> None:
    generation = {"min_p": 0.1, "presence_penalty": 1.5, "frequency_penalty": -1, "repetition_penalty": 1.05,
                  "max_new_tokens": 100, "top_k": -1}  # fmt: skip
    defaults = defaults_of(generation, {})
    assert {key: getattr(defaults, key) for key in generation} == {**generation, "top_k": 0}
    assert [defaults.max_tokens(room) for room in (99, 101)] == [99, 100]
    assert defaults_of(dict.fromkeys(generation), {}) == defaults_of({}, {})


@table(
    ("key", "value"),
    [("repetition_penalty", 0), ("min_p", 2), ("presence_penalty", "1"), ("max_new_tokens", 0), ("max_new_tokens", 1.5),
     ("top_p", float("nan")), ("top_k", True), ("eos_token_id", [1, None])],
)  # fmt: skip
def test_wrong_default_names_its_key(key: str, value: object) -> None:
    with pytest.raises(StartupError, match=rf"generation_config\.json: {key}"):
        defaults_of({key: value}, {})


async def _until_built() -> None:
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == "model tiny"))


def test_model_that_cannot_be_built_is_not_ready(tmp_path: Path, tiny_qwen3_vl: Path) -> None:
    for file in tiny_qwen3_vl.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    with scripted.running(tiny_qwen3_vl, described=False) as gateway:
        # A gateway that has never served a model would stop; this one is as one that has.
        gateway.loop.call_soon_threadsafe(gateway.application.model_registry.unservable.cancel)
        gateway.worker.become(description=scripted.describe(tmp_path), ready=True)
        gateway.loop.call_soon_threadsafe(gateway.worker_pool.changed, gateway.worker)
        wait = asyncio.run_coroutine_threadsafe(_until_built(), gateway.loop)
        wait.result(20)
        for answer in (gateway.ask("GET", "/ready"), gateway.chat()):
            assert (answer.status, answer.json["error"]["code"]) == (503, "worker_unavailable")
        assert gateway.ask("GET", "/live").status == 200
