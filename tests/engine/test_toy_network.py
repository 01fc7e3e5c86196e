"""State of more than one kind, from requests to tensors: a toy network with a paged, a latent and a recurrent layer."""

from typing import Any

import engines
import msgspec
import numpy as np
import pytest
import torch
import toy_network

from saccade.engine import startup
from saccade.engine.config import EngineConfig
from saccade.engine.core.step import SamplingInput, StepInput, StepOutput
from saccade.engine.executor import memory
from saccade.engine.executor.execution import prepare_execution
from saccade.engine.executor.loader import LoadedModel
from saccade.engine.loop import Engine
from saccade.nn.context import RecurrentState
from saccade.protocol.request import EngineRequest, SamplingParams

BLOCK = 16
LENGTHS = (1, 15, 16, 17, 40, 71, 100)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return toy_network.load()


def engine(model: LoadedModel, **settings: Any) -> Engine:
    defaults = {"device": "cpu", "num_blocks": 64, "max_num_seqs": 4, "attention_backend": "torch_sdpa"}
    config = EngineConfig("", "toy", **{**defaults, "state_snapshot_blocks": 2, "num_state_snapshots": 16, **settings})
    config.check()
    return engines.poison(
        startup.assemble(config, model, prepare_execution(config, model), startup.allocate(config, model))
    )


def request(length: int, seed: int = 0, num_samples: int = 1, **sampling: Any) -> EngineRequest:
    """A prompt of random tokens; prompts of one seed begin alike. What is drawn is the same in each run."""
    token_ids = np.random.default_rng(seed).integers(0, toy_network.V, length).tolist()
    params = SamplingParams(**{"max_tokens": 20, "temperature": 0, "seed": 1, **sampling})
    return EngineRequest(request_id=f"{seed}:{length}", token_ids=token_ids, sampling=params, num_samples=num_samples)


def check(model: LoadedModel, subject: Engine, *asked: EngineRequest) -> engines.Outcome:
    """Answer, and compare every token's logits, and every greedy token, with the reference's."""
    logits = engines.record_logits(subject)
    outcome = engines.drain(subject, *asked)
    answers = [(one, f"{one.request_id}#{index}" if index else one.request_id)
               for one in asked for index in range(one.num_samples)]  # fmt: skip
    assert set(outcome.answers) == {name for _, name in answers}
    for one, name in answers:
        token_ids = outcome.answers[name].token_ids
        assert len(token_ids) == one.sampling.max_tokens
        assert isinstance(model.network, toy_network.Network)
        expected = toy_network.reference(model.network, one.token_ids + token_ids[:-1])[len(one.token_ids) - 1 :]
        torch.testing.assert_close(torch.stack(logits[name]).double(), expected, rtol=1e-4, atol=1e-4)
        if one.sampling.temperature == 0:
            assert expected.argmax(-1).tolist() == token_ids
    assert engines.is_idle(subject)
    return outcome


def steps_of(subject: Engine) -> list[tuple[bytes, bytes, StepOutput]]:
    """Return a list that fills with the steps that the engine has executed, serialised, and their outputs."""
    found: list[tuple[bytes, bytes, StepOutput]] = []
    steps: list[bytes] = []
    samplings = engines.steps_of(subject, lambda step: steps.append(msgspec.msgpack.encode(step)))
    collect = subject.executor.collect_output

    def recording() -> StepOutput:
        found.append((steps[len(found)], msgspec.msgpack.encode(samplings[len(found)]), output := collect()))
        return output

    subject.executor.collect_output = recording  # type: ignore[method-assign]
    return found


def test_a_block_counts_paged_and_latent_layers(model: LoadedModel) -> None:
    caches = engines.local(engine(model)).runner.caches
    in_blocks = [cache for cache in caches.layers if not isinstance(cache, RecurrentState)]
    num_bytes = sum(tensor.nbytes for cache in in_blocks for tensor in cache if isinstance(tensor, torch.Tensor))
    assert num_bytes == 64 * memory.block_bytes(model.network.spec.kv_specs, BLOCK, torch.float32)


@pytest.mark.parametrize("num_tokens", [1, 7, 16, 64])
def test_answers_equal_the_reference_in_any_chunks(model: LoadedModel, num_tokens: int) -> None:
    subject = engine(model, max_num_batched_tokens=num_tokens, max_num_seqs=min(4, num_tokens))
    check(model, subject, *(request(length, seed=length) for length in LENGTHS))
    assert subject.load().cached_tokens_total == 0


