"""A gateway's settings, each with its flag, default and help text."""

import dataclasses
import os
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Group, Parameter, Token
from cyclopts.validators import Number

from saccade.config import (
    FLAT,
    GIB,
    NO_FLAG,
    VLLM_API_KEY,
    Count,
    JsonObject,
    LocalPath,
    Many,
    NotNegative,
    Port,
    Seconds,
    Size,
    Switch,
)
from saccade.errors import StartupError
from saccade.fair_queue import CLIENT_SHARE
from saccade.fleet.settings import NO_SOURCES, DispatchLimits, RoutingSettings, SourceConfig
from saccade.gateway.process_memory import default_request_memory_bytes
from saccade.gateway.state.settings import NO_STATE, StateSettings
from saccade.media.fetch import FetchConfig
from saccade.media.header import ImageLimits, MediaLimits
from saccade.media.pdf_fonts import PdfFontSettings
from saccade.media.pdf_pages import PdfLimits
from saccade.media.video_header import VideoLimits
from saccade.models.family import ReasoningParser, ToolParser
from saccade.tracing.tracer import NO_TRACES, TraceSettings
from saccade.transport.credentials import NO_CREDENTIALS, WorkerCredentials

LONE_WORKER_QUEUE = 8
"""Requests that a worker which is alone gets beyond those that it computes, if tenants wait in turn: enough that it
has something to begin with, and few, because its own queue knows no tenants."""

DEFAULT_PROCESSES = min(4, len(os.sched_getaffinity(0)))
DEFAULT_REQUEST_MEMORY = default_request_memory_bytes()
INDEXER = "indexer"
NumMedia = Annotated[int, msgspec.Meta(ge=0)]
_OLD_LIMIT = re.compile(r"(\w+)=(\d+)")
_OLD_LIMITS = re.compile(rf"{_OLD_LIMIT.pattern}(,{_OLD_LIMIT.pattern})*")


