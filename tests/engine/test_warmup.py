"""What the engine measures before its first request."""

import dataclasses
import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import pytest
import torch
from checkpoints import NETWORKS, TEXTS
from structlog.testing import capture_logs
from tables import table

from saccade import models
from saccade.engine import startup, warmup
from saccade.engine.config import EngineConfig
from saccade.engine.executor import memory
from saccade.engine.executor.caches import Caches
from saccade.engine.executor.execution import check_encoder_cache, largest_image, most_patches, prepare_execution
from saccade.engine.executor.loader import load_model
from saccade.engine.executor.memory import Measured
from saccade.engine.executor.ranks.peers import Peers, closed_on_failure, ranks_of
from saccade.errors import StartupError
from saccade.models.files import engine_config, parse_json, read_model_files

GRID = (1, 8, 8)


def test_pool_for_measuring_memory_does_not_bound_the_context(tiny_qwen3_vl: Path) -> None:
    """On a GPU memory is measured with a pool of one step's size; the context is held by the one that follows."""
    config = EngineConfig(
        str(tiny_qwen3_vl),
        "tiny",
        device="cpu",
        max_model_len=4096,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        encode_budget_patches=64,
    )
    model = load_model(config, lambda *_: None)
    startup.measure(config, model, prepare_execution(config, model), Peers(), GRID)


def test_the_shortest_context_has_a_prompt_and_an_answer(tiny_qwen3_vl: Path) -> None:
    answers = engines.drain(engines.engine(tiny_qwen3_vl, max_model_len=2), engines.request(tiny_qwen3_vl, [1])).answers
    assert len(answers["a"].token_ids) == 1
    with pytest.raises(StartupError, match="--max-model-len must be at least 2"):
        engines.engine(tiny_qwen3_vl, max_model_len=1)


@table(("cache", "warns"), [(1 << 30, False), (1 << 16, True), (0, False)])
def test_a_start_names_an_encoder_cache_without_room_for_the_largest_image(
    cache: int, warns: bool, tiny_qwen3_vl: Path
) -> None:
    config = EngineConfig(str(tiny_qwen3_vl), "tiny", device="cpu", encoder_cache_bytes=cache)
    with capture_logs() as lines:
        check_encoder_cache(config, load_model(config, lambda *_: None))
    assert [line["reason"] for line in lines] == ([f"--encoder-cache-bytes {cache}"] if warns else [])


@pytest.mark.conformance
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("budget", [16, 16384])
def test_the_largest_image_is_within_what_a_start_on_a_gpu_reserves(
    budget: int, name: str, network_folder: Callable[[str], Path]
) -> None:
    files = read_model_files(network_folder(name))
    family = models.family_of(parse_json(files, "config.json"))
    spec = models.load_spec(family, engine_config(files, models.families()[family]))
    network = SimpleNamespace(spec=spec, dtype=torch.float32, device=torch.device("cuda"))
    model: Any = SimpleNamespace(files=files, network=network)
    config = EngineConfig(str(network_folder(name)), "tiny", encoder_cache_bytes=0, encode_budget_patches=budget)
    limits, image = startup.media_memory(config, model, most_patches(config, model)), largest_image(model)
    assert spec.encode_cost(image.grid) <= limits.num_patches
    num_values = spec.encoder_output_values(image.grid, image.original_size)
    assert (
        num_values * limits.itemsize <= limits.num_bytes or spec.item_tokens(image.grid) > spec.max_position_embeddings
    )


