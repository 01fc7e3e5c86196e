"""The model's own draft layer proposes tokens: they equal the reference's, and no answer depends on them. F17"""

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
import recordings
import splits
import torch
from references.draft_layer import DraftOracle
from safetensors.torch import load_file, save_file
from tables import table
from test_speculation import comparable
from test_step_ahead import asked

from saccade.engine import loop
from saccade.engine.core.proposal_prices import StepTimes
from saccade.engine.core.schedule import Schedule
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.speculation import SHARE, Speculation
from saccade.engine.core.step import StepInput, StepOutput
from saccade.engine.core.step_builder import PlannedStep
from saccade.engine.loop import Engine
from saccade.errors import StartupError
from saccade.nn.context import KvCache
from saccade.protocol.request import EngineRequest

MTP = '{"method": "mtp", "num_speculative_tokens": 1}'
THREE = '{"method": "qwen3_next_mtp", "num_speculative_tokens": 3}'
Drafts = dict[str, dict[int, tuple[int, ...]]]
"""The drafts by sample and number of tokens of the answer."""


@pytest.fixture(scope="module")
def right(network_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose draft layer is often right: the last token decides almost alone, and it knows the first MLP."""
    folder = shutil.copytree(network_folder("qwen3_5"), tmp_path_factory.mktemp("right") / "model")
    tensors = load_file(folder / "model.safetensors")
    first, draft, norm = "model.language_model.layers.0.", "mtp.layers.0.", "model.language_model.norm.weight"
    for name, tensor in tensors.items():
        is_mlp = name.endswith("mlp.down_proj.weight") and name.startswith("model.language_model")
        if name.endswith(("o_proj.weight", "out_proj.weight")) or (is_mlp and not name.startswith(first)):
            tensor *= 0.04
        if name.startswith((f"{draft}mlp.", f"{draft}post_attention_layernorm.")):
            tensor.copy_(tensors[name.replace(draft, first)])
    tensors[norm] = 4 * (1 + tensors[norm]) - 1  # so that draws seldom differ from the best choice
    hidden = len(tensors[norm])
    save_file(
        tensors
        | {
            "mtp.norm.weight": tensors[norm].clone(),
            "mtp.fc.weight": torch.cat((torch.eye(hidden) / 10, torch.zeros(hidden, hidden)), 1),
            "mtp.pre_fc_norm_embedding.weight": torch.zeros(hidden),
        },
        folder / "model.safetensors",
    )
    return folder


@pytest.fixture(scope="module")
def plain(right: Path) -> dict[str, engines.Answer]:
    """The answers without drafts."""
    return engines.drain(engines.engine(right), *asked(right)).answers


@pytest.mark.ci
@table(
    "settings",
    [
        {},
        {"speculative_config": THREE, "max_num_batched_tokens": 32, "async_scheduling": True},
        {"speculative_config": THREE, "num_blocks": 9, "max_model_len": 140, "state_snapshot_blocks": 1},
    ],
)
def test_no_answer_depends_on_drafts(settings: dict[str, Any], right: Path, plain: dict[str, engines.Answer]) -> None:
    """Samples, images, penalties, biases, grammars, log probabilities and limits in one batch."""
    subject = engines.poison(engines.engine(right, **{"speculative_config": MTP, **settings}))
    assert comparable(engines.drain(subject, *asked(right)).answers) == comparable(plain)
    load = subject.load()
    assert load.draft_tokens_total > load.accepted_tokens_total > 20
    assert engines.is_idle(subject)


def test_only_verified_tokens_are_in_the_prefix_cache(right: Path) -> None:
    requests = [engines.request(right, [length], str(length), length, max_tokens=24) for length in (5, 16, 30, 47)]
    stored = []
    for settings in ({}, {"speculative_config": MTP}):
        subject = engines.engine(right, **settings)
        engines.drain(subject, *requests)
        stored.append({event.key for event in subject.scheduler.block_manager.paged_blocks.snapshot()})
    assert subject.load().accepted_tokens_total
    assert stored[0] == stored[1]


def noted(subject: Engine, patch: pytest.MonkeyPatch) -> Drafts:
    """A dict that fills with the drafts of *subject*."""
    found: Drafts = defaultdict(dict)
    take = loop.take_results

    def taking(scheduler: Scheduler, schedule: Schedule, plan: PlannedStep, output: StepOutput) -> None:
        take(scheduler, schedule, plan, output)
        for one in plan.drawing if scheduler is subject.scheduler else ():
            if one.draft:
                name = f"{one.request_id}#{one.index}" if one.index else one.request_id
                found[name][one.num_generated_tokens] = one.draft

    patch.setattr(loop, "take_results", taking)
    return found


def check(
    folder: Path, requests: Iterable[EngineRequest], answers: Mapping[str, engines.Answer], drafts: Drafts
) -> None:
    """Each draft has the reference's largest logit, but for rounding."""
    oracle = DraftOracle(folder)
    asked_as = {one.request_id: one for one in requests}
    for name, found in drafts.items():
        logits = oracle.drafts(asked_as[name.split("#")[0]], answers[name].token_ids, found)
        ids = torch.tensor([token_id for one in found.values() for token_id in one])
        chosen = logits.gather(1, ids[:, None]).squeeze(1)
        assert (logits.amax(-1) - chosen < 2 * oracle.atol).all(), name


PARTS: list[list[Any]] = [
    [40],
    [5, ((96, 64), 1), 9],
    [((64, 64), 2), 3, ((96, 64), 1), 20],
    [1],
    [3, ((64, 64), 4, 7), 12],
]


@pytest.mark.ci
@pytest.mark.parametrize(("name", "num_tokens"), [("qwen3_5", 3), ("qwen3_5_moe", 1)])
def test_drafts_equal_the_reference(
    name: str, num_tokens: int, network_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks that end within images, after prefixes of the cache and after accepted and refused proposals."""
    folder = network_folder(name)
    settings: dict[str, Any] = {
        "speculative_config": json.dumps({"method": "qwen3_5_mtp", "num_speculative_tokens": num_tokens}),
        "max_num_batched_tokens": 20,
        "state_snapshot_blocks": 1,
    }
    requests = [
        engines.request(folder, parts, str(number), number, max_tokens=12) for number, parts in enumerate(PARTS)
    ]
    subject = engines.poison(engines.engine(folder, **settings))
    drafts = noted(subject, monkeypatch)
    answers = engines.drain(subject, *requests).answers
    assert comparable(answers) == comparable(engines.drain(engines.engine(folder), *requests).answers)
    assert all(len(drafts[one.request_id]) > 4 for one in requests)
    assert max(len(one) for found in drafts.values() for one in found.values()) == num_tokens
    # The same blocks, then other tokens: the first after them is an input of the entry in their last slot.
    longer = [
        msgspec.structs.replace(
            requests[0], request_id=f"then {token_id}", token_ids=[*requests[0].token_ids[:32], token_id, 3]
        )
        for token_id in (9, 10)
    ]
    for one in longer:
        answers |= engines.drain(subject, one).answers
        assert answers[one.request_id].num_cached_tokens == 32
    check(folder, [*requests, *longer], answers, drafts)
    for wrong in (0, 3):
        subject = engines.poison(engines.engine(folder, **settings))
        scripted = Speculation(engines.Scripted(answers, wrong), num_tokens, num_tokens - 1)
        subject.scheduler.speculation = engines.untimed(scripted)
        drafts = noted(subject, monkeypatch)
        check(folder, requests, engines.drain(subject, *requests).answers, drafts)
        assert subject.load().accepted_tokens_total > 5


@pytest.mark.ci
def test_a_sequence_whose_drafts_are_wrong_pauses(
    network_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile it is launched ahead and asks for no drafts; the layer's keys and values go on."""
    folder = network_folder("qwen3_5")
    subject = engines.engine(folder, speculative_config=MTP, async_scheduling=True)
    assert subject.scheduler.speculation is not None
    subject.scheduler.speculation.times = times = StepTimes()
    for num_tokens, seconds in ((1, 1.0), (2, 1.5)):
        times.add(num_tokens, seconds)
    times.add = lambda *_: None  # type: ignore[method-assign]
    one = engines.request(folder, [5, ((96, 64), 1), 9], max_tokens=100)
    steps: list[StepInput] = []
    drafts, _ = noted(subject, monkeypatch), engines.steps_of(subject, steps.append)
    answers = engines.drain(subject, one).answers
    assert 0 < subject.load().draft_tokens_total <= 100 * SHARE / 0.5
    assert sum(not step.drafts for step in steps) > 50
    assert max(drafts["a"]) > 64
    check(folder, [one], answers, drafts)


@pytest.mark.ci
def test_a_decode_worker_drafts_from_the_state_that_it_receives(right: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        msgspec.structs.replace(engines.request(right, parts, str(number), number, max_tokens=12), num_samples=2)
        for number, parts in enumerate(PARTS)
    ]
    expected = engines.drain(engines.engine(right), *requests).answers
    with splits.pair_of(right, speculative_config=MTP) as pair:
        drafts = noted(pair.decode, monkeypatch)
        answers = pair.answers(*requests)
        assert comparable(answers) == comparable(expected)
        assert pair.decode.load().accepted_tokens_total > 5
    # The first token comes from the prefill worker, without a draft.
    assert all(min(found) == 2 for found in drafts.values())
    assert drafts.keys() == answers.keys()
    check(right, requests, answers, drafts)
    with splits.pair_of(right, first={"speculative_config": MTP}) as pair:
        failure = pair.answers(requests[0])["0"].failure
    assert "The workers differ in" in str(failure)


@pytest.mark.ci
def test_recorded_drafts_are_replayed_equal(right: Path, tmp_path: Path) -> None:
    with recordings.recording_engine(right, tmp_path, speculative_config=THREE) as subject:
        engines.drain(subject, *asked(right))
        assert subject.load().accepted_tokens_total > 20
    [file] = recordings.segments(tmp_path)
    assert recordings.replayed(file).first is None


@pytest.mark.ci
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_two_ranks_draft_as_one(
    name: str, network_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = network_folder(name)
    requests = [engines.request(folder, parts, str(number), number, max_tokens=8) for number, parts in enumerate(PARTS)]
    # It resumes at a state that is kept within the first chunk of another.
    then = msgspec.structs.replace(requests[0], request_id="then", token_ids=[*requests[0].token_ids[:17], 3])
    settings: dict[str, Any] = {"max_num_batched_tokens": 80, "state_snapshot_blocks": 1}
    with engines.on_ranks(folder, speculative_config=THREE, **settings) as subject:
        drafts = noted(subject, monkeypatch)
        answers = engines.drain(subject, *requests).answers
        answers |= engines.drain(subject, then).answers
    assert answers["then"].num_cached_tokens == 16
    check(folder, [*requests, then], answers, drafts)


@pytest.mark.ci
def test_the_draft_layer_has_a_cache_in_fp8(right: Path, tmp_path: Path) -> None:
    """A scale of the draft layer is none of the decoder's layer of that number."""
    folder = shutil.copytree(right, tmp_path / "model")
    scales = {"mtp.layers.0.self_attn.k_scale": 0.5, "model.language_model.layers.1.self_attn.k_scale": 2.0}
    tensors = load_file(folder / "model.safetensors") | {name: torch.tensor(one) for name, one in scales.items()}
    save_file(tensors, folder / "model.safetensors")
    requests = [engines.request(folder, parts, str(number), number) for number, parts in enumerate(PARTS)]
    expected = engines.drain(engines.engine(folder, kv_cache_dtype="fp8"), *requests).answers
    subject = engines.engine(folder, kv_cache_dtype="fp8", speculative_config=MTP)
    assert comparable(engines.drain(subject, *requests).answers) == comparable(expected)
    caches = engines.local(subject).runner.caches.layers
    assert [one.key_scale for one in caches if isinstance(one, KvCache)] == [2, 1, 1]


def test_a_model_without_a_draft_layer_is_refused(
    tiny_qwen3_vl: Path, network_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=r"mtp needs a draft layer of the model's own.*ngram"):
        engines.engine(tiny_qwen3_vl, speculative_config=MTP)
    folder = shutil.copytree(network_folder("qwen3_5"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if "mtp.fc" not in name}, folder / "model.safetensors")
    with pytest.raises(StartupError, match=r"lacks 1 tensors: mtp\.fc\.weight"):
        engines.engine(folder, speculative_config=MTP)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=r"one draft layer, but `mtp_num_hidden_layers` of its config\.json is 0"):
        engines.engine(folder, speculative_config=MTP)
