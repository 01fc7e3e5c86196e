"""Every attention backend that runs here against the same in float64, and which of them is chosen."""

import importlib
import subprocess
import sys

import pytest
import torch
from attention import BATCHES, BLOCK, DIM, HEADS, OPTIONS, assert_close, attend, attend_packed
from tables import table

from saccade.errors import StartupError
from saccade.nn.backends import (
    AMX,
    AUTO,
    BACKENDS,
    PLAIN,
    VISION_BACKENDS,
    Workload,
    load_backend,
    load_vision_backend,
    why,
)
from saccade.nn.context import ForwardContext, PackedLayout, PagedLayout, VisionAttentionBackend, check_metadata

TRITON, ONEDNN, OPENVINO = "triton", "onednn", "openvino"
BFLOAT16 = Workload(dtype=torch.bfloat16)
ON_GPU = Workload(torch.device("cuda"), torch.bfloat16)


def computes_here(name: str) -> bool:
    """Whether the backend for towers is installed, and computes in bfloat16 on this processor."""
    try:
        module = importlib.import_module(VISION_BACKENDS[name].module)
    except ImportError:
        return False
    return module.VisionAttentionBackend.unavailable(BFLOAT16) is None


@pytest.fixture
def on_intel(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own attention is the faster one."""
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_f": True, "cpu_name": "Intel(R) Xeon(R)"})


@pytest.fixture
def on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN is the faster one, on a processor without AMX."""
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_f": True, "cpu_name": "AMD EPYC"})
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)


