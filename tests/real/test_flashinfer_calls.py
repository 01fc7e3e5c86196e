"""Each call of Saccade to FlashInfer, bound to the signatures of its releases: names, order, shapes and dtypes."""

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import published
import published_delta
import pytest
import torch
from attention import BATCHES, OPTIONS, CapturedDecodes, attend, attend_packed
from latents import SCALE, WIDTH, draw, step
from latents import attend as attend_latents
from libraries import ROOT, Library
from packaging.requirements import Requirement
from published_products import MODULES

from saccade.nn.backends import Workload, load_backend, load_vision_backend
from saccade.nn.backends.workload import HALF
from saccade.nn.context import ForwardContext, LatentCache

pytestmark = pytest.mark.real
SOURCES = ROOT / "src" / "saccade"
GPU = torch.device("cuda")
DECODE, PREFILL = "flashinfer.BatchDecodeWithPagedKVCacheWrapper", "flashinfer.BatchPrefillWithPagedKVCacheWrapper"
CUDNN = "flashinfer.cudnn.cudnn_batch_prefill_with_kv_cache"
LATENTS, METADATA = "flashinfer.mla.BatchMLAPagedAttentionWrapper", "flashinfer.mla.MLAPlanMetadata"
PRODUCTS = {
    f"{module}.{function.__name__}"
    for module, functions in (*MODULES.items(), *published_delta.MODULES.items())
    for function in functions
}
BOUND = {DECODE, PREFILL, CUDNN, LATENTS, METADATA, "flashinfer.__version__", *PRODUCTS}
"""What the tests of this folder bind; `test_nothing_else_is_used` holds the list against the source."""

Bind = Callable[..., None]


