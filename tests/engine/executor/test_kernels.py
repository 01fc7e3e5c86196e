"""No step in service needs a kernel that the start did not compile, and the start compiles none that no step needs.

Libraries are played by functions that note the kernels which the real ones would compile: DeepGEMM's by the rules that
tests/real compares with its source, those of the delta rule by `published_delta`, Triton's by its own rules.
"""

import math
import random
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import published_delta
import published_products
import pytest
import starts
import torch
from torch import nn

from saccade.engine.config import EngineConfig
from saccade.engine.executor.execution import prepare_execution
from saccade.engine.executor.kernels import compile_kernels, reported
from saccade.engine.executor.loader import load_model
from saccade.errors import StartupError
from saccade.nn import gpu
from saccade.nn.backends import Workload, triton_attention
from saccade.nn.backends.compilers import EXPERTS, build_of, objects
from saccade.nn.backends.trial import of_delta_rule
from saccade.nn.context import SCALED, ForwardContext, KvCache, PagedLayout
from saccade.nn.delta_rule import Gates, RuleHeads, Trail
from saccade.nn.experts import Experts
from saccade.nn.formats.deep_gemm_keys import Weights, kernel_of
from saccade.nn.layers import Linear
from saccade.nn.ops import PLAIN, SILU, ExpertShare
from saccade.nn.parallel import ALONE, Ranks

BF16, E4M3, CPU = torch.bfloat16, torch.float8_e4m3fn, torch.device("cpu")
HOPPER, NUM_SMS = (9, 0), 132
MOST_TOKENS, MOST_ROWS, MOST_PROPOSED = 8192, 40, 4
SHAPES = [(3072, 2048), (2048, 2048), (1024, 2048), (3072, 2048)]
NUM_EXPERTS, HIDDEN, WIDTH = 16, 256, 128
HEADS = RuleHeads(2, 4, 128, 128), RuleHeads(16, 32, 128, 128)


class Step(NamedTuple):
    """The tokens of each chunk, single ones first, and of each sequence with proposals."""

    chunks: tuple[int, ...]
    proposed: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.chunks) + sum(self.proposed)


def random_steps(count: int = 5000) -> Iterator[Step]:
    """Steps within the limits; few and many tokens, and few and many rows, are as likely, and so are powers of two."""
    draw = random.Random(0)

    def number(most: int) -> int:
        power = draw.uniform(0, math.log2(most + 1))
        return min(most, int(2 ** draw.choice((power, int(power)))))

    for _ in range(count):
        num_rows = number(MOST_ROWS)
        num_speculating = draw.choice((0, draw.randint(0, num_rows)))
        fewest, most = draw.choice([(1, MOST_PROPOSED), (draw.randint(1, MOST_PROPOSED),) * 2])
        proposed = tuple(1 + draw.randint(fewest, most) for _ in range(num_speculating))
        num_others = num_rows - num_speculating
        singles = draw.choice((num_others, draw.randint(0, num_others)))
        room = MOST_TOKENS - sum(proposed) - num_others
        total = number(room)
        long = [max(2, total // (num_others - singles)) for _ in range(num_others - singles)]
        yield Step((*(1,) * singles, *long), proposed)


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> set[Hashable]:
    """The kernels of products that were met, on an H100."""
    published_products.install(monkeypatch, HOPPER)
    properties = SimpleNamespace(multi_processor_count=NUM_SMS)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    found: set[Hashable] = set()

    def product(x: torch.Tensor, weight: torch.Tensor, *, weight_scale: torch.Tensor) -> torch.Tensor:
        found.add(kernel_of(Weights(*weight.shape), len(x), NUM_SMS))
        return x.new_empty(len(x), len(weight))

    def mixture(x: torch.Tensor, *arguments: Any, **_: Any) -> torch.Tensor:
        for matrices in arguments[2:4]:
            found.add(kernel_of(Weights(*matrices.shape[1:], len(matrices)), len(x), NUM_SMS))
        return x

    # The module is imported anew for each test, and its package may still have an older one.
    fp8 = import_module("saccade.nn.formats.flashinfer_fp8")
    monkeypatch.setattr(fp8, "fp8_blockscale_gemm_sm90", product)
    monkeypatch.setattr(fp8, "cutlass_fused_moe", mixture)
    return found


@pytest.fixture
def network(met: set[Hashable]) -> nn.ModuleList:
    """Layers in FP8 blocks, two of one shape, and experts; no weight has a value."""
    from saccade.nn.formats.flashinfer_fp8 import BlockFp8, BlockFp8Experts

    layers = nn.ModuleList()
    for outputs, inputs in SHAPES:
        layer = Linear(inputs, outputs, bias=False).to(BF16)
        layer.packed = BlockFp8(torch.empty(outputs, inputs, dtype=E4M3), torch.empty(0), None, is_hopper=True)
        layers.append(layer)
    experts = Experts(NUM_EXPERTS, HIDDEN, WIDTH).to(BF16)
    matrices = (torch.empty(NUM_EXPERTS, *sides, dtype=E4M3) for sides in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)))
    share, scales = ExpertShare(NUM_EXPERTS, 0, 1), torch.empty(0)
    experts.packed = BlockFp8Experts(next(matrices), scales, next(matrices), scales, share, is_hopper=True)
    return layers.append(experts)


