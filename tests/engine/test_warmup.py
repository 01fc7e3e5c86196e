"""What the engine measures before its first request."""

from collections.abc import Callable
from pathlib import Path

import engines
import pytest

from saccade.engine import startup, warmup
from saccade.engine.config import EngineConfig
from saccade.engine.executor.execution import prepare
from saccade.engine.executor.loader import load_model
from saccade.engine.executor.ranks.peers import Peers, closed_on_failure, ranks_of


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
    startup._use_all_memory(config, model, prepare(config, model), Peers())


@pytest.mark.parametrize("name", ["llava", "llava_next", "phi3_v", "qwen2_vl"])
def test_memory_is_measured_with_a_picture_that_a_sequence_can_hold(
    name: str, network_folder: Callable[[str], Path]
) -> None:
    config = EngineConfig(str(network_folder(name)), "tiny", device="cpu")
    facts = load_model(config, lambda *_: None).network.facts
    grid = startup.largest_grid(facts, 1 << 20)
    assert facts.item_tokens(grid) + warmup.NUM_OTHER_TOKENS < facts.max_position_embeddings
    assert facts.encode_cost(grid) > facts.encode_cost(facts.square_grid(0)) or name == "llava"


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
        execution = prepare(config, model)
        peers.join(model.network.device)
        startup._use_all_memory(config, model, execution, peers)
        subject = startup.assemble(config, model, execution, startup.allocate(config, model, peers=peers), peers)
        assert engines.drain(subject, asked).answers["a"].token_ids == expected
        assert subject.load().num_blocks > 256
    subject.close()
