"""What the engine measures before its first request."""

from pathlib import Path

from saccade.engine import startup
from saccade.engine.config import EngineConfig
from saccade.engine.executor.execution import prepare
from saccade.engine.executor.loader import load_model


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
    startup._use_all_memory(config, model, prepare(config, model))
