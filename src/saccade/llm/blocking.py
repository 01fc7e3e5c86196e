"""LLM: AsyncLLM for programs without an event loop; its own loop runs in a thread."""

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar, Unpack

from saccade.errors import InvalidValue, StartupError
from saccade.llm.async_llm import AsyncLLM
from saccade.llm.conversation import ImageInput
from saccade.llm.progress import answers_bar
from saccade.llm.results import ChatResult
from saccade.llm.sampling import ChatOptions, SamplingParams
from saccade.loop_thread import LoopThread, at_end_of_program

T = TypeVar("T")


class LLM:
    """Answers chats without a server. *model* is a folder or a hub id, or None for Saccade's own small model.

        with saccade.LLM("./model", max_model_len=4096) as llm:
            [result] = llm.chat([{"role": "user", "content": "Hello"}])

    *settings* are flags of `saccade serve` for the engine, images and parsers, by name. The engine ends on close(), or
    when this object is collected. Raises NotInstalled if the engine is not installed, or StartupError if a setting is
    wrong or the engine does not start.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        self._llm = AsyncLLM(model, **settings)
        self._loop = LoopThread("saccade-llm")
        self._close = weakref.finalize(self, _close, self._llm, self._loop)
        at_end_of_program(self._close)
        try:
            self._run(self._llm.start())
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return repr(self._llm).replace("AsyncLLM", "LLM", 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and all its processes. A second call does nothing."""
        self._close()

    def chat(
        self,
        conversations: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[ChatResult]:
        """Answer one conversation, or many at once, and return a result for each, in order. See AsyncLLM.chat().

            results = llm.chat([conversation, other], SamplingParams(max_tokens=64))

        *sampling_params* apply to all conversations, or are a list with one for each. A conversation that fails has its
        error in its own result. *progress* shows a bar on a terminal or in a notebook. Raises InvalidValue if
        the list is not as long as *conversations*, or if these are a text or a single message.
        """
        if isinstance(conversations, str | bytes | Mapping):
            raise InvalidValue(
                'A conversation is a list of messages: [{"role": "user", "content": "What is this?"}]. '
                "`ask()` takes an image and a question.",
                "messages",
            )
        is_one = bool(conversations) and isinstance(conversations[0], Mapping)
        several = [conversations] if is_one else conversations
        each = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params] * len(several)
        if len(each) != len(several):
            raise InvalidValue(
                f"`sampling_params` has {len(each)} entries for {len(several)} conversations; give one for each, or "
                "one for all.",
                "sampling_params",
            )
        calls = list(zip(several, each, strict=True))
        has_bar = progress and not is_one
        with answers_bar(len(several)) if has_bar else contextlib.nullcontext(_show_nothing) as advance:

            async def answer(messages: Iterable[Any], params: SamplingParams | None) -> ChatResult:
                result = await self._llm.chat(messages, params, **options)
                advance()
                return result

            async def answers() -> list[ChatResult]:
                return await asyncio.gather(*(answer(*call) for call in calls))

            return self._run(answers())

    def ask(
        self,
        image: ImageInput | Sequence[ImageInput],
        question: str,
        sampling_params: SamplingParams | None = None,
    ) -> str:
        """Return the answer to *question* about *image*, or about several images in a list. Raises SaccadeError.

        An image is a PIL image, uint8 pixels [height, width, 3], a path, a URL or the bytes of a file.
        """
        images = image if isinstance(image, list | tuple) else [image]
        parts = [*({"type": "image", "image": one} for one in images), {"type": "text", "text": question}]
        [result] = self.chat([{"role": "user", "content": parts}], sampling_params)
        if result.error is not None:
            raise result.error
        return result.text

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run *work* in the thread's event loop and return its result."""
        if not self._close.alive:
            work.close()
            raise StartupError("This LLM is closed.")
        return self._loop.run(work)


def _show_nothing() -> None:
    """Show no progress."""


def _close(llm: AsyncLLM, loop: LoopThread) -> None:
    if loop.is_current:
        # The garbage collector found the object here; the loop cannot wait for itself.
        threading.Thread(target=_close, args=(llm, loop)).start()
        return
    loop.run(llm.close())
    loop.close()
