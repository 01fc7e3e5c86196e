"""Which workers of one name serve the same release."""

import asyncio
import json
import logging
from typing import Any

import msgspec
import pytest
from fronts import DESCRIPTION
from stub_worker import stub
from tables import table

from saccade.fleet.pool import WorkerPool
from saccade.fleet.release import Compatibility
from saccade.fleet.report import why_excluded
from saccade.identity.content import files_digest
from saccade.protocol.description import Description, ModelFiles

CONFIG = {"model_type": "m", "text_config": {"hidden_size": 64, "layers": 2}, "transformers_version": "4.57"}
TOKENIZER_CONFIG = {"eos_token": "</s>", "chat_template": "{{ messages }}", "tokenizer_class": "A"}
FILES: dict[str, Any] = {
    "config.json": CONFIG,
    "tokenizer.json": {"model": "a"},
    "tokenizer_config.json": TOKENIZER_CONFIG,
    "generation_config.json": {"top_k": 20},
    "preprocessor_config.json": {"patch_size": 16},
}


def described(changed: dict[str, Any] | None = None, **told: Any) -> Description:
    """A worker that tells its files only; *changed* replaces some, None leaves one out."""
    files = {name: content for name, content in {**FILES, **(changed or {})}.items() if content is not None}
    raw = {
        name: content if isinstance(content, bytes) else json.dumps(content).encode() for name, content in files.items()
    }
    told = {"fingerprint": files_digest(raw), **told}
    return msgspec.structs.replace(DESCRIPTION, files=ModelFiles(files=raw), **told)


def native(changed: dict[str, Any] | None = None, weights: bytes = b"w" * 32, **told: Any) -> Description:
    """A worker that tells its weights, too."""
    files = described(changed, **told)
    return msgspec.structs.replace(files, fingerprint=files.fingerprint[:16] + weights[:16], weights=weights)


SAME = {
    "weights told by one": native(),
    "another program's remarks": described(
        {"config.json": {**CONFIG, "transformers_version": "5", "dtype": "float16"}}
    ),
    "keys in another order": described({"config.json": dict(reversed(CONFIG.items()))}),
    "null for nothing": described({"config.json": {**CONFIG, "quantization_config": None}}),
    "files that are not sent": described({"generation_config.json": None, "preprocessor_config.json": None}),
    "the template in a file of its own": described(
        {
            "chat_template.jinja": b"{{ messages }}",
            "tokenizer_config.json": {"eos_token": "</s>", "tokenizer_class": "B"},
        }
    ),
    "settings of images in the other file": described(
        {
            "preprocessor_config.json": None,
            "processor_config.json": {"image_processor": {"patch_size": 16, "image_processor_type": "Fast"}},
        }
    ),
}
OTHER = {
    "config.json: text_config.hidden_size": {
        "config.json": {**CONFIG, "text_config": {"hidden_size": 65, "layers": 2}}
    },
    "config.json: quantization_config": {"config.json": {**CONFIG, "quantization_config": {"bits": 8}}},
    "config.json": {"config.json": b"{broken"},
    "tokenizer.json": {"tokenizer.json": {"model": "b"}},
    "tokenizer_config.json: eos_token": {"tokenizer_config.json": {**TOKENIZER_CONFIG, "eos_token": "<end>"}},
    "chat template": {"tokenizer_config.json": {**TOKENIZER_CONFIG, "chat_template": "other"}},
    "generation_config.json: top_k": {"generation_config.json": {"top_k": 21}},
    "image processor: patch_size": {"preprocessor_config.json": {"patch_size": 14}},
}


@table("other", SAME.values(), ids=SAME)
def test_settings_without_effect_on_answers_are_compatible(other: Description) -> None:  # F9
    assert other.fingerprint != described().fingerprint
    assert Compatibility().difference(other, described()) == ""
    assert Compatibility().difference(described(), other) == ""


@table(("place", "changed"), OTHER.items())
def test_settings_that_change_answers_are_named(place: str, changed: dict[str, Any]) -> None:  # F9
    assert Compatibility().difference(described(changed), described()) == place
    assert Compatibility().difference(described(), described(changed)) == place
    assert Compatibility([DESCRIPTION.model]).difference(described(changed), described()) == ""


def test_weights_are_compared_if_both_report_them() -> None:  # F9
    remarks = {"config.json": {**CONFIG, "transformers_version": "5"}}
    assert Compatibility().difference(native(), native(remarks)) == ""
    assert Compatibility().difference(native(), native(weights=b"v" * 32)) == "weights"
    # Of a fingerprint that is not the files' it is not known what else it covers.
    older = described(fingerprint=b"o" * 32)
    assert Compatibility().difference(native(), older) == "weights"


async def test_worker_of_another_release_gets_work_only_if_assumed_compatible(
    caplog: pytest.LogCaptureFixture,
) -> None:  # F9
    caplog.set_level(logging.WARNING)
    first, like = stub("unix:/first", native()), stub("vllm://like:1", described())
    other = stub("vllm://other:1", described({"tokenizer.json": {"model": "b"}}))
    for assumed in ((), (DESCRIPTION.model,)):
        worker_pool = WorkerPool((), lambda _: None, assumed_releases=assumed)
        announced: list[Any] = []
        worker_pool.on_model(announced.append)
        for worker in (first, like, other):
            worker_pool.add(worker)
            worker_pool.changed(worker)  # type: ignore[arg-type]
            await asyncio.sleep(0)
        served = worker_pool.model(DESCRIPTION.model).workers
        assert [worker.url for worker in served] == [w.url for w in (first, like, *((other,) if assumed else ()))]
        reason = "" if assumed else "it serves another release of its model than the first worker: tokenizer.json"
        assert why_excluded(worker_pool.clients[-1], worker_pool) == reason
        # A worker of the same release that takes the first one's place brings nothing new.
        first.become(ready=False)
        worker_pool.changed(first)  # type: ignore[arg-type]
        worker_pool.changed(like)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert len(announced) == 1
        first.become(ready=True)
    said = [record.getMessage() for record in caplog.records]
    assert [(text.rpartition(": it gets ")[2], "(tokenizer.json)" in text) for text in said if "other:1" in text] == [
        ("no work", True),
        ("work all the same", True),
    ]


async def test_release_whose_workers_take_over_is_announced() -> None:  # F9
    other_files = {"tokenizer.json": {"model": "b"}}
    old, new = stub("unix:/old", native()), stub("unix:/new", native(other_files))
    other_weights = stub("unix:/weights", native(other_files, weights=b"v" * 32))
    worker_pool = WorkerPool((), lambda _: None)
    announced: list[Any] = []
    worker_pool.on_model(lambda model: announced.append(model.description))
    for worker in (old, new, other_weights):
        worker_pool.add(worker)
        worker_pool.changed(worker)  # type: ignore[arg-type]
        await asyncio.sleep(0)
    assert announced == [old.state.description]
    worker_pool.remove(old)
    assert announced == [old.state.description, new.state.description]
    # The same files serve other weights.
    new.become(ready=False)
    worker_pool.changed(new)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert worker_pool.model(DESCRIPTION.model).workers == (other_weights,)
    assert len(announced) == 2
    other_weights.become(ready=False)
    worker_pool.changed(other_weights)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert len(announced) == 2
    # It begins again with a shorter context.
    other_weights.become(ready=True, description=native(other_files, weights=b"v" * 32, max_model_len=100))
    worker_pool.changed(other_weights)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert announced[2:] == [other_weights.state.description]