def _origins(_: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    """Return the origins from flags with one origin each, or from a JSON list as in vLLM."""
    # cyclopts splits environment variables at spaces, so a JSON list arrives in pieces.
    written = " ".join(token.value for token in tokens)
    if not written.startswith("["):
        return tuple(token.value for token in tokens)
    try:
        return msgspec.json.decode(written, type=tuple[str, ...])
    except msgspec.MsgspecError as error:
        raise ValueError('must be an origin such as https://chat.example, or a JSON list of them: ["*"]') from error


class _Limit(msgspec.Struct):
    """A limit. In vLLM's form it may come with media sizes to reserve memory for, which have no effect here."""

    count: NumMedia


class _WrittenLimits(msgspec.Struct, forbid_unknown_fields=True):
    """Limits in vLLM's notation. Audio is not served, so its limit can only be 0."""

    image: NumMedia | _Limit = MediaLimits.images
    video: NumMedia | _Limit = MediaLimits.videos
    audio: Annotated[int, msgspec.Meta(ge=0, le=0)] = 0


def _media_limits(_: Any, tokens: list[Token]) -> MediaLimits:
    """Return the limits in a JSON object, or in vLLM's older form `image=4,video=1`."""
    text = tokens[0].value
    if _OLD_LIMITS.fullmatch(text):
        text = "{" + _OLD_LIMIT.sub(r'"\1": \2', text) + "}"
    try:
        limits = msgspec.json.decode(text, type=_WrittenLimits)
    except msgspec.MsgspecError as error:
        raise ValueError(
            'must be JSON such as {"image": 4, "video": 1}, or image=4,video=1: whole numbers of "image" and '
            '"video"; other media are not served'
        ) from error
    image, video = (one.count if isinstance(one, _Limit) else one for one in (limits.image, limits.video))
    return MediaLimits(image, video)


@FLAT
@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on connections; deadlines are checked every *sweep_seconds*.

    A connection over *max_connections* replaces the oldest one without a request, or else one that keeps the server
    waiting.
    """

    max_connections: Count = 2048
    "Connections open at a time."
    max_per_address: Annotated[Count, Parameter(name="--max-connections-per-address")] = 512
    "Connections open at a time from one address (IPv6: one /64) that have not sent a valid API key."
    tenant_share: Annotated[float, NO_FLAG] = 1.0
    "The part of the connections that one tenant may have, of those that others leave."
    num_for_probes: Annotated[int, NO_FLAG] = 16
    "Connections beyond *max_connections*, for paths of orchestrators."
    waiting_seconds: Annotated[float, NO_FLAG] = 1.0
    "A connection that keeps the server waiting for so long may have to make room."
    head_seconds: Annotated[float, NO_FLAG] = 10.0
    "From the first byte of a request, or the opening of the connection, to the end of the request's head."
    keep_alive_seconds: Annotated[float, NO_FLAG] = 75.0
    "Without a request; longer than clients (5) and proxies (60) keep a connection, else one may send as it closes."
    body_grace_seconds: Annotated[float, NO_FLAG] = 5.0
    "While the server reads a body, its client sends *body_bytes_per_second* on average after this time."
    body_bytes_per_second: Annotated[float, NO_FLAG] = 240.0
    body_seconds: Annotated[float, NO_FLAG] = 300.0
    "A body arrives in this time."
    unread_seconds: Annotated[float, NO_FLAG] = 60.0
    "An answer of which the client takes nothing for so long is dropped."
    drain_bytes: Annotated[int, NO_FLAG] = 1 << 20
    "Of a refused body, so much is read for *drain_seconds*, so that the client sees the refusal."
    drain_seconds: Annotated[float, NO_FLAG] = 2.0
    sweep_seconds: Annotated[float, NO_FLAG] = 1.0


@FLAT
@dataclass(frozen=True)
class TlsSettings:
    """The HTTP server's certificates; without *certfile* the server speaks plain HTTP."""

    certfile: Annotated[LocalPath | None, Parameter(name="--ssl-certfile")] = None
    "The server's certificate, PEM, for HTTPS."
    keyfile: Annotated[LocalPath | None, Parameter(name="--ssl-keyfile")] = None
    "The key of --ssl-certfile, PEM, if it is not in the same file."
    ca_certs: Annotated[LocalPath | None, Parameter(name="--ssl-ca-certs")] = None
    "The authority of clients' certificates, PEM."
    cert_reqs: Annotated[Literal[0, 1, 2], Parameter(name="--ssl-cert-reqs")] = 0
    "Clients' certificates: 0 asks for none, 1 checks one that is sent, 2 requires one."


@Parameter(name="*", group=Group("Server", sort_key=1))
@dataclass(frozen=True)
class ServerSettings:
    """The HTTP server's address, access rules and limits."""

    host: str = "127.0.0.1"
    "Address to listen on; 0.0.0.0 makes the server reachable from the network."
    port: Port = 8000
    "Port to listen on."
    uds: LocalPath | None = None
    "Listen on this Unix socket, which only this user may open, instead of --host and --port."
    tls: TlsSettings = TlsSettings()
    root_path: str | None = None
    "The path below which a proxy serves this server, such as /vision; requests may have it or not."
    gateway_processes: Count = 1
    "Processes that share the port, and one more that keeps the index for them; limits are for all together."
    api_keys: Annotated[Many, Parameter(name="--api-key", env_var=("SACCADE_API_KEY", VLLM_API_KEY))] = field(
        default=(), repr=False
    )
    "A key for the API; may be given many times. Prefer SACCADE_API_KEY, or VLLM_API_KEY, which `ps` does not show."
    api_keys_file: LocalPath | None = None
    "A TOML file of tenants, their limits and hashed keys, watched while the gateway runs; see `saccade key`."
    allowed_origins: Annotated[Many, Parameter(converter=_origins)] = ()
    "An origin whose web pages may call the API, * for every one; may be given many times, or as a JSON list."
    max_requests: Count = 256
    "Requests served at a time; more get 429."
    max_body_bytes: Count = 64 << 20
    "The largest request body."
    max_request_memory_bytes: Annotated[Count, Parameter(name="--max-request-memory")] = DEFAULT_REQUEST_MEMORY
    "Bytes of request bodies and encoded images together; by default an eighth of the machine's memory."
    connections: ConnectionLimits = ConnectionLimits()
    trusted_proxies: Many = ()
    "A network of proxies whose X-Forwarded-For is trusted, such as 10.1.0.0/16; may be given many times."
    strict_parameters: Switch = False
    "Refuse requests with unknown parameters; otherwise a response header names them."
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    "The order in which a tenant's waiting requests begin: by arrival, or by their `priority`, lower ones first."
    trusts_request_templates: Annotated[Switch, Parameter(name="--trust-request-chat-template")] = False
    "Let requests bring chat templates, which are programs; each rendering is limited as the model's own is."
    chat_template: str | None = None
    "A chat template instead of the model's own: a file, or the text of the template."
    default_chat_template_kwargs: JsonObject | None = None
    "Switches of the chat template for requests that do not set them, as JSON."
    response_store_bytes: Size = 64 << 20
    "Conversations of /v1/responses to keep in memory, and the size of the largest one in --state; 0 keeps none."
    file_store_bytes: Size = 256 << 20
    "Memory for files uploaded to /v1/files; with --state, for those used last. 0 keeps none, not even in --state."
    file_store_seconds: Count = 24 * 3600
    "Seconds that an uploaded image is kept at most."
    state: StateSettings = NO_STATE
    batch_concurrency: Count = 16
    "Requests of /v1/batches in flight at a time; batches need --state."
    shutdown_timeout_seconds: Annotated[NotNegative, Parameter(name="--shutdown-timeout")] = 30.0
    "Seconds that running requests get to finish at shutdown."
    allowed_hosts: Many = ()
    "A Host name that a server without keys accepts, or *.suffix; may be given many times. IP addresses are accepted."
    metrics_without_key: Switch = False
    "Serve /metrics to clients without a key."
    tracing: TraceSettings = NO_TRACES
    page: bool = True
    "Serve a page for browsers at /, and the description of the API at /docs; neither needs a key."
    admin_port: Port | None = None
    "A second port, on loopback, to see workers and empty caches; needs --admin-key."
    admin_keys: Annotated[Many, Parameter(name="--admin-key")] = field(default=(), repr=False)
    "A key for the admin port; may be given many times. Prefer SACCADE_ADMIN_KEY, which `ps` does not show."
    tool_call_parser: ToolParser = "auto"
    "The form of tool calls in answers; auto is what the model's family declares, none leaves calls in the content."
    reasoning_parser: ReasoningParser = "auto"
    "auto, or a name of vLLM's, reads reasoning between `<think>` and `</think>`; none leaves it in the content."
    memory_wait_seconds: Annotated[float, NO_FLAG] = 5.0
    "A request waits so long for its part of *max_request_memory_bytes*."
    ping_interval_seconds: Annotated[float, NO_FLAG] = 15.0

    @property
    def are_several(self) -> bool:
        """Whether there may be several tenants."""
        return len(self.api_keys) > 1 or self.api_keys_file is not None

    @property
    def max_tenant_requests(self) -> int:
        """How many requests one tenant may have at a time: all, or three quarters if there may be several tenants."""
        return max(1, self.max_requests * 3 // 4) if self.are_several else self.max_requests

    def __post_init__(self) -> None:
        """Raise StartupError for settings that are malformed or contradict each other."""
        for flag, keys in (("--api-key", self.api_keys), ("--admin-key", self.admin_keys)):
            if any(key.split() != [key] for key in keys):
                raise StartupError(f"An {flag} is empty or contains a space, so clients cannot send it in a header.")
        if self.admin_port is not None and not self.admin_keys:
            raise StartupError("--admin-port needs an --admin-key: pass one, or set SACCADE_ADMIN_KEY.")
        if set(self.admin_keys) & set(self.api_keys):
            raise StartupError("An --admin-key equals an --api-key; choose an admin key that no API client has.")
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            raise StartupError(f"--root-path must be a path such as /vision, not {self.root_path!r}.")
        if self.uds is not None and self.gateway_processes > 1:
            raise StartupError("--gateway-processes over 1 needs a port, which they share; leave out --uds.")


@Parameter(name="*", group=Group("Images", sort_key=3))
@dataclass(frozen=True)
class MediaSettings:
    """Limits on images, videos and PDFs, and caches for them."""

    media_limits: Annotated[
        MediaLimits,
        Parameter(
            name="--limit-mm-per-prompt", converter=_media_limits, metavar="JSON", n_tokens=1, accepts_keys=False
        ),
    ] = MediaLimits()
    "Images and videos per request, as JSON; a kind that is left out keeps its default."
    mm_processor_kwargs: JsonObject | None = None
    "Limits of image sizes and frames for requests that do not set them, as JSON: `mm_processor_kwargs` of requests."
    media_io_kwargs: JsonObject | None = None
    "Frames of videos for requests that do not set them, as JSON: `media_io_kwargs` of requests."
    max_image_pixels: Count = ImageLimits.max_pixels
    "Pixels of the largest accepted image."
    num_decode_processes: Annotated[Count, Parameter(name="--decode-processes")] = DEFAULT_PROCESSES
    "Processes that decode images."
    decode_timeout_seconds: Annotated[Seconds, Parameter(name="--decode-timeout")] = 10.0
    "Seconds that decoding one image may take."
    max_pdf_pages: Annotated[int, Parameter(validator=Number(gte=1, lte=1000))] = PdfLimits.max_pages
    "Pages of the longest accepted PDF; each becomes an image."
    pdf_dpi: Annotated[int, Parameter(validator=Number(gte=18, lte=600))] = PdfLimits.dots_per_inch
    "Dots per inch of these images, before the model's own resizing."
    decode_memory_bytes: Count = GIB
    "Bytes of memory that one decode process may use beyond its baseline."
    shared_memory_bytes: Count = GIB
    "Bytes of all pixel slots in /dev/shm together."
    mm_processor_cache_gb: NotNegative = 0.5
    "GiB of prepared images to keep in those slots; 0 keeps none."
    url_cache_bytes: Size = 256 << 20
    "Bytes of fetched images to keep, as long as their servers allow; 0 keeps none."
    fetch: FetchConfig = FetchConfig()
    pdf_font_folder: LocalPath | None = None
    "A folder of fonts for text of PDFs whose font is not in the file; they go before those of the extra `fonts`."
    pdf_missing_fonts: Literal["refuse", "omit"] = "refuse"
    "What happens to a page of a PDF with letters that no font has: refuse it, or omit the letters and log that."
    video_timeout_seconds: Annotated[float, NO_FLAG] = 30.0
    video_wait_seconds: Annotated[float, NO_FLAG] = 60.0
    decode_in_flight_bytes: Annotated[int, NO_FLAG] = GIB
    "Bytes that the images and videos in all decode processes may take together, as estimated from their headers."
    video_limits: Annotated[VideoLimits, NO_FLAG] = VideoLimits()
    pixels_timeout_seconds: Annotated[float, NO_FLAG] = 30.0
    "For pixels that a worker was believed to hold and asks for after all."

    @property
    def image_limits(self) -> ImageLimits:
        return ImageLimits(max_pixels=self.max_image_pixels)

    @property
    def pdf_limits(self) -> PdfLimits:
        return PdfLimits(self.image_limits, self.max_pdf_pages, self.pdf_dpi)

    @property
    def pdf_fonts(self) -> PdfFontSettings:
        folder = None if self.pdf_font_folder is None else str(self.pdf_font_folder)
        return PdfFontSettings(folder, allows_gaps=self.pdf_missing_fonts == "omit")

    @property
    def image_cache_bytes(self) -> int:
        """Size of the cache for patches in slots, in bytes."""
        return int(self.mm_processor_cache_gb * GIB)

    @property
    def max_pixel_bytes(self) -> int:
        """Upper bound in bytes for all pixels: the shared memory, and as much again inline when that is full."""
        return 2 * self.shared_memory_bytes


@dataclass(frozen=True)
class Member:
    """Process *number* of the *size* processes that share a port.

    Their sockets are in *folder*, which only their user can open.
    """

    folder: Path
    number: int
    size: int

    @property
    def indexer(self) -> Path:
        """The indexer's socket."""
        return self.folder / f"{INDEXER}.sock"

    @property
    def own(self) -> Path:
        """The socket of this process."""
        return self._socket(self.number)

    @property
    def siblings(self) -> dict[str, Path]:
        """The sockets of the other gateway processes, by name."""
        return {str(number): self._socket(number) for number in range(self.size) if number != self.number}

    def _socket(self, number: int) -> Path:
        return self.folder / f"gateway-{number}.sock"

    def part(self, whole: int) -> int:
        """Return this process's share, rounded up, of a limit for all processes."""
        return -(-whole // self.size)


@dataclass(frozen=True)
class GatewayConfig(ServerSettings, RoutingSettings, MediaSettings):
    """All settings of one gateway process.

    *worker_urls* are `grpc://host:port`, `grpcs://host:port` or `unix:/path`. Workers over TCP get
    *worker_credentials*; *worker_sources* name further workers. With *member*, the process is one of several that share
    *port* and *admin_port*; see shared().
    """

    worker_urls: tuple[str, ...] = ()
    worker_credentials: WorkerCredentials = NO_CREDENTIALS
    worker_sources: SourceConfig = NO_SOURCES
    member: Member | None = None

    def shared(self, member: Member) -> "GatewayConfig":
        """Return the settings for *member*, with its share, rounded up, of each limit that all processes share."""
        part, replace = member.part, dataclasses.replace
        of_addresses = part(self.connections.max_per_address)
        connections = part(self.connections.max_connections)
        return replace(
            self,
            member=member,
            dispatch=replace(self.dispatch, max_waiting=part(self.dispatch.max_waiting), num_processes=member.size),
            max_requests=part(self.max_requests),
            max_request_memory_bytes=part(self.max_request_memory_bytes),
            connections=replace(self.connections, max_connections=connections, max_per_address=of_addresses),
            num_decode_processes=part(self.num_decode_processes),
            shared_memory_bytes=part(self.shared_memory_bytes),
            mm_processor_cache_gb=self.mm_processor_cache_gb / member.size,
            url_cache_bytes=part(self.url_cache_bytes),
            file_store_bytes=part(self.file_store_bytes),
        )

    @property
    def connection_limits(self) -> ConnectionLimits:
        """*connections*, adjusted if there may be several tenants."""
        return (
            dataclasses.replace(self.connections, tenant_share=CLIENT_SHARE) if self.are_several else self.connections
        )

    @property
    def keeps_what_is_sent(self) -> bool:
        """Whether there are files and stored responses: several processes that share a port share no memory."""
        return self.member is None or bool(self.state)

    @property
    def has_fixed_fleet(self) -> bool:
        """Whether *worker_urls* are the only workers, apart from those that an operator adds."""
        return not self.worker_sources and bool(self.worker_urls)

    @property
    def dispatch_limits(self) -> DispatchLimits:
        """*dispatch* with the scheduling policy, and with turns for tenants if there may be several.

        Tenants take turns even at a single worker.
        """
        dispatch = dataclasses.replace(self.dispatch, takes_priorities=self.scheduling_policy == "priority")
        if not self.are_several:
            return dispatch
        return dataclasses.replace(dispatch, lone_worker_queue=LONE_WORKER_QUEUE, client_share=CLIENT_SHARE)


def tls_context(settings: TlsSettings) -> ssl.SSLContext | None:
    """Return the server's TLS context, or None for plain HTTP. Raises a StartupError that names the flag."""
    if settings.certfile is None:
        if settings != TlsSettings():
            raise StartupError("--ssl-keyfile, --ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile.")
        return None
    if settings.cert_reqs and settings.ca_certs is None:
        raise StartupError("--ssl-cert-reqs over 0 needs --ssl-ca-certs: the authority of the clients' certificates.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    flags, files = "--ssl-certfile and --ssl-keyfile", (settings.certfile, settings.keyfile)
    try:
        # Without a password OpenSSL would ask for the one of an encrypted key on the terminal.
        context.load_cert_chain(settings.certfile, settings.keyfile, password="")
        if settings.ca_certs is not None:
            flags, files = "--ssl-ca-certs", (settings.ca_certs, None)
            context.load_verify_locations(settings.ca_certs)
    except ssl.SSLError as error:
        raise StartupError(
            f"{flags} must be PEM: a certificate chain, and its key without a password. Look at {_names(files)}."
        ) from error
    except OSError as error:
        raise StartupError(f"{flags}: cannot read {_names(files)}: {error.strerror}.") from error
    context.verify_mode = ssl.VerifyMode(settings.cert_reqs)
    return context


def _names(files: tuple[object, object]) -> str:
    return " and ".join(str(file) for file in files if file is not None)
