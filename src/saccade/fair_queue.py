"""A queue for a limited resource, which gives the next turn to the client that holds the least of it.

    films = FairQueue(4, "films", max_waiting=64, wait_seconds=30.0)
    with await films.enter(client):
        await show(film)

A unit of capacity is whatever is scarce: a process, a row, a byte. The weight of a turn is how many units it takes.
Clients share the resource fairly. A client is a tenant, or an address if the server has no API keys.
"""

import asyncio
import bisect
import contextlib
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Set
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

from saccade.errors import QueueFull, SaccadeError

CLIENT_SHARE = 0.75
"""The largest part of the waiting places left by others that one client may have. So a client alone has three quarters
of them, two have three sevenths each, and a later one finds a place unless there are very many."""

MAX_REMEMBERED = 1024
"""The number of clients whose last turn a queue remembers."""


class Background(NamedTuple):
    """A *client* whose turns wait as long as any other turn is waiting."""

    client: Hashable


@dataclass(eq=False)
class _Waiter:
    """A client's request for a turn."""

    client: Hashable
    weight: int
    """What it asks for; once it is granted, what it has."""
    priority: int
    """Its client's: a client of priority 2 gets twice the weight of one of priority 1."""
    rank: int
    """Its place among the turns of its client: lower ones go first."""
    number: int
    """Its place in the order of arrival."""
    need: object
    """What it needs besides capacity, None for nothing more."""
    granted: asyncio.Future[None]
    """Done when the turn was granted, refused or cancelled."""
    obstacle: Hashable = None
    """What kept it from beginning when that was last asked, None if nothing did."""


