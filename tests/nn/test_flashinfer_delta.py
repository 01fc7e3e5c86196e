"""The delta rule by FlashInfer, played on a CPU, against the plain one; what it declines; the trial before it is used."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import published_delta
import pytest
import torch
from structlog.testing import capture_logs

from saccade.engine.config import EngineConfig
from saccade.engine.executor.execution import choose_operations
from saccade.engine.executor.loader import load_model
from saccade.models.backbones.gated_delta_net import GatedDeltaNet
from saccade.nn import ops
from saccade.nn.backends import Workload
from saccade.nn.backends.trial import of_delta_rule
from saccade.nn.delta_rule import Gates, RuleHeads
from saccade.nn.ops import OF_STATES, PLAIN, resolve

BF16, GPU = torch.bfloat16, torch.device("cuda")
KEY_HEADS, HEADS, WIDTH, ROWS = 2, 4, 128, 5


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(lengths: tuple[int, ...], rows: tuple[int, ...]) -> tuple[object, ...]:
    """Heads and gates are parts of wider rows, as a layer's products have them."""
    count = sum(lengths)
    qkv = drawn(count, 2 * KEY_HEADS + HEADS, WIDTH, seed=3).to(BF16)
    q, k, v = qkv.split_with_sizes((KEY_HEADS, KEY_HEADS, HEADS), 1)
    ba = drawn(count, 2 * HEADS, seed=4).to(BF16)
    b, a = ba.chunk(2, -1)
    gates = Gates(0.1 * drawn(HEADS, seed=5), drawn(HEADS, seed=6), a, b)
    return q, k, v, gates, torch.tensor(rows, dtype=torch.int32), lengths


