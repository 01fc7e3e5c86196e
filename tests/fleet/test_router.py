"""Choosing and booking are one step."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from saccade.fleet.cost import IntArray, Policy, WorkInFlight
from saccade.fleet.expectations import ASSUMED_SECONDS, PREDICTED_SECONDS
from saccade.fleet.index import BlockIndex, Partition
from saccade.fleet.lookup import LocalLookup, Overlaps, Targets
from saccade.fleet.router import Booking, Option, RoutedImage, RoutedPrompt, Router, RoutingChoice
from saccade.protocol.kv_events import BlockOffloaded, BlockStored, ImageStored, KvEvent, KvEvents, StateStored

HERE = Partition(b"f", 16)
KEYS = [bytes([number]) * 16 for number in range(10)]
PROMPT = RoutedPrompt(161, {HERE: KEYS})
A, B = Option("a", HERE), Option("b", HERE)


def router_of(
    policy: Policy = "auto", hybrid: bool = False, offloaded_share: float = 0.25, **held: list[KvEvent]
) -> Router:
    """A router that knows exactly what the workers in *held* hold."""
    router = Router(policy, BlockIndex(1 << 20), Random(0), offloaded_share=offloaded_share)
    for worker, events in held.items():
        router.index.begin(worker, HERE, resumes_at_states=hybrid)
        router.index.take(worker, KvEvents(1, events, snapshot=True))
    return router


def book(router: Router, options: Sequence[Option], prompt: RoutedPrompt, now: float) -> Booking:
    """Look up what the workers hold, and book."""
    return router.book(prompt.among(rows_of(router, options), looked_up(router, options, prompt)), now)


def looked_up(router: Router, options: Sequence[Option], prompt: RoutedPrompt) -> Overlaps:
    targets = Targets([option.name for option in options], [option.partition for option in options])
    return LocalLookup(router.index).find(targets, prompt.keys, [image.key for image in prompt.images])


def rows_of(router: Router, options: Sequence[Option]) -> IntArray:
    return np.array([router.describe(option) for option in options])


def preview(router: Router, options: Sequence[Option], prompt: RoutedPrompt, now: float) -> RoutingChoice:
    """The choice without reports."""
    return router.preview(
        prompt.among(rows_of(router, options), Overlaps.unknown(len(options), len(prompt.images))), now
    )


def held_tokens(router: Router, options: Sequence[Option], now: float) -> list[int]:
    held: list[int] = preview(router, options, PROMPT, now).candidates.held_tokens.tolist()
    return held


def expected(router: Router, worker: str) -> list[bytes]:
    return list(router.predictions.expected(router.row_of(worker)))


def blocks(count: int) -> list[KvEvent]:
    return [BlockStored(key, b"", []) for key in KEYS[:count]]


def test_holder_is_chosen_and_its_match_is_as_reported() -> None:
    for _ in range(20):
        booking = book(router_of(a=blocks(3), b=blocks(9)), [A, B], PROMPT, now=0)
        assert (booking.worker, booking.matched_tokens) == ("b", 144)


def test_without_reports_nothing_is_claimed() -> None:
    assert book(router_of(), [A, B], PROMPT, now=0).matched_tokens is None
    assert book(router_of(a=blocks(2)), [A], RoutedPrompt(161), now=0).matched_tokens is None  # no choice, no keys


def test_work_is_booked_with_the_choice_and_taken_back() -> None:
    router = router_of(b=blocks(9))
    booking = book(router, [A, B], PROMPT, now=0)
    assert router.work_of("b") == WorkInFlight(1, 161, prefill_tokens=17, num_samples=1, num_rows=1)
    booking.first_token()
    booking.first_token()
    assert router.work_of("b") == WorkInFlight(1, 161, decode_blocks=11, num_samples=1, num_rows=1)
    booking.close(now=1)
    assert router.work_of("b") == WorkInFlight()
    aborted = book(router, [A, B], PROMPT, now=0)
    aborted.close(now=1)
    assert router.work_of("b") == WorkInFlight()


def test_prompts_that_arrive_together_find_each_other() -> None:
    router = router_of("cost")
    first = book(router, [A, B], PROMPT, now=0)
    other = RoutedPrompt(161, {HERE: [b"other"]})
    assert book(router, [A, B], other, now=0).worker != first.worker  # its work is booked already
    first.first_token()
    again = book(router, [A, B], PROMPT, now=1)
    assert again.worker == first.worker
    assert again.matched_tokens is None  # a prediction is no fact
    assert router.index.num_blocks(first.worker) == 0


def test_prediction_of_a_prompt_that_never_began_is_withdrawn() -> None:
    router = router_of("cost")
    booking = book(router, [A, B], PROMPT, now=0)
    assert expected(router, booking.worker)
    booking.close(now=1)
    assert not expected(router, booking.worker)


def test_image_goes_to_the_worker_with_its_encoder_output() -> None:
    image = RoutedImage(b"p", stop=150, num_tokens=100)
    prompt = RoutedPrompt(161, {HERE: KEYS}, [image])
    of_b: list[KvEvent] = [ImageStored(b"", b"p")]
    for _ in range(20):
        booking = book(router_of("cost", b=of_b), [A, B], prompt, now=0)
        assert (booking.worker, booking.has_images.tolist()) == ("b", [True])
        # A prefix that covers the image needs no encoder output.
        assert book(router_of("cost", a=blocks(10), b=of_b), [A, B], prompt, now=0).worker == "a"
    router = router_of("cost")
    sent = book(router, [A, B], prompt, now=0)
    sent.first_token()
    other_text = RoutedPrompt(161, {HERE: [b"other"]}, [image])
    assert book(router, [A, B], other_text, now=1).worker == sent.worker


def test_blocks_in_the_memory_of_a_cpu_save_a_share_of_the_cost_and_count_nowhere_else() -> None:  # E6
    held = [*blocks(4), *(BlockOffloaded(key) for key in KEYS[2:8])]
    for share, tokens in ((0.25, 64 + 16), (0.0, 64), (1.0, 128)):
        router = router_of("cost", offloaded_share=share, a=held, b=[BlockOffloaded(key) for key in KEYS[1:]])
        prompt = PROMPT.among(rows_of(router, [A, B]), looked_up(router, [A, B], PROMPT))
        assert router.preview(prompt, now=0).candidates.held_tokens.tolist() == [tokens, 0]
        booking = router.book(prompt, now=0)
        assert (booking.worker, booking.overlap_tokens, booking.matched_tokens) == ("a", 64, 64)
    # What is expected to be held soon is not counted twice.
    booking.first_token()
    assert router.preview(prompt, now=1).candidates.held_tokens.tolist() == [160, 0]


def test_a_hybrid_is_expected_to_resume_behind_the_whole_prompt_only() -> None:
    options = [option._replace(resumes_at_states=True) for option in (A, B)]
    router = router_of("cost", hybrid=True, a=[*blocks(10), StateStored(KEYS[3])], b=[])
    assert book(router, options, PROMPT, now=0).matched_tokens == 64
    router = router_of("cost", hybrid=True, a=[], b=[])
    first = book(router, options, PROMPT, now=0)
    first.first_token()
    assert expected(router, first.worker) == KEYS[-1:]
    longer = RoutedPrompt(177, {HERE: [*KEYS, b"k" * 16]})
    assert book(router, options, longer, now=0).worker == first.worker


def test_prompt_that_is_computed_as_a_whole_matches_nothing() -> None:
    router = router_of(a=blocks(10), b=[])
    booking = book(router, [A, B], PROMPT._replace(reads_cache=False), now=0)
    assert booking.matched_tokens == 0
    assert router.work_of(booking.worker).prefill_tokens == 161


def test_workers_with_other_block_sizes_have_keys_of_their_own() -> None:
    router = router_of("cost", a=blocks(10))
    small = Option("b", Partition(b"f", 8))
    router.index.begin("b", small.partition, resumes_at_states=False)
    router.index.take("b", KvEvents(1, [BlockStored(b"x", b"", [])], snapshot=True))
    booking = book(router, [A, small], RoutedPrompt(161, {HERE: [b"other"], small.partition: [b"x"]}), now=0)
    assert (booking.worker, booking.matched_tokens) == ("b", 8)


def test_candidates_show_every_term_of_the_cost_and_a_preview_books_nothing() -> None:
    image = RoutedImage(b"p", stop=150, num_tokens=100)
    prompt = PROMPT._replace(images=[image])
    router = router_of("cost", a=blocks(3))
    book(router, [A], PROMPT, now=0).first_token()
    book(router, [B], RoutedPrompt(161, {HERE: [b"other"]}), now=0)
    busy = B._replace(num_waiting=3, load_times=(5, 5))
    before = router.works()
    choice = router.preview(prompt.among(rows_of(router, [A, busy]), looked_up(router, [A, B], prompt)), now=6)
    found = choice.candidates
    one, other = WorkInFlight(1, 161, decode_blocks=11, num_samples=1, num_rows=1), WorkInFlight(1, 161, 161, 0, 1, 1)
    assert found.work.T.tolist() == [list(one), list(other)]
    assert (found.prompt_tokens.tolist(), found.image_tokens.tolist()) == ([113, 161], [100, 100])
    assert (found.overlap_tokens.tolist(), found.held_tokens.tolist()) == ([48, 0], [48, 0])
    # One of the three that wait is this gateway's own.
    assert (found.foreign_requests.tolist(), found.foreign_tokens.tolist()) == ([0, 2], [0, 322])
    assert (found.foreign_running.tolist(), found.foreign_decode_blocks.tolist()) == ([0, 0], [0, 0])
    assert found.costs.tolist() == [1.5 * (113 + 100) + 11, 1.5 * (161 + 100) + 161 + 2 * 161]
    assert (choice.workers, choice.worker) == (["a", "b"], "a")
    assert router.works() == before
    assert not expected(router, "a")


def test_a_preview_takes_no_turn() -> None:
    router = router_of("round_robin")
    for _ in range(3):
        assert preview(router, [A, B], PROMPT, now=0).worker == "a"
    assert [book(router, [A, B], PROMPT, now=0).worker for _ in range(2)] == ["a", "b"]


SILENT = [option._replace(reports=False) for option in (A, B)]


def test_prompts_sent_to_a_worker_without_reports_are_assumed_cached() -> None:
    router = router_of("auto")
    first = book(router, SILENT, PROMPT, now=0)
    first.first_token()
    first.close(now=1)
    later = 2 * PREDICTED_SECONDS
    for _ in range(10):
        again = book(router, SILENT, PROMPT, now=later)
        assert (again.worker, again.matched_tokens) == (first.worker, None)  # an assumption is no fact
        again.first_token()
        again.close(now=later)
    assert held_tokens(router, SILENT, now=later + ASSUMED_SECONDS) == [0, 0]
    router.expect_nothing(first.worker)
    assert held_tokens(router, SILENT, now=later) == [0, 0]


@pytest.mark.parametrize("silent", [True, False])
def test_nothing_is_assumed_if_disabled_or_if_workers_report(silent: bool) -> None:
    router = Router("cost", BlockIndex(1 << 20), Random(0), assumes=not silent)
    options = SILENT if silent else [A, B]
    booking = book(router, options, PROMPT, now=0)
    booking.first_token()
    assert max(held_tokens(router, options, now=1)) == 160  # predicted
    assert not any(held_tokens(router, options, now=2 * PREDICTED_SECONDS))


def test_prediction_continues_a_report() -> None:
    router = router_of("cost", a=blocks(3), b=[])
    book(router, [A, B], PROMPT, now=0).first_token()
    assert set(expected(router, "a")) == set(KEYS[3:])
    routed = PROMPT.among(rows_of(router, [A, B]), looked_up(router, [A, B], PROMPT))
    found = router.preview(routed, now=1).candidates
    assert (found.overlap_tokens.tolist(), found.held_tokens.tolist()) == ([48, 0], [160, 0])


def test_a_trial_of_a_failing_worker_is_noted_with_the_booking() -> None:
    router = router_of("cost")
    for _ in range(3):
        router.breakers.failed("a", "", now=0)
    assert router.breakers.allows("a", now=1)
    book(router, [A], PROMPT, now=1)
    assert not router.breakers.allows("a", now=1)


def test_load_report_excludes_this_gateways_requests_at_its_time() -> None:
    router = router_of("cost")
    first, second = (book(router, [B], PROMPT._replace(num_samples=4), now) for now in (7, 8))
    second.close(10)
    first.close(20)
    book(router, [B], PROMPT, now=30)
    cases: dict[tuple[float, float], int] = {
        (6, 6.5): 9,
        (6, 7.5): 5,  # the first may have begun when the worker answered
        (7.5, 7.5): 5,
        (8, 9): 1,
        (10.9, 10.9): 1,  # a worker learns a little later than the gateway that a request has ended
        (11.5, 11.5): 5,
        (19, 24): 5,
        (22, 22): 9,
        (29, 29.5): 9,
        (31, 31): 8,
    }
    for load_times, expected in cases.items():
        reported = B._replace(num_waiting=9, load_times=load_times)
        found = preview(router, [A, reported], PROMPT, now=32).candidates
        assert found.foreign_requests[1] == expected, load_times


def test_a_repeat_goes_to_its_holder_although_a_poll_saw_this_gateways_own_requests_there() -> None:
    keys = [bytes([number]) * 16 for number in range(65)]
    prompt = RoutedPrompt(65 * 16, {HERE: keys[:-1]})
    router = router_of("cost", b=[BlockStored(key, b"", []) for key in keys[:-1]], a=[])
    bookings = [book(router, [B], prompt, now=100) for _ in range(8)]
    for booking in bookings:
        booking.first_token()
        booking.close(102)
    polled = B._replace(num_waiting=4, num_running=4, load_times=(101, 101.1))
    assert book(router, [A, polled], prompt, now=105.5).worker == "b"


def test_running_requests_of_other_gateways_count_as_load() -> None:
    router = router_of("cost")
    book(router, [B], PROMPT._replace(num_samples=4), now=7)

    def foreign(num_running: int, num_waiting: int) -> tuple[int, ...]:
        reported = B._replace(num_running=num_running, num_waiting=num_waiting, load_times=(7, 7))
        found = preview(router, [A, reported], PROMPT, now=7).candidates
        return tuple(
            int(column[1]) for column in (found.foreign_requests, found.foreign_running, found.foreign_decode_blocks)
        )

    num_blocks = -(-PROMPT.num_tokens // 16)
    assert foreign(4, 0) == foreign(0, 4) == (0, 0, 0)
    assert foreign(6, 0) == (0, 2, 2 * num_blocks)
    # Which four of these are this gateway's own is not known: of those that wait, one cannot be.
    assert foreign(6, 5) == (1, 6, 6 * num_blocks)