class FairQueue:
    """Gives out turns whose weights add up to at most the capacity.

    - capacity: how many units there are, such as rows or bytes.
    - what: the plural name of the things that wait; errors use it.
    - max_waiting: how many turns may wait, or None for no limit.
    - wait_seconds: how long a turn may wait, or None for no limit.
    - client_capacity: returns how many units a client may hold, given how many all others hold.
    - client_share: the share that one client may take of the waiting places that others leave.
    - obstacle_to: returns what keeps a turn with a need from beginning now, or None if nothing does.

    **Who is next.** The next turn goes to the client that holds the least weight relative to its priority. In a tie, it
    goes to the client that was served longest ago, or else to the one that came first. A client's own turns are ordered
    by rank, then by arrival. Turns of Background clients begin only if no other turn is waiting.

    **Heavy turns.** A turn that does not fit yet waits for others to end, and later turns wait for it. Otherwise light
    turns could keep it out forever. Only turns with an obstacle, and turns of a client at its own capacity, are passed
    over. A turn that exceeds the whole capacity is granted when there is no other turn. A turn that weighs more than
    its client has free does not wait for all the client's other turns. It begins when half of the client's capacity is
    free, with the weight that is free.
    """

    def __init__(
        self,
        capacity: int,
        what: str,
        *,
        max_waiting: int | None,
        wait_seconds: float | None,
        client_capacity: Callable[[int], int] | None = None,
        client_share: float = CLIENT_SHARE,
        obstacle_to: Callable[[object], Hashable] = lambda _: None,
    ) -> None:
        self.capacity = capacity
        self._what = what
        self._max_waiting = max_waiting
        self._wait_seconds = wait_seconds
        self._client_capacity = client_capacity
        self._client_share = client_share
        self._obstacle_to = obstacle_to
        self.weight = 0
        """The total weight of all turns in progress."""
        self._load: Counter[Hashable] = Counter()
        self._lines: dict[Hashable, deque[_Waiter]] = {}
        self._last_turns: OrderedDict[Hashable, int] = OrderedDict()
        self._num_turns = 0
        self._num_requests = 0

    @property
    def num_waiting(self) -> int:
        return sum(not waiter.granted.done() for line in self._lines.values() for waiter in line)

    def has_waiting_besides(self, client: Hashable) -> bool:
        """Return whether turns of clients other than *client* are waiting."""
        lines = (line for other, line in self._lines.items() if other != client)
        return any(not waiter.granted.done() for line in lines for waiter in line)

    async def enter(
        self,
        client: Hashable = None,
        weight: int = 1,
        priority: int = 1,
        need: object = None,
        rank: int = 0,
    ) -> "Turn":
        """Wait for a turn for *client*, and return it. The turn lasts until leave(), or until its `with` block ends.

        A turn that fits still waits while there is an obstacle to its *need*. Several turns may have the same need.
        Call advance() when an obstacle may be gone. A task that is cancelled while it waits leaves the line. Raises
        QueueFull if too many turns are waiting or this one waits too long. It also raises the errors of refuse() and
        *obstacle_to*.
        """
        self._num_requests += 1
        granted = asyncio.get_running_loop().create_future()
        waiter = _Waiter(client, weight, priority, rank, self._num_requests, need, granted)
        bisect.insort(self._lines.setdefault(client, deque()), waiter, key=lambda one: one.rank)
        self.advance()
        if not waiter.granted.done() and self._max_waiting is not None:
            self._check_places(waiter, self._max_waiting)
        try:
            # A timer costs more than the rest of a turn that is granted at once.
            async with asyncio.timeout(None if granted.done() else self._wait_seconds):
                await granted
        except BaseException as error:
            self._withdraw(waiter)
            if isinstance(error, TimeoutError):
                raise QueueFull(
                    f"Other {self._what} kept this one waiting for {self._wait_seconds:g} seconds; try again later, or "
                    "send fewer at a time."
                ) from None
            raise
        return Turn(waiter.weight, partial(self._leave, client, waiter.weight))

    def grow(self, num_more: int) -> None:
        """Add *num_more* units of capacity, or remove units if it is negative.

        Turns in progress go on even if they exceed the capacity; without any capacity, no turn begins.
        """
        self.capacity += num_more
        self.advance()

    def advance(self) -> None:
        """Grant turns as long as the next one without an obstacle fits."""
        obstacles: set[Hashable] = set()
        while self._lines and (best := self._next(obstacles)) is not None:
            waiter, weight = best
            is_only = not self.weight and self.capacity > 0
            if not is_only and self.weight + weight > self.capacity:
                return
            try:
                waiter.obstacle = None if waiter.need is None else self._obstacle_to(waiter.need)
            except SaccadeError as error:
                waiter.granted.set_exception(error)
                continue
            if waiter.obstacle is not None:
                obstacles.add(waiter.obstacle)
                continue
            line = self._lines[waiter.client]
            line.remove(waiter)
            if not line:
                del self._lines[waiter.client]
            waiter.weight = weight
            self._load[waiter.client] += weight
            self.weight += weight
            self._note_turn(waiter.client)
            waiter.granted.set_result(None)

    def refuse(self, error: SaccadeError) -> None:
        """Fail all waiting turns with *error*."""
        for line in self._lines.values():
            for waiter in line:
                if not waiter.granted.done():
                    waiter.granted.set_exception(error)
        self._lines.clear()

    def _check_places(self, waiter: _Waiter, max_waiting: int) -> None:
        """If there is no waiting place for *waiter*, its client's newest, remove it and raise QueueFull."""
        num_own = sum(not own.granted.done() for own in self._lines[waiter.client])
        num_left = max_waiting - (self.num_waiting - num_own)
        if num_own > num_left:
            self._lines[waiter.client].remove(waiter)
            raise QueueFull(f"Too many {self._what} are waiting; try again shortly.")
        if num_own > max(1, self._client_share * num_left):
            self._lines[waiter.client].remove(waiter)
            raise QueueFull(
                f"Your share of the {self._what} that wait is used up ({num_own - 1}); send the next ones when these "
                "are done."
            )

    def _withdraw(self, waiter: _Waiter) -> None:
        """Remove *waiter*, or end its turn if one was granted in the same round of the event loop."""
        granted = waiter.granted
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            self._leave(waiter.client, waiter.weight)
            return
        granted.cancel()
        with contextlib.suppress(ValueError):
            self._lines.get(waiter.client, deque()).remove(waiter)
        self.advance()

    def _leave(self, client: Hashable, weight: int) -> None:
        self.weight -= weight
        self._load[client] -= weight
        if not self._load[client]:
            del self._load[client]
        self.advance()

    def _next(self, obstacles: Set[Hashable]) -> tuple[_Waiter, int] | None:
        """Return the next waiter without one of *obstacles*, and the weight of its turn; None if there is no waiter.

        The turn may not fit yet.
        """
        best: tuple[_Waiter, int] | None = None
        least: tuple[float, int, int] = (math.inf, 0, 0)
        lines = list(self._lines.items())
        if any(isinstance(client, Background) for client, _ in lines):
            others = [one for one in lines if not isinstance(one[0], Background)]
            lines = others if any(not one.granted.done() for _, line in others for one in line) else lines
        for client, line in lines:
            # A cancelled waiter may not have run yet to withdraw.
            while line and line[0].granted.done():
                line.popleft()
            if not line:
                del self._lines[client]
                continue
            # Written out: many clients may wait, and each end of a turn asks for the next one.
            first = line[0]
            if first.obstacle in obstacles:
                later = next((one for one in line if one.obstacle not in obstacles and not one.granted.done()), None)
                if later is None:
                    continue
                first = later
            load, weight = self._load.get(client, 0), first.weight
            if self._client_capacity is not None:
                most = self._client_capacity(self.weight - load)
                weight = _part_of(weight, most - load, most)
                if not weight:
                    continue
            service = load / first.priority, self._last_turns.get(client, 0), first.number
            if service < least:
                best, least = (first, weight), service
        return best

    def _note_turn(self, client: Hashable) -> None:
        self._num_turns += 1
        self._last_turns[client] = self._num_turns
        self._last_turns.move_to_end(client)
        if len(self._last_turns) > MAX_REMEMBERED:
            self._last_turns.popitem(last=False)


def _part_of(weight: int, free: int, most: int) -> int:
    """Return the part of *weight* that a turn gets if its client has *free* of *most* units; 0 if it must wait."""
    return weight if weight <= free else free if 2 * free >= most else 0


class Turn:
    """A client's turn, which takes *weight* units. As a context manager, it ends with the block."""

    def __init__(self, weight: int, end: Callable[[], None]) -> None:
        self.weight = weight
        self._end: Callable[[], None] | None = end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """End the turn, so that the next ones may begin. A second call does nothing."""
        end, self._end = self._end, None
        if end is not None:
            end()
