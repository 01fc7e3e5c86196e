"""Faults at each await of a request or a connection: coroutines, and tasks that they begin, are driven step by step."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CoroutineType
from typing import Any

import scripted

from saccade.gateway.server.connection import CONNECTION

HEADER = b"x-fault"


@dataclass
class Fault:
    """What happens as a request waits for the time number *place*, from 0.

    *strike* gets the request's task and its connection, if there is a request; an exception that it returns is raised
    where it waits.
    """

    place: int
    strike: Callable[[Any, Any], BaseException | None]
    task: asyncio.Task[Any] | None = None
    connection: Any = None
    num_waits: int = 0
    has_ended: threading.Event = field(default_factory=threading.Event)

    @property
    def has_struck(self) -> bool:
        """Whether the request has waited as often."""
        return self.num_waits > self.place

    def reach(self) -> BaseException | None:
        """Count one wait."""
        self.num_waits += 1
        if self.num_waits - 1 != self.place:
            return None
        return self.strike(self.task, self.connection)


_FAULT: ContextVar[Fault | None] = ContextVar("fault", default=None)


class _Steps(Coroutine[Any, Any, Any]):
    """A coroutine; its fault strikes at one of its waits."""

    def __init__(self, coroutine: Any, fault: Fault) -> None:
        self._coroutine = coroutine
        self._fault = fault

    def send(self, value: Any) -> Any:
        return self._next(lambda: self._coroutine.send(value))

    def throw(self, *error: Any) -> Any:
        return self._next(lambda: self._coroutine.throw(*error))

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def _next(self, step: Callable[[], Any]) -> Any:
        waited = step()
        error = self._fault.reach()
        if error is None or _is_in_cython(self._coroutine):
            return waited
        if waited is not None:
            # Nobody waits for it any longer.
            waited.cancel()
            waited.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._next(lambda: self._coroutine.throw(error))


def _is_in_cython(awaited: Any) -> bool:
    """Whether a coroutine of uvloop itself waits: it crashes if an exception other than a cancellation is raised in it."""
    while isinstance(awaited, CoroutineType):
        awaited = awaited.cr_await
    return "cython" in type(awaited).__module__


def _begin(loop: asyncio.AbstractEventLoop, coroutine: Any, **context: Any) -> asyncio.Task[Any]:
    fault = _FAULT.get()
    return asyncio.Task(coroutine if fault is None else _Steps(coroutine, fault), loop=loop, **context)


@contextmanager
def followed(fault: Fault) -> Generator[None, None, None]:
    """Inject *fault* into the tasks that begin in the block, and those that they begin, of the running event loop."""
    asyncio.get_running_loop().set_task_factory(_begin)
    token = _FAULT.set(fault)
    try:
        yield
    finally:
        _FAULT.reset(token)


async def driven(fault: Fault, responses: Any) -> AsyncGenerator[Any, None]:
    """Yield what the asynchronous generator *responses* yields, with *fault* injected into it."""
    asyncio.get_running_loop().set_task_factory(_begin)
    try:
        while True:
            token = _FAULT.set(fault)
            try:
                response = await _Steps(anext(responses), fault)
            except StopAsyncIteration:
                return
            finally:
                _FAULT.reset(token)
            yield response
    finally:
        await responses.aclose()


@contextmanager
def injected(gateway: scripted.Gateway) -> Generator[dict[str, Fault], None, None]:
    """Inject faults[name] into the request whose header x-fault has the name."""
    faults: dict[str, Fault] = {}
    server = gateway.server.config
    served = server.loaded_app

    async def app(scope: Any, receive: Any, send: Any) -> None:
        name = dict(scope.get("headers", ())).get(HEADER, b"").decode()
        if name not in faults:
            await served(scope, receive, send)
            return
        fault = faults[name]
        fault.task, fault.connection = asyncio.current_task(), scope[CONNECTION]
        token = _FAULT.set(fault)
        try:
            await _Steps(served(scope, receive, send), fault)
        finally:
            _FAULT.reset(token)
            fault.has_ended.set()

    async def follow(factory: Any) -> None:
        gateway.loop.set_task_factory(factory)

    server.loaded_app = app
    asyncio.run_coroutine_threadsafe(follow(_begin), gateway.loop).result()
    try:
        yield faults
    finally:
        server.loaded_app = served
        asyncio.run_coroutine_threadsafe(follow(None), gateway.loop).result()
