"""Nothing that was computed with NaN or infinity is reused, sent, reported or repeated. F25"""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
import recordings
import splits
import structlog
import torch
from captures import Again
from engines import Answer
from faults_of_layers import LayerFault
from safetensors.torch import load_file, save_file
from tables import table

from saccade.engine.core.cache_events import WatchedCaches
from saccade.engine.executor.caches import Caches
from saccade.engine.executor.decode_graphs import DecodeGraphs
from saccade.engine.loop import Engine
from saccade.errors import NonFiniteOutput
from saccade.protocol.kv_events import BlockRemoved, BlockStored, KvEvents, StateRemoved, StateStored
from saccade.protocol.request import EngineRequest

pytestmark = pytest.mark.ci

WIDE = (1, 6, 16)
BAD = 499
MTP = '{"method": "mtp", "num_speculative_tokens": 2}'
EMBEDDING = "language_model.embed_tokens"
NAN = float("nan")


def asked(folder: Path, parts: list[Any], name: str, at: int | None = None, **sampling: Any) -> EngineRequest:
    """A request, with BAD as token number *at* of its prompt."""
    request = engines.request(folder, parts, name, **{"max_tokens": 4, **sampling})
    token_ids = list(request.token_ids)
    if at is not None:
        token_ids[at] = BAD
    return msgspec.structs.replace(request, token_ids=token_ids)


def code(answer: Answer) -> str | None:
    return None if answer.failure is None else answer.failure.code


