"""Assembles the gateway's packages into one ASGI application."""

import asyncio
from collections.abc import Mapping

from starlette.routing import Router
from starlette.types import Receive, Scope

from saccade.errors import InvalidApiKey, InvalidValue
from saccade.fleet.pool import WorkerPool
from saccade.fleet.report import RouteReport, route_report
from saccade.gateway.apis.batches.store import BatchStore
from saccade.gateway.apis.responses.stores import response_store
from saccade.gateway.apis.routes import Apis
from saccade.gateway.config import GatewayConfig
from saccade.gateway.images.decode_pool.pool import DecodePool
from saccade.gateway.images.file_store import MAX_FILES
from saccade.gateway.images.media import Media
from saccade.gateway.memory_parts import MemoryParts
from saccade.gateway.pipeline import Pipeline
from saccade.gateway.prompt.media_options import read_defaults
from saccade.gateway.prompt.prompt_builder import PromptBuilder
from saccade.gateway.request import Limits
from saccade.gateway.routing import Routing
from saccade.gateway.served_models.model_registry import ModelRegistry
from saccade.gateway.served_models.served_model import Parsers
from saccade.gateway.server.access_keys import METRICS_PATH
from saccade.gateway.server.access_log import AccessLog
from saccade.gateway.server.answer_memory import AnswerMemory
from saccade.gateway.server.body import BodyReader
from saccade.gateway.server.middleware import guarded
from saccade.gateway.siblings import Siblings
from saccade.gateway.state.state import State
from saccade.gateway.structured_output.grammars import RequestGrammars
from saccade.gateway.tenants.account import Ledger
from saccade.gateway.tenants.api_keys import ApiKeyStore
from saccade.gateway.tenants.report import DailyUsage, TenantMetrics, TenantReport, daily_usage, tenant_reports
from saccade.gateway.tenants.shared_limits import LimitMetrics, SharedLimits
from saccade.gateway.usage_log import UNATTRIBUTED
from saccade.models.files import read_chat_template
from saccade.protocol.description import ModelFiles
from saccade.protocol.gateway_calls import Work
from saccade.telemetry import Metrics
from saccade.tracing.tracer import Tracer
from saccade.transport import lasting_task


