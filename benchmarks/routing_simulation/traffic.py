"""Kinds of traffic: groups of prompts that share images and most of the text, as in llm-d's guide to its router."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from benchmarks.routing_simulation.fleet import Fleet
from benchmarks.routing_simulation.worker import Prompt, Speed
from saccade.fleet.router import RoutedImage

BLOCK_SIZE = 16
NUM_IMAGES = 3
IMAGES_START = 50
"""The first image's place in a prompt."""

SPEED = Speed(step=0.012, token=4e-5, image_token=1.5e-5, decode=1.5e-4, max_tokens=8192, max_sequences=256)
"""About that of an 8B model on one GPU."""


@dataclass(frozen=True)
class Traffic:
    """*num_groups* groups of *group_size* prompts on average, *rate* prompts a second.

    A prompt has three images of together *num_image_tokens* tokens and *num_text_tokens* tokens; its first
    *shared_part* is that of its group. With *exponent*, groups are as popular as Zipf's law says. The cache of a worker
    holds *num_cached_prompts* prompts.
    """

    rate: float
    num_groups: int = 300
    group_size: int = 5
    num_image_tokens: int = 2640
    num_text_tokens: int = 1300
    shared_part: float = 0.7
    exponent: float = 0.0
    num_workers: int = 8
    num_cached_prompts: int = 60
    num_answer: int = 200

    @property
    def num_tokens(self) -> int:
        """The length of a prompt."""
        return self.num_image_tokens + self.num_text_tokens

    @property
    def fleet(self) -> Fleet:
        """The workers of this traffic."""
        num_blocks = self.num_cached_prompts * self.num_tokens // BLOCK_SIZE
        return Fleet(self.num_workers, num_blocks, num_images=64, block_size=BLOCK_SIZE, speed=SPEED)

    def arrivals(self, seed: int) -> Iterator[tuple[float, Prompt]]:
        """Yield prompts with their times of arrival in seconds, a Poisson process."""
        random = Random(seed)
        groups = [group for group in range(self.num_groups) for _ in range(self.group_size)]
        if self.exponent:
            popularity = [1 / (rank + 1) ** self.exponent for rank in range(self.num_groups)]
            groups = random.choices(range(self.num_groups), popularity, k=len(groups))
        else:
            random.shuffle(groups)
        seconds, seen = 0.0, Counter[int]()
        for group in groups:
            seconds += random.expovariate(self.rate)
            num_answer = max(2, round(random.gauss(self.num_answer, self.num_answer / 5)))
            yield seconds, self._prompt(group, seen[group], num_answer)
            seen[group] += 1

    def _prompt(self, group: int, number: int, num_answer: int) -> Prompt:
        num_blocks = self.num_tokens // BLOCK_SIZE
        num_shared = int(self.num_tokens * self.shared_part) // BLOCK_SIZE
        own = number + 1
        keys = [_key(group, 0 if place < num_shared else own, place) for place in range(num_blocks)]
        size = self.num_image_tokens // NUM_IMAGES
        images = [
            RoutedImage(_key(group, 0, num_blocks + place), IMAGES_START + (place + 1) * size, size)
            for place in range(NUM_IMAGES)
        ]
        return Prompt(self.num_tokens, keys, images, num_answer, repeats=number > 0)


def _key(group: int, number: int, place: int) -> bytes:
    return b"%05d-%05d-%04d" % (group, number, place)


KINDS = {
    "20 requests/s": Traffic(20),
    "40 requests/s": Traffic(40),
    "50 requests/s, near saturation": Traffic(50),
    "caches too small": Traffic(30, num_cached_prompts=22),
    "2 workers": Traffic(10, num_groups=150, num_workers=2, num_cached_prompts=90),
    "32 workers": Traffic(160, num_groups=400, num_workers=32),
    "text, 90 % shared": Traffic(40, num_image_tokens=3, num_text_tokens=4000, shared_part=0.9),
    "popular groups, Zipf 1.2": Traffic(40, exponent=1.2),
    "popular groups, Zipf 1.6, 60 requests/s": Traffic(60, exponent=1.6),
    "one prompt for all, 60 requests/s": Traffic(
        60, num_groups=1, group_size=1200, num_image_tokens=3, num_text_tokens=4000, shared_part=0.8
    ),
    "nothing repeats": Traffic(30, num_groups=1200, group_size=1),
}
