"""No step of a network makes the host wait for a GPU: not the encoder, the layers, the graphs of decodes or the draws.

Steps of a real network on a CPU are launched again on torch's meta device, with everything that a GPU takes but
FlashInfer: graphs, and Triton's kernels, which do nothing there.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from captures import Again
from checkpoints import NETWORKS
from tables import table
from waits import META, NoWaiting

from saccade.engine.core.step import SamplingInput, StepInput
from saccade.engine.executor import encoder
from saccade.engine.executor.caches import Caches, CacheSizes
from saccade.engine.executor.decode_graphs import DecodeGraphs
from saccade.engine.executor.execution import Execution
from saccade.engine.executor.loader import empty_network
from saccade.engine.executor.local import LocalExecutor
from saccade.engine.executor.model_runner import ModelRunner
from saccade.engine.executor.threads import Threads
from saccade.models.files import read_model_files
from saccade.models.spec import Latent
from saccade.nn import gpu, gpu_draws, grouped_experts
from saccade.nn.backends import torch_sdpa, triton_attention
from saccade.nn.layers import use_operations
from saccade.nn.ops import resolve

EVERYDAY = ("qwen3_vl", "qwen3_vl_moe", "gemma4_e2b")
"""Whose tests are quick, one with experts and one with windows and embeddings of each layer."""
WAITS = {"qwen3_5_moe"}
"""The rows of its experts are no multiples of 16 bytes, unlike those of releases, so no kernel for GPUs takes them."""

FAMILIES = [
    pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.conformance)
    for name in NETWORKS
    if name not in WAITS
]
KERNELS = {
    triton_attention: ("decode_kernel", "packed_kernel"),
    gpu: ("heads_kernel", "gated_kernel", "conv_kernel", "norm_kernel", "pairs_kernel", "choice_kernel"),
    grouped_experts: ("places_kernel", "rows_kernel", "sum_kernel"),
    gpu_draws: ("draw_kernel",),
}
DRAWS: dict[str, Any] = {
    "temperature": 0.7, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5, "num_logprobs": 2,
    "num_prompt_logprobs": 1, "logit_bias": {5: 1.0}, "min_tokens": 2, "stop_token_ids": (7,),
}  # fmt: skip


class Nothing:
    """A kernel that does nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Nothing())
    monkeypatch.setattr(encoder, "FAILURES", ())  # else an image that cannot be encoded fails alone


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("on_gpu")
def test_a_launch_of_a_network_waits_for_no_device(name: str, network_folder: Callable[[str], Path]) -> None:
    folder = network_folder(name)
    steps, sizes = steps_on_cpu(folder)
    subject, graphs = executor_on_meta(folder, sizes)
    with NoWaiting() as mode:
        for step, sampling in steps:
            subject.launch(step, sampling)
    assert mode.num_copies > 4
    assert any(step.images for step, _ in steps)
    assert any(sampling.uniforms for _, sampling in steps)
    assert graphs.replayed


def steps_on_cpu(folder: Path) -> tuple[list[tuple[StepInput, SamplingInput]], CacheSizes]:
    """Prompts with images, one in chunks, and decodes: greedy ones, and draws with all that a request may ask for."""
    subject = engines.engine(folder, max_num_seqs=3, num_blocks=96, max_num_batched_tokens=48)
    found: list[tuple[StepInput, SamplingInput]] = []
    launch = subject.executor.launch

    def recording(step: StepInput, sampling: SamplingInput) -> None:
        found.append((step, sampling))
        launch(step, sampling)

    subject.executor.launch = recording  # type: ignore[method-assign]
    engines.drain(
        subject,
        engines.request(folder, [3, ((96, 160), 2), 6], "a", max_tokens=4),
        engines.request(folder, [9, ((64, 64), 3), 70], "b", max_tokens=5, **DRAWS),
    )
    return found, engines.local(subject).runner.caches.sizes


def executor_on_meta(folder: Path, sizes: CacheSizes) -> tuple[LocalExecutor, Again]:
    """The network without weights, computed as on a GPU; graphs of decodes are calls again."""
    _, network = empty_network(read_model_files(folder))
    network.to(torch.bfloat16)
    network.finish()
    use_operations(network, resolve("cuda", torch.bfloat16))
    kv_specs = network.spec.kv_specs
    has_latent_layers = any(isinstance(kv_spec, Latent) for kv_spec in kv_specs)
    backend = torch_sdpa.AttentionBackend() if has_latent_layers else triton_attention.AttentionBackend()
    execution = Execution(backend, triton_attention.VisionAttentionBackend(), Threads(1, 0))
    caches = Caches(kv_specs, replace(sizes, num_padding=1), torch.bfloat16, META)
    runner, again = ModelRunner(network, execution, caches), Again()
    runner.graphs = DecodeGraphs(network, backend, caches, sizes.num_blocks, again)
    return LocalExecutor(runner), again


READS: list[Callable[[torch.Tensor], object]] = [
    lambda x: x.tolist(),
    lambda x: x[0].item(),
    lambda x: bool(x[0] > 0),
    lambda x: x.cpu(),
    lambda x: x.nonzero(),
    lambda x: x.unique(),
    lambda x: x.repeat_interleave(x.long()),
]
COPIES: list[Callable[[torch.Tensor], object]] = [
    lambda x: torch.tensor(2.0, device=x.device),
    lambda x: torch.as_tensor([1, 2], device=x.device),
    lambda x: x.new_tensor([1.0]),
    lambda x: x[[1, 2]],
    lambda x: x[x > 0],
    lambda x: x.copy_(torch.zeros(9)),
    lambda x: x.__setitem__(slice(2), torch.zeros(2)),
    lambda x: torch.zeros(3).to(x.device),
]


@table("call", [*READS, *COPIES])
def test_what_makes_the_host_wait_is_refused(call: Callable[[torch.Tensor], object]) -> None:
    with NoWaiting(), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        call(torch.zeros(9, device=META))