@pytest.mark.parametrize(("lengths", "rows"), [((1, 1, 1), (4, 0, 2)), ((1, 70), (3, 1)), ((5,), (2,))])
def test_steps(lengths: tuple[int, ...], rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    published_delta.install(monkeypatch)
    fast = resolve("cuda", BF16, OF_STATES).gated_delta_rule
    *tokens, places, counts = inputs(lengths, rows)
    plain_states = drawn(ROWS, HEADS, WIDTH, WIDTH, seed=9)
    states = plain_states.transpose(-1, -2).contiguous()
    for _ in range(2):  # the second step goes on from the states of the first
        found = fast(*tokens, states, places, counts, None)  # type: ignore[arg-type]
        expected = ops.gated_delta_rule(*tokens, plain_states, places, counts)  # type: ignore[arg-type]
        assert (found.dtype, expected.dtype) == (BF16, torch.float32)
        torch.testing.assert_close(found.float(), expected, atol=0.03, rtol=0.03)
        torch.testing.assert_close(states.transpose(-1, -2), plain_states, atol=0.03, rtol=0.03)


def test_proposals_keep_the_state_after_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    published_delta.install(monkeypatch)
    fast = resolve("cuda", BF16, OF_STATES).gated_delta_rule
    *tokens, places, counts = inputs((3, 3), (1, 0))
    trail = torch.tensor([[5, 7, 1], [6, 2, 0]])
    plain_states = drawn(8, HEADS, WIDTH, WIDTH, seed=9)
    states = plain_states.transpose(-1, -2).contiguous()
    found = fast(*tokens, states, places, counts, trail)  # type: ignore[arg-type]
    expected = ops.gated_delta_rule(*tokens, plain_states, places, counts, trail)  # type: ignore[arg-type]
    torch.testing.assert_close(found.float(), expected, atol=0.03, rtol=0.03)
    torch.testing.assert_close(states.transpose(-1, -2), plain_states, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("what", ["width", "capability"])
def test_what_no_kernel_takes_goes_to_the_plain_rule(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    published_delta.install(monkeypatch, (8, 0) if what == "capability" else (9, 0))
    width = 64 if what == "width" else WIDTH
    states = drawn(ROWS, HEADS, width, width)
    q, k, v, gates, rows, lengths = inputs((1, 1), (4, 0))
    args = *(part[..., :width] for part in (q, k, v)), gates  # type: ignore[index]
    kept = states.clone()
    found = resolve("cuda", BF16, OF_STATES).gated_delta_rule(*args, states, rows, lengths, None)  # type: ignore[arg-type]
    assert torch.equal(found, ops.gated_delta_rule(*args, kept, rows, lengths))  # type: ignore[arg-type]
    assert torch.equal(states, kept)


RELEASED = RuleHeads(2, 4, WIDTH, WIDTH)


@pytest.mark.parametrize("num_proposed", [0, 3])
def test_the_trial_compiles_every_kernel_of_the_model_s_heads(
    num_proposed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are chosen by the heads, the number of sequences, and that of proposals."""
    published_delta.install(monkeypatch)
    met = set()

    def rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        states, rows, lengths, trail = rest[1:]
        kind = "proposals" if trail is not None else "decodes" if max(lengths) == 1 else "chunks"
        met.add((kind, len(rows), max(lengths), q.shape[1], v.shape[1], tuple(states.shape[1:])))
        return ops.gated_delta_rule(q, k, v, *rest)

    operations, seen = replace(PLAIN, gated_delta_rule=rule), list[tuple[int, int]]()
    most, note = 3, lambda *counts: seen.append(counts)
    of_delta_rule(operations, Workload(torch.device("cpu"), BF16), RELEASED, num_proposed, most, note)
    heads = (2, 4, (4, WIDTH, WIDTH))
    proposals = {("proposals", count, 1 + number) for count in (1, 2, 3) for number in range(1, num_proposed + 1)}
    kinds = {("decodes", 1, 1), *(("chunks", count, 70) for count in (1, 2, 3)), *proposals}
    assert met == {(*kind, *heads) for kind in kinds}
    assert seen == [(done, len(kinds)) for done in range(len(kinds))]


def test_a_layer_knows_its_heads_on_each_rank(network_folder: Callable[[str], Path]) -> None:
    network = load_model(EngineConfig(str(network_folder("qwen3_5")), "tiny", device="cpu"), lambda *_: None).module
    config = network.spec.text.delta_net
    heads = {layer.rule_heads for layer in network.modules() if isinstance(layer, GatedDeltaNet)}
    assert heads == {(config.num_key_heads, config.num_value_heads, config.key_width, config.value_width)}


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_vl"])
def test_a_model_with_states_tries_the_kernel_first(
    name: str, network_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    published_delta.install(monkeypatch)
    monkeypatch.setattr(GatedDeltaNet, "rule_heads", RELEASED)  # a tiny network's are too narrow for the kernel
    config = EngineConfig(str(network_folder(name)), "tiny", device="cpu", max_num_seqs=2)
    model = load_model(config, lambda *_: None)
    workload = Workload(torch.device("cpu"), BF16)
    monkeypatch.setattr(
        "saccade.engine.executor.execution.OF_STATES",
        {("gated_delta_rule", "cpu", BF16): "saccade.nn.flashinfer_delta"},
    )

    def is_fast(config: EngineConfig) -> bool:
        return choose_operations(config, model, workload).gated_delta_rule is not ops.gated_delta_rule

    assert is_fast(config) == (name == "qwen3_5")
    assert not is_fast(replace(config, role="prefill"))
    tried: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        record = lambda *arguments: tried.append(arguments[3:5])  # noqa: E731
        patch.setattr("saccade.engine.executor.execution.trial.of_delta_rule", record)
        most = {"max_num_seqs": 5, "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'}
        is_fast(replace(config, **most))  # type: ignore[arg-type]
    assert tried == [(3, 5)] * (name == "qwen3_5")
    proposing = replace(config, speculative_config='{"method": "ngram", "num_speculative_tokens": 3}')
    assert is_fast(proposing) == (name == "qwen3_5")

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("nvcc failed")

    monkeypatch.setattr("saccade.nn.flashinfer_delta.chunk_gated_delta_rule", failing)
    with capture_logs() as lines:
        assert not is_fast(config)
    assert ["its library fails" in line["reason"] for line in lines] == [True] * (name == "qwen3_5")
