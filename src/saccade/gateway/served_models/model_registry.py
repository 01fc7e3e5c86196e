"""Builds and holds the models that a gateway serves, from their workers' descriptions."""

import asyncio
import dataclasses
import gc
from collections.abc import Mapping

import structlog

from saccade.errors import ModelNotFound, StartupError, WorkerUnavailable
from saccade.fleet.pool import Model, WorkerPool
from saccade.gateway.served_models.model_probe import ModelProbe
from saccade.gateway.served_models.served_model import DECLARED, Parsers, ServedModel
from saccade.models.files import with_chat_template
from saccade.protocol.description import Description, ModelFiles

_logger = structlog.get_logger(__name__)


class ModelRegistry:
    """Builds and holds the models that a pool of workers serves. If a model cannot be built, the log says why.

    - worker_pool: the workers whose descriptions models are built from.
    - parsers: the operator's choice of parsers for answers.
    - model_files: replace the files that workers send, by model name.
    - chat_template: replaces the template in the files.
    - unservable: a future that gets the reason if all workers have described their models, none can be built, and none
          was served before. It is cancelled when a model is served.
    """

    def __init__(
        self,
        worker_pool: WorkerPool,
        model_files: Mapping[str, ModelFiles],
        parsers: Parsers = DECLARED,
        chat_template: bytes | None = None,
    ) -> None:
        self._worker_pool = worker_pool
        self._model_files = model_files
        self._parsers = parsers
        self._chat_template = chat_template
        self._models: dict[str, ServedModel] = {}
        self._described: dict[str, Description] = {}
        self._building: set[asyncio.Task[None]] = set()
        self._refused: dict[str, StartupError] = {}
        self.unservable: asyncio.Future[StartupError] = asyncio.get_running_loop().create_future()
        worker_pool.on_model(self._on_model)
        worker_pool.on_change(self._judge)

    @property
    def ready(self) -> bool:
        """Whether a worker is ready and its model is built."""
        return self._worker_pool.ready and any(
            model.workers and model.name in self._models for model in self._worker_pool.models()
        )

    def models(self) -> list[ServedModel]:
        """Return the models that requests can name, ready or not."""
        return [self._models[model.name] for model in self._worker_pool.models() if model.name in self._models]

    def names(self) -> list[tuple[str, ServedModel]]:
        """Return every name that requests can use, with its model; a model's own name comes before its aliases."""
        served = [
            (model, self._models[model.name]) for model in self._worker_pool.models() if model.name in self._models
        ]
        return [(name, one) for model, one in served for name in (model.name, *self._worker_pool.aliases(model.name))]

    def get(self, name: str | None) -> ServedModel:
        """Return the model with the name or alias *name*; None means the only model.

        Raises ModelNotFound and WorkerUnavailable.
        """
        if name is None:
            names = [model.name for model in self._worker_pool.models()]
            if len(names) > 1:
                raise ModelNotFound(f"Send `model`: name one of the models {', '.join(names)}.", "model")
            name = "".join(names)
        served = self._models.get(self._worker_pool.model(name).name)
        if served is None:
            raise WorkerUnavailable(f"The model {name!r} is not ready yet; try again shortly.")
        return served

    def is_current(self, served: ServedModel) -> bool:
        """Return whether *served* still matches what its model's workers serve."""
        return self._models.get(served.name) is served

    def _on_model(self, model: Model) -> None:
        last = self._described.get(model.name)
        if last is None or self._worker_pool.releases.difference(last, model.description):
            self._models.pop(model.name, None)
        # Otherwise only its length differs, and the present model is served until the new one is built.
        self._refused.pop(model.name, None)
        self._described[model.name] = model.description
        task = asyncio.create_task(self._build(model.description), name=f"model {model.name}")
        self._building.add(task)
        task.add_done_callback(self._building.discard)

    async def _build(self, description: Description) -> None:
        try:
            files = self._model_files.get(description.model, description.files)
            files = with_chat_template(files, self._chat_template)
            await _try_in_child(description.model, files)
            served = await asyncio.to_thread(
                ServedModel.from_files, description.model, files, description.max_model_len, parsers=self._parsers
            )
        except StartupError as error:
            _logger.error("model cannot be served", model=description.model, reason=error.message)
            if self._described[description.model] is description:
                self._refused[description.model] = error
                self._judge()
        except Exception:
            # Nobody awaits this task, so an unforeseen error would pass without a log line.
            _logger.exception("model cannot be served", model=description.model)
        else:
            # Builds run concurrently: the last description counts, not the last build to end.
            if self._described[description.model] is description:
                own = self._chat_template is None
                self._models[description.model] = dataclasses.replace(
                    served, has_own_template=own, note=description.note
                )
                self.unservable.cancel()
                # The model is never freed. Without this every collection would scan it, for tens of milliseconds.
                gc.collect()
                gc.freeze()

    def _judge(self) -> None:
        """Set *unservable* if there are workers and all their models have been refused."""
        described = [client.state.description for client in self._worker_pool.clients]
        reasons = [None if description is None else self._refused.get(description.model) for description in described]
        first = next(iter(reasons), None)
        if first is not None and all(reasons) and not self.unservable.done():
            self.unservable.set_result(first)


async def _try_in_child(name: str, files: ModelFiles) -> None:
    """Load the files in a limited child. Raises StartupError if they fail there."""
    probe = ModelProbe(name, files)
    try:
        await asyncio.to_thread(probe.run_child)
    finally:
        probe.stop()
