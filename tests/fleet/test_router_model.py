"""What the router takes workers to hold, against a naive model: a set of keys for each worker."""

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.fleet.expectations import ASSUMED_SECONDS, PREDICTED_SECONDS
from saccade.fleet.index import BlockIndex, Partition
from saccade.fleet.lookup import LocalLookup, Overlaps, Targets
from saccade.fleet.router import Option, RoutedPrompt, Router
from saccade.protocol.kv_events import BlockStored, KvEvent, KvEvents, StateStored

BLOCK_SIZE, NUM_BLOCKS = 16, 6
WHOLE, OTHER = Partition(b"f", BLOCK_SIZE), Partition(b"g", BLOCK_SIZE)
OPTIONS = (
    Option("a", WHOLE),
    Option("b", WHOLE),
    Option("hybrid", WHOLE, resumes_at_states=True),
    Option("silent", WHOLE, reports=False),
    Option("of another model", OTHER),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["report", "send", "wait"]),
        st.integers(0, len(OPTIONS) - 1),
        st.integers(0, 2),
        st.integers(0, NUM_BLOCKS),
    ),
    max_size=25,
)


def keys_of(partition: Partition, prompt: int) -> list[bytes]:
    """Two of the three prompts have their first three blocks in common."""
    return [bytes([prompt if number >= 3 or prompt == 2 else 0, number]) + partition[0] for number in range(NUM_BLOCKS)]


class Model:
    """One worker: what it has reported of each prompt, and until when it is expected to hold a key."""

    def __init__(self, option: Option) -> None:
        self.option = option
        self.reported: list[bytes] = []
        self.expected: dict[bytes, float] = {}

    def num_reported(self, keys: list[bytes]) -> int:
        count = 0
        while count < min(len(keys), len(self.reported)) and keys[count] == self.reported[count]:
            count += 1
        # A hybrid has a state at the end of what it reported.
        return count if not self.option.resumes_at_states or count == len(self.reported) else 0

    def num_held(self, keys: list[bytes], now: float) -> int:
        count, alive = self.num_reported(keys), {key for key, until in self.expected.items() if until > now}
        if self.option.resumes_at_states:
            return max([count, *(number + 1 for number, key in enumerate(keys) if key in alive)])
        while count < len(keys) and keys[count] in alive:
            count += 1
        return count

    def send(self, keys: list[bytes], now: float) -> None:
        count = self.num_reported(keys)
        new = keys[max(count, len(keys) - 1) :] if self.option.resumes_at_states else keys[count:]
        seconds = PREDICTED_SECONDS if self.option.reports else ASSUMED_SECONDS
        self.expected |= dict.fromkeys(new, now + seconds)


@settings(max_examples=60)
@given(STEPS)
def test_held_tokens_equal_those_of_a_set_of_keys_for_each_worker(steps: list[tuple[str, int, int, int]]) -> None:
    index = BlockIndex(1 << 20)
    router, now = Router("cost", index, Random(0)), 0.0
    rows = np.array([router.describe(option) for option in OPTIONS])
    targets = Targets([option.name for option in OPTIONS], [option.partition for option in OPTIONS])
    models = [Model(option) for option in OPTIONS]
    prompts = [
        RoutedPrompt(BLOCK_SIZE * NUM_BLOCKS + 1, {each: keys_of(each, prompt) for each in (WHOLE, OTHER)})
        for prompt in range(3)
    ]
    for step, number, prompt, count in steps:
        option, keys = OPTIONS[number], keys_of(OPTIONS[number].partition, prompt)
        if step == "wait":
            now += count
        elif step == "send":
            found = LocalLookup(index).find(targets, prompts[prompt].keys).at(np.array([number]))
            router.book(prompts[prompt].among(rows[[number]], found), now).first_token()
            models[number].send(keys, now)
        elif option.reports:
            models[number].reported = keys[:count]
            events: list[KvEvent] = [
                BlockStored(key, keys[place - 1] if place else b"", [], is_first=not place)
                for place, key in enumerate(keys[:count])
            ]
            events += [StateStored(keys[count - 1])] if count else []
            index.begin(option.name, option.partition, resumes_at_states=option.resumes_at_states)
            index.take(option.name, KvEvents(1, events, snapshot=True))
        for asked in prompts:
            found = LocalLookup(index).find(targets, asked.keys)
            assert isinstance(found, Overlaps)
            candidates = router.preview(asked.among(rows, found), now).candidates
            shown = (candidates.held_tokens // BLOCK_SIZE).tolist()
            assert shown == [model.num_held(list(asked.keys[model.option.partition]), now) for model in models]
