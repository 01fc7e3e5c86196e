"""A decode step's time in delta nets and in full attention, by context: `python -m benchmarks.recurrent_decode`.

The decoder has random weights; each step decodes one token of each sequence. Contexts are filled by writing the lengths
into the layout, not by computing prompts: what a step costs does not depend on the numbers in the caches.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.measured import commit, machine
from saccade.engine.executor.caches import Caches, CacheSizes
from saccade.models.backbones.gated_delta_net import GatedDeltaNet
from saccade.models.backbones.hybrid_text import GatedAttention, HybridDecoder
from saccade.models.backbones.text_config import HybridConfig
from saccade.models.qwen_vl.spec import PARTIAL
from saccade.models.spec import KvSpec, Paged
from saccade.nn.backends.torch_sdpa import AttentionBackend
from saccade.nn.context import ForwardContext, PagedLayout
from saccade.nn.layers import finish

CONTEXTS = (1024, 4096, 16384)
NUM_SEQUENCES, NUM_STEPS, NUM_WARM = 4, 40, 5
BLOCK = 16
DEVICE = torch.device("cpu")
TEXT = {
    "vocab_size": 512, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}  # fmt: skip
"""The shape of a small release's text decoder, with fewer layers: six delta nets and two layers of full attention."""


def decoder(config: HybridConfig) -> HybridDecoder:
    """Return a decoder with random weights."""
    made = HybridDecoder(config).eval()
    draw = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw) * parameter.shape[-1] ** -0.5
    finish(made)
    return made


def specs(config: HybridConfig) -> list[KvSpec]:
    """Return what each layer keeps."""
    paged = Paged(config.num_kv_heads, config.head_dim, config.head_dim)
    return [paged if layer in config.full_attention else config.delta_net.state for layer in range(config.num_layers)]


def context(caches: Caches, length: int) -> ForwardContext:
    """Return a step that decodes the last of *length* tokens of each sequence."""
    rows = torch.arange(NUM_SEQUENCES)
    per_row = length // BLOCK
    tables = rows[:, None] * per_row + torch.arange(per_row)
    layout = PagedLayout(
        slot_mapping=tables[:, -1] * BLOCK + BLOCK - 1,
        block_tables=tables,
        context_lengths=torch.full((NUM_SEQUENCES,), length),
        query_lengths=(1,) * NUM_SEQUENCES,
        host_context_lengths=(length,) * NUM_SEQUENCES,
        num_decodes=NUM_SEQUENCES,
        block_size=BLOCK,
        rows=rows,
    )
    backend = AttentionBackend()
    plan = backend.plan(layout, torch.float32)
    positions = torch.full((3, NUM_SEQUENCES), length - 1)
    return ForwardContext(positions, layout, caches.layers, backend, plan)


@contextmanager
def timed(made: HybridDecoder) -> Iterator[dict[type, float]]:
    """Add up the seconds of each kind of mixer while the block runs."""
    seconds: dict[type, float] = {GatedDeltaNet: 0.0, GatedAttention: 0.0}
    mixers = [mixer for mixer in made.modules() if isinstance(mixer, GatedDeltaNet | GatedAttention)]
    for mixer in mixers:
        mixer.add_to = _timing(mixer, seconds)  # type: ignore[method-assign,assignment]
    try:
        yield seconds
    finally:
        for mixer in mixers:
            del mixer.add_to


def _timing(mixer: GatedDeltaNet | GatedAttention, seconds: dict[type, float]) -> Callable[..., torch.Tensor]:
    plain: Callable[..., torch.Tensor] = mixer.add_to

    def timing(*arguments: object) -> torch.Tensor:
        began = time.thread_time()
        result = plain(*arguments)
        seconds[type(mixer)] += time.thread_time() - began
        return result

    return timing


@torch.inference_mode()
def main() -> None:
    """Print a table: medians of a step's milliseconds of processor time, which other processes change little."""
    torch.set_num_threads(1)
    config = HybridConfig.read_decoder(TEXT, PARTIAL)
    made = decoder(config)
    sizes = CacheSizes(NUM_SEQUENCES * max(CONTEXTS) // BLOCK, BLOCK, NUM_SEQUENCES, 0)
    caches = Caches(specs(config), sizes, torch.float32, DEVICE)
    x = torch.randn(NUM_SEQUENCES, config.hidden_size, generator=torch.Generator().manual_seed(1))
    print(f"{machine()}; 1 thread; commit {commit()}\n")
    print("| context | delta nets, ms | full attention, ms | whole step, ms |\n|---|---|---|---|")
    for length in CONTEXTS:
        step = context(caches, length)
        nets, attention, whole = list[float](), list[float](), list[float]()
        for number in range(NUM_WARM + NUM_STEPS):
            with timed(made) as seconds:
                began = time.thread_time()
                made(x, step)
                elapsed = time.thread_time() - began
            if number >= NUM_WARM:
                nets.append(1000 * seconds[GatedDeltaNet])
                attention.append(1000 * seconds[GatedAttention])
                whole.append(1000 * elapsed)
        medians = " | ".join(f"{statistics.median(values):.2f}" for values in (nets, attention, whole))
        print(f"| {length} | {medians} |")


if __name__ == "__main__":
    main()