needs_openvino = pytest.mark.skipif(
    not computes_here(OPENVINO), reason="OpenVINO is missing, or instructions for bfloat16"
)
needs_amx = pytest.mark.skipif(not computes_here(AMX), reason="this processor has no AMX")
WITH_DTYPES = [
    *((PLAIN, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
    *((TRITON, dtype) for dtype in (torch.float32, torch.float16)),
    *((ONEDNN, dtype) for dtype in (torch.float32, torch.bfloat16)),
]
VISION_WITH_DTYPES = [
    *WITH_DTYPES,
    pytest.param(AMX, torch.bfloat16, marks=needs_amx),
]


@table(("name", "dtype"), WITH_DTYPES)
@table(("queries", "contexts"), BATCHES)
@pytest.mark.usefixtures("on_amd")
def test_paged(queries: list[int], contexts: list[int], dtype: torch.dtype, name: str) -> None:  # [eng] 41
    output, expected = attend(load_backend(name, Workload(dtype=dtype)), queries, contexts, dtype)
    assert_close(output, expected, ulps=2)


@pytest.mark.usefixtures("on_amd")
@table("name", [PLAIN, TRITON, ONEDNN])
@table("options", [{}, {"window": 1}, {"window": 5}, {"scale": 2.0, "window": 9, "soft_cap": 3.0}])
@table("image", [(0, 6), (7, 12), (2, 40)])
def test_tokens_of_an_image_see_its_later_ones(
    name: str, options: dict[str, float], image: tuple[int, int]
) -> None:  # [eng] 41
    """Backwards only within the window, forwards all of it; a chunk may begin inside the image."""
    for queries, contexts in (([6, 12], [6, 12]), ([1, 5, 4], [20, 12, 40]), ([1, 1], [12, 13])):
        output, expected = attend(load_backend(name), queries, contexts, torch.float32, options=options, image=image)
        assert_close(output, expected)


@pytest.mark.ci
@pytest.mark.usefixtures("on_amd")
@table("name", [PLAIN, TRITON, ONEDNN])
@table("value_width", [DIM, 12])
@table("options", [{}, *OPTIONS])
@table(("queries", "contexts"), BATCHES)
def test_paged_with_options(
    queries: list[int], contexts: list[int], options: dict[str, float], value_width: int, name: str
) -> None:
    output, expected = attend(load_backend(name), queries, contexts, torch.float32, value_width, options)
    assert output.shape == (sum(queries), HEADS * value_width)
    assert_close(output, expected)


@table("dtype", [torch.float32, torch.bfloat16])
@table(("queries", "contexts"), BATCHES)
def test_paged_over_float8(queries: list[int], contexts: list[int], dtype: torch.dtype) -> None:
    """Every token attends over keys and values as the cache gives them, also those of its own chunk."""
    backend = load_backend(AUTO, Workload(dtype=dtype, cache_dtype=torch.float8_e4m3fn))
    output, expected = attend(backend, queries, contexts, dtype, scales=(0.25, 3.0))
    assert_close(output, expected, ulps=2)


@pytest.mark.ci
@pytest.mark.parametrize(("name", "dtype"), VISION_WITH_DTYPES)
@table("scale", [None, 0.5])
@table("lengths", [(6,), (4, 4, 4), (3, 8, 1), (150, 33), (5, 5, 2, 2, 2, 5)])
def test_packed(name: str, lengths: tuple[int, ...], dtype: torch.dtype, scale: float | None) -> None:
    output, expected = attend_packed(load_vision_backend(name, Workload(dtype=dtype)), lengths, dtype, scale)
    assert_close(output, expected, ulps=2)


@pytest.mark.usefixtures("on_amd")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onednn_attends_within_images_of_any_size(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long images take several blocks, the last one shorter; short ones are PyTorch's."""
    monkeypatch.setattr("saccade.nn.backends.onednn_attention.BLOCK_ROWS", 32)
    monkeypatch.setattr("saccade.nn.backends.onednn_attention.SHORT_SEQUENCE", 16)
    for lengths in ((16,), (33,), (64, 3, 70), (5, 9)):
        for scale, dim in ((None, 16), (0.5, 72)):
            backend = load_vision_backend(ONEDNN, Workload(dtype=dtype))
            assert_close(*attend_packed(backend, lengths, dtype, scale, dim=dim), ulps=2)


@needs_openvino
def test_openvino_attends_within_images_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short images are PyTorch's, then oneDNN's. Scores are rounded, so errors are larger than theirs."""
    monkeypatch.setattr("saccade.nn.backends.onednn_attention.SHORT_SEQUENCE", 8)
    monkeypatch.setattr("saccade.nn.backends.openvino_attention.LEAST_TOKENS", 16)
    backend = load_vision_backend(OPENVINO, BFLOAT16)
    for lengths in ((16,), (33,), (64, 3, 70), (5, 9), (33,)):
        for scale, dim in ((None, 16), (0.1, 72)):
            assert_close(*attend_packed(backend, lengths, torch.bfloat16, scale, dim=dim), ulps=4)


WITHOUT_NETWORK = """
import sys
events = []
sys.addaudithook(lambda event, _: events.append(event) if event.startswith(("socket.", "subprocess.", "os.fork")) else None)
import threading, torch
from saccade.nn.backends import Workload, load_vision_backend
from saccade.nn.context import PackedLayout
backend = load_vision_backend("openvino", Workload(dtype=torch.bfloat16))
heads = torch.ones(3, 2048, 2, 64, dtype=torch.bfloat16).unbind(0)
backend.packed(heads, PackedLayout(torch.tensor([0, 2048]), 2048, (2048,)))
print(events, threading.active_count())
"""


@needs_openvino
def test_openvino_reports_to_nobody() -> None:
    """Its package starts a process at its import, which calls its makers' analytics."""
    ran = subprocess.run([sys.executable, "-c", WITHOUT_NETWORK], capture_output=True, text=True, check=True)
    assert ran.stdout == "[] 1\n"


@needs_openvino
def test_openvino_is_taken_only_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = load_vision_backend(AUTO, BFLOAT16)
    assert chosen.name != OPENVINO
    assert "not openvino: it rounds scores to bfloat16, so it is faster and less exact" in why(AUTO, chosen, BFLOAT16)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    with pytest.raises(StartupError, match="cannot be openvino: this processor has no instructions for bfloat16"):
        load_vision_backend(OPENVINO, BFLOAT16)


@pytest.mark.usefixtures("on_amd")
@table("options", [{}, {"window": 40}, {"scale": 2.0}, {"soft_cap": 3.0}])
@table("value_width", [DIM, 12])
def test_onednn_attends_in_blocks_of_a_prompt(
    options: dict[str, float], value_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.nn.backends.onednn_attention.BLOCK_ROWS", 32)
    monkeypatch.setattr("saccade.nn.backends.onednn_attention.SHORT_SEQUENCE", 16)
    for queries, contexts in (([70], [70]), ([33, 20], [90, 20]), ([1, 64], [9, 64])):
        backend = load_backend(ONEDNN)
        output, expected = attend(backend, queries, contexts, torch.float32, value_width, options)
        assert_close(output, expected)


@pytest.mark.parametrize("name", [ONEDNN, pytest.param(OPENVINO, marks=needs_openvino)])
def test_an_image_has_the_same_bits_beside_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:  # [eng] 41
    processor = torch.cpu.get_capabilities() | {"avx512_f": True, "cpu_name": "AMD EPYC"}
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: processor)
    if name == OPENVINO:
        monkeypatch.setattr("saccade.nn.backends.openvino_attention.LEAST_TOKENS", 16)
    backend = load_vision_backend(name, BFLOAT16)
    heads = torch.randn(3, 700, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16().unbind(0)
    alone = backend.packed(tuple(part[:300] for part in heads), PackedLayout(torch.tensor([0, 300]), 300, (300,)))  # type: ignore[arg-type]
    both = backend.packed(heads, PackedLayout(torch.tensor([0, 300, 700]), 400, (300, 400)))  # type: ignore[arg-type]
    assert torch.equal(both[:300], alone)


@pytest.mark.parametrize("dim", [20, 72])
def test_heads_whose_size_is_no_power_of_two(dim: int) -> None:
    assert_close(*attend_packed(load_vision_backend(TRITON), (70, 5), torch.float32, dim=dim))
    assert_close(*attend(load_backend(TRITON), [1, 1, 9], [70, 4, 9], torch.float32, dim=dim))


@pytest.mark.usefixtures("on_intel")
def test_unknown_backends_name_the_known_and_why_some_cannot_compute_here() -> None:
    known = r"auto, torch_sdpa, onednn, triton, flashinfer, not 'nonesuch'"
    with pytest.raises(StartupError, match=known) as refused:
        load_backend("nonesuch")
    assert "Here torch_sdpa can compute. Not onednn: it is not faster on" in refused.value.message
    assert "Not triton: it computes on a GPU." in refused.value.message
    known = "auto, torch_sdpa, onednn, triton, flashinfer_cudnn, torch_varlen, openvino, amx, not"
    with pytest.raises(StartupError, match=known) as refused:
        load_vision_backend("nonesuch")
    assert "Not amx: it computes in bfloat16 on a CPU, not in float32 on cpu." in refused.value.message


@pytest.mark.usefixtures("on_intel")
def test_auto_takes_the_last_that_can_compute() -> None:
    assert load_backend(AUTO).name == PLAIN
    assert load_vision_backend(AUTO, BFLOAT16).name == (AMX if computes_here(AMX) else PLAIN)
    assert load_vision_backend(AUTO).name == PLAIN
    assert load_vision_backend(AUTO, ON_GPU).name == PLAIN  # torch finds none here
    assert load_vision_backend(PLAIN, BFLOAT16).name == PLAIN
    with pytest.raises(StartupError, match=r"cannot be amx: .*not in float32 on cpu"):
        load_vision_backend(AMX)


@pytest.mark.usefixtures("on_amd")
def test_auto_is_onednn_where_it_is_faster() -> None:
    assert load_backend(AUTO, BFLOAT16).name == load_vision_backend(AUTO, BFLOAT16).name == ONEDNN
    assert load_vision_backend(PLAIN, BFLOAT16).name == PLAIN


@pytest.mark.usefixtures("on_intel")
def test_a_start_says_why() -> None:
    assert why(PLAIN, load_backend(PLAIN), Workload()) == "as asked"
    slower = "it is not faster on this processor"
    assert why(AUTO, load_backend(AUTO), Workload()) == f"auto for float32 on cpu; not onednn: {slower}"
    if computes_here(AMX):
        assert why(AUTO, load_vision_backend(AUTO, BFLOAT16), BFLOAT16) == "auto for bfloat16 on cpu"
    reasons = (
        "not openvino: it computes in bfloat16, not in float32; not amx: it computes in bfloat16 on a CPU, not in float32 "
        f"on cpu; not onednn: {slower}"
    )
    assert why(AUTO, load_vision_backend(AUTO), Workload()) == f"auto for float32 on cpu; {reasons}"


def test_no_package_is_named_that_would_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    for entry in (*BACKENDS.values(), *VISION_BACKENDS.values()):
        if "saccade-vlm[gpu]" in entry.install:
            monkeypatch.setitem(sys.modules, entry.module, None)
    for dtype, is_hinted in ((torch.bfloat16, True), (torch.float32, False)):
        workload = Workload(torch.device("cuda"), dtype)
        for plain in (load_backend(PLAIN), load_vision_backend(PLAIN)):
            assert ("saccade-vlm[gpu]" in why(AUTO, plain, workload)) is is_hinted


def test_nothing_of_another_device_is_imported_for_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {entry.module for entry in (*BACKENDS.values(), *VISION_BACKENDS.values()) if entry.device_type == "cuda"}
    for module in others:
        monkeypatch.delitem(sys.modules, module, raising=False)
    load_backend(AUTO)
    load_vision_backend(AUTO, BFLOAT16)
    assert not others & sys.modules.keys()


def test_layers_of_latents_are_declined_without_a_method_for_them() -> None:
    workload = Workload(has_latent_layers=True)
    assert load_backend(PLAIN, workload).name == PLAIN
    with pytest.raises(StartupError, match="cannot be triton: it has no attention over latents"):
        load_backend(TRITON, workload)


@pytest.mark.usefixtures("on_intel")
@pytest.mark.parametrize("is_installed", [True, False])
def test_without_the_processor_amx_is_refused_and_auto_is_plain(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_installed:
        monkeypatch.setitem(sys.modules, VISION_BACKENDS[AMX].module, None)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    plain = load_vision_backend(AUTO, BFLOAT16)
    assert plain.name == PLAIN
    reason = "this processor has no AMX, or the system does not enable it"
    assert f"; not amx: {reason}; not onednn: " in why(AUTO, plain, BFLOAT16)
    with pytest.raises(StartupError, match="cannot be amx: this processor has no AMX"):
        load_vision_backend(AMX, BFLOAT16)


@pytest.mark.usefixtures("on_intel")
def test_without_its_folder_or_numba_amx_is_refused_and_auto_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.nn.backends.workload.has_amx", lambda: True)
    monkeypatch.setitem(sys.modules, VISION_BACKENDS[AMX].module, None)
    plain = load_vision_backend(AUTO, BFLOAT16)
    assert plain.name == PLAIN
    assert "`pip install 'saccade-vlm[cpu]'` installs it" in why(AUTO, plain, BFLOAT16)
    assert "pip" not in why(AUTO, plain, Workload())
    with pytest.raises(StartupError, match=r"cannot be amx: it is not installed .*saccade-vlm\[cpu\]"):
        load_vision_backend(AMX, BFLOAT16)


class Borders:
    """A vision backend that reads borders on the device alone."""

    name = "borders"
    metadata = ("cu_seqlens",)

    def packed(self, *_: object) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.usefixtures("on_intel")
def test_missing_metadata_is_refused_before_the_launch() -> None:
    backend: VisionAttentionBackend = Borders()  # type: ignore[assignment]
    check_metadata(backend, PackedLayout(torch.tensor([0, 4]), 4, (4,)))
    with pytest.raises(ValueError, match="borders needs cu_seqlens"):
        check_metadata(backend, PackedLayout(None, 4, (4,)))  # type: ignore[arg-type]
    layout = PagedLayout(torch.zeros(1), None, torch.ones(1), (1,), (1,), 1, BLOCK, torch.zeros(1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="torch_sdpa needs block_tables"):
        ForwardContext(torch.zeros(3, 1), layout, [], load_backend(AUTO), None)


@pytest.mark.ci
def test_a_cpu_does_without_torchs_compiler() -> None:
    """Its import takes half a second of every start."""
    program = "import sys, saccade.nn.backends.torch_sdpa; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
