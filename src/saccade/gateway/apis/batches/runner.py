"""Answers the requests of batches while no other request waits."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

import msgspec
from starlette.types import Message

from saccade.errors import (
    Draining,
    ImageTooLarge,
    QueueFull,
    RateLimitExceeded,
    SaccadeError,
    StoreUnavailable,
    WorkerUnavailable,
)
from saccade.gateway.apis.batches.lines import BatchLine, read_lines
from saccade.gateway.apis.batches.store import LEASE_SECONDS, BatchStore, Lease
from saccade.gateway.apis.batches.wire import BatchFault, BatchFaults, RequestCounts, answer_line, error_line
from saccade.gateway.apis.chat_endpoint import ChatEndpoint, ReadApi
from saccade.gateway.images.file_store import FileObject, FileStore, StoredFile, file_id
from saccade.gateway.server.errors import encode_error
from saccade.gateway.tenants.account import Account
from saccade.transport import lasting_task

POLL_SECONDS: Final = 2.0
PROGRESS_SECONDS: Final = 1.0
"""How often the progress of a batch is stored, and looked up whether it is cancelled."""

PAUSE_SECONDS: Final = 1.0
"""Between two tries of a request that cannot be served now."""

MAX_BATCHES: Final = 4
"""Batches that a gateway works on at a time."""


class BatchRunner:
    """Takes batches from *store* and answers their lines through *chats*, at most *concurrency* at a time.

    *apis* maps each endpoint to the function that reads its bodies, and *accounts* returns all accounts.
    """

    def __init__(
        self,
        store: BatchStore,
        files: FileStore,
        chats: ChatEndpoint,
        apis: Mapping[str, ReadApi],
        accounts: Callable[[], Iterable[Account]],
        concurrency: int,
    ) -> None:
        self._store = store
        self._files = files
        self._chats = chats
        self._apis = apis
        self._accounts = accounts
        self._places = asyncio.Semaphore(concurrency)
        self._looking: asyncio.Task[None] | None = None
        self._working: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to look for batches."""
        self._looking = lasting_task.begin(self._look, "batches")

    async def close(self) -> None:
        """Stop. Other gateways go on with the batches."""
        await lasting_task.end(self._looking, *self._working)

    async def _look(self) -> None:
        while True:
            self._store.is_new.clear()
            with contextlib.suppress(StoreUnavailable):
                accounts = {account.tenant.id: account for account in self._accounts()}
                for place, account in await self._store.free(accounts, MAX_BATCHES - len(self._working)):
                    if (lease := await self._store.take(place, account)) is not None:
                        self._begin(lease)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._store.is_new.wait()

    def _begin(self, lease: Lease) -> None:
        work = BatchWork(self._store, self._files, self._ask, self._places, lease)
        task = lasting_task.begin(work.run, "batch")
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _ask(self, endpoint: str, body: bytes, account: Account) -> tuple[int, bytes]:
        """Return the status and the body of an answer. Raises SaccadeError if the request should be tried again."""
        pieces: list[bytes] = []

        async def keep(message: Message) -> None:
            pieces.append(message.get("body", b""))

        try:
            await self._chats.answer(self._apis[endpoint], body, account, keep)
        except (Draining, QueueFull, RateLimitExceeded, StoreUnavailable, WorkerUnavailable):
            raise
        except SaccadeError as error:
            return error.status, encode_error(error)
        return 200, b"".join(pieces)


