"""The workers of a gateway, and which of them can serve a model."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from saccade.connectors.context import ClientContext
from saccade.errors import ModelNotFound, WorkerUnavailable
from saccade.fleet.address import clients, placeholder_id, targets, traits_of
from saccade.fleet.release import Compatibility
from saccade.fleet.traffic import EVERYONE_ORDINARY, FleetTraffic
from saccade.fleet.worker import Worker
from saccade.models.files import read_model_files
from saccade.protocol.description import Description, ModelFiles
from saccade.transport.credentials import NO_CREDENTIALS, WorkerCredentials

MAX_SHOWN_CHARACTERS = 100
"""A longer model name from a request is cut in errors."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """A served model: its name, its first ready worker's description, and its workers that may get requests now.

    *traffic* is that of all workers.
    """

    name: str
    description: Description
    workers: tuple[Worker, ...]
    traffic: FleetTraffic = EVERYONE_ORDINARY


class WorkerPool:
    """The workers at *urls*, connected between start() and close().

    *on_released* gets the names of shared-memory slots that no worker will read any more, *on_discarded* those that a
    worker may still be reading. *model_files* has files by model name, for workers that send none. Saccade's and vLLM's
    workers get *credentials*. Workers of a model in *assumed_releases* share its work, whatever they report about it.
    """

    def __init__(
        self,
        urls: Sequence[str],
        on_released: Callable[[Sequence[str]], None],
        on_discarded: Callable[[Sequence[str]], None] | None = None,
        model_files: Mapping[str, ModelFiles] = MappingProxyType({}),
        credentials: WorkerCredentials = NO_CREDENTIALS,
        assumed_releases: Collection[str] = (),
    ) -> None:
        self.releases = Compatibility(assumed_releases)
        self.release = on_released
        self.traffic = EVERYONE_ORDINARY
        self._clients: list[Worker] = []
        self._listeners: list[Callable[[Model], None]] = []
        self._watchers: list[Callable[[], None]] = []
        self._leaving: list[Worker] = []
        self._forgetters: list[Callable[[str], Awaitable[None]]] = []
        self._announcements: dict[str, Description] = {}
        self._load_listeners: list[Callable[[Worker], None]] = []
        # What models() and model() return until a worker changes.
        self._models: dict[str, Model] | None = None
        self._changed: list[Worker] = []
        self._names: dict[str, str] = {}
        self._context = ClientContext(
            on_released,
            self.changed,
            self.reported_load,
            on_discarded or on_released,
            credentials,
            model_files=model_files,
            read_files=read_model_files,
            traits=traits_of,
            placeholder_id=placeholder_id,
        )
        for url in targets(urls):
            self.join(url)

    async def start(self) -> None:
        """Begin to connect to every worker; return at once."""
        await asyncio.gather(*(client.start() for client in self._clients))

    async def close(self) -> None:
        """Close every connection; requests that still run fail with WorkerFailed."""
        await asyncio.gather(*(client.close() for client in (*self._clients, *self._leaving)))

    @property
    def ready(self) -> bool:
        """Whether at least one worker can take a request."""
        return any(client.state.ready for client in self._clients)

    @property
    def clients(self) -> tuple[Worker, ...]:
        """Every worker, ready or not, in the order of the urls."""
        return tuple(self._clients)

    @property
    def leaving(self) -> tuple[Worker, ...]:
        """Removed workers, which finish their requests and get no new ones."""
        return tuple(self._leaving)

    def add(self, client: Worker) -> None:
        """Add a worker, which the caller starts, or take back one that is leaving."""
        self._clients.append(client)
        self._models = None
        if client in self._leaving:
            self._leaving.remove(client)
            self._notify()

    def join(self, url: str) -> tuple[Worker, ...]:
        """Add a client for every target of *url*; the caller starts them. Raises StartupError."""
        joined = clients(url, self._context)
        for client in joined:
            self.add(client)
        return joined

    def remove(self, client: Worker) -> None:
        """Send *client* no more requests; those that it has go on. The caller closes it, then calls forget()."""
        self._clients.remove(client)
        self._leaving.append(client)
        logger.info("worker %s is removed: it gets no more requests", client.url)
        self._notify()

    def direct(self, traffic: FleetTraffic) -> None:
        """Replace the traffic of the workers. One that is cordoned finishes its requests."""
        if traffic == self.traffic:
            return
        before, self.traffic = self.traffic, traffic
        for client in self._clients:
            if (now := traffic.of(client.url)) != before.of(client.url):
                logger.info("worker %s has the traffic %s", client.url, now)
        self._notify()

    async def forget(self, client: Worker) -> None:
        """Drop all state about *client*, which has left and has no requests."""
        for forgetter in self._forgetters:
            await forgetter(client.url)
        if client in self._leaving:
            self._leaving.remove(client)

    def reset_caches(self, *, prefix: bool, media: bool) -> list[str]:
        """Tell every worker to drop what no request uses; return the urls of workers without this command."""
        return [client.url for client in self._clients if not client.reset_caches(prefix=prefix, media=media)]

    def reported_load(self, client: Worker) -> None:
        """Pass on that *client* has reported its load."""
        for listener in self._load_listeners:
            listener(client)

    def changed(self, client: Worker) -> None:
        """Note a change of *client*'s readiness or description.

        Watchers hear of it, with all other changes of this turn of the event loop, before the next turn: to look at a
        thousand workers for each of a thousand changes would take seconds.
        """
        self._models = None
        logger.info("worker %s is %s", client.url, "ready" if client.state.ready else "not ready")
        if not self._changed:
            asyncio.get_running_loop().call_soon(self._handle_changes)
        self._changed.append(client)

    def _handle_changes(self) -> None:
        changed, self._changed = self._changed, []
        for client in changed:
            if (now := client.state).description is not None and now.ready and client in self._clients:
                self._log_difference(client, now.description)
        self._notify()

    def _notify(self) -> None:
        self._models = None
        self._announce()
        for watcher in self._watchers:
            watcher()

    def _announce(self) -> None:
        """Announce each model that is new, or whose workers now have a release with other files, or another length."""
        for model in self.models():
            last, now = self._announcements.get(model.name), model.description
            if model.workers and (
                last is None
                or last.max_model_len != now.max_model_len
                or (self.releases.difference(last, now) and last.files != now.files)
            ):
                self._announcements[model.name] = now
                for listener in self._listeners:
                    listener(model)

    def _log_difference(self, client: Worker, description: Description) -> None:
        model = self._known_models()[description.model]
        if difference := self.releases.reported_difference(description, model.description):
            gets_work = client in model.workers
            level, gets = (logging.WARNING, "work all the same") if gets_work else (logging.ERROR, "no work")
            logger.log(
                level,
                "worker %s serves another release of %r than the first worker (%s): it gets %s",
                *(client.url, description.model, difference, gets),
            )

    def on_model(self, listener: Callable[[Model], None]) -> None:
        """Call *listener* with each model, now or when first served, and again when its files or length change."""
        self._listeners.append(listener)
        for model in self.models():
            self._announcements[model.name] = model.description
            listener(model)

    def on_change(self, watcher: Callable[[], None]) -> None:
        """Call *watcher* when a worker comes or goes, or its readiness or description changes."""
        self._watchers.append(watcher)

    def on_load(self, listener: Callable[[Worker], None]) -> None:
        """Call *listener* with each worker that has reported its load."""
        self._load_listeners.append(listener)

    def on_forget(self, forgetter: Callable[[str], Awaitable[None]]) -> None:
        """Call *forgetter* with the url of a worker that has left; it drops its state about that worker."""
        self._forgetters.append(forgetter)

    def models(self) -> list[Model]:
        """Return every model that a worker has described, ready or not, in the order of the urls."""
        return list(self._known_models().values())

    def model(self, name: str) -> Model:
        """Return the model that requests call *name*, with at least one ready worker that is not cordoned.

        The same object is returned until a worker changes. Raises ModelNotFound and WorkerUnavailable.
        """
        models, names = self._known_models(), self._names
        if not names:
            raise WorkerUnavailable("No worker is ready yet; try again shortly.")
        if name not in names:
            excerpt = name if len(name) <= MAX_SHOWN_CHARACTERS else name[:MAX_SHOWN_CHARACTERS] + "..."
            served = f"served: {', '.join(names)}."
            raise ModelNotFound(
                f"The model {excerpt!r} is not served here; {served}", "model", reason=f"Not served here; {served}"
            )
        model = models[names[name]]
        if not model.workers:
            raise WorkerUnavailable(f"No worker of the model {name!r} is ready; try again shortly.")
        return model

    def aliases(self, name: str) -> tuple[str, ...]:
        self._known_models()
        return tuple(alias for alias, meant in self._names.items() if meant == name and alias != name)

    def _known_models(self) -> dict[str, Model]:
        """Return every described model by name. They are rebuilt after a worker has changed."""
        if self._models is None:
            self._names = self._find_names()
            self._models = {name: self._model(name) for name in dict.fromkeys(self._names.values())}
        return self._models

    def _find_names(self) -> dict[str, str]:
        """Return the model of every name that a request may use; a model's own name wins over an alias."""
        descriptions = [one for client in self._clients if (one := client.state.description)]
        names = {one.model: one.model for one in descriptions}
        for one in descriptions:
            names |= {alias: one.model for alias in one.aliases if alias not in names}
        return names

    def _model(self, name: str) -> Model:
        """Return the model *name*, without cordoned workers, and those whose release differs from the first one's."""
        states = [(client, client.state) for client in self._clients]
        serving = [
            (client, one, state.ready) for client, state in states if (one := state.description) and one.model == name
        ]
        ready = [one for one in serving if one[2] and not self.traffic.of(one[0].url).cordoned]
        first = (ready or serving)[0][1]
        workers = tuple(
            client
            for client, description, _ in ready
            if description.fingerprint == first.fingerprint or not self.releases.difference(description, first)
        )
        return Model(name=name, description=first, workers=workers, traffic=self.traffic)
