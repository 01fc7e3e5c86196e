"""The parts that take pictures from a request to a worker, put together for one gateway."""

from concurrent.futures import ThreadPoolExecutor

from saccade.gateway.admission import Admission
from saccade.gateway.byte_budget import ByteBudget
from saccade.gateway.cache_metrics import CacheCollector
from saccade.gateway.config import GatewayConfig
from saccade.gateway.media_pool import MediaPool
from saccade.gateway.picture_cache import PictureCache
from saccade.gateway.prepare import Preparer, RequestLimits
from saccade.gateway.sources import Sources
from saccade.gateway.url_cache import UrlCache
from saccade.media.fetch import Fetcher
from saccade.telemetry import Metrics

THREADS = 2
"""Long texts and large pictures that are worked on at a time, beside the event loop."""


class Preparation:
    """Owns what fetches and what caches; *preparer* uses both. Raises StartupError where a setting is wrong."""

    def __init__(
        self, config: GatewayConfig, pool: MediaPool, admission: Admission, memory: ByteBudget, metrics: Metrics
    ) -> None:
        self._fetcher = Fetcher(config.fetch)
        self._cache = PictureCache(pool, config.picture_cache_bytes)
        metrics.slots_in_use.set_function(lambda: pool.num_slots - self._cache.num_idle)
        self._urls = UrlCache(config.url_cache_bytes)
        for name, cache in (("picture", self._cache), ("url", self._urls)):
            metrics.registry.register(CacheCollector(name, cache))
        sources = Sources(self._fetcher, self._urls, memory, metrics)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")
        self.preparer = Preparer(
            admission=admission,
            pool=pool,
            cache=self._cache,
            sources=sources,
            metrics=metrics,
            limits=RequestLimits(
                picture=config.picture_limits,
                num_images=config.limit_images,
                max_encoded_bytes=config.max_body_bytes,
                bring_seconds=config.pixels_timeout_seconds,
            ),
            threads=self._threads,
        )

    async def start(self) -> None:
        """Make ready to fetch."""
        await self._fetcher.start()

    def forget(self) -> None:
        """Empty both caches, but for the pictures that requests are waiting for."""
        self._cache.clear()
        self._urls.clear()

    async def close(self) -> None:
        """Let go of connections and of pictures that were kept."""
        await self._fetcher.close()
        self._cache.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