class BatchWork:
    """Works on the batch of *lease* until it ends, or until another gateway has the lease."""

    def __init__(
        self,
        store: BatchStore,
        files: FileStore,
        ask: Callable[[str, bytes, Account], Awaitable[tuple[int, bytes]]],
        places: asyncio.Semaphore,
        lease: Lease,
    ) -> None:
        self._store = store
        self._files = files
        self._ask = ask
        self._places = places
        self._lease = lease
        self._batch = lease.batch
        self._is_error: dict[int, bool] = {}

    async def run(self) -> None:
        """Answer all lines and store the files of the answers. Raises nothing for a database that is away."""
        while True:
            try:
                await lasting_task.until_one_ends(self._work(), self._keep_lease())
                return
            except StoreUnavailable:
                await asyncio.sleep(PAUSE_SECONDS)
            except asyncio.CancelledError:
                with contextlib.suppress(StoreUnavailable):
                    await self._store.give_back(self._lease)
                raise

    async def _work(self) -> None:
        lines = read_lines(await self._store.source(self._lease), self._batch.endpoint)
        if isinstance(lines, BatchFault):
            await self._end(status="failed", failed_at=self._store.now(), errors=BatchFaults([lines]))
            return
        self._is_error = await self._store.lines(self._lease)
        if self._batch.in_progress_at is None:
            self._change(status="in_progress", in_progress_at=self._store.now())
        self._change(request_counts=self._counts(len(lines)))
        await self._store.set_batch(self._lease, self._batch)
        async with asyncio.TaskGroup() as group:
            for line in lines:
                if line.number in self._is_error:
                    continue
                await self._places.acquire()
                if self._must_end:
                    self._places.release()
                    break
                group.create_task(self._answer(line))
        await self._finish(lines)

    @property
    def _must_end(self) -> bool:
        return self._lease.is_cancelled or self._store.now() >= self._batch.expires_at

    async def _answer(self, line: BatchLine) -> None:
        """Answer a line, which has a place."""
        try:
            line_id, custom_id = f"batch_req_{self._batch.id[6:]}_{line.number}", line.custom_id or ""
            if line.error is not None:
                await self._keep(line, 400, error_line(line_id, line.custom_id, line.error.code, line.error.message))
                return
            while not self._must_end:
                try:
                    status, body = await self._ask(self._batch.endpoint, line.body, self._lease.account)
                except RateLimitExceeded as error:
                    await asyncio.sleep(min(error.retry_after_seconds, LEASE_SECONDS))
                except SaccadeError:
                    await asyncio.sleep(PAUSE_SECONDS)
                else:
                    await self._keep(line, status, answer_line(line_id, custom_id, status, body))
                    return
        finally:
            self._places.release()

    async def _keep(self, line: BatchLine, status: int, answer: bytes) -> None:
        """Store an answer, as soon as the database takes it: it must not be asked for again."""
        while True:
            try:
                await self._store.put_answer(self._lease, line.number, status != 200, answer)
            except StoreUnavailable:
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                self._is_error[line.number] = status != 200
                return

    async def _keep_lease(self) -> None:
        """Renew the lease, store the progress, and learn of a cancellation, until another gateway has the batch."""
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            with contextlib.suppress(StoreUnavailable):
                lease = await self._store.take(self._lease.place, self._lease.account)
                if lease is None:
                    return
                self._lease = lease
                counts = self._counts(self._batch.request_counts.total)
                if counts != self._batch.request_counts:
                    self._change(request_counts=counts)
                    await self._store.set_batch(lease, self._batch)

    async def _finish(self, lines: list[BatchLine]) -> None:
        self._change(status="finalizing", finalizing_at=self._store.now())
        await self._store.set_batch(self._lease, self._batch)
        now = self._store.now()
        if not self._lease.is_cancelled:
            for line in lines:
                if line.number not in self._is_error:
                    line_id = f"batch_req_{self._batch.id[6:]}_{line.number}"
                    message = "The batch expired before this request was answered."
                    await self._keep(line, 400, error_line(line_id, line.custom_id, "batch_expired", message))
        try:
            output = await self._put_file("output", is_error=False)
            errors = await self._put_file("errors", is_error=True)
        except ImageTooLarge as error:
            fault = BatchFault(code="output_too_large", message=error.message)
            await self._end(status="failed", failed_at=now, errors=BatchFaults([fault]))
            return
        self._change(output_file_id=output, error_file_id=errors, request_counts=self._counts(len(lines)))
        if self._lease.is_cancelled:
            await self._end(status="cancelled", cancelling_at=now, cancelled_at=now)
        elif now >= self._batch.expires_at:
            await self._end(status="expired", expired_at=now)
        else:
            await self._end(status="completed", completed_at=now)

    async def _put_file(self, name: str, *, is_error: bool) -> str | None:
        content, tenant = await self._store.answers(self._lease, is_error), self._lease.account.tenant.id
        if not content:
            return None
        now = self._store.now()
        about = FileObject(
            id=file_id(tenant, content),
            bytes=len(content),
            created_at=now,
            expires_at=now + self._files.keep_seconds,
            filename=f"{self._batch.id}_{name}.jsonl",
            purpose="batch_output",
        )
        await self._files.put(tenant, StoredFile(about, content))
        return about.id

    async def _end(self, **changes: object) -> None:
        self._change(**changes)
        await self._store.end(self._lease, self._batch)

    def _change(self, **changes: object) -> None:
        self._batch = msgspec.structs.replace(self._batch, **changes)

    def _counts(self, total: int) -> RequestCounts:
        num_errors = sum(self._is_error.values())
        return RequestCounts(total, len(self._is_error) - num_errors, num_errors)
