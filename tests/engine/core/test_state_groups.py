"""Two kinds of KV state at once: paged blocks, and checkpoints of recurrent states. Contract 4 holds for both."""

import sys
from collections.abc import Sequence as Ordered
from typing import Any

import pytest
import scheduling
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import BLOCK, lengths

from saccade.engine.core.kv.state_checkpoints import StateCheckpoints
from saccade.engine.core.schedule import Schedule
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.scheduling import schedule_step
from saccade.engine.core.sequence import Sequence, row_of
from saccade.engine.core.step import StateSave
from saccade.protocol.media import MediaItem
from saccade.protocol.output import FinishReason

State = tuple[int, ...]


class Player:
    """A scheduler, and an executor whose recurrent state is the tokens that went through it: a wrong one shows."""

    def __init__(
        self, interval: int = 2, num_checkpoints: int = 8, group: StateCheckpoints | None = None, **budgets: int
    ) -> None:
        self.group = group or StateCheckpoints(num_checkpoints, BLOCK, interval)
        self.subject: Scheduler = scheduling.scheduler(checkpoints=self.group, **budgets)
        self.live: dict[int, State] = {}
        self.checkpoints: dict[int, State] = {}
        self.saving: dict[int, tuple[StateSave, ...]] = {}
        self.num_saved = 0

    def step(self) -> Schedule:
        return scheduling.run(self.subject, self._compute, self._begin)

    def _begin(self, step: Schedule) -> None:
        started = [owner for owner in step.chunks if owner.row is None]
        for owner in started:
            self.live[self.subject.rows.start_row(owner).row] = ()
        restore, saves = self.group.moves(started, step.chunks)
        assert {move.row for move in restore} <= {owner.row for owner in started}
        for move in restore:
            self.live[move.row] = self.checkpoints[move.checkpoint]
        self.saving = {row_of(owner): found for owner, found in saves.items()}
        saved = [save.checkpoint for found in saves.values() for save in found]
        self.num_saved += len(saved)
        assert not {move.checkpoint for move in restore} & set(saved)
        assert len(set(saved)) == len(saved)

    def _compute(self, sequence: Sequence, num_tokens: int) -> None:
        row, first = sequence.row, sequence.num_computed_tokens
        assert row is not None
        self.live[row] += tuple(sequence.token_ids[first : first + num_tokens])
        assert list(self.live[row]) == sequence.token_ids[: first + num_tokens]
        for save in self.saving.get(row, ()):
            assert 0 < save.num_tokens <= num_tokens
            self.checkpoints[save.checkpoint] = self.live[row][: first + save.num_tokens]

    def num_cached(
        self, tokens: Ordered[int], max_tokens: int = 1, media: tuple[MediaItem, ...] = (), **sampling: Any
    ) -> int:
        """Answer *tokens* and return how many of them were not computed."""
        owner = scheduling.of(tokens, media, arrival=1, max_tokens=max_tokens, **sampling)
        self.subject.add_sequence(owner)
        while self.subject.has_work:
            self.step()
        assert owner.num_cached_tokens is not None
        return owner.num_cached_tokens


@pytest.mark.parametrize(("interval", "expected"), [(1, 4), (2, 4), (3, 3), (9, 0)])
def test_reuse_is_the_least_of_all_groups_and_at_a_boundary(interval: int, expected: int) -> None:
    player = Player(interval, tokens=100)
    assert player.num_cached(range(8 * BLOCK + 2)) == 0
    assert player.num_cached([*range(5 * BLOCK - 1), 99, 98, 97]) == expected * BLOCK
    load = player.subject.load()
    assert (load.between_states_tokens_total, load.evicted_state_tokens_total) == ((4 - expected) * BLOCK, 0)


def test_the_end_of_a_prompt_is_a_boundary() -> None:
    player = Player(interval=100, tokens=100)
    assert [player.num_cached(range(5 * BLOCK + 2)) for _ in range(2)] == [0, 5 * BLOCK]


