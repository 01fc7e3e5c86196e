"""Decodes by graphs, with a stand-in for CUDA's: the choice of a graph, rows that are added, addresses that stay.

The stand-in calls the captured function again at each replay. The network is a real one; attention is by Triton's
interpreter, the one backend whose decodes may be captured.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from captures import Again, PlayedCuda
from references.formats import FP8
from safetensors.torch import load_file, save_file

from saccade.engine import startup
from saccade.engine.config import EngineConfig
from saccade.engine.core.step import Chunk, RowStart, StepInput, TableChange
from saccade.engine.executor import decode_graphs
from saccade.engine.executor.batch import build_batch
from saccade.engine.executor.caches import Caches
from saccade.engine.executor.decode_graphs import DecodeGraphs, row_counts
from saccade.engine.executor.execution import prepare_execution
from saccade.engine.executor.graphs import Graphs
from saccade.engine.executor.loader import load_model
from saccade.engine.executor.model_runner import ModelRunner, make_runner
from saccade.engine.loop import Engine
from saccade.errors import StartupError
from saccade.nn.backends import Workload, load_backend
from saccade.protocol.request import SamplingParams

pytestmark = pytest.mark.ci

WIDE = (1, 6, 16)
MAX_BLOCKS = 16
Decoding = tuple[ModelRunner, "Again", StepInput]


class Addressed:
    """A network that fails where an input lies at another address than at the first call with as many rows."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self._addresses: dict[int, tuple[int, ...]] = {}
        self.spec, self.device, self.dtype = network.spec, network.device, network.dtype

    def __call__(self, input_ids: torch.Tensor, context: Any) -> torch.Tensor:
        layout = context.layout
        inputs = (
            input_ids,
            context.positions,
            layout.slot_mapping,
            layout.block_tables,
            layout.context_lengths,
            layout.rows,
        )
        addresses = tuple(tensor.data_ptr() for tensor in inputs)
        assert self._addresses.setdefault(len(input_ids), addresses) == addresses
        return self._network(input_ids, context)  # type: ignore[no-any-return]


@pytest.fixture
def subject(tiny_qwen3_vl: Path) -> Engine:
    return engines.engine(tiny_qwen3_vl, attention_backend="triton", max_num_seqs=5, num_blocks=80, max_model_len=240)


def with_graphs(engine: Engine) -> tuple[ModelRunner, Again]:
    """Have *engine* decode by graphs, over caches with a padding block and row."""
    runner, again = engines.local(engine).runner, Again()
    caches = runner.caches
    sizes = replace(caches.sizes, num_padding=1)
    runner.caches = Caches(runner.network.spec.kv_specs, sizes, runner.dtype, runner.device)
    runner.graphs = DecodeGraphs(Addressed(runner.network), runner.backend, runner.caches, MAX_BLOCKS, again)
    return runner, again


def asked(folder: Path) -> list[Any]:
    parts: list[list[Any]] = [[5, (WIDE, 1), 9], [30], [(WIDE, 2), 3], [11], [17]]
    return [engines.request(folder, part, str(index), index, max_tokens=6 + index) for index, part in enumerate(parts)]


def test_row_counts_are_powers_of_two_up_to_the_maximum() -> None:
    assert row_counts(1) == [1]
    assert row_counts(6) == [1, 2, 4, 6]
    assert row_counts(8) == [1, 2, 4, 8]


@pytest.mark.ci
def test_answers_equal_those_without_graphs(subject: Engine, tiny_qwen3_vl: Path) -> None:  # [eng] 33
    expected = engines.drain(subject, *asked(tiny_qwen3_vl)).answers
    subject.scheduler.reset_caches(prefix=True, media=True)
    _, again = with_graphs(subject)
    found = engines.drain(subject, *asked(tiny_qwen3_vl)).answers
    assert {name: answer.token_ids for name, answer in found.items()} == {
        name: answer.token_ids for name, answer in expected.items()
    }
    # Five rows decode, then fewer and fewer as answers end.
    assert set(again.replayed) == {5, 4, 2, 1}
    assert again.num_captures == 4
    assert engines.is_idle(subject)


