"""Placeholders are filled by position, and images may have text of their own."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import InvalidValue
from saccade.gateway.prompt.placeholders import expand, write_images
from saccade.gateway.served_models.served_model import Placeholders
from saccade.protocol.media import ImageLayout, Span
from saccade.tokenization.tokenizer import Segment

PAD = 9
IMAGES = Placeholders(PAD)
BOTH = Placeholders(PAD, 7, "<video>", ("<v>", "<video>"))


@given(
    texts=st.lists(st.lists(st.integers(0, 8), max_size=5), min_size=1, max_size=6),
    counts=st.lists(st.integers(1, 7), min_size=5, max_size=5),
)
def test_every_placeholder_lies_in_its_span(texts: list[list[int]], counts: list[int]) -> None:
    counts = counts[: len(texts) - 1]
    token_ids = [token_id for text in texts[:-1] for token_id in (*text, PAD)] + texts[-1]
    expanded, spans = expand(token_ids, IMAGES, list(map(layout, counts)))
    placed = [position for (span,) in spans for position in range(span.start, span.start + span.length)]
    assert [position for position, token_id in enumerate(expanded) if token_id == PAD] == placed
    assert [span.length for (span,) in spans] == counts
    assert [token_id for token_id in expanded if token_id != PAD] == [i for text in texts for i in text]


@pytest.mark.parametrize(("token_ids", "counts"), [([1, PAD], []), ([1], [4]), ([PAD, PAD], [4])])
def test_counts_must_agree(token_ids: list[int], counts: list[int]) -> None:  # A9
    with pytest.raises(InvalidValue, match=f"{token_ids.count(PAD)} images .* hold {len(counts)},"):
        expand(token_ids, IMAGES, list(map(layout, counts)))


def layout(num_tokens: int, *prompt: str | int) -> ImageLayout:
    return ImageLayout(
        resized_height=1, resized_width=1, grid=(1, 1, 1), num_tokens=num_tokens, pixel_shape=(1,), prompt=prompt
    )


def special(text: str) -> Segment:
    return Segment(text, is_special=True)


def plain(text: str) -> Segment:
    return Segment(text, is_special=False)


def test_an_image_may_be_several_runs_with_text_between() -> None:
    tokens = {"<image>": PAD, "<row>": 8}
    layouts = [layout(5, "<row>", 2, "\n<row>", 3), layout(4)]
    written = write_images([special("<image>"), plain("<image>"), special("<image>")], tokens, IMAGES, layouts)
    image = special("<image>")
    assert list(written) == [special("<row>"), image, plain("\n<row>"), image, plain("<image>"), image]
    token_ids, spans = expand([8, PAD, 1, PAD, 2, PAD], IMAGES, layouts)
    assert token_ids == [8, PAD, PAD, 1, PAD, PAD, PAD, 2, PAD, PAD, PAD, PAD]
    assert spans == ((Span(1, 2), Span(4, 3)), (Span(8, 4),))


def test_a_prompt_with_another_number_of_placeholders_is_refused() -> None:  # A9
    layouts = [layout(5, "<row>", 2, "<row>", 3)]
    segments = [special("<image>"), special("<image>")]
    assert list(write_images(segments, {"<image>": PAD}, IMAGES, layouts)) == segments
    with pytest.raises(InvalidValue, match=r"2 images .* hold 1,"):
        expand([PAD, PAD, 1], IMAGES, [layout(9, 2, "<row>", 3, "<row>", 4)])


def video(num_tokens: int, *prompt: str | int) -> ImageLayout:
    return msgspec.structs.replace(layout(num_tokens, *prompt), frames=(0, 1))


def test_images_and_videos_have_placeholders_of_their_own() -> None:
    tokens = {"<image>": PAD, "<video>": 7, "<t>": 6}
    layouts = [video(4, "<t>", 2, " s<t>", 2), layout(3), video(5)]
    segments = [plain("a"), special("<v>"), special("<video>"), special("<image>"), special("<v>"), special("<video>")]
    pad = special("<video>")
    assert list(write_images(segments, tokens, BOTH, layouts)) == [
        plain("a"), special("<t>"), pad, plain(" s<t>"), pad, special("<image>"), pad,
    ]  # fmt: skip
    token_ids, spans = expand([6, 7, 1, 7, 2, PAD, 7], BOTH, layouts)
    assert token_ids == [6, 7, 7, 1, 7, 7, 2, PAD, PAD, PAD, 7, 7, 7, 7, 7]
    assert spans == ((Span(1, 2), Span(4, 2)), (Span(7, 3),), (Span(10, 5),))
    for other in ([PAD, 7, 7], [7, PAD, 7], [7, 7]):
        with pytest.raises(InvalidValue):
            expand(other, BOTH, layouts[:2])


@pytest.mark.parametrize(
    "segments",
    [
        [special("<image>"), special("<v>"), special("<video>")],
        [special("<v>"), special("<video>")],
        [special("<image>"), special("<image>")],
        [special("<video>"), special("<v>"), special("<image>")],
        [plain("<v>"), special("<video>"), special("<image>")],
    ],
)
def test_a_template_that_writes_other_videos_is_refused(segments: list[Segment]) -> None:
    with pytest.raises(InvalidValue):
        list(write_images(segments, {"<image>": PAD, "<video>": 7}, BOTH, [video(4), layout(3)]))
