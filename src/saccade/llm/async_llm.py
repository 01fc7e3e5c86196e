"""AsyncLLM: a gateway in the caller's event loop, and a worker with its engine as a child process. It opens no port.

The engine has its own processes, so a crash does not take the caller down, and the engine never waits for the caller's
GIL.
"""

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, Unpack

import msgspec

from saccade.engine.gpu_devices import has_gpu
from saccade.engine.installed import require_engine
from saccade.errors import InvalidValue, QueueFull, RequestError, SaccadeError, StartupError, WorkerUnavailable
from saccade.gateway.apis.chat.reader import parse_chat
from saccade.gateway.apis.chat_endpoint import FieldNames, warning_of
from saccade.gateway.app import connected
from saccade.gateway.application import Application
from saccade.gateway.config import GatewayConfig
from saccade.gateway.image_source import ImageSource
from saccade.gateway.output.answer import Answer
from saccade.gateway.output.choice import AnswerChunk
from saccade.gateway.request import COPIES, Request
from saccade.gateway.tenants.account import EVERYBODY, Account
from saccade.llm.conversation import Source, load, num_bytes, read_messages
from saccade.llm.results import ChatResult, Delta, Deltas, complete
from saccade.llm.sampling import ChatOptions, SamplingParams, response_format_of
from saccade.llm.settings import read_settings
from saccade.log_setup import log_warnings
from saccade.models.bundled_model import BUNDLED_NAME
from saccade.private_folder import private_folder
from saccade.protocol.output import TokenDelta
from saccade.supervisor.tree import Child
from saccade.supervisor.worker_child import worker_child
from saccade.transport import lasting_task

CLIENT = "python"
AHEAD = 16
"""Chats that are prepared while the engine answers as many as it can; others wait without holding anything."""

MEMORY_WAIT_SECONDS = 600.0
RETRY_SECONDS = 1.0
RESTART_SECONDS = 300.0
"""How long a chat waits for an engine that has ended, and is started again."""

POLL_SECONDS = 0.05