class Application:
    """A gateway, assembled from its packages. A server calls *asgi*; a caller in Python calls *pipeline*.

    *limits* are the limits that all requests share, and *memory* measures the memory that clients can fill.
    *model_registry* holds the served models, *routing* holds the workers, and *siblings* reaches the other processes
    that share the port.
    """

    def __init__(
        self,
        config: GatewayConfig,
        worker_pool: WorkerPool,
        pool: DecodePool,
        models: Mapping[str, ModelFiles],
        access_log: AccessLog | None = None,
    ) -> None:
        self.metrics = metrics = Metrics()
        self._access_log = access_log or AccessLog()
        self._tracer = Tracer.of_settings(config.tracing)
        self.limits = Limits.of_config(config)
        self._worker_pool = worker_pool
        num_processes = 1 if config.member is None else config.member.size
        self._state = State.of_settings(config.state, MAX_FILES)
        ledger = None if self._state is None else Ledger(self._state.usage_log, SharedLimits(self._state))
        self._api_keys = ApiKeyStore(
            config.api_keys,
            config.api_keys_file,
            config.admin_keys,
            num_processes,
            ledger=ledger,
        )
        metrics.registry.register(TenantMetrics(self._api_keys))
        if ledger is not None:
            metrics.registry.register(LimitMetrics(ledger.limits))
        metrics.requests_in_flight.set_function(lambda: self.limits.admission.num_requests)
        # Metrics that are equal in all of several processes are shown once.
        of_engines = metrics.registry if config.member is None else metrics.new_registry()
        self.routing = Routing(config, worker_pool, metrics.registry, of_engines)
        parsers = Parsers(config.tool_call_parser, config.reasoning_parser)
        self.model_registry = ModelRegistry(worker_pool, models, parsers, read_chat_template(config.chat_template))
        items = None if self._state is None else self._state.items
        self.media = Media(config, pool, self.limits.work_threads(), metrics, items)
        self.siblings = Siblings(
            config.member, self._work, self.media.forget_media, metrics.registry, of_engines, self._api_keys.usages
        )
        self.bodies = BodyReader.of_config(config, self.limits, self.media.threads)
        self.pipeline = Pipeline(
            model_registry=self.model_registry,
            prompts=PromptBuilder(
                config.media_limits,
                metrics,
                self.media.threads,
                config.trusts_request_templates,
                read_defaults(config.default_chat_template_kwargs, config.mm_processor_kwargs, config.media_io_kwargs),
            ),
            grammars=RequestGrammars(),
            images=self.media.images,
            dispatcher=self.routing.dispatcher,
            pixels=self.media.pixels,
            metrics=metrics,
        )
        responses, memory_of_responses = response_store(config, self._state)
        batches = None if self._state is None else BatchStore(self._state)
        self._apis = Apis(config, self.bodies, self.pipeline, self.siblings, self.media.pdfs, responses, batches)
        self._batch_runner = (
            None
            if batches is None
            else self._apis.batch_runner(batches, self._api_keys.accounts, config.batch_concurrency)
        )
        self.memory = MemoryParts()
        self.memory.add_parts(
            *self.limits.memory_parts,
            *self.media.memory_parts,
            memory_of_responses,
            self.pipeline.grammars.memory_part,
            self.pipeline.prompts.pieces.memory_part,
            *self.routing.memory_parts,
        )
        metrics.registry.register(self.memory)
        if self._state is not None:
            metrics.registry.register(self._state)
        router = Router(self._apis.routes, redirect_slashes=False)
        of_operator, of_clients = self.limits.reserve.reservation, self.bodies.answer_memory
        counted = AnswerMemory(
            router, lambda scope: of_operator() if scope["path"] == METRICS_PATH else of_clients(scope)
        )
        self.asgi = guarded(counted, config, self._api_keys, metrics, self._access_log, self._tracer)
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the database and start the fetcher. Follow the keys file and the traffic file, and connect to siblings.

        Raises OSError and StartupError.
        """
        if self._state is not None:
            await self._state.start()
            self._state.on_beat = self._api_keys.give_back
        await self.media.start()
        self._following = lasting_task.begin(self._api_keys.follow, "keys file")
        await self.siblings.start()
        await self.routing.start()
        if self._batch_runner is not None:
            self._batch_runner.start()

    async def close(self) -> None:
        """Stop looking for workers and listening to them, close connections and drop cached images."""
        await lasting_task.end(self._following)
        if self._batch_runner is not None:
            await self._batch_runner.close()
        self.pipeline.grammars.close()
        await self.routing.close()
        await self.siblings.close()
        await self.media.close()
        if self._state is not None:
            await self._state.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    async def preview(self, scope: Scope, receive: Receive, api_key: bytes) -> RouteReport:
        """Return where a request's chat would go if the tenant with *api_key* sent it now. Raises SaccadeError."""
        try:
            account = self._api_keys.account(api_key)
        except InvalidApiKey as error:
            raise InvalidValue(
                "The caches of tenants are apart: name one of the gateway's API keys in the header x-api-key.",
                "x-api-key",
            ) from error
        return route_report(
            await self._apis.preview(scope, receive, account), self._worker_pool, self.routing.cache_view
        )

    async def tenants(self) -> list[TenantReport]:
        """Return each keys-file tenant's limits, and its usage across all processes that share the port."""
        return tenant_reports(self._api_keys.named, await self.siblings.usages())

    async def daily_usage(self, first: int, last: int) -> list[DailyUsage] | None:
        """Return the usage from the day *first* to the day *last*, in days since 1970, over all gateways.

        Without a database, return None. Raises StoreUnavailable.
        """
        if self._state is None:
            return None
        name_of = self._state.items.keys.tenant
        names = {name_of(account.tenant.id): name for name, account in self._api_keys.named.items()}
        return daily_usage(
            await self._state.usage_between(first, last), names | {name_of(UNATTRIBUTED): "unattributed"}
        )

    def _work(self) -> Work:
        num_requests, num_waiting = self.limits.admission.num_requests, self.routing.dispatcher.num_waiting
        return Work(num_requests, self.routing.booked(), num_waiting, list(self._access_log.errors))