def test_products(network: nn.ModuleList, met: set[Hashable]) -> None:
    """Without any one of the start's products, a step would meet a new kernel; two layers share theirs."""
    lines: list[tuple[str, int, int]] = []
    compile_kernels(network, MOST_TOKENS, ALONE, lambda *line: lines.append(line))
    compiled = set(met)
    assert [line[1:] for line in lines] == [(done, len(lines)) for done in range(len(lines))]
    assert len(lines) == len(compiled)
    assert "compiling kernels" in lines[0][0]
    met.clear()
    *linears, experts = network
    for step in random_steps():
        for layer in linears:
            layer(torch.empty(step.num_tokens, layer.weight.shape[1], dtype=BF16))
        ids = torch.zeros(step.num_tokens, 2, dtype=torch.int64)
        experts(torch.empty(step.num_tokens, HIDDEN, dtype=BF16), ids, ids.float())
    assert met == compiled, sorted(map(str, met ^ compiled))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The most rows of each start's products."""
    rows: list[int] = []
    monkeypatch.setattr(
        "saccade.engine.executor.execution.compile_kernels", lambda _, most_rows, *__: rows.append(most_rows)
    )
    starts.install(monkeypatch)
    return rows


@pytest.mark.parametrize(("patches", "most"), [(256, 8192), (65536, 65536)])
def test_a_start_compiles_for_the_largest_step(
    patches: int, most: int, tiny_qwen3_vl: Path, compiled: list[int]
) -> None:
    """As many rows as tokens, or as patches of its images."""
    config = EngineConfig(str(tiny_qwen3_vl), "tiny", device="cpu", encode_budget_patches=patches, cuda_graphs=False)
    prepare_execution(config, starts.on_gpu(load_model(config, lambda *_: None)))
    assert len(compiled) == 1
    assert compiled[0] >= most