DECODERS = ["paddleocr_vl", "glm4v", "internvl", "gemma4_e2b", "gemma4_unified"]
"""Of kinds of decoders without experts, one each."""


@pytest.mark.conformance
@pytest.mark.parametrize("name", DECODERS)
def test_other_decoders_answer_alike_with_graphs(name: str, network_folder: Callable[[str], Path]) -> None:
    folder = network_folder(name)
    settings = {"attention_backend": "triton", "max_num_seqs": 2, "num_blocks": 32, "max_model_len": 240}
    requests = [engines.request(folder, [size], str(size), size, max_tokens=4) for size in (5, 18)]
    expected = engines.drain(engines.engine(folder, **settings), *requests).answers
    subject = engines.engine(folder, **settings)
    _, again = with_graphs(subject)
    found = engines.drain(subject, *requests).answers
    assert [found[key].token_ids for key in expected] == [answer.token_ids for answer in expected.values()]
    assert again.replayed


@pytest.mark.ci
def test_proposals_are_verified_by_graphs(tiny_qwen3_vl: Path) -> None:
    """Each proposed token is a row of the graph; a step with a prompt runs without one."""
    settings = {"attention_backend": "triton", "max_num_seqs": 9, "num_blocks": 80, "max_model_len": 240}
    requests = asked(tiny_qwen3_vl)[2:4]
    expected = engines.drain(engines.engine(tiny_qwen3_vl, **settings), *requests).answers
    subject = engines.speculating(engines.engine(tiny_qwen3_vl, **settings), expected, wrong=3)
    _, again = with_graphs(subject)
    found = engines.drain(subject, *requests).answers
    assert {name: answer.token_ids for name, answer in found.items()} == {
        name: answer.token_ids for name, answer in expected.items()
    }
    assert max(again.replayed) > 2
    assert subject.load().accepted_tokens_total > 0


@pytest.mark.ci
def test_layers_with_a_window_decode_by_graphs(network_folder: Callable[[str], Path]) -> None:
    folder = network_folder("gemma4")
    requests = [engines.request(folder, [length], str(length), length, max_tokens=20) for length in (5, 60, 33)]
    settings = {"attention_backend": "triton", "max_num_seqs": 4, "num_blocks": 80, "max_model_len": 240}
    expected = engines.drain(engines.engine(folder, **settings), *requests).answers
    subject = engines.engine(folder, **settings)
    _, again = with_graphs(subject)
    found = engines.drain(subject, *requests).answers
    assert {name: answer.token_ids for name, answer in found.items()} == {
        name: answer.token_ids for name, answer in expected.items()
    }
    assert len(again.replayed) > 15


@pytest.fixture
def three_rows(subject: Engine) -> Decoding:
    """A runner with three decoding rows, and the step that follows."""
    runner, again = with_graphs(subject)
    params = SamplingParams(max_tokens=9, temperature=0)
    starts = tuple(RowStart(row, row, params, 0) for row in range(3))
    tables = tuple(TableChange(row, 0, (2 * row, 2 * row + 1)) for row in range(3))
    chunks = tuple(Chunk(row, 0, 20, tuple(range(row, row + 20)), draws=True) for row in range(3))
    first = StepInput(1, started=starts, tables=tables, chunks=chunks)
    runner.update(first)
    runner.forward(first)
    return runner, again, StepInput(2, chunks=tuple(Chunk(row, 20, 1, (7,), draws=True) for row in range(3)))


