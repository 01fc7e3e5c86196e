"""Answers the requests of batches while no other request waits."""

import asyncio
import contextlib
from collections import Counter, deque
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
    WorkerFailed,
    WorkerUnavailable,
)
from saccade.gateway.apis.batches.lines import BatchLine, read_lines
from saccade.gateway.apis.batches.store import LEASE_SECONDS, BatchStore, Lease
from saccade.gateway.apis.batches.usage_sum import sum_usage
from saccade.gateway.apis.batches.wire import BatchFault, BatchFaults, RequestCounts, answer_line, error_line
from saccade.gateway.apis.chat_endpoint import ChatEndpoint, ReadApi
from saccade.gateway.images.file_store import FileObject, FileStore, StoredFile, file_id
from saccade.gateway.server.errors import encode_error
from saccade.gateway.state.rows import Place
from saccade.gateway.tenants.account import Account
from saccade.transport import lasting_task

POLL_SECONDS: Final = 2.0
PROGRESS_SECONDS: Final = 1.0
"""How often the progress of a batch is stored, and looked up whether it is cancelled."""

PAUSE_SECONDS: Final = 1.0
"""Between two tries of a request that cannot be served now."""

MAX_BATCHES: Final = 4
"""Batches that a gateway works on at a time; one tenant has at most all but one of them."""

MAX_FAILURES: Final = 3
"""How often a request may fail because its worker does."""

TRIED_AGAIN: Final = (Draining, QueueFull, StoreUnavailable, WorkerUnavailable)
"""These say that a request cannot be served now."""

