"""Make room for pictures and videos in a prompt: the text that stands for one, and its runs of placeholders."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from saccade.errors import InvalidValue
from saccade.protocol.media import PictureLayout, Span
from saccade.tokenization.tokenizer import Segment


class Item(NamedTuple):
    """A picture or video of the prompt, whose tokens have the id *placeholder*."""

    placeholder: int
    layout: PictureLayout

    @property
    def runs(self) -> list[int]:
        """The lengths of its runs of placeholders, in order."""
        return [piece for piece in self.layout.prompt if isinstance(piece, int)] or [self.layout.num_tokens]


def write_pictures(
    segments: Sequence[Segment], special_tokens: Mapping[str, int], known: Collection[int], items: Sequence[Item]
) -> Iterator[Segment]:
    """Yield a rendered prompt with the text that stands for each of *items* in place of its placeholder.

    Every run of placeholders is one placeholder, for `expand` to repeat. *known* are all placeholders of the model. A
    prompt with other placeholders than those of *items* is left as it is; `expand` refuses it.
    """
    written = [special_tokens.get(one.text) if one.is_special else None for one in segments]
    is_right = [token_id for token_id in written if token_id in known] == [item.placeholder for item in items]
    pending = iter(items)
    for segment, token_id in zip(segments, written, strict=True):
        prompt = next(pending).layout.prompt if is_right and token_id in known else ()
        if not prompt:
            yield segment
        for piece in prompt:
            yield segment if isinstance(piece, int) else Segment(piece, piece in special_tokens)


def expand(
    token_ids: list[int], known: Collection[int], items: Sequence[Item]
) -> tuple[list[int], tuple[tuple[Span, ...], ...]]:
    """Replace each placeholder of *items* by as many as its run has; *known* are all placeholders of the model.

    Return the ids, and for each item where its runs lie. Raises InvalidValue where the prompt has other placeholders
    than those of the items' runs.
    """
    found = sorted(place for placeholder in known for place in _places(token_ids, placeholder))
    wanted = [item.placeholder for item in items for _ in item.runs]
    if [token_ids[place] for place in found] != wanted:
        raise InvalidValue(
            f"The model's chat template makes room for {len(found)} images and videos; the messages hold {len(items)}, "
            "or in another order.",
            "messages",
        )
    expanded: list[int] = []
    spans: list[tuple[Span, ...]] = []
    position, pending = 0, iter(found)
    for item in items:
        of_item: list[Span] = []
        for length in item.runs:
            place = next(pending)
            expanded += token_ids[position:place]
            of_item.append(Span(len(expanded), length))
            expanded += [item.placeholder] * length
            position = place + 1
        spans.append(tuple(of_item))
    return expanded + token_ids[position:], tuple(spans)


def _places(token_ids: list[int], placeholder: int) -> Iterator[int]:
    place = -1
    for _ in range(token_ids.count(placeholder)):
        place = token_ids.index(placeholder, place + 1)
        yield place
