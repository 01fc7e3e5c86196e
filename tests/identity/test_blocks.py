"""Keys of KV blocks: equal exactly for equal content. # B3, E7, F3"""

from hypothesis import given
from hypothesis import strategies as st

from saccade.identity.blocks import KEY_BYTES, MediaRun, block_key, block_keys, root_key, runs_within

BLOCK_SIZE = 16
ROOT = root_key(b"model", b"")
PAD = 500


def prompt(content_hash: bytes, start: int, length: int, total: int) -> tuple[list[int], list[MediaRun]]:
    token_ids = [7] * start + [PAD] * length + [9] * (total - start - length)
    return token_ids, [MediaRun(start, length, content_hash)]


@given(st.integers(0, 60), st.integers(1, 60), st.integers(0, 40))
def test_images_share_blocks_only_before_the_first_placeholder(start: int, length: int, rest: int) -> None:  # [eng] 11
    total = start + length + rest
    one = block_keys(ROOT, *prompt(b"a" * 32, start, length, total), BLOCK_SIZE)
    other = block_keys(ROOT, *prompt(b"b" * 32, start, length, total), BLOCK_SIZE)
    shared = start // BLOCK_SIZE
    assert len(one) == total // BLOCK_SIZE
    assert one[:shared] == other[:shared]
    assert not set(one[shared:]) & set(other[shared:])


@given(st.lists(st.integers(0, 1000), max_size=64), st.lists(st.integers(0, 1000), max_size=64))
def test_keys_are_equal_exactly_as_far_as_the_tokens_are(one: list[int], other: list[int]) -> None:
    keys = [block_keys(ROOT, tokens, [], BLOCK_SIZE) for tokens in (one, other)]
    for index, pair in enumerate(zip(*keys, strict=False)):
        end = (index + 1) * BLOCK_SIZE
        assert (pair[0] == pair[1]) == (one[:end] == other[:end])


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50)), max_size=4), st.integers(0, 20))
def test_keys_of_a_prompt_equal_those_of_its_blocks(block_size: int, images: list[tuple[int, int]], rest: int) -> None:
    token_ids: list[int] = []
    runs = []
    for number, (gap, length) in enumerate(images):
        token_ids += [7] * gap
        runs.append(MediaRun(len(token_ids), length, bytes([number]) * 32, offset=number))
        token_ids += [PAD] * length
    token_ids += [9] * rest
    parent, expected = ROOT, []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_key(parent, token_ids[start : start + block_size], start, runs)
        expected.append(parent)
    assert block_keys(ROOT, token_ids, runs, block_size) == expected


def test_key_depends_on_the_place_in_the_item() -> None:
    """The second and third block of a long image hold the same token ids; their keys differ, whatever came before."""
    token_ids, runs = prompt(b"a" * 32, 0, 64, 64)
    shifted = [MediaRun(0, 64, b"a" * 32, offset=16)]
    assert len(set(block_keys(ROOT, token_ids, runs, BLOCK_SIZE))) == 4
    assert block_keys(ROOT, token_ids, runs, BLOCK_SIZE)[0] != block_keys(ROOT, token_ids, shifted, BLOCK_SIZE)[0]


def test_adjacent_images_differ_by_their_boundary() -> None:
    token_ids = [PAD] * 16
    first = [MediaRun(0, 8, b"a" * 32), MediaRun(8, 8, b"b" * 32)]
    second = [MediaRun(0, 4, b"a" * 32), MediaRun(4, 12, b"b" * 32)]
    assert block_keys(ROOT, token_ids, first, BLOCK_SIZE) != block_keys(ROOT, token_ids, second, BLOCK_SIZE)


def test_models_and_tenants_share_nothing() -> None:
    roots = [root_key(b"model", b""), root_key(b"other", b""), root_key(b"model", b"tenant"), root_key(b"mode", b"l")]
    assert len(set(roots)) == len(roots)
    assert all(len(root) == KEY_BYTES for root in roots)


def test_keys_are_equal_in_other_processes() -> None:
    """Gateways and workers of different versions must agree, so the values are fixed here."""
    root = root_key(b"model", b"salt")
    assert root.hex() == "a53c5123d38faf5debdfe469b2efa6ea"
    runs = [MediaRun(5, 30, b"a" * 32, offset=2)]
    assert [key.hex() for key in block_keys(root, list(range(48)), runs, 16)] == [
        "4f1b8504177880f03bd8b48c3647a962",
        "94218dae00c6f4546a903ee49bff8bbd",
        "de8244312a713b4b3acfba5b682fd20c",
    ]
    assert block_keys(root, [0, 1, 2], [], 3)[0].hex() == "6fb4032549db53ee58479f1585d36177"


def test_a_part_of_a_prompt_has_the_parts_of_its_runs() -> None:
    runs = [MediaRun(2, 10, b"a" * 32, offset=1), MediaRun(20, 4, b"b" * 32)]
    assert runs_within(runs, 8, 16) == (MediaRun(0, 4, b"a" * 32, offset=7),)
    assert runs_within(runs, 12, 20) == ()
