"""The operator's port: a second listener on loopback, with its own keys, for commands that no tenant may send."""

import itertools
import time
from collections.abc import Collection, Sequence
from datetime import UTC, date, datetime, timedelta

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from saccade.errors import InternalError, InvalidValue, StartupError, StoreUnavailable, WorkerUnavailable
from saccade.fleet.address import check_url
from saccade.fleet.report import WorkerReport, worker_report
from saccade.fleet.traffic import MAX_WEIGHT, MIN_WEIGHT, TrafficChange
from saccade.gateway.apis.pages import page
from saccade.gateway.apis.routes import route
from saccade.gateway.application import Application
from saccade.gateway.server.access_keys import Keys
from saccade.gateway.server.access_log import MAX_ERRORS, AccessLog
from saccade.gateway.server.answer_memory import AnswerMemory
from saccade.gateway.server.middleware import GuardMiddleware, TelemetryMiddleware
from saccade.gateway.server.origins import AllowedOrigins
from saccade.gateway.tenants.api_keys import ApiKeyStore
from saccade.gateway.tenants.report import EPOCH, TenantReport
from saccade.protocol.gateway_calls import Booked, RequestError, Work, total
from saccade.release import installed_version
from saccade.telemetry import METRICS_CONTENT_TYPE
from saccade.transport.framing import UNREADABLE

HOST = "127.0.0.1"
PAGE = "/"
TENANT_HEADER = "x-api-key"
SOURCE = "POST /workers"
"""The name of this port as a source of workers."""

MAX_BODY_BYTES = 16 << 10