@pytest.fixture(scope="module")
def damaged(tiny_qwen3_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in which the embedding of BAD is NaN."""
    folder = shutil.copytree(tiny_qwen3_vl, tmp_path_factory.mktemp("damaged") / "model")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [one for one in tensors if one.endswith("embed_tokens.weight")]:
            tensors[name][BAD] = NAN
        save_file(tensors, file, {"format": "pt"})
    return folder


def reported(engine: Engine) -> set[bytes]:
    """The keys of the blocks and states that a watcher of the caches believes to be there."""
    keys: set[bytes] = set()
    while engine.feed.busy:
        for message in engine.feed.take_messages():
            for event in msgspec.msgpack.decode(message.payload, type=KvEvents).events:
                match event:
                    case BlockStored(key=key) | StateStored(key=key):
                        keys.add(key)
                    case BlockRemoved(key=key) | StateRemoved(key=key):
                        keys.discard(key)
    return keys


@table("name", ["qwen3_vl", "qwen3_5", "gemma4_e2b"])
@table("at", [0, 20, -1])
def test_a_watcher_hears_of_nothing_that_stays(name: str, at: int, network_folder: Callable[[str], Path]) -> None:
    """Of blocks, states and blocks of windows, also if an earlier chunk was right."""
    folder = network_folder(name)
    engine = engines.engine(folder, state_snapshot_blocks=1, max_num_batched_tokens=16, async_scheduling=True)
    engine.feed.watch(0, WatchedCaches(blocks=True, images=True))
    with LayerFault(engine, EMBEDDING, NAN, BAD).happening():
        answers = engines.drain(engine, asked(folder, [40, ((96, 64), 1), 9], "a", at)).answers
    assert code(answers["a"]) == NonFiniteOutput.code
    assert reported(engine) == set()
    assert engines.is_idle(engine)


def test_a_bad_image_is_not_kept_or_reported(tiny_qwen3_vl: Path) -> None:
    """Requests that need it fail, beside one with another image; no later one finds it. # B4"""
    engine = engines.engine(tiny_qwen3_vl, async_scheduling=True)
    engine.feed.watch(0, WatchedCaches(blocks=True, images=True))
    engines.drain(engine, asked(tiny_qwen3_vl, [(WIDE, 2), 5], "known"))
    requests = [asked(tiny_qwen3_vl, [(WIDE, 1), length], f"bad {length}") for length in (5, 9)]
    other = asked(tiny_qwen3_vl, [(WIDE, 2), 9], "other")
    right = engines.drain(engines.engine(tiny_qwen3_vl), *requests, other).answers
    with LayerFault(engine, "visual.merger", NAN, BAD).happening():
        answers = engines.drain(engine, *requests, other).answers
    assert [code(answers[one.request_id]) for one in requests] == [NonFiniteOutput.code] * 2
    assert answers["other"].token_ids == right["other"].token_ids
    cache = engine.scheduler.encoder_scheduler.encoder_cache
    assert [event.content_hash for event in cache.snapshot()] == [other.media[0].content_hash]
    assert engine.load().encoded_items_total == 1
    again = engines.drain(engine, *requests).answers
    assert {name: answer.token_ids for name, answer in again.items()} == {name: right[name].token_ids for name in again}
    assert engines.is_idle(engine)


def test_state_that_went_bad_is_computed_again(network_folder: Callable[[str], Path]) -> None:
    """A bad kernel wrote into blocks, states and features that are kept: one request fails, the next one is right."""
    for name in ("qwen3_vl", "qwen3_5"):
        folder = network_folder(name)
        engine = engines.engine(folder, state_snapshot_blocks=1)
        one = asked(folder, [40, ((96, 64), 1), 9], "a")
        right = engines.drain(engine, one).answers["a"].token_ids
        engines.poison(engine)
        assert code(engines.drain(engine, one).answers["a"]) == NonFiniteOutput.code
        assert engines.drain(engine, one).answers["a"].token_ids == right
        outputs = engines.local(engine).runner.encoder_outputs
        outputs.update({number: torch.full_like(features, NAN) for number, features in outputs.items()})
        engine.scheduler.reset_caches(prefix=True, media=False)
        assert code(engines.drain(engine, one).answers["a"]) == NonFiniteOutput.code
        assert engines.drain(engine, one).answers["a"].token_ids == right


def test_a_sequence_that_shares_bad_blocks_stores_nothing_behind_them(tiny_qwen3_vl: Path) -> None:
    engine = engines.engine(tiny_qwen3_vl)
    engine.feed.watch(0, WatchedCaches(blocks=True, images=False))
    long = asked(tiny_qwen3_vl, [40], "long", max_tokens=60)
    engine.requests.submit(0, long)
    while not engine.scheduler.running or engine.load().generated_tokens_total < 4:
        engine.step()
    with LayerFault(engine, EMBEDDING, NAN, BAD).happening():
        engine.requests.submit(0, asked(tiny_qwen3_vl, [40], "bad", -1))
        while engine.load().non_finite_requests_total == 0:
            engine.step()
    answer = engines.drain(engine).answers["long"]
    assert answer.failure is None
    assert reported(engine) == set()
    right = engines.drain(engines.engine(tiny_qwen3_vl), long).answers["long"].token_ids
    assert engines.drain(engine, long).answers["long"].token_ids == right


@table("name", ["qwen3_vl", "qwen3_5", "gemma4_e2b"])
def test_a_sequence_that_would_resume_from_bad_state_begins_again(
    name: str, network_folder: Callable[[str], Path]
) -> None:
    """It is admitted, and waits for its turn at the encoder, when the state of its prefix is forgotten. # B4"""
    folder = network_folder(name)
    settings = {"state_snapshot_blocks": 1, "encode_budget_patches": 1}
    waits = asked(folder, [48, ((96, 64), 2), 9], "waits")
    right = engines.drain(engines.engine(folder, **settings), waits).answers["waits"].token_ids
    engine = engines.engine(folder, **settings)
    engines.drain(engine, asked(folder, [48, 9], "before"))
    with LayerFault(engine, EMBEDDING, NAN, BAD).happening():
        answers = engines.drain(engine, asked(folder, [48, ((96, 64), 1), 9], "bad", -1), waits).answers
    assert code(answers["bad"]) == NonFiniteOutput.code
    assert (answers["waits"].failure, answers["waits"].token_ids) == (None, right)
    assert engines.is_idle(engine)


def test_an_answer_ends_where_its_values_do(tiny_qwen3_vl: Path) -> None:
    """The tokens before are told, then the error: in a decode, and in one that is a step ahead."""
    one = asked(tiny_qwen3_vl, [30], "a", max_tokens=12, temperature=1.0, seed=3)
    right = engines.drain(engines.engine(tiny_qwen3_vl), one).answers["a"].token_ids
    place = next(i for i in range(2, 10) if right[i] not in (*one.token_ids, *right[:i]))
    for is_ahead in (False, True):
        engine = engines.engine(tiny_qwen3_vl, async_scheduling=is_ahead)
        with LayerFault(engine, EMBEDDING, NAN, right[place]).happening():
            answer = engines.drain(engine, one).answers["a"]
        assert (answer.token_ids, code(answer)) == (right[: place + 1], NonFiniteOutput.code)
        assert engines.drain(engine, one).answers["a"].token_ids == right


@pytest.mark.ci
@table("place", ["mtp.fc", "mtp.layers.0.self_attn.qkv_proj", "mtp.norm"])
@table("value", [NAN, float("inf"), float("-inf")])
def test_a_bad_draft_changes_no_answer_and_is_not_kept(
    place: str, value: float, network_folder: Callable[[str], Path]
) -> None:  # F17
    folder = network_folder("qwen3_5")
    requests = [asked(folder, [40], "a", 20, max_tokens=8), asked(folder, [17], "b", max_tokens=8)]
    right = {one.request_id: engines.drain(engines.engine(folder), one).answers for one in requests}
    engine = engines.engine(folder, speculative_config=MTP, state_snapshot_blocks=1, max_num_batched_tokens=24)
    engine.feed.watch(0, WatchedCaches(blocks=True, images=True))
    with LayerFault(engine, place, value, BAD).happening():
        answers = engines.drain(engine, requests[0]).answers
        assert answers["a"].token_ids == right["a"]["a"].token_ids
        assert reported(engine) == set()
        answers = engines.drain(engine, *requests).answers
    for name in "ab":
        assert answers[name].token_ids == right[name][name].token_ids
    assert engine.load().non_finite_requests_total == 2
    assert engines.is_idle(engine)
    assert engines.drain(engine, requests[0]).answers["a"].token_ids == right["a"]["a"].token_ids
    assert engine.load().non_finite_requests_total == 2


def test_a_cap_of_logits_hides_no_infinity(network_folder: Callable[[str], Path]) -> None:
    folder = network_folder("gemma4_e2b")
    engine = engines.engine(folder)
    for value in (NAN, float("inf"), float("-inf")):
        with LayerFault(engine, "lm_head", value, BAD).happening():
            answer = engines.drain(engine, asked(folder, [20], "a", -1)).answers["a"]
        assert code(answer) == NonFiniteOutput.code
    assert code(engines.drain(engine, asked(folder, [20], "a", -1)).answers["a"]) is None


def test_the_draft_layer_does_not_read_the_next_row(network_folder: Callable[[str], Path]) -> None:
    """The chunk of a long prompt ends beside the first token of another request, which is bad."""
    folder = network_folder("qwen3_5")
    requests = [asked(folder, [40], "long"), asked(folder, [9], "bad", 0)]
    engine = engines.engine(folder, speculative_config=MTP, max_num_batched_tokens=24)
    with LayerFault(engine, EMBEDDING, NAN, BAD).happening():
        answers = engines.drain(engine, *requests).answers
    assert [code(answers[name]) for name in ("long", "bad")] == [None, NonFiniteOutput.code]
    assert engine.load().non_finite_requests_total == 1


@pytest.mark.ci
@table("num_samples", [1, 3])
def test_a_decode_worker_gets_nothing_of_it(num_samples: int, damaged: Path) -> None:  # A8
    with splits.pair_of(damaged, num_blocks=64, max_num_seqs=4) as pair:
        one = asked(damaged, [20, (WIDE, 1), 20], "bad", 60, max_tokens=6)
        pair.submit(msgspec.structs.replace(one, num_samples=num_samples))
        pair.run_until_idle()
        assert code(pair.first.answers["bad"]) == NonFiniteOutput.code
        failed = [code(answer) for answer in pair.second.answers.values() if answer.failure is not None]
        assert failed == ["peer_failed"]
        for engine in (pair.prefill, pair.decode):
            assert list(engine.scheduler.block_manager.paged_blocks.snapshot()) == []
        answers = pair.answers(asked(damaged, [20, (WIDE, 1), 20], "good", max_tokens=6))
        right = engines.drain(engines.engine(damaged), asked(damaged, [20, (WIDE, 1), 20], "good", max_tokens=6))
        assert answers["good"].token_ids == right.answers["good"].token_ids


def test_ranks_find_it_wherever_it_is(damaged: Path) -> None:
    """The row of BAD lies at rank 1, which draws nothing."""
    requests = [asked(damaged, [30], "bad", -1), asked(damaged, [17], "good")]
    right = engines.drain(engines.engine(damaged), requests[1]).answers["good"].token_ids
    with engines.on_ranks(damaged) as engine:
        for _ in range(2):
            answers = engines.drain(engine, *requests).answers
            assert code(answers["bad"]) == NonFiniteOutput.code
            assert answers["good"].token_ids == right
        assert engines.is_idle(engine)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of Triton's interpreter
def test_graphs_find_it_in_decodes(tiny_qwen3_vl: Path) -> None:  # B7
    settings = {"attention_backend": "triton", "max_num_seqs": 4, "num_blocks": 80, "max_model_len": 240}
    engine = engines.engine(tiny_qwen3_vl, **settings)
    requests = [asked(tiny_qwen3_vl, [9], "a", max_tokens=5), asked(tiny_qwen3_vl, [17], "b", max_tokens=5)]
    right = {name: answer.token_ids for name, answer in engines.drain(engine, *requests).answers.items()}
    engine.scheduler.reset_caches(prefix=True, media=True)
    runner, again = engines.local(engine).runner, Again()
    sizes = dataclasses.replace(runner.caches.sizes, num_padding=1)
    runner.caches = Caches(runner.network.spec.kv_specs, sizes, runner.dtype, runner.device)
    runner.graphs = DecodeGraphs(runner.network, runner.backend, runner.caches, 16, again)
    drawn = next(token_id for token_id in right["a"][1:3] if token_id not in right["b"])
    with LayerFault(engine, EMBEDDING, NAN, drawn).happening():
        answers = engines.drain(engine, *requests).answers
    assert code(answers["a"]) == NonFiniteOutput.code
    assert answers["b"].token_ids == right["b"]
    assert set(again.replayed) == {2, 1}
    assert engines.drain(engine, requests[0]).answers["a"].token_ids == right["a"]


def test_a_replay_finds_the_same(damaged: Path, tmp_path: Path) -> None:
    with recordings.recording_engine(damaged, tmp_path) as engine:
        answers = engines.drain(engine, asked(damaged, [30], "bad", -1), asked(damaged, [17], "good")).answers
        assert code(answers["bad"]) == NonFiniteOutput.code
    [file] = recordings.segments(tmp_path)
    outcome = recordings.replayed(file)
    assert outcome.first is None
    assert outcome.num_tokens


def test_the_log_names_a_request_and_counts_the_others(damaged: Path) -> None:
    engine = engines.engine(damaged)
    with structlog.testing.capture_logs() as lines:
        engines.drain(engine, *(asked(damaged, [30], f"bad {number}", -1) for number in range(6)))
    found = [line for line in lines if "not finite" in line["event"]]
    assert [line["request_id"] for line in found] == ["bad 0"]
    assert engine.load().non_finite_requests_total == 6


def test_a_model_with_such_values_everywhere_starts_and_says_so(damaged: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(damaged, tmp_path / "model")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for tensor in tensors.values():
            tensor.fill_(NAN)
        save_file(tensors, file, {"format": "pt"})
    with structlog.testing.capture_logs() as lines:
        engine = engines.engine(folder)
    assert any("not finite" in line["event"] for line in lines)
    assert code(engines.drain(engine, asked(folder, [5], "a")).answers["a"]) == NonFiniteOutput.code