def test_measurement_memory_is_freed_before_the_caches_are_sized(
    tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the states of recurrent layers would be there twice. No garbage is collected during a start."""
    config = EngineConfig(str(tiny_qwen3_vl), "tiny", device="cpu", max_num_seqs=4, max_num_batched_tokens=64)
    config = dataclasses.replace(config, encode_budget_patches=64)
    model = load_model(config, lambda *_: None)
    watches: list[weakref.ref[Caches]] = []
    allocate = memory.allocate

    def watched(*arguments: Any) -> Caches:
        caches = allocate(*arguments)
        watches.append(weakref.ref(caches))
        return caches

    monkeypatch.setattr(memory, "allocate", watched)
    gc.disable()
    try:
        measured = startup.measure(config, model, prepare_execution(config, model), Peers(), GRID)
        assert [ref() for ref in watches] == [None]
    finally:
        gc.enable()
    assert measured.num_blocks > 64 // config.block_size


def test_text_model_is_measured_without_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step encodes an image, and no memory is left for those that are kept."""
    folder = TEXTS["llama_text"](tmp_path)
    config = EngineConfig(str(folder), "tiny", device="cpu", max_num_seqs=4, max_num_batched_tokens=64)
    model = load_model(config, lambda *_: None)
    sizes: list[int] = []
    monkeypatch.setattr(memory, "num_blocks", lambda config, *_: sizes.append(config.encoder_cache_bytes))
    memory.fitting_blocks(config, model)
    assert sizes == [0]
    assert (
        startup.measure(config, model, prepare_execution(config, model), Peers(), None).num_blocks
        > 64 // config.block_size
    )


def test_memory_pool_of_the_measurement_is_not_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1000 bytes 900 may be used; other programs have 50, and torch has had 400 at most, of which 100 were blocks."""
    config = EngineConfig("", "", gpu_memory_utilization=0.9, encoder_cache_bytes=150)
    for name, value in {"mem_get_info": (550, 1000), "memory_reserved": 400, "max_memory_reserved": 400}.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    num_blocks = partial(memory.num_blocks, config, lambda count: 10 * count, 4096, torch.device("cuda"))
    assert num_blocks(Measured(10)) == 40
    assert num_blocks(Measured(10, outside=100)) == 30
    assert num_blocks() == 30


def test_copies_of_the_longest_context_are_measured(tiny_qwen3_vl: Path) -> None:
    """Two KV heads of 32 channels for keys, and for values: a layer's copy at 8192 tokens."""
    for settings, num_bytes in (({}, 4), ({"dtype": "bfloat16"}, 2), ({"kv_cache_dtype": "fp8"}, 4 + 1 + 4)):
        config = EngineConfig(str(tiny_qwen3_vl), "tiny", **{"device": "cpu", "dtype": "float32", **settings})
        model = load_model(config, lambda *_: None)
        measured = memory.measured(config, model, prepare_execution(config, model).backend, 7)
        assert measured == Measured(7, 2 * (32 + 32) * num_bytes * 8192), settings


def test_warm_up_that_fails_names_the_cause(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl)

    def fails(*_: object) -> None:
        raise RuntimeError("the kernel did not compile\nand a second line")

    subject.executor.launch = fails  # type: ignore[method-assign]
    with pytest.raises(StartupError, match=r"first request: RuntimeError: the kernel did not compile$"):
        warmup.run_warmup(subject, 33)


def test_all_rows_draw_in_one_step_when_memory_is_measured(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl, max_num_seqs=4)
    steps = engines.steps_of(subject)
    warmup.run_warmup(subject, 33, num_rows=4)
    assert max(len(sampling.counts) for sampling in steps) == 4


@pytest.mark.ci
@table("name", ["qwen2_vl", "qwen2_5_vl", "llava", "llava_next", "phi3_v", "smolvlm", "kimi_k25", "paddleocr_vl"])
def test_largest_image_is_that_of_the_models_own_settings(name: str, network_folder: Callable[[str], Path]) -> None:
    """Gateways send no larger one, unless a request changes the settings; a step's budget may be less."""
    folder = network_folder(name)
    config = EngineConfig(str(folder), "tiny", device="cpu", encode_budget_patches=1)
    model = load_model(config, lambda *_: None)
    sent = engines.photo(folder, (3000, 3000), 1)
    assert most_patches(config, model) >= model.network.spec.encode_cost(sent.grid)
    assert most_patches(dataclasses.replace(config, encode_budget_patches=1 << 20), model) == 1 << 20


@pytest.mark.parametrize("name", ["llava", "llava_next", "phi3_v", "qwen2_vl"])
def test_memory_is_measured_with_an_image_that_a_sequence_can_hold(
    name: str, network_folder: Callable[[str], Path]
) -> None:
    config = EngineConfig(str(network_folder(name)), "tiny", device="cpu")
    spec = load_model(config, lambda *_: None).network.spec
    grid = startup.largest_grid(spec, 1 << 20)
    assert spec.item_tokens(grid) + warmup.NUM_OTHER_TOKENS < spec.max_position_embeddings
    assert spec.encode_cost(grid) > spec.encode_cost(spec.square_grid(0)) or name == "llava"


@pytest.mark.conformance
def test_all_ranks_measure_and_then_allocate_anew(tiny_qwen3_vl: Path) -> None:  # [eng] 36
    """The start on GPUs, with two ranks: a step as large as the budgets, then the least of what fits."""
    config = EngineConfig(
        str(tiny_qwen3_vl), "tiny", device="cpu", dtype="float32", tensor_parallel_size=2, max_num_batched_tokens=64
    )
    asked = engines.request(tiny_qwen3_vl, [5, ((1, 4, 6), 1), 9])
    expected = engines.drain(engines.engine(tiny_qwen3_vl), asked).answers["a"].token_ids
    with closed_on_failure(Peers(ranks_of(config))) as peers:
        peers.start(config)
        model = load_model(config, lambda *_: None, peers.ranks)
        execution = prepare_execution(config, model)
        peers.join(model.network.device)
        startup.measure(config, model, execution, peers, GRID)
        subject = startup.assemble(config, model, execution, startup.allocate(config, model, peers=peers), peers)
        assert engines.drain(subject, asked).answers["a"].token_ids == expected
        assert subject.load().num_blocks > 256
    subject.close()
