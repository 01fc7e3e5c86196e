"""The plan of one step. No torch."""

from dataclasses import dataclass, field

from saccade.engine.encoder_cache import EncoderKey
from saccade.engine.pixels import PixelSource
from saccade.engine.sequence import Sequence


@dataclass(slots=True)
class Schedule:
    """One step's work: how many tokens of which sequence, and which pictures must be encoded before.

    *encode* maps a key to everyone in the step who brings or needs that picture, first comer first. Those *aside* are
    encoded while this step and later ones run, and nobody's chunk goes beyond the start of one. *lacking* maps parked
    sequences to the indices of pictures that they need and nobody can bring.
    """

    chunks: dict[Sequence, int] = field(default_factory=dict)
    encode: dict[EncoderKey, list[tuple[Sequence, PixelSource]]] = field(default_factory=dict)
    aside: set[EncoderKey] = field(default_factory=set)
    lacking: dict[Sequence, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Left:
    """What is left of the budgets in the step being planned."""

    tokens: int
    patches: int
