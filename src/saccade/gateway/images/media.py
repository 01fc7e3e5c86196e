"""Constructs the objects that fetch, collect, cache and decode a gateway's images and videos."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.gateway.config import GatewayConfig
from saccade.gateway.images.collect import ImageCollector
from saccade.gateway.images.decode_pool.pool import DecodePool
from saccade.gateway.images.file_store import FileStore
from saccade.gateway.images.media_loader import MediaLoader
from saccade.gateway.images.memory_files import MemoryFileStore
from saccade.gateway.images.pdf_drawer import PdfDrawer
from saccade.gateway.images.pixels import PixelPreparer
from saccade.gateway.images.processor_cache import ProcessorCache
from saccade.gateway.images.state_files import StateFileStore
from saccade.gateway.images.url_cache import UrlCache
from saccade.gateway.memory_parts import MemoryPart
from saccade.gateway.state.items import Items
from saccade.gateway.work_threads import WorkThreads
from saccade.media.fetch import Fetcher
from saccade.media.pdf_pages import DECODER as PDF_DECODER
from saccade.metric_registry import filled
from saccade.telemetry import Metrics


class Media:
    """*images* collects the images of requests, and *pixels* decodes them in *pool*. *pdfs* draws pages for people, and
    *threads* runs long work.

    Files are in *items*, or in memory if that is None. *memory_parts* measure its caches and its files. Raises
    StartupError if a setting is wrong.
    """

    def __init__(
        self,
        config: GatewayConfig,
        pool: DecodePool,
        threads: WorkThreads,
        metrics: Metrics,
        items: Items | None = None,
    ) -> None:
        self.threads = threads
        self._fetcher = Fetcher(config.fetch)
        self._cache = ProcessorCache(pool, config.image_cache_bytes)
        self._urls = UrlCache(config.url_cache_bytes)
        file_bytes = config.file_store_bytes if config.keeps_what_is_sent else 0
        recent = MemoryFileStore(file_bytes, config.file_store_seconds)
        files: FileStore = recent if items is None else StateFileStore(items, recent)
        self.memory_parts = (
            MemoryPart("prepared_images", config.image_cache_bytes, lambda: self._cache.num_bytes),
            MemoryPart("fetched_images", config.url_cache_bytes, lambda: self._urls.num_bytes),
            MemoryPart("files", file_bytes, lambda: recent.num_bytes),
        )
        metrics.file_store_bytes.set_function(lambda: recent.num_bytes)
        metrics.slots_in_use.set_function(lambda: pool.num_slots - self._cache.num_idle)
        metrics.registry.register(CacheCollector("image", self._cache))
        metrics.registry.register(CacheCollector("url", self._urls))
        metrics.registry.register(FetchCollector(self._fetcher))
        self.images = ImageCollector(
            loader=MediaLoader(self._fetcher, self._urls, metrics),
            files=files,
            video_header=pool.video_header,
            pdf_pages=pool.pdf_pages,
            layout=pool.layout,
            pdf_decoder=f"{PDF_DECODER}-{config.pdf_fonts.fingerprint}",
            limits=config.image_limits,
            max_encoded_bytes=config.max_body_bytes,
            metrics=metrics,
            threads=self.threads,
        )
        self.pdfs = PdfDrawer(pool, threads)
        self.pixels = PixelPreparer(pool, self._cache, metrics, config.pixels_timeout_seconds)

    async def start(self) -> None:
        """Start the fetcher."""
        await self._fetcher.start()

    def forget_media(self) -> None:
        """Empty the caches of images and URLs; images in use stay."""
        self._cache.clear()
        self._urls.clear()

    async def close(self) -> None:
        """Close connections, drop cached images and stop the threads."""
        await self._fetcher.close()
        self._cache.close()
        self.threads.close()


class CacheCollector(Collector):
    """Collects the metrics of *cache*, named `saccade_<name>_cache_*`."""

    def __init__(self, name: str, cache: UrlCache | ProcessorCache) -> None:
        self._name = f"saccade_{name}_cache"
        self._cache = cache

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(f"{self._name}_hits", "Found, or on the way.", value=self._cache.num_hits)
        yield CounterMetricFamily(f"{self._name}_misses", "Not found.", value=self._cache.num_misses)
        yield GaugeMetricFamily(f"{self._name}_bytes", "Bytes that are kept.", value=self._cache.num_bytes)


class FetchCollector(Collector):
    """Collects a fetcher's metrics."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def collect(self) -> Iterable[Metric]:
        fetches = CounterMetricFamily("saccade_fetches", "Images asked for by URL, by outcome.", labels=("outcome",))
        yield filled(fetches, [((outcome,), count) for outcome, count in self._fetcher.outcomes.items()])
        num_bytes, refused = self._fetcher.num_bytes, self._fetcher.guard.num_refused
        yield CounterMetricFamily("saccade_fetch_bytes", "Bytes of images that were fetched.", value=num_bytes)
        yield CounterMetricFamily("saccade_fetch_refused_connections", "Not made: forbidden address.", value=refused)
