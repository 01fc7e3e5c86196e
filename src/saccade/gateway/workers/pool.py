"""The workers of a gateway, and which of them can serve a model."""

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from saccade.errors import ModelNotFound, WorkerUnavailable
from saccade.gateway.workers.compatibility import Compatibility
from saccade.gateway.workers.connectors import Hooks, clients, targets
from saccade.gateway.workers.worker import Worker
from saccade.protocol.description import Description, ModelFiles
from saccade.transport.credentials import NO_CREDENTIALS, WorkerCredentials

logger = logging.getLogger(__name__)


MAX_SHOWN_CHARACTERS = 100
"""Of a model name from a request, in an error."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A served model: its name, its description by its workers, and those workers that are ready now."""

    name: str
    description: Description
    workers: tuple[Worker, ...]


class WorkerPool:
    """The workers at *urls*, connected between start() and close().

    *on_released* gets the names of shared-memory slots that no worker will read any more, *on_discarded* those that one
    may still be reading. *model_files* are files of models, by name, for workers that send none. Saccade workers get
    *credentials*. Workers of a model named in *assumed_releases* share its work, whatever they report of it.
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
        self._clients: list[Worker] = []
        self._listeners: list[Callable[[Model], None]] = []
        self._watchers: list[Callable[[], None]] = []
        self._leaving: list[Worker] = []
        self._forgetters: list[Callable[[str], Awaitable[None]]] = []
        self._announcements: dict[str, Description] = {}
        self._hooks = Hooks(on_released, self.changed, on_discarded or on_released, model_files, credentials)
        for url in targets(urls):
            self.join(url)

    async def start(self) -> None:
        """Begin to connect to every worker; return at once."""
        await asyncio.gather(*(client.start() for client in self._clients))

    async def close(self) -> None:
        """End every stream; what still runs is aborted and raises WorkerFailed."""
        await asyncio.gather(*(client.close() for client in (*self._clients, *self._leaving)))

    @property
    def ready(self) -> bool:
        """Whether at least one worker can take a request."""
        return any(client.ready for client in self._clients)

    @property
    def clients(self) -> tuple[Worker, ...]:
        """Every worker, ready or not, in the order of the urls."""
        return tuple(self._clients)

    @property
    def leaving(self) -> tuple[Worker, ...]:
        """Workers that were removed, get no requests and finish those that they have."""
        return tuple(self._leaving)

    def add(self, client: Worker) -> None:
        """Add a worker, which the caller starts, or take back one that is leaving."""
        self._clients.append(client)
        if client in self._leaving:
            self._leaving.remove(client)
            self._notify()

    def join(self, url: str) -> tuple[Worker, ...]:
        """Add a client for every target behind *url*; the caller starts them. Raises StartupError."""
        joined = clients(url, self._hooks)
        for client in joined:
            self.add(client)
        return joined

    def remove(self, client: Worker) -> None:
        """Send *client* no more requests; those that it has go on. The caller closes it, and has it forgotten."""
        self._clients.remove(client)
        self._leaving.append(client)
        logger.info("worker %s is removed: it gets no more requests", client.url)
        self._notify()

    async def forget(self, client: Worker) -> None:
        """Have everything dropped that is known of *client*, which has left and has no requests."""
        for forgetter in self._forgetters:
            await forgetter(client.url)
        if client in self._leaving:
            self._leaving.remove(client)

    def reset_caches(self, *, prefix: bool, media: bool) -> list[str]:
        """Have every worker drop what no request uses; return the urls of workers that did not take the command."""
        return [client.url for client in self._clients if not client.reset_caches(prefix=prefix, media=media)]

    def changed(self, client: Worker) -> None:
        """Note that readiness or description of *client* has changed."""
        logger.info("worker %s is %s", client.url, "ready" if client.ready else "not ready")
        if client.description is not None and client.ready and client in self._clients:
            self._announce(client, client.description)
        self._notify()

    def _notify(self) -> None:
        for watcher in self._watchers:
            watcher()

    def _announce(self, client: Worker, description: Description) -> None:
        model = self._model(description.model)
        if difference := self.releases.reported_difference(description, model.description):
            gets_work = client in model.workers
            level, gets = (logging.WARNING, "work all the same") if gets_work else (logging.ERROR, "no work")
            logger.log(
                level,
                "worker %s serves another release of %r than the first worker (%s): it gets %s",
                *(client.url, description.model, difference, gets),
            )
        last = self._announcements.get(model.name)
        if last is None or self.releases.reported_difference(last, model.description):
            self._announcements[model.name] = model.description
            for listener in self._listeners:
                listener(model)

    def on_model(self, listener: Callable[[Model], None]) -> None:
        """Have *listener* called when a model is served first, and again when its fingerprint or files have changed."""
        self._listeners.append(listener)

    def on_change(self, watcher: Callable[[], None]) -> None:
        """Have *watcher* called when a worker comes or goes, or its readiness or description has changed."""
        self._watchers.append(watcher)

    def on_forget(self, forgetter: Callable[[str], Awaitable[None]]) -> None:
        """Have *forgetter* called with the url of a worker of which nothing may be kept."""
        self._forgetters.append(forgetter)

    def models(self) -> list[Model]:
        """Return every model that a worker has described, in the order of the urls, with or without a ready worker."""
        return [self._model(name) for name in dict.fromkeys(self._names().values())]

    def model(self, name: str) -> Model:
        """Return the model that may be requested as *name*, with at least one ready worker.

        Raises ModelNotFound and WorkerUnavailable.
        """
        names = self._names()
        if not names:
            raise WorkerUnavailable("No worker is ready yet; try again shortly.")
        if name not in names:
            shown = name if len(name) <= MAX_SHOWN_CHARACTERS else name[:MAX_SHOWN_CHARACTERS] + "..."
            served = f"served: {', '.join(names)}."
            raise ModelNotFound(
                f"The model {shown!r} is not served here; {served}", "model", reason=f"Not served here; {served}"
            )
        model = self._model(names[name])
        if not model.workers:
            raise WorkerUnavailable(f"No worker of the model {name!r} is ready; try again shortly.")
        return model

    def aliases(self, name: str) -> tuple[str, ...]:
        return tuple(alias for alias, meant in self._names().items() if meant == name and alias != name)

    def _names(self) -> dict[str, str]:
        """Return every name that may be requested, and its model; a model's own name wins over an alias."""
        descriptions = [client.description for client in self._clients if client.description]
        names = {one.model: one.model for one in descriptions}
        for one in descriptions:
            names |= {alias: one.model for alias in one.aliases if alias not in names}
        return names

    def _model(self, name: str) -> Model:
        """Return the model *name*.

        Workers that serve another release than the first ready one are left out: their answers could differ.
        """
        described = [(client, client.description) for client in self._clients if client.description]
        serving = [(client, description) for client, description in described if description.model == name]
        ready = [(client, description) for client, description in serving if client.ready]
        first = (ready or serving)[0][1]
        workers = tuple(
            client
            for client, description in ready
            if description.fingerprint == first.fingerprint or not self.releases.difference(description, first)
        )
        return Model(name=name, description=first, workers=workers)
