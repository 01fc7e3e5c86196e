"""The adapters of libraries for GPUs: their arguments are those that the libraries publish, and mean what they should."""

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import published
import pytest
import torch
from attention import BATCHES, HEADS, OPTIONS, CapturedDecodes, assert_close, attend, attend_packed
from latents import SCALE, WIDTH, draw
from latents import attend as attend_latents
from latents import reference as latent_reference
from latents import step as latents_step
from structlog.testing import capture_logs

from saccade.errors import StartupError
from saccade.nn.backends import AUTO, PLAIN, Workload, compilers, load_backend, load_vision_backend, trial, why
from saccade.nn.backends.flashinfer_wrappers import Wrappers
from saccade.nn.backends.trial import tried
from saccade.nn.backends.workload import HALF, cost_of_cache
from saccade.nn.context import AttentionBackend, ForwardContext, LatentCache, PackedLayout, VisionAttentionBackend

GPU = torch.device("cuda")
FLASHINFER, CUDNN, VARLEN = "flashinfer", "flashinfer_cudnn", "torch_varlen"
LENGTHS = [(6,), (4, 4, 4), (3, 8, 1), (1,) * 9, (7,) * 70]
TOWER = Workload(GPU, torch.bfloat16, head_sizes=frozenset({(72, 72)}))
DECODER = Workload(GPU, torch.bfloat16, head_sizes=frozenset({(128, 128)}))
HALVES = Workload(GPU, torch.float16, head_sizes=frozenset({(64, 64)}))
FIND_TOOLKIT = compilers.find_toolkit
MISMATCH = "another package has another version"


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    published.install(monkeypatch)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(trial, "computes", lambda _: True)


def decoder() -> AttentionBackend:
    return load_backend(FLASHINFER, DECODER)


def tower(name: str) -> VisionAttentionBackend:
    return load_vision_backend(name, TOWER)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("queries", "contexts"), BATCHES)
def test_flashinfer(queries: list[int], contexts: list[int], dtype: torch.dtype) -> None:
    output, expected = attend(decoder(), queries, contexts, dtype, 64, dim=64)
    assert output.shape == (sum(queries), HEADS * 64)
    assert_close(output, expected, ulps=2)


def test_flashinfer_reads_a_cache_in_float8() -> None:
    cached = replace(HALVES, cache_dtype=torch.float8_e4m3fn)
    output, expected = attend(
        load_backend(FLASHINFER, cached), [1, 1, 7, 4], [30, 2, 7, 40], torch.float16, 64, dim=64, scales=(0.01, 0.02)
    )
    assert_close(output, expected, ulps=2)
    backend, workload = decoder_tried(AUTO, cached)
    assert backend.name == FLASHINFER
    assert cost_of_cache(workload) is None
    _, workload = decoder_tried(PLAIN, cached)
    assert "no kernel reads a KV cache in float8_e4m3fn" in (cost_of_cache(workload) or "")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_flashinfer_with_options(options: dict[str, float]) -> None:
    output, expected = attend(decoder(), [1, 1, 7, 4], [30, 2, 7, 40], torch.float16, 64, options, dim=64)
    assert_close(output, expected, ulps=2)


@pytest.mark.parametrize(("queries", "contexts"), BATCHES)
def test_flashinfer_attends_to_latents(queries: list[int], contexts: list[int]) -> None:
    q, latents = draw(queries, contexts, torch.float16)
    backend = load_backend(FLASHINFER, Workload(GPU, torch.float16, has_latent_layers=True))
    output = attend_latents(backend, latents_step(queries, contexts, torch.float16), q, latents)
    expected = [
        latent_reference(own, latent.unsqueeze(1).expand(-1, own.shape[1], -1), latent[:, None, :WIDTH].expand(-1, own.shape[1], -1))
        for own, latent in zip(q.split(queries), latents, strict=True)
    ]  # fmt: skip
    assert_close(output, torch.cat(expected), ulps=4)


