"""Detect the axis order in which a checkpoint stores a layer's expert matrices.

A release stores them as [experts, inputs, outputs] or as [experts, outputs, inputs]. Tools may write them the other way
round. Shapes tell the two apart, except for a square matrix. A layer has two matrices, [2I, H] and [H, I], at most one
of which is square.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from saccade.engine.executor.weight_fields import WEIGHT
from saccade.engine.executor.weight_places import PLAIN, Filling, WeightPlace


def turned(fillings: Sequence[Filling], places: Mapping[str, WeightPlace]) -> Iterator[Filling]:
    """Yield *fillings*, with the targets and formats of experts adapted to the checkpoint's axis order.

    A layer whose matrices do not agree with each other stays as the family says, and is later refused because of its
    shapes.
    """
    others: dict[str, set[bool]] = defaultdict(set)
    for filling in fillings:
        place = places.get(filling.target.parameter)
        values = filling.fields.get(PLAIN) or filling.fields.get(WEIGHT)
        if place is None or values is None or not _is_joined(filling, place):
            continue
        stated, other = (
            place.checkpoint_shape(filling.target._replace(transposed=way))
            for way in (filling.target.transposed, not filling.target.transposed)
        )
        if stated != other:
            others[_layer(filling)].add(values.shape == other)
    for filling in fillings:
        target, format = filling.target, filling.format
        place = places.get(target.parameter)
        if place is not None and _is_joined(filling, place) and others[_layer(filling)] == {True}:
            target = target._replace(transposed=not target.transposed)
        if target.transposed and format is not None:
            format = format.transposed() or format
        yield filling._replace(target=target, format=format)


def _is_joined(filling: Filling, place: WeightPlace) -> bool:
    return place.experts is not None and filling.target.expert is None and len(place.shape) == 2


def _layer(filling: Filling) -> str:
    return filling.target.parameter.rpartition(".")[0]
