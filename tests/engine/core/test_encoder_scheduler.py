"""Images that several steps encode, layer by layer, while a sequence decodes."""

from collections.abc import Callable

import pytest
from scheduling import check_holdings, encode_costs, lengths, run, scheduler, sequence

from saccade.engine.core.schedule import Schedule
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.scheduling import schedule_step
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.step_costs import Allowance
from saccade.protocol.output import FinishReason

LAYERS = 6


def with_decode(max_tokens: int = 40, patches: int = 64, **costs: int) -> Scheduler:
    """A scheduler of an encoder of six layers, and a sequence that decodes; steps have a quarter of *patches*."""
    subject = scheduler(tokens=1000, patches=patches, costs=encode_costs(LAYERS, **costs))
    subject.add_sequence(sequence(1, 4, max_tokens=max_tokens))
    run(subject)
    return subject


def planned(step: Schedule) -> list[int | None]:
    """The layers of the step's slices, by arrival of the images."""
    return [part.num_layers for _, part in sorted(step.slices.items(), key=lambda item: item[0].content_hash)]


def test_a_large_image_takes_some_layers_a_step() -> None:
    subject = with_decode()
    subject.add_sequence(sequence(2, 20, ((4, 12),), max_tokens=1))  # 48 patches; a step has 6 * 16 layers of patches
    steps = [run(subject) for _ in range(4)]
    assert [planned(step) for step in steps] == [[2], [2], [None], []]
    assert [lengths(step) for step in steps] == [{1: 1, 2: 4}, {1: 1}, {1: 1, 2: 16}, {1: 1}]
    assert [len(step.encode) for step in steps] == [1, 0, 0, 0]
    check_holdings(subject)


def test_a_projector_alone_tells_nothing_of_a_layer() -> None:
    subject = with_decode(patches=4)
    subject.add_sequence(sequence(2, 20, ((4, 12),), max_tokens=1))
    steps = [run(subject) for _ in range(LAYERS)]
    assert [step.work.projects for step in steps] == [False] * (LAYERS - 1) + [True]
    assert all(step.work.patch_layers == 48 for step in steps)


def test_an_image_larger_than_a_step_has_one_layer_a_step() -> None:
    subject = with_decode(patches=4)
    subject.add_sequence(sequence(2, 20, ((4, 12),), max_tokens=1))
    assert [planned(run(subject)) for _ in range(LAYERS)] == [[1]] * (LAYERS - 1) + [[None]]


def test_without_decodes_the_rest_is_encoded_at_once() -> None:
    subject = with_decode(max_tokens=2)
    subject.add_sequence(sequence(2, 20, ((4, 12),), max_tokens=1))
    steps = [run(subject) for _ in range(2)]
    assert [planned(step) for step in steps] == [[2], [None]]
    assert lengths(steps[1]) == {2: 16}


def test_an_image_in_a_graph_is_encoded_whole() -> None:
    subject = with_decode(most_whole=48)
    subject.add_sequence(sequence(2, 20, ((4, 12),), max_tokens=1))
    step = run(subject)
    assert (planned(step), lengths(step)) == ([], {1: 1, 2: 20})


def test_a_video_goes_on_part_after_part() -> None:
    subject = with_decode(num_parts=3)
    subject.add_sequence(sequence(2, 20, ((4, 12),), max_tokens=1))  # 18 layers of 16 patches
    assert [planned(run(subject)) for _ in range(4)] == [[6], [6], [None], []]


def test_sequences_that_need_one_image_wait_for_it_together() -> None:
    subject = with_decode()
    for _ in range(2):
        subject.add_sequence(sequence(2, 20, ((4, 12),), max_tokens=1))
    steps = [run(subject) for _ in range(4)]
    assert [planned(step) for step in steps] == [[2], [2], [None], []]
    assert sum(len(step.encode) for step in steps) == 1
    assert sorted(steps[2].chunks.values()) == [1, 16, 16]


def test_images_share_a_step_in_the_order_of_their_begin() -> None:
    subject = with_decode()
    for arrival, tokens in ((2, 12), (3, 6), (4, 4)):
        subject.add_sequence(sequence(arrival, tokens, ((0, tokens),), max_tokens=1))
    steps = [run(subject) for _ in range(8)]
    # 48, 24 and 16 patches a layer, 96 a step.
    assert all(step.chunks[next(iter(subject.running))] == 1 for step in steps)
    assert [key.content_hash[0] for step in steps for key in step.encoded] == [2, 3, 4]
    assert sum(len(step.encode) for step in steps) == 3