def test_flashinfer_plans_once_a_step_for_all_layers_of_a_kind() -> None:
    wrappers: Wrappers[str, object] = Wrappers(lambda _: object(), lambda *plan: planned.append(plan))
    planned: list[tuple[object, ...]] = []
    steps = object(), object()
    for step in steps:
        assert len({id(wrappers.of("full", step)) for _ in range(3)}) == 1
    assert [step for _, _, step in planned] == [*steps]


@pytest.mark.parametrize("num_steps", [2, 5])
def test_flashinfer_alternates_wrappers_of_each_kind_however_many_plans_a_step_has(
    num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a model with windows has two; and kernels of the last step may still wait for its plans."""
    planned: dict[tuple[type, int], list[object]] = {}
    for kind in (published.BatchDecodeWithPagedKVCacheWrapper, published.BatchPrefillWithPagedKVCacheWrapper):

        def plan(self: Any, *arguments: Any, play: Any = kind.plan, **options: Any) -> None:
            planned.setdefault((type(self), options["window_left"]), []).append(self)
            play(self, *arguments, **options)

        monkeypatch.setattr(kind, "plan", plan)
    backend = decoder()
    for _ in range(num_steps):
        for options in ({"window": 4}, {}):
            attend(backend, [1, 5], [9, 12], torch.float16, 64, options, dim=64)
    assert len(planned) == 4
    for used in planned.values():
        first, second = used[:2]
        assert first is not second
        assert used == [first, second, first, second, first][:num_steps]


def test_plans_of_graphs_wait_for_their_own_last_copy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two plans of a step the second must not wait for the first one's copy: it waits for the step in flight."""
    recorded: list[object] = []
    waited: list[int] = []

    class Event:
        def record(self) -> None:
            recorded.append(self)

        def synchronize(self) -> None:
            waited.append(recorded.index(self))

    monkeypatch.setattr("torch.cuda.Event", Event)
    of_step: list[Wrappers[str, str]] = [Wrappers(lambda _: object(), lambda *_: None) for _ in range(2)]
    for one in of_step:
        one.of("kind", "the capture")
    for number in range(3):
        for one in of_step:
            one.replan(f"step {number}", GPU)
    assert waited == [0, 1, 2, 3]  # each step has recorded two


def test_flashinfer_plans_captured_decodes_again() -> None:
    """In wrappers with buffers that never move, one for each number of rows; other steps have their own."""
    backend, made = decoder(), published.BatchDecodeWithPagedKVCacheWrapper.num_made
    graph = CapturedDecodes(backend, torch.float16, num_rows=3, num_blocks=12)
    for contexts in ([1, 1, 1], [9, 4, 40], [48, 1, 17]):
        output, expected = graph.step(contexts)
        assert_close(output, expected, ulps=2)
    attend(backend, [1, 1, 1], [9, 3, 5], torch.float16, 64, dim=64)
    assert published.BatchDecodeWithPagedKVCacheWrapper.num_made == made + 2
    (((wrapper, _),),) = graph.context.plan.wrappers.decoders.planned.values()
    assert wrapper.num_plans == 4  # one before the capture


@pytest.mark.parametrize("major", [9, 10])
def test_flashinfer_plans_captured_decodes_over_latents_again(major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (major, 0))
    backend = load_backend(FLASHINFER, Workload(GPU, torch.float16, has_latent_layers=True))
    contexts = [9, 4, 40]
    made = latents_step([1, 1, 1], contexts, torch.float16)
    q, latents = draw([1, 1, 1], contexts, torch.float16)
    expected = attend_latents(backend, made, q, latents)
    shorter = replace(made.layout, host_context_lengths=(1, 1, 1))
    plan = backend.plan_captured(shorter, torch.float16)
    context = ForwardContext(torch.zeros(3, 3, dtype=torch.int64), shorter, [LatentCache(made.cache)], backend, plan)
    own = torch.stack([latent[-1] for latent in latents])
    before = backend.latent(q, own, 0, context, value_width=WIDTH, scale=SCALE)
    backend.replan(plan, made.layout)
    found = backend.latent(q, own, 0, context, value_width=WIDTH, scale=SCALE)
    assert torch.equal(found, expected)
    assert not torch.equal(before, expected)


def test_flashinfer_plans_the_next_step_in_other_wrappers() -> None:
    """A step ahead: the kernels of the last step may still read its plan."""
    backend = decoder()
    wrappers = published.BatchDecodeWithPagedKVCacheWrapper, published.BatchPrefillWithPagedKVCacheWrapper
    before = [wrapper.num_made for wrapper in wrappers]
    for _ in range(4):
        attend(backend, [1, 5], [9, 12], torch.float16, 64, {}, dim=64)
    assert [wrapper.num_made - count for wrapper, count in zip(wrappers, before, strict=True)] == [2, 2]


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", [CUDNN, VARLEN])
@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
def test_towers(name: str, lengths: tuple[int, ...], dtype: torch.dtype, scale: float | None) -> None:
    assert_close(*attend_packed(tower(name), lengths, dtype, scale, dim=72), ulps=2)


def test_cudnn_rounds_lengths_up_and_keeps_metadata_while_a_tower_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = tower(CUDNN)
    calls = []

    def record(*args: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, None]:
        calls.append(kwargs)
        return args[0], None

    monkeypatch.setattr(
        sys.modules["saccade.nn.backends.flashinfer_cudnn"], "cudnn_batch_prefill_with_kv_cache", record
    )
    q = torch.zeros(5000, 2, 8, dtype=torch.bfloat16)
    layouts = [PackedLayout(torch.tensor([0, *borders], dtype=torch.int32), longest, (1,) * len(borders))
               for borders, longest in (((4000, 5000), 4000), (range(50, 5001, 50), 50), ((5000,), 5000))]  # fmt: skip
    for layout in (*layouts, layouts[-1]):
        backend.packed((q, q, q), layout)
    assert [call["max_token_per_sequence"] for call in calls] == [4096, 4096, 8192, 8192]
    assert [len(call["actual_seq_lens_q"]) for call in calls] == [8, 128, 8, 8]  # type: ignore[arg-type]
    assert calls[2]["batch_offsets_q"] is calls[3]["batch_offsets_q"]
    assert calls[0]["batch_offsets_q"].tolist() == [0, 4000 * 16, *[5000 * 16] * 7]  # type: ignore[attr-defined]


def test_more_channels_than_an_offset_counts_are_refused() -> None:  # [eng] 34
    q = torch.empty(1 << 27, 2, 8, dtype=torch.bfloat16, device="meta")
    layout = PackedLayout(torch.tensor([0, 1 << 27], dtype=torch.int32), 1 << 27, (1 << 27,))
    with pytest.raises(ValueError, match="channels of queries are more than"):
        tower(CUDNN).packed((q, q, q), layout)


def test_auto_on_a_gpu() -> None:
    assert load_backend(AUTO, DECODER).name == FLASHINFER
    assert load_vision_backend(AUTO, TOWER).name == VARLEN
    odd = Workload(GPU, torch.bfloat16, head_sizes=frozenset({(20, 20)}))
    assert load_vision_backend(AUTO, odd).name == "triton"
    assert "not torch_varlen: its heads have a multiple of 8 channels" in why(AUTO, load_vision_backend(AUTO, odd), odd)
    assert load_backend(AUTO, odd).name == "triton"
    latents = Workload(GPU, torch.bfloat16, has_latent_layers=True)
    assert load_backend(AUTO, latents).name == FLASHINFER
    cached = replace(latents, cache_dtype=torch.float8_e4m3fn)
    assert load_backend(AUTO, cached).name == PLAIN
    assert "not triton: it reads no KV cache in float8_e4m3fn" in why(AUTO, load_backend(AUTO, cached), cached)
    with pytest.raises(StartupError, match="it has no attention over latents"):
        load_backend("triton", latents)
    cached = Workload(GPU, torch.bfloat16, torch.float8_e4m3fn)
    assert load_backend(AUTO, cached).name == FLASHINFER
    assert load_backend(AUTO, replace(cached, dtype=torch.float32)).name == PLAIN
    assert load_backend(AUTO, Workload(GPU, torch.float32)).name == "triton"


@pytest.mark.parametrize(
    ("name", "workload", "reason"),
    [
        (CUDNN, Workload(GPU, torch.float32), "float16 and bfloat16, not in float32"),
        (CUDNN, Workload(GPU, torch.bfloat16, head_sizes=frozenset({(160, 160)})), "at most 128, not 160"),
        (VARLEN, Workload(dtype=torch.bfloat16), "it computes on a GPU, not on a cpu"),
        (VARLEN, Workload(GPU, torch.bfloat16, head_sizes=frozenset({(20, 20)})), "multiple of 8"),
    ],
)
def test_a_tower_that_a_backend_cannot_compute(name: str, workload: Workload, reason: str) -> None:
    with pytest.raises(StartupError, match=f"cannot be {name}: .*{reason}"):
        load_vision_backend(name, workload)


def test_a_cache_that_no_kernel_reads_is_said_to_be_slow() -> None:
    for device in (GPU, torch.device("cpu")):
        cached = Workload(device, torch.bfloat16, torch.float8_e4m3fn)
        assert "no kernel reads a KV cache in float8_e4m3fn" in (cost_of_cache(cached) or "")
        assert cost_of_cache(Workload(device, torch.bfloat16)) is None


def test_an_old_gpu_and_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (7, 5))
    with pytest.raises(StartupError, match=r"compute capability 8\.0"):
        load_vision_backend(VARLEN, TOWER)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(StartupError, match="torch finds no CUDA device"):
        load_vision_backend(CUDNN, TOWER)


