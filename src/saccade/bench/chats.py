"""Makes the conversations to send; the same settings and seed give the same bytes."""

import functools
import mimetypes
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pybase64

from saccade.bench.images import Photographer
from saccade.bench.settings import BenchSettings

WORDS = (
    "a and at big blue book by car city day door eye for green hand he in is it lake man of old on red sea she sun the"
)
"""Words that most vocabularies have as one token."""

_photographer = functools.lru_cache(maxsize=8)(Photographer)


class Chats:
    """The conversations of one run. Runs that differ in *run* have other images and texts, of the same sizes."""

    def __init__(self, settings: BenchSettings, seed: int, run: Sequence[int], files: Sequence[Path] = ()) -> None:
        self._settings = settings
        self._seed = seed
        self._run = run
        self._files = [files[index] for index in self._random(0).permutation(len(files))]

    def messages(self, number: int) -> list[msgspec.Raw]:
        """Return the contents of a conversation's user messages, as JSON. The first has the images and the video."""
        words = WORDS.split()
        shape = self._settings.turns, self._settings.input_tokens
        texts = [
            " ".join(words[word] for word in row) for row in self._random(number, 1).integers(0, len(words), shape)
        ]
        content = [*self._media(self._source(number)), {"type": "text", "text": texts[0]}]
        return [msgspec.Raw(msgspec.json.encode(one)) for one in (content, *texts[1:])]

    def _random(self, *place: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, *self._run, *place])

    def _source(self, number: int) -> int:
        """Return the number of the conversation that sends this one's images first."""
        share = self._settings.repeat_share
        while number and int(share * (number + 1)) > int(share * number):
            number = int(np.random.default_rng([self._seed, number]).integers(number))
        return number

    def _media(self, number: int) -> Iterator[dict[str, object]]:
        settings, random, count = self._settings, self._random(number, 2), self._settings.images_per_request
        sizes = np.random.default_rng([self._seed, number, 3]).integers(len(settings.image_size), size=count)
        for index, size in enumerate(sizes, number * count):
            if self._files:
                path = self._files[index % len(self._files)]
                yield _part("image_url", mimetypes.guess_type(path.name)[0] or "image/jpeg", path.read_bytes())
            else:
                image = _photographer(self._seed, *settings.image_size[size]).jpeg(random)
                yield _part("image_url", "image/jpeg", image)
        if settings.video_seconds:
            clip = _photographer(self._seed, *settings.image_size[0]).clip(random, settings.video_seconds)
            yield _part("video_url", "video/mp4", clip)


def _part(name: str, kind: str, content: bytes) -> dict[str, object]:
    return {"type": name, name: {"url": f"data:{kind};base64,{pybase64.b64encode(content).decode()}"}}
