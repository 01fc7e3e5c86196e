"""Choosing and booking are one step."""

from random import Random

from saccade.protocol.kv_events import BlockStored, KvEvent, KvEvents, StateStored
from saccade.routing.index import BlockIndex, Partition
from saccade.routing.policy import Policy, WorkInFlight
from saccade.routing.router import Option, RoutedPicture, RoutedPrompt, Router

HERE = Partition(b"f", 16)
KEYS = [bytes([number]) * 16 for number in range(10)]
PROMPT = RoutedPrompt(161, {16: KEYS})
A, B = Option("a", HERE), Option("b", HERE)


def router_of(policy: Policy = "auto", hybrid: bool = False, **held: list[KvEvent]) -> Router:
    """A router that knows exactly what the workers in *held* hold."""
    router = Router(policy, BlockIndex(1 << 20), Random(0))
    for worker, events in held.items():
        router.index.begin(worker, HERE, resumes_at_states=hybrid)
        router.index.take(worker, KvEvents(1, events, snapshot=True))
    return router


def blocks(count: int) -> list[KvEvent]:
    return [BlockStored(key, b"", []) for key in KEYS[:count]]


def test_the_holder_is_chosen_and_the_match_is_what_it_reported() -> None:
    for _ in range(20):
        booking = router_of(a=blocks(3), b=blocks(9)).book([A, B], PROMPT, now=0)
        assert (booking.worker, booking.matched_tokens) == ("b", 144)


def test_without_reports_nothing_is_claimed() -> None:
    assert router_of().book([A, B], PROMPT, now=0).matched_tokens is None
    assert router_of(a=blocks(2)).book([A], RoutedPrompt(161), now=0).matched_tokens is None  # no choice, no keys


def test_work_is_booked_with_the_choice_and_taken_back() -> None:
    router = router_of(b=blocks(9))
    booking = router.book([A, B], PROMPT, now=0)
    assert router.work["b"] == WorkInFlight(1, 161, prefill_tokens=17)
    booking.first_token(16)
    booking.first_token(16)
    assert router.work["b"] == WorkInFlight(1, 161, decode_blocks=11)
    booking.close()
    assert router.work["b"] == WorkInFlight()
    aborted = router.book([A, B], PROMPT, now=0)
    aborted.close()
    assert router.work["b"] == WorkInFlight()


def test_prompts_that_arrive_together_find_each_other() -> None:
    router = router_of("cost")
    first = router.book([A, B], PROMPT, now=0)
    other = RoutedPrompt(161, {16: [b"other"]})
    assert router.book([A, B], other, now=0).worker != first.worker  # its work is booked already
    first.first_token(16)
    again = router.book([A, B], PROMPT, now=1)
    assert again.worker == first.worker
    assert again.matched_tokens is None  # a prediction is no fact
    assert router.index.num_blocks(first.worker) == 0


def test_what_was_predicted_of_a_prompt_that_never_began_is_taken_back() -> None:
    router = router_of("cost")
    booking = router.book([A, B], PROMPT, now=0)
    assert router.predictions.held(booking.worker, now=0)
    booking.close()
    assert not router.predictions.held(booking.worker, now=0)


def test_a_picture_goes_where_its_encoding_is() -> None:
    picture = RoutedPicture(b"p", stop=150, num_tokens=100)
    prompt = RoutedPrompt(161, {16: KEYS}, [picture])
    holder = Option("b", HERE, encodes=lambda key: key != b"p")
    for _ in range(20):
        assert router_of("cost").book([A, holder], prompt, now=0).worker == "b"
        # A prefix that covers the picture needs no encoding.
        assert router_of("cost", a=blocks(10)).book([A, holder], prompt, now=0).worker == "a"
    router = router_of("cost")
    sent = router.book([A, B], prompt, now=0)
    sent.first_token(16)
    other_text = RoutedPrompt(161, {16: [b"other"]}, [picture])
    assert router.book([A, B], other_text, now=1).worker == sent.worker


def test_a_hybrid_is_expected_to_resume_behind_the_whole_prompt_only() -> None:
    options = [option._replace(resumes_at_states=True) for option in (A, B)]
    router = router_of("cost", hybrid=True, a=[*blocks(10), StateStored(KEYS[3])], b=[])
    assert router.book(options, PROMPT, now=0).matched_tokens == 64
    router = router_of("cost", hybrid=True, a=[], b=[])
    first = router.book(options, PROMPT, now=0)
    first.first_token(16)
    assert list(router.predictions.held(first.worker, now=0)) == KEYS[-1:]
    longer = RoutedPrompt(177, {16: [*KEYS, b"k" * 16]})
    assert router.book(options, longer, now=0).worker == first.worker


def test_prompt_that_is_computed_as_a_whole_matches_nothing() -> None:
    router = router_of(a=blocks(10), b=[])
    booking = router.book([A, B], PROMPT._replace(reads_cache=False), now=0)
    assert booking.matched_tokens == 0
    assert router.work[booking.worker].prefill_tokens == 161


def test_workers_with_other_block_sizes_have_keys_of_their_own() -> None:
    router = router_of("cost", a=blocks(10))
    small = Option("b", Partition(b"f", 8))
    router.index.begin("b", small.partition, resumes_at_states=False)
    router.index.take("b", KvEvents(1, [BlockStored(b"x", b"", [])], snapshot=True))
    booking = router.book([A, small], RoutedPrompt(161, {16: [b"other"], 8: [b"x"]}), now=0)
    assert (booking.worker, booking.matched_tokens) == ("b", 8)