def test_heads_that_flashinfer_has_no_kernel_for() -> None:
    with pytest.raises(StartupError, match="64, 128, 256 channels, not 192 and 128"):
        load_backend(FLASHINFER, Workload(GPU, torch.bfloat16, head_sizes=frozenset({(192, 128)})))


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(StartupError, match=r"pip install 'saccade-vlm\[gpu\]'` installs it"):
        load_backend(FLASHINFER, DECODER)
    assert load_backend(AUTO, DECODER).name == "triton"


def on_cpu(workload: Workload) -> Workload:
    """As the trials of these tests see it: the libraries' stand-ins compute on a CPU."""
    return replace(workload, device=torch.device("cpu"))


def decoder_tried(asked: str, workload: Workload = HALVES) -> tuple[AttentionBackend, Workload]:
    return tried(load_backend, asked, workload, lambda backend, tried: trial.of_decoder(backend, on_cpu(tried)))


def test_a_failure_that_leaves_the_gpu_unusable_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every backend after it would fail its trial, too, and the summary would blame them all."""
    monkeypatch.setattr(trial, "computes", lambda _: False)

    def failing(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(StartupError, match=r"trial of the attention backend flashinfer failed .*illegal memory access"):
        tried(load_backend, AUTO, HALVES, failing)


def test_a_device_that_raises_does_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert trial.computes(torch.device("cpu"))
    assert not trial.computes(torch.device("meta"))


def test_backends_pass_their_trials() -> None:
    for name in (FLASHINFER, "triton", PLAIN):
        assert decoder_tried(name)[0].name == name
    for name in (FLASHINFER, PLAIN):
        assert decoder_tried(name, replace(HALVES, has_latent_layers=True))[0].name == name
    tower = replace(HALVES, head_sizes=frozenset({(72, 72)}))
    for name in (VARLEN, CUDNN, "triton", PLAIN):
        trial.of_tower(load_vision_backend(name, tower), on_cpu(tower))


@pytest.mark.parametrize("broken", ["import", "plan"])
def test_a_library_that_fails_is_not_taken_by_auto(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    if broken == "import":
        monkeypatch.setattr(sys, "meta_path", [Raising(), *sys.meta_path])
        monkeypatch.delitem(sys.modules, "flashinfer")
    else:
        monkeypatch.setattr(published.BatchPrefillWithPagedKVCacheWrapper, "plan", fails)
    backend, workload = decoder_tried(AUTO)
    assert backend.name == "triton"
    assert f"RuntimeError: {MISMATCH}" in why(AUTO, backend, workload)
    with pytest.raises(StartupError, match=rf"cannot be flashinfer: .*RuntimeError: {MISMATCH}"):
        decoder_tried(FLASHINFER)


class Raising:
    """What importing flashinfer does if two of its packages have different versions."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "flashinfer":
            raise RuntimeError(MISMATCH)