Ask = Callable[[str, bytes, Account], Awaitable[tuple[bytes, str]]]
"""Asks an endpoint for the answer to a body, and returns it with a warning."""


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
        self._concurrency = concurrency
        self._places = asyncio.Semaphore(concurrency)
        self._looking: asyncio.Task[None] | None = None
        self._working: dict[Place, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Begin to look for batches."""
        self._looking = lasting_task.begin(self._look, "batches")

    async def close(self) -> None:
        """Stop. Other gateways go on with the batches."""
        await lasting_task.end(self._looking, *self._working.values())

    async def _look(self) -> None:
        while True:
            self._store.is_new.clear()
            with contextlib.suppress(StoreUnavailable):
                await self._take_batches()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._store.is_new.wait()

    async def _take_batches(self) -> None:
        accounts = {account.tenant.id: account for account in self._accounts()}
        waiting = [one for one in await self._store.free(accounts) if one[0] not in self._working]
        while waiting and len(self._working) < MAX_BATCHES:
            shares = Counter(place.tenant for place in self._working)
            # Of equal tenants, the one with the oldest batch.
            chosen = min(waiting, key=lambda one: shares[one[0].tenant])
            if shares[chosen[0].tenant] >= MAX_BATCHES - 1:
                return
            waiting.remove(chosen)
            if (lease := await self._store.take(*chosen)) is not None:
                self._begin(lease)

    def _begin(self, lease: Lease) -> None:
        work = BatchWork(self._store, self._files, self._ask, self._places, self._concurrency, lease)
        task = lasting_task.begin(work.run, "batch")
        self._working[lease.place] = task
        task.add_done_callback(lambda _: self._working.pop(lease.place))

    async def _ask(self, endpoint: str, body: bytes, account: Account) -> tuple[bytes, str]:
        pieces: list[bytes] = []

        async def keep(message: Message) -> None:
            pieces.append(message.get("body", b""))

        warning = await self._chats.answer(self._apis[endpoint], body, account, keep)
        return b"".join(pieces), warning


class BatchWork:
    """Works on the batch of *lease* until it ends, or until another gateway has the lease."""

    def __init__(
        self,
        store: BatchStore,
        files: FileStore,
        ask: Ask,
        places: asyncio.Semaphore,
        concurrency: int,
        lease: Lease,
    ) -> None:
        self._store = store
        self._files = files
        self._ask = ask
        self._places = places
        self._concurrency = concurrency
        self._lease = lease
        self._batch = lease.batch
        self._is_error: dict[int, bool] = {}
        self._failures = Counter[int]()

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
        source = await self._store.source(self._lease)
        lines = await asyncio.to_thread(read_lines, source, self._batch.endpoint)
        del source
        if isinstance(lines, BatchFault):
            await self._end(status="failed", failed_at=self._store.now(), errors=BatchFaults([lines]))
            return
        self._is_error = await self._store.lines(self._lease)
        if self._batch.in_progress_at is None and not self._lease.is_cancelled:
            self._change(status="in_progress", in_progress_at=self._store.now())
        models = {line.model for line in lines if line.error is None}
        self._change(request_counts=self._counts(len(lines)), model=models.pop() if len(models) == 1 else None)
        await self._store.set_batch(self._lease, self._batch)
        waiting = deque(line for line in lines if line.number not in self._is_error)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._concurrency, len(waiting))):
                group.create_task(self._answer_lines(waiting))
        await self._finish(lines)

    @property
    def _must_end(self) -> bool:
        return self._lease.is_cancelled or self._store.now() >= self._batch.expires_at

    async def _answer_lines(self, waiting: deque[BatchLine]) -> None:
        """Answer the lines in *waiting*, one at a time. A line that cannot be answered now goes back to them."""
        while waiting and not self._must_end:
            async with self._places:
                if self._must_end or not waiting:
                    return
                line = waiting.popleft()
                pause_seconds = await self._answer(line)
            if pause_seconds:
                waiting.appendleft(line)
                # Meanwhile, others have the place.
                await asyncio.sleep(pause_seconds)

    async def _answer(self, line: BatchLine) -> float:
        """Answer a line, and store the answer. Return after how many seconds to try again, or 0."""
        line_id = self._line_id(line)
        if line.error is not None:
            await self._keep(line, 400, error_line(line_id, line.custom_id, line.error.code, line.error.message))
            return 0.0
        status, warning = 200, ""
        try:
            body, warning = await self._ask(self._batch.endpoint, line.body, self._lease.account)
        except RateLimitExceeded as error:
            return min(max(error.retry_after_seconds, PAUSE_SECONDS), LEASE_SECONDS)
        except TRIED_AGAIN:
            return PAUSE_SECONDS
        except SaccadeError as error:
            self._failures[line.number] += 1
            if isinstance(error, WorkerFailed) and self._failures[line.number] < MAX_FAILURES:
                return PAUSE_SECONDS
            status, body = error.status, encode_error(error)
        await self._keep(line, status, answer_line(line_id, line.custom_id, status, body, warning))
        return 0.0

    def _line_id(self, line: BatchLine) -> str:
        return f"batch_req_{self._batch.id.removeprefix('batch_')}_{line.number}"

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
                if not await self._renew_lease():
                    return
                counts = self._counts(self._batch.request_counts.total)
                if counts != self._batch.request_counts:
                    self._change(request_counts=counts)
                    await self._store.set_batch(self._lease, self._batch)

    async def _renew_lease(self) -> bool:
        """Return False if another gateway has the batch."""
        lease = await self._store.take(self._lease.place, self._lease.account)
        if lease is None:
            return False
        self._lease = lease
        if lease.is_cancelled:
            self._change(status=lease.batch.status, cancelling_at=lease.batch.cancelling_at)
        return True

    async def _finish(self, lines: list[BatchLine]) -> None:
        if not await self._renew_lease():
            return
        if not self._lease.is_cancelled:
            self._change(status="finalizing", finalizing_at=self._store.now())
        await self._store.set_batch(self._lease, self._batch)
        now = self._store.now()
        unanswered = [line for line in lines if line.number not in self._is_error]
        if not self._lease.is_cancelled:
            for line in unanswered:
                message = "The batch expired before this request was answered."
                await self._keep(line, 400, error_line(self._line_id(line), line.custom_id, "batch_expired", message))
        try:
            answers = await self._store.answers(self._lease, is_error=False)
            usage = await asyncio.to_thread(sum_usage, answers.splitlines())
            output = await self._put_file("output", answers)
            del answers
            errors = await self._put_file("errors", await self._store.answers(self._lease, is_error=True))
        except ImageTooLarge as error:
            fault = BatchFault(code="output_too_large", message=error.message)
            await self._end(status="failed", failed_at=now, errors=BatchFaults([fault]))
            return
        counts = self._counts(len(lines))
        self._change(output_file_id=output, error_file_id=errors, usage=usage, request_counts=counts)
        if self._lease.is_cancelled:
            await self._end(status="cancelled", cancelled_at=now)
        elif unanswered:
            await self._end(status="expired", expired_at=now)
        else:
            await self._end(status="completed", completed_at=now)

    async def _put_file(self, name: str, content: bytes) -> str | None:
        tenant = self._lease.account.tenant.id
        if not content:
            return None
        now, expiry = self._store.now(), self._batch.output_expires_after
        about = FileObject(
            id=await asyncio.to_thread(file_id, tenant, content),
            bytes=len(content),
            created_at=now,
            expires_at=now + (self._files.keep_seconds if expiry is None else expiry.seconds),
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
