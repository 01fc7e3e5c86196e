"""GatewayConfig: the settings of a gateway."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from saccade.fair_queue import FairQueue
from saccade.gateway.images.decode_pool.pool import DecodePoolConfig
from saccade.gateway.limits import Admission, ByteBudget
from saccade.gateway.process_memory import default_request_memory_bytes
from saccade.gateway.processes.siblings import Member
from saccade.gateway.request import Limits
from saccade.gateway.served_models.tool_call_tokens import DECLARED, Parsers
from saccade.gateway.server.connection import ConnectionLimits
from saccade.gateway.workers.settings import DEFAULT_LIMITS, INDEX_BYTES, DispatchLimits, SourceConfig
from saccade.media.fetch import FetchConfig
from saccade.media.header import ImageLimits, MediaLimits
from saccade.routing.policy import Policy
from saccade.transport.credentials import NO_CREDENTIALS, WorkerCredentials

POOL = DecodePoolConfig()

PIXELS_WAIT_SECONDS = 10.0
"""How long a request waits for room for its pixels."""

LONE_WORKER_QUEUE = 8
"""Requests that a worker which is alone gets beyond those that it computes, where tenants wait in turn: enough that it
has something to begin with, and few, because its own queue knows no tenants."""


@dataclass(frozen=True)
class GatewayConfig:
    """Settings of one gateway process.

    *routing_policy* chooses among the workers of a model, at *routing_temperature* (see saccade.routing.policy);
    what they report of their caches takes *routing_index_bytes*. With
    *assumes_holdings*, a worker that reports nothing is taken to hold what was sent there lately. *dispatch* bounds
    what workers get, what waits for them, and retries. Workers of a model in *assumed_releases* share its work whatever
    they tell of it.
    *worker_urls* are `grpc://host:port`, `grpcs://host:port` or `unix:/path`; *worker_credentials* are sent to workers
    over TCP; *worker_sources* are where further workers come from. Without *api_keys* and *api_keys_file* every client
    is served that uses an IP address, a loopback name, *host* or one of *allowed_hosts*. *metrics_without_key* opens
    /metrics although there are keys. *admin_port* is a second port on loopback, which needs one of *admin_keys*.
    *media_limits* and *max_image_pixels* hold per request and per image. *max_requests* are served at a time; more
    get 429. With *strict_parameters* an unknown parameter is refused rather than ignored with a warning; if it
    *trusts_request_templates*, requests may bring chat templates. *parsers* choose what is read out of answers of
    every model. *response_store_bytes* of conversations are kept for requests that continue them, 0 for none,
    and *file_store_bytes* of uploaded files, each for *file_store_seconds* at most.
    *shared_memory_bytes* bounds all pixel slots together; *decode_memory_bytes* what one decode process may add to
    its baseline. *pixels_timeout_seconds* is for pixels that a worker was believed to hold and asks for after all.
    *image_cache_bytes* of patches are kept in those slots, *url_cache_bytes* of fetched images. Bodies, and
    images while they are encoded, take *max_request_memory_bytes* together; a request waits *memory_wait_seconds*
    for its part. X-Forwarded-For of *trusted_proxies* is used.
    With *member*, the process is one of several that share *port* and *admin_port*; see shared().
    """

    host: str = "127.0.0.1"
    port: int = 8000
    worker_urls: tuple[str, ...] = ()
    worker_credentials: WorkerCredentials = NO_CREDENTIALS
    worker_sources: SourceConfig = field(default_factory=SourceConfig)
    routing_policy: Policy = "auto"
    routing_temperature: float = 0.0
    routing_index_bytes: int = INDEX_BYTES
    assumes_holdings: bool = True
    dispatch: DispatchLimits = DEFAULT_LIMITS
    assumed_releases: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_keys_file: Path | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    metrics_without_key: bool = False
    admin_port: int | None = None
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    media_limits: MediaLimits = field(default_factory=MediaLimits)
    max_image_pixels: int = POOL.limits.max_pixels
    max_requests: int = 256
    max_body_bytes: int = 64 << 20
    max_request_memory_bytes: int = field(default_factory=default_request_memory_bytes)
    memory_wait_seconds: float = 5.0
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    trusted_proxies: tuple[str, ...] = ()
    strict_parameters: bool = False
    trusts_request_templates: bool = False
    response_store_bytes: int = 64 << 20
    file_store_bytes: int = 256 << 20
    file_store_seconds: int = 24 * 3600
    parsers: Parsers = DECLARED
    shutdown_timeout_seconds: float = 30.0
    ping_interval_seconds: float = 15.0
    num_decode_processes: int = POOL.num_processes
    decode_timeout_seconds: float = POOL.time_limit_seconds
    decode_memory_bytes: int = POOL.memory_bytes
    pixels_timeout_seconds: float = 30.0
    shared_memory_bytes: int = POOL.slot_bytes
    image_cache_bytes: int = POOL.slot_bytes // 2
    url_cache_bytes: int = 256 << 20
    fetch: FetchConfig = field(default_factory=FetchConfig)
    member: Member | None = None

    def shared(self, member: Member) -> "GatewayConfig":
        """Return the settings of *member*: it has its part of every limit that all processes share, rounded up."""
        part = member.part
        return dataclasses.replace(
            self,
            member=member,
            dispatch=dataclasses.replace(
                self.dispatch, max_waiting=part(self.dispatch.max_waiting), num_processes=member.size
            ),
            max_requests=part(self.max_requests),
            max_request_memory_bytes=part(self.max_request_memory_bytes),
            connections=dataclasses.replace(
                self.connections,
                max_connections=part(self.connections.max_connections),
                max_per_address=part(self.connections.max_per_address),
            ),
            num_decode_processes=part(self.num_decode_processes),
            shared_memory_bytes=part(self.shared_memory_bytes),
            image_cache_bytes=part(self.image_cache_bytes),
            url_cache_bytes=part(self.url_cache_bytes),
        )

    @property
    def has_fixed_fleet(self) -> bool:
        """Whether no workers can come but those of *worker_urls*, unless an operator adds them to these."""
        return not self.worker_sources and bool(self.worker_urls)

    @property
    def max_tenant_requests(self) -> int:
        """Requests of one tenant at a time; where there may be several tenants, less than all places."""
        are_several = len(self.api_keys) > 1 or self.api_keys_file is not None
        return max(1, self.max_requests * 3 // 4) if are_several else self.max_requests

    @property
    def dispatch_limits(self) -> DispatchLimits:
        """*dispatch*; with a keys file, requests wait for a lone worker at the gateway, where tenants take turns."""
        if self.api_keys_file is None:
            return self.dispatch
        return dataclasses.replace(self.dispatch, lone_worker_queue=LONE_WORKER_QUEUE)

    def limits(self) -> Limits:
        """Return what the requests of a gateway share, of which nothing is taken yet."""
        return Limits(
            Admission(self.max_requests, self.max_tenant_requests),
            ByteBudget(self.max_request_memory_bytes, self.memory_wait_seconds),
            FairQueue(self.max_pixel_bytes, "images", max_waiting=None, wait_seconds=PIXELS_WAIT_SECONDS),
        )

    @property
    def max_pixel_bytes(self) -> int:
        """Bound of all pixels at a time: the size of shared memory, and as much inline where it is full."""
        return 2 * self.shared_memory_bytes

    @property
    def image_limits(self) -> ImageLimits:
        return ImageLimits(max_pixels=self.max_image_pixels)

    @property
    def media(self) -> DecodePoolConfig:
        return DecodePoolConfig(
            num_processes=self.num_decode_processes,
            time_limit_seconds=self.decode_timeout_seconds,
            memory_bytes=self.decode_memory_bytes,
            slot_bytes=self.shared_memory_bytes,
            limits=self.image_limits,
        )
