"""The executor of one device: its calls launch work, and only `collect_output` waits for the device."""

import pytest
import torch
import toy_network
from waits import CPU, META, NoWaiting

from saccade.engine.core.step import (
    Chunk,
    DrawMask,
    PromptScores,
    RowCounts,
    RowStart,
    SamplingInput,
    StateMove,
    StateSave,
    StepInput,
    TableChange,
)
from saccade.engine.executor import logprobs
from saccade.engine.executor.caches import Caches, CacheSizes
from saccade.engine.executor.execution import Execution
from saccade.engine.executor.local import LocalExecutor
from saccade.engine.executor.model_runner import ModelRunner
from saccade.engine.executor.threads import Threads
from saccade.nn.backends import load_backend, load_vision_backend
from saccade.protocol.request import SamplingParams

COUNTS = (RowCounts(3, b"\3" + bytes(7), b"\1" + bytes(7)),)
PARAMS = (
    SamplingParams(max_tokens=4, temperature=0),
    SamplingParams(max_tokens=4, temperature=0.7, top_p=0.5, top_k=7, min_p=0.1, num_logprobs=2),
    SamplingParams(max_tokens=4, temperature=0, allowed_token_ids=(3, 4), logit_bias={5: 1.0}, num_logprobs=0),
    SamplingParams(max_tokens=4, temperature=0, repetition_penalty=1.5, stop_token_ids=(7,), min_tokens=2),
)


def executor(device: torch.device) -> LocalExecutor:
    network = toy_network.Network(toy_network.Spec()).to(device)
    execution = Execution(load_backend("torch_sdpa"), load_vision_backend("torch_sdpa"), Threads(1, 0))
    caches = Caches(network.spec.kv_specs, CacheSizes(256, 16, 4, 2, num_kept=2), torch.float32, device)
    return LocalExecutor(ModelRunner(network, execution, caches))


def prefill() -> tuple[StepInput, SamplingInput]:
    """Four rows start; prompts of several lengths, one beyond the shortest group of decodes."""
    lengths = (5, 17, 600, 33)
    started = tuple(RowStart(row, row, params, 0) for row, params in enumerate(PARAMS))
    tables = tuple(
        TableChange(row, 0, tuple(range(64 * row, 64 * row + -(-(length + 9) // 16))))
        for row, length in enumerate(lengths)
    )
    chunks = tuple(
        Chunk(row, 0, length, tuple(range(length % 7, 7)) * (length // 7) + (1,) * length, draws=True)
        for row, length in enumerate(lengths)
    )
    chunks = tuple(
        Chunk(chunk.row, 0, chunk.num_tokens, (chunk.token_ids or ())[: chunk.num_tokens], draws=True, saves=saves)
        for chunk, saves in zip(chunks, ((), (StateSave(16, 0), StateSave(17, 1)), (), ()), strict=True)
    )
    return StepInput(1, started=started, tables=tables, chunks=chunks), sampling(1, PromptScores(1, 2, (4, 5, 6), 2))


def decode() -> tuple[StepInput, SamplingInput]:
    chunks = tuple(Chunk(row, length, 1, None, draws=True) for row, length in enumerate((5, 17, 600, 33)))
    return StepInput(2, chunks=chunks), sampling(2)


def proposals() -> tuple[StepInput, SamplingInput]:
    chunks = tuple(
        Chunk(row, length, 3, (7, 8, 9), draws=True, num_proposed=2) for row, length in enumerate((6, 18, 601, 34))
    )
    return StepInput(3, chunks=chunks), SamplingInput(
        3,
        uniforms=(0.5,) * 12,
        num_top=(None, 2) * 6,
        too_short=(9, 10),
        counts=COUNTS,
        masks=(DrawMask(4, b"\377" * 12),),
    )


def rewound() -> tuple[StepInput, SamplingInput]:
    chunks = tuple(Chunk(row, length, 1, (7,), draws=True) for row, length in enumerate((7, 19, 602, 35)))
    return StepInput(4, rewind=(StateMove(0, 0), StateMove(2, 1)), chunks=chunks), sampling(4)


def sampling(number: int, *prompt_scores: PromptScores) -> SamplingInput:
    return SamplingInput(
        number,
        uniforms=(0.1, 0.5, 0.2, 0.9),
        num_top=(None, 2, 0, None),
        too_short=(3,),
        counts=COUNTS,
        prompt_scores=prompt_scores,
    )


def test_a_step_is_launched_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    monkeypatch.setattr(logprobs.HostCopy, "wait", lambda copy: waited.append(copy) or [])
    subject = executor(META)
    with NoWaiting() as mode:
        for step, wanted in (prefill(), decode(), proposals(), rewound()):
            subject.launch(step, wanted)
    assert mode.num_copies > 4
    assert waited == []


def test_launched_ahead_equals_one_by_one() -> None:
    """A step may be launched before the last one was collected."""
    one_by_one, ahead = executor(CPU), executor(CPU)
    expected = []
    for step, wanted in (prefill(), decode()):
        one_by_one.launch(step, wanted)
        expected.append(one_by_one.collect_output())
    for step, wanted in (prefill(), decode()):
        ahead.launch(step, wanted)
    found = [ahead.collect_output(), ahead.collect_output()]
    for one, other in zip(expected, found, strict=True):
        assert (one.number, one.token_ids, one.logprobs) == (other.number, other.token_ids, other.logprobs)
        assert one.prompt_logprobs == other.prompt_logprobs
        assert [logprob is None for logprob in one.logprobs] == [True, False, False, True]
    assert [len(scores) for scores in expected[0].prompt_logprobs] == [3]


def test_the_sampling_of_another_step_is_refused() -> None:
    subject = executor(CPU)
    (first, wanted), (_, other) = prefill(), decode()
    with pytest.raises(ValueError, match="step 1 cannot be sampled as step 2"):
        subject.launch(first, other)
    subject.launch(first, wanted)
    assert subject.collect_output().number == 1