@pytest.fixture
def checked(flashinfer: Library, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Play the library as `published` does, and bind each call first. The result counts checked tensors by function."""
    published.install(monkeypatch)
    counts: dict[str, int] = {}
    known: dict[str, int] = {}

    def bind(name: str, *args: Any, **kwargs: Any) -> None:
        call = flashinfer.call(name)
        arguments = call.bind(*args, **kwargs)
        counts[name] = counts.get(name, 0) + call.check(arguments, known)

    for name in (DECODE, PREFILL):
        monkeypatch.setattr(sys.modules["flashinfer"], name.rpartition(".")[2], _wrapper(name, bind, known))
    monkeypatch.setattr(sys.modules["flashinfer.mla"], LATENTS.rpartition(".")[2], _wrapper(LATENTS, bind, known))
    csr = published.MLAPlanMetadata.csr

    def bound_csr(*args: Any) -> Any:
        bind(f"{METADATA}.csr", *args)
        return csr(*args)

    monkeypatch.setattr(published.MLAPlanMetadata, "csr", bound_csr)
    original = published.cudnn_batch_prefill_with_kv_cache

    def cudnn(*args: Any, **kwargs: Any) -> Any:
        known.clear()
        bind(CUDNN, *args, **kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(sys.modules["flashinfer.cudnn"], CUDNN.rpartition(".")[2], cudnn)
    return counts


def _wrapper(name: str, bind: Bind, known: dict[str, int]) -> type:
    played: Any = getattr(published, name.rpartition(".")[2])

    class Wrapper(played):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            bind(f"{name}.__init__", *args, **kwargs)
            super().__init__(*args, **kwargs)

        def plan(self, *args: Any, **kwargs: Any) -> None:
            known.clear()
            bind(f"{name}.plan", *args, **kwargs)
            self.known = dict(known, head_dim=args[5 if name == DECODE else 6]) if args else dict(known)
            super().plan(*args, **kwargs)

        def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            known.clear()
            known.update(self.known)
            bind(f"{name}.run", *args, **kwargs)
            return super().run(*args, **kwargs)  # type: ignore[no-any-return]

    return Wrapper


def test_paged_attention(checked: dict[str, int]) -> None:
    for dtype in HALF:
        backend = load_backend("flashinfer", Workload(GPU, dtype, head_sizes=frozenset({(64, 64)})))
        for queries, contexts in BATCHES:
            attend(backend, queries, contexts, dtype, 64, dim=64)
        for options in OPTIONS:
            attend(backend, [1, 1, 7, 4], [30, 2, 7, 40], dtype, 64, options, dim=64)
        attend(backend, [1, 1, 7, 4], [30, 2, 7, 40], dtype, 64, dim=64, scales=(0.01, 0.02))
        CapturedDecodes(backend, dtype, 3, 12).step([9, 4, 40])
    for wrapper in (DECODE, PREFILL):
        assert checked[f"{wrapper}.plan"] > 3 * len(BATCHES)
        assert checked[f"{wrapper}.run"] > 3 * len(BATCHES)


def test_latent_attention(checked: dict[str, int]) -> None:
    """The library's documents name no shapes here; `published` does."""
    for dtype in HALF:
        backend = load_backend("flashinfer", Workload(GPU, dtype, has_latent_layers=True))
        for queries, contexts in BATCHES:
            attend_latents(backend, step(queries, contexts, dtype), *draw(queries, contexts, dtype))
        made = step([1, 1], [9, 40], dtype)
        q, latents = draw([1, 1], [9, 40], dtype)
        plan = backend.plan_captured(made.layout, dtype)
        graph = ForwardContext(
            torch.zeros(3, 2, dtype=torch.int64), made.layout, [LatentCache(made.cache)], backend, plan
        )
        backend.latent(q, torch.stack([latent[-1] for latent in latents]), 0, graph, value_width=WIDTH, scale=SCALE)
        backend.replan(plan, made.layout)
    assert {f"{LATENTS}.__init__", f"{LATENTS}.plan", f"{LATENTS}.run", f"{METADATA}.csr"} <= checked.keys()


def test_attention_of_towers(checked: dict[str, int]) -> None:
    for dtype in HALF:
        backend = load_vision_backend("flashinfer_cudnn", Workload(GPU, dtype, head_sizes=frozenset({(72, 72)})))
        for lengths in ((6,), (3, 8, 1), (7,) * 70):
            attend_packed(backend, lengths, dtype, dim=72)
    assert checked[CUDNN] >= 7 * 2 * 3


def test_a_call_that_the_library_refuses_is_found(flashinfer: Library) -> None:
    plan, run = flashinfer.call(f"{PREFILL}.plan"), flashinfer.call(f"{PREFILL}.run")
    with pytest.raises(TypeError, match="missing a required argument: 'page_size'"):
        plan.bind(1, 2, 3, 4, 5, 6, 7)
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        run.bind(1, 2, scale=1.0)
    with pytest.raises(TypeError, match=r"has no parameters \['causal'\]"):
        flashinfer.call(f"{DECODE}.plan").bind(1, 2, 3, 4, 5, 6, 7, causal=True)
    indptr = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(AssertionError, match=r"paged_kv_last_page_len is \[4\].*not"):
        plan.check(plan.bind(indptr, indptr, indptr, indptr, 4, 2, 64, 16), {})
    cudnn = flashinfer.call(CUDNN)
    with pytest.raises(AssertionError, match=r"batch_offsets_q is .*torch.int64, not \['int32'\]"):
        cudnn.check({"batch_offsets_q": indptr.long()}, {"batch_size": 3})


def test_the_extra_brings_no_package_of_another_version(flashinfer: Library) -> None:
    """Kernels that are compiled elsewhere come from packages that must have the library's own version."""
    (metadata,) = flashinfer.root.glob("*.dist-info/METADATA")
    lines = metadata.read_text().partition("\n\n")[0].splitlines()
    needed = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist")]
    needed = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    assert not {"flashinfer-cubin", "flashinfer-jit-cache"} & {one.name for one in needed}
    (torch_needed,) = (one for one in needed if one.name == "torch")
    assert torch_needed.specifier.contains(torch.__version__)


def test_nothing_else_is_used() -> None:
    used = {name for path in SOURCES.rglob("*.py") for name in _used(path)}
    assert used == BOUND


def _used(path: Path) -> Iterator[str]:
    """Yield what a file takes from libraries for GPUs, by dotted names."""
    tree = ast.parse(path.read_text())
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_gpu_library(node.module):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if _is_gpu_library(alias.name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
            yield ast.unparse(node)
        elif (
            isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and ast.unparse(node.args[0]) in modules
        ):
            yield f"{ast.unparse(node.args[0])}.{ast.literal_eval(node.args[1])}"


def _is_gpu_library(module: str | None) -> bool:
    names = ("flashinfer", "deep_gemm", "flash_attn", "flash_attn_interface", "flash_mla", "sgl_kernel", "vllm", "fla")
    return (module or "").partition(".")[0] in names
