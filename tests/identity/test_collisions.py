"""Nothing that differs shares a key: random prompts changed in one place, the known attacks, a million images."""

import io
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from saccade.identity.blocks import MediaRun, block_key, block_keys, root_key
from saccade.identity.content import content_hash, processor_fingerprint

PAD = 500


@dataclass(frozen=True)
class Prompt:
    """All that a block key may depend on."""

    token_ids: tuple[int, ...]
    runs: tuple[MediaRun, ...]
    block_size: int
    fingerprint: bytes = b"model"
    salt: bytes = b""

    def keys(self) -> list[bytes]:
        return block_keys(root_key(self.fingerprint, self.salt), self.token_ids, self.runs, self.block_size)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """A prompt of texts and images, at least one block long."""
    token_ids: list[int] = []
    runs = []
    for is_image in draw(st.lists(st.booleans(), min_size=1, max_size=6)):
        length = draw(st.integers(1, 20))
        if is_image:
            content = draw(st.binary(min_size=32, max_size=32))
            runs.append(MediaRun(len(token_ids), length, content, draw(st.sampled_from([0, 7]))))
            token_ids += [PAD] * length
        else:
            token_ids += draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length))
    block_size = draw(st.integers(1, len(token_ids)))
    return Prompt(tuple(token_ids), tuple(runs), block_size)


def flipped(content: bytes, bit: int) -> bytes:
    """The same bytes but for one bit."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@given(prompts(), st.data())
def test_one_changed_token_changes_every_key_from_its_block_on(prompt: Prompt, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(prompt.token_ids) - 1))
    token_ids = list(prompt.token_ids)
    token_ids[place] += data.draw(st.sampled_from([1, 1 << 16, 1 << 32, -prompt.token_ids[place] - 1]))
    check_from(prompt, replace(prompt, token_ids=tuple(token_ids)), place)


@given(prompts().filter(lambda prompt: prompt.runs), st.data())
def test_one_changed_bit_of_an_image_changes_every_key_from_its_block_on(prompt: Prompt, data: st.DataObject) -> None:
    """Every bit of the hash counts, the last of 256 as the first: none is cut off.  # [eng] 11, F3"""
    which = data.draw(st.integers(0, len(prompt.runs) - 1))
    run = prompt.runs[which]
    bit = data.draw(st.integers(0, 255))
    changed = run._replace(content_hash=flipped(run.content_hash, bit))
    check_from(prompt, with_run(prompt, which, changed), run.start)
    check_from(prompt, with_run(prompt, which, run._replace(offset=run.offset + 1)), run.start)


@given(prompts().filter(lambda prompt: any(run.length > 1 for run in prompt.runs)), st.data())
def test_an_image_that_begins_or_ends_elsewhere_has_other_keys(prompt: Prompt, data: st.DataObject) -> None:
    which = data.draw(st.sampled_from([i for i, run in enumerate(prompt.runs) if run.length > 1]))
    run = prompt.runs[which]
    # The token that is no longer the image's keeps its id: only the run tells.
    later = run._replace(start=run.start + 1, length=run.length - 1, offset=run.offset + 1)
    check_from(prompt, with_run(prompt, which, later), run.start)
    shorter = run._replace(length=run.length - 1)
    check_from(prompt, with_run(prompt, which, shorter), run.start + run.length - 1)


@given(prompts(), st.binary(max_size=40), st.binary(max_size=40))
def test_other_models_and_tenants_share_no_key(prompt: Prompt, fingerprint: bytes, salt: bytes) -> None:  # F3
    other = replace(prompt, fingerprint=fingerprint, salt=salt)
    if (fingerprint, salt) != (prompt.fingerprint, prompt.salt):
        check_from(prompt, other, 0)


@given(prompts(), prompts())
def test_equal_keys_only_for_equal_content(one: Prompt, other: Prompt) -> None:
    seen: dict[bytes, object] = {}
    for prompt in (one, other):
        for index, key in enumerate(prompt.keys()):
            end = (index + 1) * prompt.block_size
            assert seen.setdefault(key, content(prompt, end)) == content(prompt, end)