def aborted(subject: Scheduler, waiting: Sequence) -> None:
    subject.end_sequence(waiting, FinishReason.ABORT)


def preempted(subject: Scheduler, waiting: Sequence) -> None:
    subject.preempt(waiting)


@pytest.mark.parametrize(("leave", "num_begun"), [(aborted, 1), (preempted, 2)])
def test_an_image_that_no_sequence_needs_is_forgotten(
    leave: Callable[[Scheduler, Sequence], None], num_begun: int
) -> None:
    subject = with_decode()
    cache = subject.encoder_scheduler.encoder_cache
    waiting = sequence(2, 20, ((4, 12),), max_tokens=1)
    subject.add_sequence(waiting)
    first = run(subject)
    [part] = first.slices.values()
    leave(subject, waiting)
    assert subject.encoder_scheduler.has_unpinned
    steps = [first, *(run(subject) for _ in range(4))]
    assert cache.take_dropped() == (part.output_id,)
    assert not subject.encoder_scheduler.has_unpinned
    assert sum(len(step.encode) for step in steps) == num_begun
    assert len(cache) == num_begun - 1
    check_holdings(subject)


def test_a_failed_step_forgets_its_slice_and_names_who_waits_for_it() -> None:
    subject = with_decode()
    decoding, waiting = next(iter(subject.running)), sequence(2, 20, ((0, 12),), max_tokens=1)
    subject.add_sequence(waiting)
    run(subject)
    step = schedule_step(subject)
    subject.launch(step)
    assert subject.owners(step) == [decoding, waiting]
    subject.abandon(step)
    assert not subject.encoder_scheduler.encoder_cache.has_begun(waiting.images[0].key)
    assert not waiting.images[0].pins
    # What the failed step would have completed is begun once more.
    assert len(run(subject).encode) == 1


def test_a_step_ahead_of_a_failed_one_completes_nothing() -> None:
    subject = with_decode()
    waiting = sequence(2, 20, ((0, 12),), max_tokens=1)
    subject.add_sequence(waiting)
    run(subject)
    failed = schedule_step(subject)
    subject.launch(failed)
    ahead = schedule_step(subject)
    subject.launch(ahead)
    assert ahead.encoded == [waiting.images[0].key]
    assert len(subject.encoder_scheduler.encoded_by(ahead)) == 1
    subject.abandon(failed)
    assert subject.encoder_scheduler.encoded_by(ahead) == {}
    subject.add_sequence(sequence(2, 20, ((0, 12),), max_tokens=1))
    schedule_step(subject)  # begins the image once more
    assert subject.encoder_scheduler.encoder_cache.has_begun(waiting.images[0].key)
    assert subject.encoder_scheduler.encoded_by(ahead) == {}


def test_an_emptied_cache_keeps_no_begun_image() -> None:
    subject = with_decode()
    subject.add_sequence(sequence(2, 20, ((4, 12),), max_tokens=1))
    run(subject)
    subject.start_over()
    assert len(subject.encoder_scheduler.encoder_cache) == 0
    step = run(subject)  # both prompts begin together
    assert (len(step.encode), planned(step)) == (1, [])
    while subject.has_work:
        run(subject)
    check_holdings(subject)


def test_prompts_and_images_share_what_is_allowed() -> None:
    subject = with_decode(patches=4096)
    subject.add_sequence(sequence(2, 20, ((0, 12),), max_tokens=1))
    subject.add_sequence(sequence(3, 90, max_tokens=1))
    allowance = Allowance(tokens=60, patch_layers=192, least_tokens=4)
    steps = [run(subject, allowance=allowance) for _ in range(4)]
    # Four layers of 48 patches leave the least to prompts; then two layers leave half.
    assert [planned(step) for step in steps] == [[4], [None], [], []]
    assert [lengths(step).get(3) for step in steps] == [4, 10, 60, 16]
    assert lengths(steps[1])[2] == 20


def test_text_of_a_prompt_gets_what_its_own_image_leaves() -> None:
    subject = with_decode(patches=4096)
    subject.add_sequence(sequence(2, 60, ((40, 12),), max_tokens=1))
    step = run(subject, allowance=Allowance(tokens=60, patch_layers=192, least_tokens=4))
    assert (planned(step), lengths(step)[2]) == ([4], 4)


def test_without_decodes_all_is_allowed() -> None:
    subject = scheduler(tokens=1000)
    subject.add_sequence(sequence(1, 200, max_tokens=1))
    assert lengths(run(subject, allowance=Allowance(4, 1, 4))) == {1: 200}
