"""Files that would stop or fill a gateway are refused by a child, and named."""

import asyncio
import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import scripted
from tables import table

from saccade.errors import StartupError
from saccade.gateway.limited_child import ChildLimits
from saccade.gateway.served_models import model_probe
from saccade.gateway.served_models.model_probe import ModelProbe
from saccade.models.files import read_model_files
from saccade.protocol.description import ModelFiles
from saccade.protocol.model_files import MAX_FILES_BYTES
from saccade.protocol.output import FinishReason, TokenDelta

LOOPS = b"{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
EIGHT_GIB = b"{{ 'x' * 8589934592 }}"
LIMITS = ChildLimits(seconds=20.0, memory_bytes=512 << 20)


def changed(given: ModelFiles, **contents: bytes) -> ModelFiles:
    return ModelFiles(files={**given.files, **{name.replace("__", "."): content for name, content in contents.items()}})


def normalised(given: ModelFiles, *steps: dict[str, Any]) -> bytes:
    """Return the tokenizer.json of *given* with these steps before all others."""
    tokenizer = json.loads(given.files["tokenizer.json"])
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": list(steps)}
    return json.dumps(tokenizer).encode()


@pytest.fixture(scope="module")
def sound(tiny_qwen3_vl: Path) -> ModelFiles:
    return read_model_files(tiny_qwen3_vl)


def test_sound_files_pass(sound: ModelFiles) -> None:
    ModelProbe("tiny", sound).run_child()