@pytest.mark.parametrize("start", [BLOCK + 1, 3 * BLOCK])
def test_questions_about_one_image_resume_at_its_end(start: int) -> None:
    player, end = Player(interval=100, tokens=100), start + 2 * BLOCK + 1
    shown = scheduling.image(start, end - start, b"a")
    other = scheduling.image(start, end - start, b"b")
    prompts = [[*[1] * end, *[question] * 2 * BLOCK] for question in (2, 3, 4)]
    assert player.num_cached(prompts[0], media=(shown,)) == 0
    resumed = [player.num_cached(prompt, media=(shown,)) for prompt in prompts[1:]]
    assert resumed == [end // BLOCK * BLOCK] * 2
    assert player.num_cached(prompts[1], media=(other,)) == 0


def test_a_state_is_kept_after_the_last_of_several_images() -> None:
    player = Player(interval=100, tokens=100)
    shown = tuple(scheduling.image(start, BLOCK, bytes([start])) for start in (BLOCK, 3 * BLOCK, 5 * BLOCK))
    prompts = [[*[1] * 7 * BLOCK, *[question] * 3 * BLOCK] for question in (2, 3)]
    assert [player.num_cached(prompt, media=shown) for prompt in prompts] == [0, 6 * BLOCK]
    assert player.num_saved == 3  # after the images, and at the end of each prompt


END = 77


def test_conversations_with_one_system_turn_resume_after_it() -> None:
    player, told = Player(interval=100, tokens=100), [*[1] * (3 * BLOCK), END]
    prompts = [[*told, *[asked] * 3 * BLOCK, END, 5] for asked in (2, 3)]
    assert [player.num_cached(prompt, stop_token_ids=(99, END)) for prompt in prompts] == [0, 3 * BLOCK]


def test_a_single_turn_has_no_state_of_its_own() -> None:
    """Its end is that of the prompt but for some tokens, where a state is kept anyway."""
    player = Player(interval=100, tokens=100)
    player.num_cached([*[1] * (4 * BLOCK), END, *[5] * BLOCK], stop_token_ids=(END,))
    assert player.num_saved == 1


@pytest.mark.parametrize(("shared", "expected"), [(1, 0), (2, 2 * BLOCK), (5, 5 * BLOCK)])
def test_a_third_prompt_resumes_where_the_second_left_the_first(shared: int, expected: int) -> None:
    """A state for a single block is not worth its place."""
    player = Player(interval=100, tokens=100)
    prompts = [[*[1] * (shared * BLOCK), *[asked] * (3 * BLOCK)] for asked in (2, 3, 4)]
    assert [player.num_cached(prompt) for prompt in prompts] == [0, 0, expected]


def test_an_answer_is_kept_at_its_boundaries() -> None:
    player = Player(interval=3, tokens=100)
    player.num_cached([5] * BLOCK, max_tokens=3 * BLOCK)  # the player's tokens are 0
    assert player.num_cached([*[5] * BLOCK, *[0] * 2 * BLOCK, 1]) == 3 * BLOCK


def test_no_checkpoint_is_no_reuse_and_no_shorter_chunk() -> None:
    player = Player(interval=1, num_checkpoints=0, tokens=100)
    assert [player.num_cached(range(5 * BLOCK + 2)) for _ in range(2)] == [0, 0]
    player.subject.add_sequence(scheduling.of(range(5 * BLOCK + 2), (), arrival=7))
    assert lengths(player.step()) == {7: 5 * BLOCK + 2}


def test_the_least_recently_used_goes_first() -> None:
    player = Player(interval=100, num_checkpoints=2, tokens=100)
    a, b, c = (range(start, start + BLOCK + 1) for start in (0, 100, 200))
    assert [player.num_cached(prompt) for prompt in (a, b, a, c, a, b)] == [0, 0, BLOCK, 0, BLOCK, 0]


def test_tokens_whose_state_was_evicted_are_counted() -> None:
    player = Player(interval=2, num_checkpoints=1, tokens=100)
    prompts = [range(start, start + 5 * BLOCK) for start in (0, 100, 0)]
    assert [player.num_cached(prompt) for prompt in prompts] == [0, 0, 0]
    load = player.subject.load()
    assert (load.between_states_tokens_total, load.evicted_state_tokens_total) == (0, 4 * BLOCK)


def test_one_step_saves_the_states_of_a_whole_prompt() -> None:
    player = Player(interval=2, num_checkpoints=99, tokens=100)
    player.subject.add_sequence(scheduling.of(range(7 * BLOCK + 1), (), arrival=1, max_tokens=1))
    assert lengths(player.step()) == {1: 7 * BLOCK + 1}
    assert player.num_saved == 4
    prompts = [[*range(count * BLOCK), *[200 + count] * BLOCK] for count in range(1, 8)]
    assert [player.num_cached(prompt) // BLOCK for prompt in prompts] == [0, 2, 2, 4, 4, 6, 7]


def test_few_checkpoints_are_for_the_last_states_of_each_prompt() -> None:
    player = Player(interval=1, num_checkpoints=4, tokens=100)
    for arrival in (1, 2):
        player.subject.add_sequence(scheduling.of([arrival] * (5 * BLOCK + 1), (), arrival, max_tokens=1))
    player.step()
    for arrival in (1, 2):
        for count in (3, 4, 5):
            owner = scheduling.of([arrival] * (count * BLOCK) + [9], (), arrival=9)
            missing = player.subject.block_manager.num_missing_tokens(owner) - 1
            assert missing == (3 * BLOCK if count == 3 else 0)


def test_existing_checkpoint_is_not_saved_again() -> None:
    player = Player(interval=100, tokens=100)
    for arrival in (1, 2):
        player.subject.add_sequence(scheduling.of(range(BLOCK + 1), (), arrival, max_tokens=1))
    while player.subject.has_work:
        player.step()
    assert player.num_saved == 1


def test_the_cost_of_saving_is_linear() -> None:
    """Counted in lines of Python that run, while many sequences save a state in one step."""

    def num_lines(num_sequences: int) -> int:
        group = StateCheckpoints(num_sequences, BLOCK, 1)
        owners = [scheduling.of(range(10 * n, 10 * n + BLOCK + 1), (), n) for n in range(num_sequences)]
        for owner in owners:
            owner.row = owner.arrival
        num_run = 0

        def count(_: object, event: str, __: object) -> Any:
            nonlocal num_run
            num_run += event == "line"
            return count

        before = sys.gettrace()
        sys.settrace(count)
        _, saves = group.moves([], dict.fromkeys(owners, BLOCK))
        sys.settrace(before)
        assert len({save.checkpoint for found in saves.values() for save in found}) == num_sequences
        return num_run

    assert num_lines(64) < 10 * num_lines(8)


def test_a_checkpoint_stays_until_it_is_restored() -> None:
    """Both checkpoints are resumed from in one step, in which two others would be saved."""
    player = Player(interval=1, num_checkpoints=2, tokens=100)
    prompts = [range(start, start + BLOCK + 1) for start in (0, 100)]
    assert [player.num_cached(prompt) for prompt in prompts] == [0, 0]
    for arrival, prompt in enumerate(prompts):
        player.subject.add_sequence(scheduling.of([*prompt, *[7] * BLOCK], (), arrival))
    assert lengths(player.step()) == {0: BLOCK + 1, 1: BLOCK + 1}
    assert player.num_saved == 2


def test_a_checkpoint_stays_while_its_sequence_waits_for_a_first_step() -> None:
    player = Player(interval=100, num_checkpoints=1, tokens=100)
    player.num_cached(range(BLOCK + 1))
    owner = scheduling.of(range(BLOCK + 1), (), arrival=9)
    assert player.subject.block_manager.admit(owner, headroom_blocks=0)
    player.num_cached(range(100, 100 + BLOCK + 1))
    player.subject.block_manager.clear()
    player.subject.rows.start_row(owner)
    restore, _ = player.group.moves([owner], {})
    assert [move.checkpoint for move in restore] == [0]
    assert player.num_saved == 1


def test_clear_forgets_checkpoints() -> None:
    player = Player(interval=1, num_checkpoints=3, tokens=100)
    for _ in range(3):  # checkpoints that were lost would be missed
        assert player.num_cached(range(3 * BLOCK + 1)) == 0
        assert player.num_cached(range(3 * BLOCK + 1)) == 3 * BLOCK
        player.subject.block_manager.clear()


def test_failed_step_saves_no_checkpoint() -> None:
    group = StateCheckpoints(1, BLOCK, 1)
    subject = scheduling.scheduler(checkpoints=group)
    for number in range(3):
        owner = scheduling.of(range(BLOCK + 1), (), number)
        subject.add_sequence(owner)
        step = schedule_step(subject)
        assert owner.num_cached_tokens == 0
        subject.rows.start_row(owner)
        _, saves = group.moves([owner], step.chunks)
        assert [save.checkpoint for save in saves[owner]] == [0]
        subject.end_sequence(owner, FinishReason.ABORT)


def test_checkpoint_without_its_paged_blocks_is_not_reused() -> None:
    player = Player(interval=1, num_checkpoints=99, num_blocks=6)
    player.num_cached(range(4 * BLOCK))
    player.num_cached(range(100, 100 + 5 * BLOCK))
    assert player.num_saved > 6  # all are there still, and alone they are not enough
    assert player.num_cached(range(4 * BLOCK)) <= BLOCK


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=30), st.integers(1, 12)), min_size=1, max_size=10
)


@settings(deadline=None, max_examples=80)
@given(PROMPTS, st.integers(1, 4), st.integers(0, 6), st.integers(3, 20))
def test_every_state_is_of_its_own_tokens(
    prompts: list[tuple[list[int], int]], interval: int, num_checkpoints: int, tokens: int
) -> None:
    """The player looks at each chunk: whatever was reused, preempted or cut, no token is missing or twice."""
    player = Player(interval, num_checkpoints, num_blocks=12, seqs=3, tokens=tokens)
    for arrival, (prompt, max_tokens) in enumerate(prompts):
        player.subject.add_sequence(scheduling.of(prompt, (), arrival, max_tokens))
    steps = 0
    while player.subject.has_work:
        assert player.step().chunks
        steps += 1
        assert steps < 3000, "livelock"
    assert scheduling.paged(player.subject).num_free_blocks == 12
    player.subject.block_manager.clear()
    fillers = [range(start, start + BLOCK + 1) for start in range(100, 100 * (num_checkpoints + 1), 100)]
    assert [player.num_cached(prompt) for prompt in fillers] == [0] * num_checkpoints
    assert [player.num_cached(prompt) for prompt in fillers] == [BLOCK] * num_checkpoints, "a checkpoint is lost"
