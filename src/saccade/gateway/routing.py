"""Constructs a gateway's routing: the cache index, the dispatcher, and worker discovery."""

from functools import partial
from random import Random

from prometheus_client import CollectorRegistry

from saccade.fleet.decision_metrics import DecisionMetrics
from saccade.fleet.dispatch import Dispatcher
from saccade.fleet.feed import CacheListener
from saccade.fleet.index import BlockIndex
from saccade.fleet.metrics import DispatchCollector, FleetCollector, RoutingCollector, SourceCollector
from saccade.fleet.pool import WorkerPool
from saccade.fleet.prompt_keys import MAX_BYTES
from saccade.fleet.report import booked
from saccade.fleet.router import Router
from saccade.fleet.shared import CacheView, SharedIndex, exactness
from saccade.fleet.sources import Discovery
from saccade.fleet.traffic_control import TrafficControl
from saccade.gateway.config import GatewayConfig
from saccade.gateway.memory_parts import MemoryPart
from saccade.protocol.gateway_calls import Booked


class Routing:
    """*dispatcher* sends requests to the workers of *worker_pool*; *discovery* adds and removes workers.

    *traffic* changes which requests the workers get. *cache_view* knows what their caches hold; with several gateway
    processes, it asks their indexer. Metrics go to *registry*, except those of the engines, which go to *of_engines*.
    *memory_parts* measure this process's cache index and prompt keys.
    """

    def __init__(
        self, config: GatewayConfig, worker_pool: WorkerPool, registry: CollectorRegistry, of_engines: CollectorRegistry
    ) -> None:
        index = BlockIndex(config.routing_index_bytes)
        self._router = router = Router(
            config.routing_policy,
            index,
            Random(),
            config.routing_temperature,
            config.routing_recompute_weight,
            offloaded_share=config.routing_offloaded_share,
            assumes=config.routing_assumptions,
        )
        self._index = None if config.member is None else SharedIndex(worker_pool, router, config.member.indexer)
        self.cache_view: CacheView = self._index or CacheListener(worker_pool, router)
        decisions = DecisionMetrics(registry, partial(exactness, cache_view=self.cache_view))
        self.dispatcher = Dispatcher(worker_pool, router, decisions, config.dispatch_limits, self._index)
        keys = self.dispatcher.lookup.prompt_keys
        self.memory_parts = (
            MemoryPart("routing_index", config.routing_index_bytes, lambda: index.num_bytes),
            MemoryPart("prompt_keys", MAX_BYTES, lambda: keys.num_bytes),
        )
        self.discovery = Discovery(worker_pool, self.dispatcher.num_requests_at, config.worker_sources.drain_seconds)
        self.traffic = TrafficControl(worker_pool, config.worker_sources.traffic_file)
        registry.register(RoutingCollector(worker_pool, self.cache_view))
        registry.register(DispatchCollector(self.dispatcher))
        registry.register(SourceCollector(self.discovery))
        of_engines.register(FleetCollector(worker_pool))

    async def start(self) -> None:
        """Read the traffic file; connect to the indexer, if there is one. Raises StartupError."""
        await self.traffic.start()
        if self._index is not None:
            self._index.start()

    async def close(self) -> None:
        """Stop discovery and the cache event feeds."""
        await self.discovery.close()
        await self.traffic.close()
        await self.cache_view.close()

    def booked(self) -> dict[str, Booked]:
        """Return the bookings at each worker, keyed by the worker's URL."""
        return {url: booked(work) for url, work in self._router.works().items()}