@table(("num_kills", "passes"), [(1, True), (2, False)])
def test_a_killed_child_is_followed_by_one_more(
    num_kills: int, passes: bool, sound: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"
    program = f"""
import os
with open({str(begun)!r}, "a") as begun:
    begun.write(".")
if os.path.getsize({str(begun)!r}) <= {num_kills}:
    os.kill(os.getpid(), 9)
print('{{"passed": true}}')
"""
    (tmp_path / "dying.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(model_probe, "PROGRAM", "dying")
    probe = ModelProbe("tiny", sound)
    if passes:
        probe.run_child()
    else:
        with pytest.raises(StartupError, match="ends its process by signal 9"):
            probe.run_child()


# qwen2_vl: special tokens that only tokenizer_config.json has are merged, which is logged.
@pytest.mark.parametrize(
    "name",
    ["kimi_k25", *(pytest.param(name, marks=pytest.mark.conformance) for name in ("llava", "phi3_v", "qwen2_vl"))],
)
def test_files_of_every_kind_pass(name: str, checkpoint: Callable[[str], Path]) -> None:  # E3
    ModelProbe(name, read_model_files(checkpoint(name))).run_child()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("contents", "sentence"),
    [
        ({"chat_template__jinja": LOOPS}, r"chat_template\.jinja.*longer than 2 seconds"),
        ({"chat_template__jinja": EIGHT_GIB}, r"chat_template\.jinja.*more than 32 MiB"),
        ({"config__json": b"[" * 1_000_000}, r"config\.json is nested too deeply"),
        ({"tokenizer__json": b'{"a":' * 1_000_000}, r"tokenizer\.json"),
        ({"tokenizer_config__json": b"{}" + b" " * 10 + b"x"}, r"tokenizer_config\.json is not valid JSON"),
    ],
    ids=["loops", "8 GiB", "nested", "nested tokenizer", "no JSON"],
)
def test_a_file_that_fails_is_named(sound: ModelFiles, contents: dict[str, bytes], sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        ModelProbe("tiny", changed(sound, **contents), LIMITS).run_child()


def test_a_tokenizer_that_unfolds_ends_the_child_alone(sound: ModelFiles) -> None:
    unfold = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    tokenizer = normalised(sound, unfold, unfold, unfold)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    with pytest.raises(StartupError, match=r"tokenizer\.json.*more than 512 MiB of memory"):
        ModelProbe("tiny", changed(sound, tokenizer__json=tokenizer), LIMITS).run_child()
    after = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert after <= max(before, 1 << 20)  # in KiB


@pytest.mark.conformance
def test_a_tokenizer_without_end_is_stopped(sound: ModelFiles) -> None:
    unfold = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 2000}
    limits = ChildLimits(seconds=4.0, memory_bytes=64 << 30)
    with pytest.raises(StartupError, match=r"tokenizer\.json: loading takes longer than 4 seconds"):
        ModelProbe("tiny", changed(sound, tokenizer__json=normalised(sound, unfold)), limits).run_child()


def test_a_tokenizer_that_fails_is_refused(sound: ModelFiles) -> None:
    tokenizer = normalised(sound, {"type": "Replace", "pattern": {"Regex": "(a|a|aa)+$b"}, "content": ""})
    # Python ends with 120 instead of 1 if it could not write all of its traceback.
    with pytest.raises(StartupError, match=r"tokenizer\.json: loading fails \(exit code (1|120)\)"):
        ModelProbe("tiny", changed(sound, tokenizer__json=tokenizer), LIMITS).run_child()


def test_a_tokenizer_of_nothing_takes_no_more_than_its_share(sound: ModelFiles) -> None:
    vocabulary = b",".join(b'"%d":%d' % (number, number) for number in range(1_000_000))
    tokenizer = b'{"model":{"type":"BPE","merges":[],"vocab":{' + vocabulary + b"}}}"
    limits = ChildLimits(seconds=20.0, memory_bytes=64 << 20)
    with pytest.raises(StartupError, match=r"tokenizer\.json.*more than 64 MiB of memory"):
        ModelProbe("tiny", changed(sound, tokenizer__json=tokenizer), limits).run_child()


def test_files_too_large_together_are_not_read(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_qwen3_vl / "config.json").read_bytes())
    for name in ("tokenizer.json", "tiktoken.model"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(MAX_FILES_BYTES // 2)
    with pytest.raises(StartupError, match=r"tiktoken\.model has 67108864 bytes; at most 134217728"):
        read_model_files(tmp_path)
    (tmp_path / "tiktoken.model").unlink()
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(MAX_FILES_BYTES + 1)
    with pytest.raises(StartupError, match=r"tokenizer\.json has 134217729 bytes; at most 134217728"):
        read_model_files(tmp_path)


def test_a_stopped_probe_ends_its_child(sound: ModelFiles) -> None:
    probe = ModelProbe("tiny", sound)
    probe.stop()
    with pytest.raises(StartupError):
        probe.run_child()


@pytest.mark.ci
def test_the_gateway_goes_on_serving_another_model(tiny_qwen3_vl: Path) -> None:  # A9
    with scripted.running(tiny_qwen3_vl) as gateway:
        worker = gateway.worker
        worker.script = [TokenDelta("r", [300]), TokenDelta("r", [301, gateway.eos], FinishReason.STOP)]
        assert worker.state.description is not None
        sound = worker.state.description.files
        pattern = normalised(sound, {"type": "Replace", "pattern": {"Regex": "(a|a|aa)+$b"}, "content": ""})
        bad = {
            "loops": changed(sound, chat_template__jinja=LOOPS),
            "huge": changed(sound, chat_template__jinja=EIGHT_GIB),
            # It loads; only the child uses it before a client does.
            "pattern": changed(sound, tokenizer__json=pattern),
        }
        for name, hostile in bad.items():
            said = msgspec.structs.replace(worker.state.description, model=name, files=hostile)
            other = replace(worker, state=replace(worker.state, description=said))
            gateway.worker_pool.add(other)
            gateway.loop.call_soon_threadsafe(gateway.worker_pool.changed, other)
            assert gateway.chat().status == 200
        asyncio.run_coroutine_threadsafe(_until_built(), gateway.loop).result(60)
        assert gateway.chat().status == 200
        for name in bad:
            answer = gateway.chat(model=name)
            assert (answer.status, answer.json["error"]["code"]) == (503, "worker_unavailable")


async def _until_built() -> None:
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name().startswith("model ")))
