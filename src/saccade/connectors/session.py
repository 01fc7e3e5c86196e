"""The life of a gateway's client for one worker: it connects, is ready, loses the worker, and tries again."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

from saccade.connectors.context import ClientContext
from saccade.connectors.worker_load import plausible
from saccade.connectors.worker_state import NO_REFUSALS, Refusals, WorkerState, refusals_of
from saccade.errors import MAX_CAUSE_CHARACTERS, WorkerUnavailable, printable
from saccade.protocol.description import Description
from saccade.protocol.engine_load import Load
from saccade.protocol.exactness import Exactness
from saccade.protocol.request import EngineRequest
from saccade.transport import lasting_task
from saccade.transport.backoff import Backoff

MAX_CHANGE_SECONDS = 60.0
"""The longest wait after a worker that describes itself differently each time, since a gateway prepares its model anew.
One that stays as long may be tried again soon.
"""

LOST = "The worker stopped while it answered; the request can be sent again."
NOT_READY = "The worker is not ready; try again shortly."

S = TypeVar("S")

logger = logging.getLogger(__name__)


def slots_of(request: EngineRequest) -> list[str]:
    """Return the names of the shared-memory slots that *request* refers to."""
    return [item.slot.name for item in request.media if item.slot is not None]


class Connector(ABC, Generic[S]):
    """A client of the worker at *url*; between start() and close() it reconnects by itself.

    It has a session while the worker is ready. *load* was true at some time between the two of *load_times*, in seconds
    of the monotonic clock. *loss* says why the last attempt to connect failed, or why the last session ended; "" while
    there is one.
    """

    LIMIT_SECONDS: ClassVar[float] = 1.0
    """The longest wait for the next attempt to connect."""

    HEALTHY_SECONDS: ClassVar[float] = 5.0
    """After a connection of this time the waits are short again."""

    REPORTS_IMAGES: ClassVar[bool] = False
    """Whether the worker's events report encoder outputs."""

    LOSS_LEVEL: ClassVar[int] = logging.WARNING
    """The level at which a new reason for a loss is logged."""

    def __init__(self, url: str, context: ClientContext) -> None:
        self.url = url
        self.context = context
        self.description: Description | None = None
        self.load: Load | None = None
        self.load_times = (0.0, 0.0)
        self.loss = ""
        self._refusals = NO_REFUSALS
        self._session: S | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> WorkerState:
        """What is known about the worker now."""
        return WorkerState(
            self.description,
            self.ready,
            self.loss,
            self.load,
            self.load_times,
            self.exactness,
            self._refusals,
            self.salt,
            self.REPORTS_IMAGES,
            self.kept_image_bytes,
        )

    @property
    def ready(self) -> bool:
        """Whether the worker was connected and healthy when last checked."""
        return self._session is not None

    @property
    @abstractmethod
    def exactness(self) -> Exactness:
        """How exactly the worker's events can report what it holds."""

    @property
    def salt(self) -> bytes | None:
        """The only tenant's salt that the worker serves; most keep tenants apart."""
        return None

    @property
    def kept_image_bytes(self) -> int:
        """Bytes of the images sent to the worker that it is believed to keep; most wires need the pixels every time."""
        return 0

    def refusals(self, session: S) -> Refusals:
        """Return the needs that this wire cannot serve at the worker of *session*."""
        return NO_REFUSALS

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        self._task = lasting_task.begin(self._run, f"worker client {self.url}")

    async def close(self) -> None:
        """Close every connection; the worker aborts what is still open, and open requests raise WorkerFailed."""
        await lasting_task.end(self._task)

    def reset_caches(self, *, prefix: bool, media: bool) -> bool:
        """Tell the worker to drop what no request uses. Return whether its wire has such a command; most have none."""
        return False

    @abstractmethod
    async def _live(self) -> str:
        """Connect, then watch the worker until it is lost or unhealthy; return why."""

    async def _run(self) -> None:
        backoff = Backoff(0.05, self.LIMIT_SECONDS, self.HEALTHY_SECONDS)
        changes = Backoff(0.05, MAX_CHANGE_SECONDS, MAX_CHANGE_SECONDS)
        logged = ""
        while True:
            backoff.started()
            changes.started()
            before = self.description
            reason = await self._live()
            logger.log(logging.DEBUG if reason == logged else self.LOSS_LEVEL, "worker %s: %s", self.url, reason)
            logged, self.loss = reason, printable(reason)[:MAX_CAUSE_CHARACTERS]
            seconds = backoff.after_failure()
            if before is not None and self.description != before:
                seconds = max(seconds, changes.after_failure())
            await asyncio.sleep(seconds)

    def _session_for(self, request: EngineRequest) -> S:
        """Return the session that sends *request*. Without one, give its slots back and raise WorkerUnavailable."""
        if self._session is None:
            self.context.on_released(slots_of(request))
            raise WorkerUnavailable(NOT_READY)
        return self._session

    def _enter(self, session: S, description: Description) -> None:
        self._session, self.description, self.loss = session, description, ""
        self._refusals = {**self.refusals(session), **refusals_of(description)}
        self.context.on_change(self)

    def _leave(self) -> None:
        if self._session is not None:
            self._session = self.load = None
            self.context.on_change(self)

    def _note_load(self, load: Load, since: float) -> None:
        """Keep a report of the load that was requested at *since*."""
        self.load, self.load_times = plausible(load), (since, time.monotonic())
        self.context.on_load(self)