def test_added_rows_write_nothing_of_a_sequence(three_rows: Decoding) -> None:  # [eng] 33
    runner, again, step = three_rows
    before = [[part.clone() for part in cache[:2]] for cache in runner.caches.layers]
    forwarded = runner.forward(step)
    assert again.replayed == [4]
    assert forwarded.hidden is not None
    assert forwarded.hidden.shape[0] == 3
    for cache, parts in zip(runner.caches.layers, before, strict=True):
        for tensor, kept in zip(cache[:2], parts, strict=True):
            changed = (tensor != kept).flatten(2).any(-1).nonzero().tolist()
            # One slot of each row, and one of the padding block.
            assert sorted(changed) == [[1, 4], [3, 4], [5, 4], [80, 0]]


def test_the_backend_plans_each_replay_with_the_lengths_of_the_step(
    three_rows: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Added rows have one token."""
    runner, _, step = three_rows
    planned: list[Any] = []
    monkeypatch.setattr(runner.backend, "replan", lambda plan, layout: planned.append((plan, layout)))
    runner.forward(step)
    ((plan, layout),) = planned
    assert layout.host_context_lengths == (21, 21, 21, 1)
    assert layout.context_lengths.tolist() == [21, 21, 21, 1]
    assert layout.num_decodes == 4
    assert plan is not None


def test_hidden_states_outlive_the_next_replay(three_rows: Decoding) -> None:  # [eng] 33
    runner, _, step = three_rows
    first = runner.forward(step).hidden
    assert first is not None
    kept = first.clone()
    other = StepInput(3, chunks=tuple(Chunk(row, 21, 1, (9,), draws=True) for row in range(3)))
    assert not torch.equal(runner.forward(other).hidden, kept)  # type: ignore[arg-type]
    assert torch.equal(first, kept)


@pytest.mark.parametrize("reason", ["prefill", "rows", "blocks"])
def test_other_steps_run_without_a_graph(three_rows: Decoding, reason: str) -> None:  # [eng] 33
    runner, again, step = three_rows
    chunks = step.chunks
    if reason == "prefill":
        chunks = (*chunks[:2], Chunk(2, 20, 2, (7, 8), draws=True))
    batch = build_batch(chunks, runner.rows, 16, runner.device)
    graphs = runner.graphs
    assert graphs is not None
    if reason == "rows":
        graphs.by_size.sizes = [1, 2]
    elif reason == "blocks":
        graphs = DecodeGraphs(runner.network, runner.backend, runner.caches, 1, again)
    assert graphs.run_step(batch) is None
    assert again.replayed == []


def test_all_graphs_are_captured_before_the_first_step(subject: Engine) -> None:
    runner, again = with_graphs(subject)
    assert runner.graphs is not None
    assert list(runner.graphs.by_size.capture_graphs()) == [(number, 4) for number in range(4)]
    assert again.num_captures == 4
    assert again.replayed == []


def test_graphs_share_one_pool_of_memory_and_one_stream(subject: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest is captured first, so the pool then does not grow. cuBLAS keeps a workspace for each stream."""
    cuda = PlayedCuda(monkeypatch)
    runner, _ = with_graphs(subject)
    list(DecodeGraphs(runner.network, runner.backend, runner.caches, MAX_BLOCKS).by_size.capture_graphs())
    assert cuda.pools == [(0, 1)] * 4
    assert cuda.num_streams == 1


def test_a_failed_capture_names_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what torch raises at the end of it; and a library for GPUs may raise anything."""
    PlayedCuda(monkeypatch)
    calls = []

    def compute() -> torch.Tensor:
        calls.append(len(calls))
        if len(calls) == 2:
            raise ValueError("plan() was not called before the capture")
        return torch.zeros(1)

    graphs: Graphs[None] = Graphs([1], lambda _: (None, compute), "--no-cuda-graphs")
    reason = r"ValueError: plan\(\) was not called before the capture\)\. Start with --no-cuda-graphs"
    with pytest.raises(StartupError, match=reason):
        list(graphs.capture_graphs())


@pytest.mark.parametrize("backend", ["triton", "torch_sdpa"])
def test_graphs_on_a_cpu_are_refused(tiny_qwen3_vl: Path, backend: str) -> None:
    with pytest.raises(
        StartupError, match=f"needs a GPU and --attention-backend triton or flashinfer, not {backend} on cpu"
    ):
        engines.engine(tiny_qwen3_vl, cuda_graphs=True, attention_backend=backend)


def test_quantised_weights_are_refused_by_name(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_qwen3_vl, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    (name,) = [name for name in tensors if name.endswith("layers.1.mlp.down_proj.weight") and "language" in name]
    rows, columns = tensors[name].shape
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.ones(-(-rows // 128), -(-columns // 128))
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    module = load_model(EngineConfig(str(folder), "tiny", device="cpu"), lambda *_: None).module
    triton = load_backend("triton", Workload(torch.device("cpu"), torch.float32))
    reason = decode_graphs.refusal(module, triton, torch.device("cuda"), torch.bfloat16)
    assert reason is not None
    assert "does not take weights in a quantised format" in reason


def test_experts_that_make_the_host_wait_are_refused_by_name(
    network_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # B7
    """On any device, before CUDA would end the capture with an error of its own."""
    monkeypatch.setattr("saccade.engine.executor.unpacking.free_bytes", lambda: 0)
    weight = "gate_up_proj"
    folder = shutil.copytree(network_folder("qwen3_vl_moe"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(weight)]:
        num_experts, rows, columns = tensors[name].shape
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(num_experts, -(-rows // 128), -(-columns // 128))
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    with pytest.raises(StartupError, match="--cuda-graphs does not take experts in a quantised format"):
        engines.engine(folder, cuda_graphs=True)
    plain = load_model(EngineConfig(str(network_folder("qwen3_vl_moe")), "tiny", device="cpu"), lambda *_: None)
    gpu, triton = torch.device("cuda"), load_backend("triton", Workload(torch.device("cpu"), torch.float32))
    assert "float16" in (decode_graphs.refusal(plain.module, triton, gpu, torch.float16) or "")
    assert decode_graphs.refusal(plain.module, triton, gpu, torch.bfloat16) is None


def test_a_start_captures_graphs_over_padded_caches(tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again, shown = Again(), []
    monkeypatch.setattr(DecodeGraphs.__init__, "__defaults__", (again,))
    config = EngineConfig(
        str(tiny_qwen3_vl), "tiny", device="cpu", dtype="float32", num_blocks=9, max_num_seqs=3, cuda_graphs=True,
        attention_backend="triton",
    )  # fmt: skip
    model = load_model(config, lambda *_: None)
    execution = replace(prepare_execution(replace(config, cuda_graphs=False), model), captures_decodes=True)
    caches = startup.allocate(config, model)
    runner = make_runner(config, model, execution, caches, lambda *stage: shown.append(stage))
    assert shown == [("capturing CUDA graphs", number, 3) for number in range(3)]
    assert again.num_captures == 3
    assert runner.graphs is not None
    assert {len(part) for cache in caches.layers for part in cache[:2]} == {10}


@pytest.mark.parametrize("is_requested", [None, True])
def test_a_capture_that_fails_ends_the_start_if_graphs_were_requested(
    is_requested: bool | None, tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(DecodeGraphs.__init__, "__defaults__", (failing,))
    config = EngineConfig(
        str(tiny_qwen3_vl), "tiny", device="cpu", num_blocks=9, max_num_seqs=2, attention_backend="triton"
    )
    model = load_model(config, lambda *_: None)
    execution = replace(prepare_execution(config, model), captures_decodes=True)
    caches = startup.allocate(replace(config, cuda_graphs=True), model)
    config = replace(config, cuda_graphs=is_requested)
    if is_requested:
        with pytest.raises(StartupError, match=r"not permitted .*Start with --no-cuda-graphs"):
            make_runner(config, model, execution, caches)
    else:
        assert make_runner(config, model, execution, caches).graphs is None