class AsyncLLM:
    """Answers chats without a server. *model* is a folder or a hub id, or None for Saccade's own small model.

        async with saccade.AsyncLLM("./model", max_model_len=4096) as llm:
            result = await llm.chat([{"role": "user", "content": "Hello"}])

    *settings* are flags of `saccade serve` for the engine, images and parsers, by name. Raises NotInstalled if the
    engine is not installed, or StartupError if a setting is wrong.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        require_engine()
        self._model = None if model is None else os.fspath(model)
        self._settings = read_settings(settings)
        device = self._settings.engine.device
        device = device if device != "auto" else "cuda" if has_gpu() else "cpu"
        self._num_places = self._settings.engine.limits(device).max_num_seqs + AHEAD
        self._places = asyncio.Semaphore(self._num_places)
        self._loading = asyncio.Lock()
        self._account = Account(EVERYBODY)
        self._resources = contextlib.AsyncExitStack()
        self._app: Application | None = None

    def __repr__(self) -> str:
        state = "not started, or closed" if self._app is None else "ready"
        return f"<saccade.{type(self).__name__} {self._model or BUNDLED_NAME}: {state}>"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the engine, and return when it is ready.

        Raises StartupError if the model cannot be served, or if the worker ends first; the worker prints why.
        """
        log_warnings()
        async with contextlib.AsyncExitStack() as resources:
            socket = resources.enter_context(private_folder("saccade-")) / "worker.sock"
            child = Child(worker_child(self._model, socket, self._settings.engine), lambda: self._app is not None)
            worker = asyncio.create_task(child.run(), name="worker")
            resources.push_async_callback(_stop, child, worker)
            app = await resources.enter_async_context(connected(self._config(f"unix:{socket}")))
            ready = asyncio.ensure_future(_until_ready(app))
            resources.callback(ready.cancel)
            await asyncio.wait((worker, ready), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise StartupError("The worker ended before it was ready; it printed the reason on standard error.")
            ready.result()
            self._app = app
            self._resources = resources.pop_all()

    async def close(self) -> None:
        """End the engine and all its processes; chats that are still running fail. A second call does nothing."""
        if self._app is not None:
            self._app.limits.admission.draining = True
            self._app = None
        await self._resources.aclose()

    async def chat(
        self, messages: Iterable[Any], sampling_params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> ChatResult:
        """Return the answer to a conversation. *messages* and *options*, the other fields, are as in OpenAI's API.

            {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What is this?"}]}

        An image may be a PIL image, uint8 pixels [height, width, 3], a path, a URL, or the bytes of a file. If the chat
        fails, the result has the error.
        """
        start = time.perf_counter()
        while True:
            chunks: list[AnswerChunk] = []
            try:
                async with self._places:
                    generated = await self._generate(messages, sampling_params, options, chunks.append)
                begun_at = [choice.first_token_at for choice in generated.answer.choices if choice.first_token_at]
                ttft_seconds = min(begun_at) - start if begun_at else None
                completion = await complete(generated.answer, chunks)
                form = options.get("response_format")
                kind = form if isinstance(form, type) else None
                seconds, images = time.perf_counter() - start, generated.images
                return ChatResult.of_completion(completion, ttft_seconds, seconds, generated.warning, kind, images)
            except QueueFull:
                # Large images may fill a limit before all places are taken. Other chats end, and give it back.
                await asyncio.sleep(RETRY_SECONDS)
            except SaccadeError as error:
                return ChatResult(seconds=time.perf_counter() - start, error=error)

    async def stream(
        self, messages: Iterable[Any], sampling_params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[Delta, None]:
        """Yield the answer to *messages* as it grows, then its usage and warning. Raises SaccadeError."""
        deltas, maker = asyncio.Queue[Delta | None](), Deltas()

        def take(chunk: AnswerChunk) -> None:
            deltas.put_nowait(maker.delta_of(chunk))  # now: its choice changes with later chunks

        async def run() -> Delta:
            try:
                async with self._places:
                    generated = await self._generate(messages, sampling_params, options, take)
                    return Delta(usage=generated.answer.usage, warning=generated.warning)
            finally:
                deltas.put_nowait(None)

        running = asyncio.create_task(run(), name="stream")
        try:
            while (delta := await deltas.get()) is not None:
                yield delta
            yield await running
        finally:
            await lasting_task.end(running)

    async def _generate(
        self,
        messages: Iterable[Any],
        sampling_params: SamplingParams | None,
        options: ChatOptions,
        take: Callable[[AnswerChunk], None],
    ) -> "_Generated":
        """Answer one conversation as the API does, and return the whole answer. Raises SaccadeError."""
        if (app := self._app) is None:
            raise StartupError(
                "This LLM is not started, or closed: use it in a block, as `async with AsyncLLM() as llm`."
            )
        try:
            async with asyncio.timeout(RESTART_SECONDS):
                await _until_ready(app)
        except TimeoutError:
            raise WorkerUnavailable(
                "The engine has ended, and does not start again; standard error says why."
            ) from None
        read, sources = read_messages(messages)
        if isinstance(kind := options.get("response_format"), type):
            options = {**options, "response_format": response_format_of(kind)}
        try:
            body = msgspec.json.encode({"messages": read, **(sampling_params or SamplingParams()).fields(), **options})
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidValue(
                "Messages and options must be dicts, lists, texts, numbers, booleans and None."
            ) from error

        with Request.begin_request(app.limits, self._account, CLIENT) as request:
            request.memory.take_bytes(COPIES * len(body))
            async with request.turn(len(body)):
                reading = app.pipeline.read_chat(request, parse_chat(body, strict=True)[0])
            del body
            [part] = await reading
            await self._load(part.chat.images, sources, request)
            answers = list[Answer]()

            def deliver(answer: Answer) -> _TokenSink:
                answers.append(answer)
                return _TokenSink(answer, take)

            await app.pipeline.answer(request, part, deliver)
        return _Generated(answers[0], warning_of(part, FieldNames()), tuple(sources.values()))

    async def _load(self, images: list[ImageSource], sources: Mapping[str, Source], request: Request) -> None:
        """Load the content of those *images* that are in *sources*. Raises RequestError, which names the field."""
        # At once, before any is read: two requests that wait for each other's memory would never end.
        await request.memory.grow(sum(map(num_bytes, sources.values())))
        for position, image in enumerate(images):
            if (source := sources.get(image.url)) is not None:
                # One at a time: a PIL image in several conversations reads its file when it is first used.
                async with self._loading:
                    try:
                        content = await asyncio.to_thread(load, source)
                    except RequestError as error:
                        raise error.at(image.field) from error
                images[position] = dataclasses.replace(image, content=content)

    def _config(self, worker_url: str) -> GatewayConfig:
        server = self._settings.server
        return GatewayConfig(
            **vars(self._settings.media),
            tool_call_parser=server.tool_call_parser,
            reasoning_parser=server.reasoning_parser,
            trusts_request_templates=True,
            max_requests=self._num_places,
            memory_wait_seconds=MEMORY_WAIT_SECONDS,
            worker_urls=(worker_url,),
        )


class _Generated(NamedTuple):
    """A whole *answer*, which settings have no effect, and the conversation's *images* that are not URLs."""

    answer: Answer
    warning: str
    images: Sequence[Source]


class _TokenSink:
    """Passes the chunks of *answer* to *take*, however fast they come."""

    def __init__(self, answer: Answer, take: Callable[[AnswerChunk], None]) -> None:
        self.is_whole = answer.is_whole
        self._answer = answer
        self._take = take

    def take(self, delta: TokenDelta) -> bool:
        """Pass on the chunk of *delta*, if it has one. Raises what Answer.take_delta() raises."""
        chunk = self._answer.take_delta(delta)
        if chunk is not None:
            self._take(chunk)
        self.is_whole = self._answer.is_whole
        return True

    async def flush(self) -> None:
        """Let other tasks run."""
        await asyncio.sleep(0)


async def _until_ready(app: Application) -> None:
    """Return when the engine is ready, or *app* closes. Raises StartupError if its model cannot be served."""
    registry = app.model_registry
    while not (registry.ready or app.limits.admission.draining):
        if registry.unservable.done() and not registry.unservable.cancelled():
            raise registry.unservable.result()
        await asyncio.sleep(POLL_SECONDS)


async def _stop(child: Child, worker: asyncio.Task[int]) -> None:
    await child.stop()
    await lasting_task.end(worker)
