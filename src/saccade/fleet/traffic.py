"""What traffic an operator lets a worker have: none, more or less than others, or a share of the conversations."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from saccade.errors import StartupError

MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0

Weight = Annotated[float, Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]

OPTIONS = f"there are weight=2, from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}, share=10%, up to 100%, and cordoned"
"""The options of a worker in a file, for people."""

_NUMBER = r"\d{1,9}(?:\.\d{1,9})?"
_OPTION = re.compile(f"(?P<cordoned>cordoned)|weight=(?P<weight>{_NUMBER})|share=(?P<share>{_NUMBER})%", re.ASCII)


class WorkerTraffic(msgspec.Struct, frozen=True):
    """What traffic a worker gets.

    A *cordoned* worker gets no new requests. One of *weight* 2 is taken to be twice as fast as one of weight 1. A
    worker with a *share*, from 0 to 1, is a canary: it gets that part of the conversations, and no others.
    """

    cordoned: bool = False
    weight: Weight = 1.0
    share: Share | None = None

    @property
    def is_canary(self) -> bool:
        return self.share is not None

    def part(self, number: int) -> "WorkerTraffic":
        """Return the traffic of each of *number* workers that have the share together."""
        return self if self.share is None else msgspec.structs.replace(self, share=self.share / number)

    def __str__(self) -> str:
        """Return it in the form of the workers file, for the log."""
        share = [] if self.share is None else [f"share={100 * self.share:g}%"]
        return " ".join([f"weight={self.weight:g}", *share, *(["cordoned"] if self.cordoned else [])])


class TrafficChange(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the admin port has set of a worker's traffic; None for what it leaves as it is."""

    cordoned: bool | None = None
    weight: Weight | None = None
    share: Share | None = None

    def of(self, traffic: WorkerTraffic) -> WorkerTraffic:
        """Return *traffic* with the change."""
        changes = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return msgspec.structs.replace(traffic, **changes)


ORDINARY = WorkerTraffic()
NO_CHANGE = TrafficChange()


@dataclass(frozen=True)
class FleetTraffic:
    """The traffic of all workers by url: as a source *lists* them, with the *changes* of the admin port."""

    lists: Mapping[str, WorkerTraffic] = field(default_factory=dict)
    changes: Mapping[str, TrafficChange] = field(default_factory=dict)

    def of(self, worker: str) -> WorkerTraffic:
        """Return the traffic of the worker with the url *worker*."""
        listed, change = self.lists.get(worker, ORDINARY), self.changes.get(worker)
        return listed if change is None else change.of(listed)


EVERYONE_ORDINARY = FleetTraffic()


def read_traffic(words: Sequence[str]) -> WorkerTraffic:
    """Return what *words* say, such as `weight=0.5`, `share=10%` and `cordoned`. Raises StartupError."""
    values: dict[str, str] = {}
    for word in words:
        option = _OPTION.fullmatch(word)
        if option is None or (name := option.lastgroup or "") in values:
            raise StartupError(f"{word!r} is no option of a worker, or a second one: {OPTIONS}.")
        values[name] = option[name]
    weight, share = float(values.get("weight", ORDINARY.weight)), float(values.get("share", 0)) / 100
    if not (MIN_WEIGHT <= weight <= MAX_WEIGHT and share <= 1):
        raise StartupError(f"{' '.join(words)!r} has a number that is too small or too large: {OPTIONS}.")
    return WorkerTraffic("cordoned" in values, weight, share if "share" in values else None)
