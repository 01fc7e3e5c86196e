"""Make room for pictures in a prompt: the text that stands for a picture, and its runs of placeholders."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from saccade.errors import InvalidValue
from saccade.protocol.media import PictureLayout, Span
from saccade.tokenization.tokenizer import Segment


def write_pictures(
    segments: Sequence[Segment],
    special_tokens: Mapping[str, int],
    placeholder_token_id: int,
    layouts: Sequence[PictureLayout],
) -> Iterator[Segment]:
    """Yield a rendered prompt with the text that stands for each picture in place of its placeholder.

    Every run of placeholders is one placeholder, for `expand` to repeat. A prompt with another number of placeholders
    than pictures is left as it is; `expand` refuses it.
    """
    is_placeholder = [one.is_special and special_tokens.get(one.text) == placeholder_token_id for one in segments]
    is_right = sum(is_placeholder) == len(layouts)
    pending = iter(layouts)
    for segment, is_picture in zip(segments, is_placeholder, strict=True):
        prompt = next(pending).prompt if is_picture and is_right else ()
        if not prompt:
            yield segment
        for piece in prompt:
            yield segment if isinstance(piece, int) else Segment(piece, piece in special_tokens)


def runs(layout: PictureLayout) -> list[int]:
    """Return the lengths of a picture's runs of placeholders, in order."""
    return [piece for piece in layout.prompt if isinstance(piece, int)] or [layout.num_tokens]


def expand(
    token_ids: list[int], placeholder_token_id: int, pictures: Sequence[Sequence[int]]
) -> tuple[list[int], tuple[tuple[Span, ...], ...]]:
    """Replace each placeholder by as many as its run has; pictures[i] are the lengths of the runs of picture i.

    Return the ids, and for each picture where its runs lie. Raises InvalidValue where placeholders and runs are not
    equally many.
    """
    lengths = [length for picture in pictures for length in picture]
    num_placeholders = token_ids.count(placeholder_token_id)
    if num_placeholders != len(lengths):
        raise InvalidValue(
            f"The model's chat template makes room for {num_placeholders} images; the messages hold {len(pictures)}.",
            "messages",
        )
    expanded: list[int] = []
    spans: list[Span] = []
    position = 0
    for length in lengths:
        found = token_ids.index(placeholder_token_id, position)
        expanded += token_ids[position:found]
        spans.append(Span(len(expanded), length))
        expanded += [placeholder_token_id] * length
        position = found + 1
    return expanded + token_ids[position:], tuple(_grouped(spans, map(len, pictures)))


def _grouped(spans: Iterable[Span], sizes: Iterable[int]) -> Iterator[tuple[Span, ...]]:
    pending = iter(spans)
    for size in sizes:
        yield tuple(islice(pending, size))