def content(prompt: Prompt, end: int) -> object:
    """What the tokens [0, end) are: id, and image with the place in it, one by one."""
    shown: list[tuple[bytes, int] | None] = [None] * len(prompt.token_ids)
    for run in prompt.runs:
        for place in range(run.length):
            shown[run.start + place] = (run.content_hash, run.offset + place)
    return prompt.token_ids[:end], tuple(shown[:end])


def with_run(prompt: Prompt, which: int, run: MediaRun) -> Prompt:
    """The prompt with another run in place of one of its own."""
    return replace(prompt, runs=(*prompt.runs[:which], run, *prompt.runs[which + 1 :]))


def check_from(one: Prompt, other: Prompt, place: int) -> None:
    """The keys differ from the block of token *place* on, and are equal before."""
    shared = place // one.block_size
    ours, theirs = one.keys(), other.keys()
    assert ours[:shared] == theirs[:shared]
    assert not set(ours[shared:]) & set(theirs[shared:])


def png(image: Image.Image) -> bytes:
    """The image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def painted(palette: list[int]) -> Image.Image:
    """An image of colour numbers, whose colours are in the palette alone."""
    image = Image.frombytes("P", (4, 4), bytes(range(16)))
    image.putpalette(palette)
    return image


PLAIN = processor_fingerprint({"max_pixels": 1024}, b"", "")
PAIRS: dict[str, tuple[bytes, bytes]] = {
    # CVE-2025-46722: the pixels' bytes alone know neither size nor palette nor mode.
    "constant image, turned": (png(Image.new("RGB", (56, 28), "red")), png(Image.new("RGB", (28, 56), "red"))),
    "30 by 100 and 100 by 30": (png(Image.new("L", (30, 100))), png(Image.new("L", (100, 30)))),
    "another palette": (png(painted([*range(48)])), png(painted([*range(48)][::-1]))),
    "another mode": (png(Image.new("L", (6, 2))), png(Image.new("RGB", (2, 2)))),
}


@pytest.mark.parametrize("name", PAIRS)
def test_images_of_equal_raw_bytes_have_other_keys(name: str) -> None:  # [eng] 10
    one, other = (Image.open(io.BytesIO(encoded)) for encoded in PAIRS[name])
    assert one.tobytes() == other.tobytes()
    assert content_hash(PAIRS[name][0], PLAIN) != content_hash(PAIRS[name][1], PLAIN)


@pytest.mark.parametrize("other", [{"max_pixels": 2048}, {"max_pixels": 1024.5}, {"max_pixels": 1024, "detail": "low"}])
def test_equal_bytes_with_other_settings_have_other_keys(other: dict[str, object]) -> None:  # [eng] 9, 10
    encoded = PAIRS["another mode"][0]
    assert content_hash(encoded, PLAIN) != content_hash(encoded, processor_fingerprint(other, b"", ""))


def test_numbers_that_are_equal_to_python_are_not_equal_settings() -> None:
    """CVE-2025-25183 was Python's own hash, in which 1, 1.0 and True are one."""
    settings = [{"scale": 1}, {"scale": True}, {"scale": 1.0}, {"scale": "1"}]
    assert len({processor_fingerprint(one, b"", "") for one in settings}) == len(settings)


@pytest.mark.conformance
def test_a_million_random_images_share_nothing() -> None:  # F3, [eng] 11
    number = 1 << 20
    pixels = np.random.default_rng(0).bytes(64 * number)
    root, token_ids = root_key(b"model", b""), [PAD] * 4
    hashes, keys = set(), set()
    for start in range(0, len(pixels), 64):
        image = content_hash(pixels[start : start + 64], PLAIN)
        hashes.add(image)
        keys.add(block_key(root, token_ids, 0, [MediaRun(0, 4, image)]))
    assert len(hashes) == len(keys) == number