class _WorkerUrl(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that adds or removes a worker."""

    url: str


class _TrafficBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that changes a worker's traffic; null clears a field, and a missing one stays."""

    url: str
    cordoned: bool | UnsetType | None = UNSET
    weight: float | UnsetType | None = UNSET
    share: float | UnsetType | None = UNSET


class Admin:
    """An ASGI application that shows, adds and removes workers, changes their traffic, previews routes, and more.

    Every path except PAGE requires one of *keys*. Raises StartupError if *keys* is empty.
    """

    def __init__(self, keys: Collection[str], app: Application, access_log: AccessLog) -> None:
        if not keys:
            raise StartupError("--admin-port needs an --admin-key.")
        self._app = app
        self._discovery, self._worker_pool = app.routing.discovery, app.routing.discovery.worker_pool
        self._traffic = app.routing.traffic
        router = Router(
            [
                route("GET", PAGE, page("board.html")),
                route("GET", "/board", self.board),
                route("GET", "/metrics", self.show_metrics),
                route("GET", "/workers", self.workers),
                route("POST", "/workers", self.add_worker, takes_json=True),
                route("DELETE", "/workers", self.remove_worker, takes_json=True),
                route("PATCH", "/workers", self.change_traffic, takes_json=True),
                route("POST", "/route", self.route, takes_json=True),
                route("GET", "/usage", self.usage),
                route("POST", "/reset_prefix_cache", self.reset_prefix_cache),
                route("POST", "/reset_mm_cache", self.reset_mm_cache),
            ],
            redirect_slashes=False,
        )
        admin_keys = Keys(ApiKeyStore(keys, kind="admin"), {PAGE})
        counted = AnswerMemory(router, lambda _: app.limits.reserve.reservation())
        guarded = GuardMiddleware(counted, admin_keys, AllowedOrigins((), (), keyless=False))
        self._asgi = TelemetryMiddleware(guarded, app.metrics, access_log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._asgi(scope, receive, send)

    async def workers(self, request: Request) -> Response:
        """GET /workers: each worker's health and load, the known contents of its caches, and its bookings.

        Bookings cover all processes that share the port; the circuit breaker's state is this process's own.
        """
        return _json({"workers": self._reports(await self._app.siblings.works())})

    async def board(self, request: Request) -> Response:
        """GET /board: a snapshot of requests, workers, hit rates, tenants, and the latest errors."""
        works = await self._app.siblings.works()
        return _json(board(time.time(), self._reports(works), await self._app.tenants(), works))

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics: the same metrics as on the API's port."""
        return Response(await self._app.siblings.metrics(), media_type=METRICS_CONTENT_TYPE)

    def _reports(self, works: list[Work]) -> list[WorkerReport]:
        """Return a report on every worker, with the bookings of all processes."""
        workers = (*self._worker_pool.clients, *self._worker_pool.leaving)
        reports = [worker_report(worker, self._worker_pool, self._app.routing.cache_view) for worker in workers]
        booked = [total(Booked, [work.booked.get(one.url, Booked()) for work in works]) for one in reports]
        return [msgspec.structs.replace(one, booked=own) for one, own in zip(reports, booked, strict=True)]

    async def add_worker(self, request: Request) -> Response:
        """POST /workers: add the worker at the body's url.

        The worker stays until DELETE /workers removes it or the gateway stops.
        """
        url = await self._url(request)
        try:
            check_url(url)
        except StartupError as error:
            raise InvalidValue(error.message, "url") from error
        await self._discovery.want(SOURCE, url)
        return self._sources_of(url)

    async def remove_worker(self, request: Request) -> Response:
        """DELETE /workers: remove the worker at the body's url, which POST /workers must have added."""
        url = await self._url(request)
        sources = self._discovery.sources_of(url)
        if SOURCE not in sources:
            origin = f"it comes from {', '.join(sources)}, so take it out there" if sources else "there is none at it"
            raise InvalidValue(f"No worker at this url was added by {SOURCE}: {origin}.", "url")
        await self._discovery.drop(SOURCE, url)
        return self._sources_of(url)

    async def change_traffic(self, request: Request) -> Response:
        """PATCH /workers: change whether the worker at the body's url is cordoned, its weight, or its canary share.

        The body is a JSON merge patch (RFC 7396). Raises as read_short(), and InvalidValue.
        """
        if self._app.siblings.are_several and self._traffic.path is None:
            raise InvalidValue("With --gateway-processes over 1 this needs a --traffic-file, which all follow.", "url")
        body = await self._app.bodies.read_short(request.scope, request.receive, MAX_BODY_BYTES)
        try:
            patch = msgspec.json.decode(body, type=_TrafficBody)
        except UNREADABLE as error:
            form = '{"url": "grpc://HOST:PORT", "cordoned": true, "weight": 0.5, "share": 0.1}'
            raise InvalidValue(
                f"The body must be JSON with `url` and what to change, such as {form}.", "url"
            ) from error
        if isinstance(patch.weight, float) and not MIN_WEIGHT <= patch.weight <= MAX_WEIGHT:
            raise InvalidValue(f"`weight` must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}; null clears it.", "weight")
        if isinstance(patch.share, float) and not 0 <= patch.share <= 1:
            raise InvalidValue("`share` must be from 0 to 1; null clears it.", "share")
        url, changes = patch.url, {name: getattr(patch, name) for name in TrafficChange.__struct_fields__}
        is_known = url in {worker.url for worker in self._worker_pool.clients}
        if not is_known and url not in self._worker_pool.traffic.changes:
            raise InvalidValue("There is no worker at this url; GET /workers lists them.", "url")
        try:
            await self._traffic.change(url, {name: value for name, value in changes.items() if value is not UNSET})
        except StartupError as error:
            raise InternalError(f"Nothing was changed. {error.message}") from error
        lasts = "the gateway ends" if self._traffic.path is None else "it is cleared"
        return _json({"url": url, "traffic": self._worker_pool.traffic.of(url), "until": lasts})

    async def _url(self, request: Request) -> str:
        """Return the url in a request's body.

        Raises InvalidValue if the body is malformed or if several processes share the port. Also raises whatever
        read_short() raises.
        """
        if self._app.siblings.are_several:
            raise InvalidValue(
                "With --gateway-processes over 1 workers are added and removed by --workers-file.", "url"
            )
        body = await self._app.bodies.read_short(request.scope, request.receive, MAX_BODY_BYTES)
        try:
            return msgspec.json.decode(body, type=_WorkerUrl).url
        except UNREADABLE as error:
            raise InvalidValue('The body must be JSON with one field: {"url": "grpc://HOST:PORT"}.', "url") from error

    def _sources_of(self, url: str) -> Response:
        return _json({"url": url, "sources": self._discovery.sources_of(url)})

    async def route(self, request: Request) -> Response:
        """POST /route: report which worker would get the chat in the body, and why. The chat is not sent.

        The route depends on the caches of the tenant whose key is in the header x-api-key. A gateway without API keys
        does not require the header.
        """
        api_key = request.headers.get(TENANT_HEADER, "").encode()
        return _json(await self._app.preview(request.scope, request.receive, api_key))

    async def usage(self, request: Request) -> Response:
        """GET /usage: the keys file's tenants, their limits per minute, and their usage since the gateway started.

        With a database, `days` has the usage by day, tenant and model, from the day `since` to the day `until` of the
        query; by default, of the last 31 days. It is null while the database is away.
        """
        today = datetime.now(UTC).date()
        last = _day(request, "until", today)
        first = _day(request, "since", last - timedelta(30))
        tenants = await self._app.tenants()
        try:
            days = await self._app.daily_usage((first - EPOCH).days, (last - EPOCH).days)
        except StoreUnavailable:
            return _json({"tenants": tenants, "days": None})
        return _json({"tenants": tenants} if days is None else {"tenants": tenants, "days": days})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """POST /reset_prefix_cache: the workers drop every KV block that no running request uses."""
        return self._reset(prefix=True)

    async def reset_mm_cache(self, request: Request) -> Response:
        """POST /reset_mm_cache: the gateway drops cached images and URLs; the workers drop unused encoder outputs."""
        missed = await self._app.siblings.forget_media()
        answer = self._reset(media=True)
        if missed:
            raise WorkerUnavailable(
                f"These gateway processes did not take the command: {', '.join(missed)}; the others did. Send it again."
            )
        return answer

    def _reset(self, *, prefix: bool = False, media: bool = False) -> Response:
        """Tell the workers to drop what no request uses. Raises WorkerUnavailable if any did not take the command."""
        missed = self._worker_pool.reset_caches(prefix=prefix, media=media)
        if missed:
            raise WorkerUnavailable(f"These workers did not take the command: {', '.join(missed)}; the others did.")
        return Response()


def _day(request: Request, name: str, default: date) -> date:
    try:
        return date.fromisoformat(request.query_params.get(name, default.isoformat()))
    except ValueError as error:
        raise InvalidValue(f"`{name}` must be a day such as 2026-12-31.", name) from error


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a gateway at *time*, in seconds since 1970, across all of its processes.

    The gateway serves *num_requests*; *num_waiting* of them wait because every worker is at its limit. Hit rates are
    from 0 to 1 and cover the prompt tokens or images since the engines started. A rate is None if there were none. To
    get rates per second, compare two boards: the fields of a worker's load that end in `_total` only grow. *errors*
    lists the latest requests that were refused or failed, newest first.
    """

    version: str
    time: float
    num_processes: int
    num_requests: int
    num_waiting: int
    prefix_hit_rate: float | None
    encoder_hit_rate: float | None
    workers: Sequence[WorkerReport]
    tenants: Sequence[TenantReport]
    errors: Sequence[RequestError]


def board(
    time: float, workers: Sequence[WorkerReport], tenants: Sequence[TenantReport], works: Sequence[Work]
) -> Board:
    """Return the board for the processes whose work is *works*."""
    loads = [worker.load for worker in workers if worker.load is not None]
    hits = sum(load.encoder_cache_hits_total for load in loads)
    cached_tokens = sum(load.cached_tokens_total for load in loads)
    errors = itertools.chain.from_iterable(work.errors for work in works)
    return Board(
        version=installed_version(),
        time=time,
        num_processes=len(works),
        num_requests=sum(work.num_requests for work in works),
        num_waiting=sum(work.num_waiting for work in works),
        prefix_hit_rate=_share(cached_tokens, sum(load.prompt_tokens_total for load in loads)),
        encoder_hit_rate=_share(hits, sum(load.encoder_lookups_total for load in loads)),
        workers=workers,
        tenants=tenants,
        errors=sorted(errors, key=lambda error: error.time, reverse=True)[:MAX_ERRORS],
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