def fails(*_: object, **__: object) -> None:
    raise RuntimeError(f"{MISMATCH}\nand a second line")


@pytest.mark.parametrize(
    ("name", "found", "reason"),
    [
        (FLASHINFER, (), "finds no nvcc and no ninja and no curand_kernel.h: install the CUDA toolkit and ninja"),
        (FLASHINFER, ("nvcc",), "finds no ninja"),
        ("triton", ("nvcc", "ninja"), "needs a C compiler at its first use, and finds none: install gcc"),
    ],
)
def test_a_missing_compiler_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, found: tuple[str, ...], reason: str
) -> None:
    monkeypatch.setattr(compilers, "find_toolkit", FIND_TOOLKIT)
    monkeypatch.setattr(compilers, "find_spec", lambda _: None)
    monkeypatch.setattr("shutil.which", lambda asked: asked if asked in found else None)
    monkeypatch.setattr(compilers, "TOOLKIT", Path("/nonexistent"))
    for variable in ("CC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(StartupError, match=f"cannot be {name}: .*{reason}"):
        load_backend(name, DECODER)
    assert load_backend(AUTO, DECODER).name != name


def test_compiled_kernels_need_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    module = ModuleType("flashinfer_jit_cache")
    module.__spec__ = ModuleSpec("flashinfer_jit_cache", None)
    monkeypatch.setitem(sys.modules, "flashinfer_jit_cache", module)
    assert load_backend(FLASHINFER, DECODER).name == FLASHINFER


def test_the_first_use_says_that_kernels_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    for is_compiled in (False, True):
        if is_compiled:
            (tmp_path / ".cache" / "flashinfer" / "0.7.2" / "90a" / "cached_ops" / "batch_prefill").mkdir(parents=True)
        with capture_logs() as lines:
            attend(decoder(), [1], [1], torch.float16, 64, dim=64)
        assert ["half a minute" in line["event"] for line in lines] == [True] * (not is_compiled)


def test_an_old_release_of_flashinfer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workspace would have to be larger for some models."""
    for version, is_old in (("0.6.14", True), ("0.7.2.post1", False), ("0.10.0rc1", False), ("nightly", False)):
        monkeypatch.setattr(sys.modules["flashinfer"], "__version__", version, raising=False)
        assert load_backend(AUTO, DECODER).name == ("triton" if is_old else FLASHINFER), version


def test_auto_takes_what_can_be_captured_for_cuda_graphs() -> None:
    captured = replace(DECODER, is_captured=True)
    assert load_backend(AUTO, captured).name == FLASHINFER
    assert load_backend(AUTO, replace(captured, has_latent_layers=True)).name == FLASHINFER


@pytest.mark.parametrize(("major", "name"), [(8, None), (9, "FA3"), (10, "FA4"), (12, None)])
def test_newer_flash_attention_is_taken_if_it_is_installed(
    major: int, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch knows both names, and imports their packages; neither is installed here."""
    assert {"FA3", "FA4"} <= set(torch.nn.attention.list_flash_attention_impls())
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (major, 0))
    with capture_logs() as lines:
        output, expected = attend_packed(tower(VARLEN), (3, 8, 1), torch.float16, dim=72)
    assert_close(output, expected, ulps=2)
    assert [(line["instead_of"], "it is not installed" in line["reason"]) for line in lines] == [(name, True)] * (
        name is not None
    )
    activated: list[str] = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    tower(VARLEN)
    assert activated == [name] * (name is not None)
