"""Writes image placeholders into a prompt's text, and expands them among its tokens."""

from collections.abc import Iterator, Mapping, Sequence

from saccade.errors import InvalidValue
from saccade.gateway.served_models.served_model import Placeholders, media_segments
from saccade.protocol.media import ImageLayout, Span
from saccade.tokenization.tokenizer import Segment


def runs(layout: ImageLayout) -> list[int]:
    """Return the lengths of an image's or video's placeholder runs, in order."""
    return [piece for piece in layout.prompt if isinstance(piece, int)] or [layout.num_tokens]


def write_images(
    segments: Sequence[Segment],
    special_tokens: Mapping[str, int],
    placeholders: Placeholders,
    layouts: Sequence[ImageLayout],
) -> Iterator[Segment]:
    """Yield the rendered prompt *segments*, with the template's text for each image or video replaced by its layout's.

    Every run is written as a single placeholder, which `expand` repeats. A prompt whose images do not match *layouts*
    stays unchanged, and `expand` refuses it. Raises InvalidValue if the videos do not match.
    """
    segments_of_media = list(media_segments(segments, special_tokens, placeholders))
    if [is_video for _, _, is_video in segments_of_media] != [bool(layout.frames) for layout in layouts]:
        if any(is_video for _, _, is_video in segments_of_media) or any(layout.frames for layout in layouts):
            raise _refusal(len(segments_of_media), len(layouts))
        yield from segments
        return
    position = 0
    for (start, stop, is_video), layout in zip(segments_of_media, layouts, strict=True):
        yield from segments[position:start]
        placeholder = segments[start]
        if is_video or placeholders.template_mark is not None:
            placeholder = Segment(placeholders.video if is_video else placeholders.image_token, is_special=True)
        for piece in layout.prompt or (layout.num_tokens,):
            yield placeholder if isinstance(piece, int) else Segment(piece, piece in special_tokens)
        position = stop
    yield from segments[position:]


def expand(
    token_ids: list[int], placeholders: Placeholders, layouts: Sequence[ImageLayout]
) -> tuple[list[int], tuple[tuple[Span, ...], ...]]:
    """Repeat each placeholder of *layouts* to the length of its run.

    Return the ids, and each image's or video's spans. Raises InvalidValue if the prompt's placeholders do not match the
    runs.
    """
    places = sorted(place for placeholder in placeholders.ids for place in _places(token_ids, placeholder))
    expected = [placeholders.id_of(layout) for layout in layouts for _ in runs(layout)]
    if [token_ids[place] for place in places] != expected:
        raise _refusal(len(places), len(layouts))
    expanded: list[int] = []
    spans: list[tuple[Span, ...]] = []
    position, pending = 0, iter(places)
    for layout in layouts:
        of_item: list[Span] = []
        for length in runs(layout):
            place = next(pending)
            expanded += token_ids[position:place]
            of_item.append(Span(len(expanded), length))
            expanded += [placeholders.id_of(layout)] * length
            position = place + 1
        spans.append(tuple(of_item))
    return expanded + token_ids[position:], tuple(spans)


def _places(token_ids: list[int], placeholder: int) -> Iterator[int]:
    place = -1
    for _ in range(token_ids.count(placeholder)):
        place = token_ids.index(placeholder, place + 1)
        yield place


def _refusal(num_written: int, num_sent: int) -> InvalidValue:
    return InvalidValue(
        f"The model's chat template makes room for {num_written} images and videos; the messages hold {num_sent}, or "
        "in another order.",
        "messages",
    )