@pytest.mark.parametrize("num_tokens", [7, 64])
def test_prefixes_resume_from_checkpoints(model: LoadedModel, num_tokens: int) -> None:
    subject = engine(model, max_num_batched_tokens=num_tokens)
    check(model, subject, request(100))
    asked = [request(length) for length in (33, 34, 97, 100, 110)]
    outcome = check(model, subject, *asked)
    # Checkpoints are behind every second block, and behind the last whole one of the prompt of 100.
    assert [outcome.answers[one.request_id].num_cached_tokens for one in asked] == [32, 32, 96, 96, 96]
    follow_up = msgspec.structs.replace(
        asked[4], request_id="next", token_ids=asked[4].token_ids + outcome.answers["0:110"].token_ids + [1] * 9
    )
    assert check(model, subject, follow_up).answers["next"].num_cached_tokens == 128


def test_checkpoints_are_evicted(model: LoadedModel) -> None:
    subject = engine(model, num_state_snapshots=2)
    for _ in range(2):
        check(model, subject, *(request(length, seed=length) for length in LENGTHS))
    check(model, subject, request(100, seed=100))
    assert check(model, subject, request(100, seed=100)).answers["100:100"].num_cached_tokens == 96


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preemption_changes_no_answer(model: LoadedModel, enable_prefix_caching: bool) -> None:
    subject = engine(model, num_blocks=9, max_num_batched_tokens=32, enable_prefix_caching=enable_prefix_caching)
    check(model, subject, *(request(length, seed=length, max_tokens=40) for length in (30, 40, 50, 60)))
    assert subject.load().preemptions_total > 0


@pytest.mark.parametrize("num_tokens", [7, 64])
def test_samples_begin_from_the_prompt_s_checkpoint(model: LoadedModel, num_tokens: int) -> None:
    subject = engine(model, max_num_batched_tokens=num_tokens)
    steps = steps_of(subject)
    asked = (request(60, num_samples=3, temperature=1.0, seed=5), request(20, seed=7))
    outcome = check(model, subject, *asked)
    assert len({tuple(answer.token_ids) for answer in outcome.answers.values()}) == 4
    restored = [move for step, _, _ in steps for move in msgspec.msgpack.decode(step, type=StepInput).restore]
    assert len(restored) == 2
    assert len({move.checkpoint for move in restored}) == 1


def test_a_recycled_state_never_leaks(model: LoadedModel) -> None:
    """Rows, blocks and checkpoints that nothing is kept in are spoilt behind every step."""
    subject = engine(model, max_num_seqs=2, enable_prefix_caching=False, num_blocks=20)

    asked = [request(length, seed=length) for length in LENGTHS]
    expected = check(model, engine(model), *asked).answers
    answers = engines.drain(subject, *asked, each_step=lambda: engines.spoil_unused(subject)).answers
    assert {name: one.token_ids for name, one in answers.items()} == {
        name: one.token_ids for name, one in expected.items()
    }


def test_a_reset_forgets_every_kind(model: LoadedModel) -> None:
    subject = engine(model)
    asked = [request(length, seed=length) for length in LENGTHS]
    for _ in range(2):
        outcome = check(model, subject, *asked)
        assert not any(answer.num_cached_tokens for answer in outcome.answers.values())
        subject.scheduler.reset_caches(prefix=True, media=False)
        engines.poison(subject)


def test_executors_that_get_the_same_steps_hold_the_same(model: LoadedModel) -> None:
    settings = {"num_blocks": 12, "max_num_batched_tokens": 40, "num_state_snapshots": 3, "state_snapshot_blocks": 1}
    subject, twin = engine(model, **settings), engine(model, **settings)
    steps = steps_of(subject)
    check(model, subject, *(request(length, seed=1) for length in LENGTHS))
    check(model, subject, *(request(length, seed=1, num_samples=2, temperature=1.0) for length in (50, 90)))
    moves = [msgspec.msgpack.decode(step, type=StepInput) for step, _, _ in steps]
    assert any(step.restore for step in moves)
    assert any(len(chunk.saves) > 1 for step in moves for chunk in step.chunks)
    assert subject.load().preemptions_total > 0
    for step, sampling, output in steps:
        engines.local(twin).launch(
            msgspec.msgpack.decode(step, type=StepInput), msgspec.msgpack.decode(sampling, type=SamplingInput)
        )
        again = engines.local(twin).collect_output()
        assert (again.number, again.token_ids) == (output.number, output.token_ids)
    for own, other in zip(engines.cache_tensors(subject), engines.cache_tensors(twin), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0, equal_nan=True)