def test_a_start_on_a_cpu_compiles_nothing(
    tiny_qwen3_vl: Path, compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it ask how many rows a step has, which a network need not know."""
    monkeypatch.setattr("saccade.engine.executor.execution.most_tokens", lambda *_: pytest.fail("asked for rows"))
    config = EngineConfig(str(tiny_qwen3_vl), "tiny", device="cpu")
    prepare_execution(config, load_model(config, lambda *_: None))
    assert not compiled


def test_ranks_begin_at_different_kernels(network: nn.ModuleList, met: set[Hashable]) -> None:
    """They work at the same time, and find what the others compiled."""
    orders = []
    for rank in range(2):
        order: list[Hashable] = []
        for layer in network:
            layer.compile_kernel = lambda count, layer=layer, order=order: order.append((id(layer), count))
        compile_kernels(network, MOST_TOKENS, Ranks(rank, 2), lambda *_: None)
        orders.append(order)
    half = len(orders[0]) // 2
    assert orders[1] == orders[0][half:] + orders[0][:half]


def test_a_product_that_fails_ends_the_start(network: nn.ModuleList, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("nvcc: no space left on device")

    monkeypatch.setattr(import_module("saccade.nn.formats.flashinfer_fp8"), "fp8_blockscale_gemm_sm90", fails)
    with pytest.raises(
        StartupError, match=r"product of the model with 1 rows failed: its library fails .*no space left on device"
    ):
        compile_kernels(network, MOST_TOKENS, ALONE, lambda *_: None)


def test_what_a_library_compiles_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A front ends a start that is silent for an hour, and experts for Hopper take longer on a few cores."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    folder = tmp_path / ".cache" / "flashinfer" / "0.7.2" / "90a" / "cached_ops" / EXPERTS.module
    folder.mkdir(parents=True)
    sources = "".join(f"build {folder}/{name}.cuda.o: cuda_compile {name}.cu\n" for name in "abc")
    (folder / "build.ninja").write_text(f"rule cuda_compile\n{sources}build {folder}/one.so: link a.cuda.o\n")
    (folder / "b.cuda.o").touch()
    lines, heard = list[tuple[str, int, int]](), threading.Event()

    def progress(*line: Any) -> None:
        lines.append(line)
        if len(lines) == 2:
            heard.set()

    with reported(progress, "packing weights", 0.001):
        assert heard.wait(60)
    assert lines[:2] == [("packing weights", 0, 0), ("packing weights", 1, 3)]
    assert "248 sources" in (build_of(EXPERTS) or "")
    (folder / f"{EXPERTS.module}.so").touch()
    assert (objects(), build_of(EXPERTS)) == ((0, 0), None)


@pytest.mark.parametrize("heads", HEADS)
def test_delta_rule(heads: RuleHeads) -> None:
    """A step has a call for all chunks, or one for each number of proposals besides those of its chunks' parts."""
    found: set[Hashable] = set()

    def rule(
        q: torch.Tensor, _: torch.Tensor, v: torch.Tensor, gates: Gates, states: torch.Tensor, rows: torch.Tensor,
        lengths: tuple[int, ...], trail: Trail,
    ) -> torch.Tensor:  # fmt: skip
        found.add(rule_kernel(lengths, v.shape[1], trail is not None))
        return v.float()

    def rule_kernel(lengths: tuple[int, ...], num_heads: int, is_proposed: bool) -> Hashable:
        if is_proposed:
            return published_delta.proposals_kernel(len(lengths), lengths[0], num_heads)
        if max(lengths) == 1:
            return "single tokens"
        return published_delta.chunk_kernel(len(lengths), num_heads, NUM_SMS)

    of_delta_rule(replace(PLAIN, gated_delta_rule=rule), Workload(CPU, BF16), heads, MOST_PROPOSED, MOST_ROWS)
    needed: set[Hashable] = set()
    for step in random_steps():
        if step.chunks:
            needed.add(rule_kernel(step.chunks, heads.num_value_heads, is_proposed=False))
        for length in set(step.proposed):
            lengths = (length,) * step.proposed.count(length)
            needed.add(rule_kernel(lengths, heads.num_value_heads, is_proposed=True))
    assert needed == found


class Launched:
    """A kernel of Triton that notes by what it would be compiled, and computes nothing."""

    def __init__(self, kernel: Any, found: set[Hashable]) -> None:
        self._kernel, self._found = kernel, found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: Any, **constants: Any) -> None:
        options = self._kernel.kwargs
        fixed, anywhere = (options[f"do_not_specialize{end}"] or () for end in ("", "_on_alignment"))
        key: list[Hashable] = [self._kernel.__name__, *sorted(constants.items())]
        for name, value in zip(self._kernel.arg_names, arguments, strict=False):
            if isinstance(value, torch.Tensor):
                key.append((name, value.dtype, name in anywhere or value.data_ptr() % 16 == 0))
            elif isinstance(value, int) and name not in fixed:
                key.append((name, value == 1, value % 16 == 0))
        self._found.add(tuple(key))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[Hashable]:
    found: set[Hashable] = set()
    for module, name in [(gpu, "conv_kernel"), (gpu, "heads_kernel"), (triton_attention, "decode_kernel")]:
        monkeypatch.setattr(module, name, Launched(getattr(module, name), found))
    return found


def test_triton_s_kernels(launched: set[Hashable]) -> None:
    """Metadata begin anywhere in a tensor, tables have any width, chunks any length: none of it is a new kernel."""
    heads, kv_heads, size, width, backend = 4, 2, 64, 192, triton_attention.AttentionBackend()
    cache = KvCache(*(torch.zeros(8, 16, kv_heads, size, dtype=BF16) for _ in range(2)))
    states = torch.zeros(MOST_ROWS, 3, width, dtype=BF16)
    for offset, step in enumerate(random_steps(100)):
        count, num_rows = min(step.num_tokens, 300), max(1, len(step.chunks))
        metadata = torch.zeros(2 * (count + MOST_ROWS) + 2, dtype=torch.int64)[offset % 2 :]
        qkv, angles = (
            torch.zeros(count, heads + 2 * kv_heads, size, dtype=BF16),
            torch.zeros(count, 1, size, dtype=BF16),
        )
        gpu.cached_heads(qkv, kv_heads, None, 1e-6, (angles, angles), cache, metadata[:count])
        tables = torch.zeros(num_rows, offset + 1, dtype=torch.int64)
        layout = PagedLayout(
            slot_mapping=metadata[:num_rows], block_tables=tables, context_lengths=metadata[:num_rows],
            query_lengths=(1,) * num_rows, host_context_lengths=(1,) * num_rows, num_decodes=num_rows, block_size=16,
            rows=metadata[:num_rows],
        )  # fmt: skip
        queries = torch.zeros(num_rows, heads, size, dtype=BF16)
        context = ForwardContext(torch.zeros(3, num_rows, dtype=torch.int64), layout, [cache], backend, ())
        backend.attend(queries, (queries, queries), cache, context, SCALED)
        lengths = tuple(min(one, 30) for one in step.chunks) or (1,)
        x, taps = torch.zeros(sum(lengths), width, dtype=BF16), torch.zeros(4, width)
        gpu.causal_conv(x, taps, states, metadata[: len(lengths)], lengths, SILU)
    assert len(launched) == 3, sorted(map(str, launched))
