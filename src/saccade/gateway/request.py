"""Request: the resources that one call holds in the gateway, from its body to the end of its answer."""

import contextlib
from collections.abc import Hashable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Self

from saccade.fair_queue import Background, FairQueue
from saccade.gateway.admission import LARGE_BODY_BYTES, Admission
from saccade.gateway.body_bounds import num_value_bytes
from saccade.gateway.byte_budget import ByteBudget
from saccade.gateway.config import GatewayConfig
from saccade.gateway.memory_parts import MemoryPart
from saccade.gateway.reservation import Reservation
from saccade.gateway.tenants.account import Account, Charge, Tenant
from saccade.gateway.work_threads import WorkThreads

COPIES = 2
"""The body and the strings parsed from it, until the body is dropped."""

PIXELS_WAIT_SECONDS = 10.0
"""How long a request waits for room for its pixels."""


RESERVE_BYTES = 16 << 20
"""Memory for answers to the operator: /metrics and the admin port must answer while clients hold all other memory."""


@dataclass(frozen=True)
class Limits:
    """The limits that a gateway's requests share: places, turns, memory for clients' data, and memory for pixels.

    *reserve* is memory for answers to the operator.
    """

    admission: Admission
    memory: ByteBudget
    pixels: FairQueue
    reserve: ByteBudget

    @property
    def memory_parts(self) -> tuple[MemoryPart, ...]:
        """The parts of the memory that these limits bound."""
        return (
            MemoryPart("requests", self.memory.capacity_bytes, lambda: self.memory.num_bytes),
            MemoryPart("operator", self.reserve.capacity_bytes, lambda: self.reserve.num_bytes),
            MemoryPart("pixels", self.pixels.capacity, lambda: self.pixels.weight),
        )

    def work_threads(self) -> WorkThreads:
        """Return threads for long work; short work takes turns with requests on the event loop."""
        return WorkThreads(self.admission)

    @classmethod
    def of_config(cls, config: GatewayConfig) -> Self:
        """Return the limits that *config* sets, with nothing taken yet."""
        return cls(
            Admission(config.max_requests, config.max_tenant_requests),
            ByteBudget(config.max_request_memory_bytes, config.memory_wait_seconds),
            FairQueue(config.max_pixel_bytes, "images", max_waiting=None, wait_seconds=PIXELS_WAIT_SECONDS),
            ByteBudget(RESERVE_BYTES),
        )


@dataclass(frozen=True)
class Request:
    """One call of a tenant, over HTTP or from Python.

        with Request.begin_request(limits, account, client) as request:
            async with request.turn(len(body)):
                chat = parse(body)
            with request.place():
                ...

    A resource that a method returns is released when its block ends; all others are released when the request ends.
    """

    account: Account
    """The tenant's, which requests, tokens and bytes are charged to."""
    charge: Charge
    tenant: Tenant
    client: Hashable
    """Who shares fairly with others: the tenant, or an address if there are no API keys."""
    memory: Reservation
    """Counts its body, then its encoded images."""
    lifetime_memory: Reservation
    """Counts what stays until its end, and what waits for its client."""
    limits: Limits

    @property
    def is_background(self) -> bool:
        """Whether it waits as long as any other request is waiting."""
        return isinstance(self.client, Background)

    @classmethod
    @contextlib.contextmanager
    def begin_request(
        cls, limits: Limits, account: Account, client: Hashable, *, is_charged: bool = True
    ) -> Iterator[Self]:
        """Begin a request, which ends with the block.

        Raises Draining, QueueFull and RateLimitExceeded if it must be refused.
        """
        limits.admission.check(account.tenant.id)
        charged = account.request() if is_charged else contextlib.nullcontext(Charge())
        with (
            charged as charge,
            limits.memory.reservation(client) as memory,
            limits.memory.reservation(client) as lifetime_memory,
        ):
            yield cls(account, charge, account.tenant, client, memory, lifetime_memory, limits)

    async def hold_values(self, body: bytes | bytearray, threads: WorkThreads) -> None:
        """Reserve memory for the values that *body* decodes to, if there are many. Raises QueueFull and BodyTooLarge.

        A body of up to LARGE_BODY_BYTES is not counted. An ordinary larger body has few values, and its reservation has
        room for them because the body counts twice.
        """
        if len(body) > LARGE_BODY_BYTES:
            num_bytes = await threads.parse(body, num_value_bytes)
            if num_bytes > LARGE_BODY_BYTES:
                await self.memory.grow(num_bytes)

    def hold_recalled(self, num_bytes: int) -> None:
        """Reserve memory for stored messages that the body did not contain.

        Their *num_bytes* count twice, because their texts are encoded and decoded again. Raises QueueFull and
        BodyTooLarge.
        """
        self.memory.claim(COPIES * num_bytes)

    def keep_chat(self) -> None:
        """Release half of the bytes reserved for the body; the other half stays reserved for the chat."""
        self.memory.keep(self.memory.num_bytes // COPIES)

    def place(self) -> AbstractContextManager[None]:
        """Hold a place among the served requests during the block. Raises Draining and QueueFull."""
        return self.limits.admission.admit(self.tenant.id)

    def turn(self, num_bytes: int) -> AbstractAsyncContextManager[None]:
        """Wait for a turn in which the block works on *num_bytes* on the event loop. The block must not wait."""
        return self.limits.admission.turn(num_bytes)

    async def pixels(self, num_bytes: int) -> AbstractContextManager[object]:
        """Wait for room, and hold *num_bytes* of pixels during the block. Raises QueueFull."""
        if not num_bytes:
            return contextlib.nullcontext()
        return await self.limits.pixels.enter(self.client, num_bytes, self.tenant.priority)

    def count_waiting(self, num_bytes: int) -> bool:
        """Count *num_bytes* more, or fewer if negative, that wait for the client; return whether there is room."""
        self.lifetime_memory.count(num_bytes)
        return not self.lifetime_memory.is_over

    def reservation(self) -> Reservation:
        """Return another reservation, for bytes with a different lifetime."""
        return self.limits.memory.reservation(self.client)
