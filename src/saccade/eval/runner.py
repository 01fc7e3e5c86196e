"""Asks many things concurrently, and keeps the answers in a file from which the next run continues."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from saccade.errors import StartupError
from saccade.whole_file import whole_file

T = TypeVar("T")
RETRY_SECONDS = (1.0, 4.0, 15.0)


class Journal:
    """A JSONL file of results by key. Good results from an earlier run are kept; the others are asked again."""

    def __init__(
        self, path: Path, key: Callable[[Mapping[str, Any]], object], is_good: Callable[[Mapping[str, Any]], bool]
    ) -> None:
        """Read *path* if it exists. Raises StartupError if it is not such a file, or cannot be written."""
        self.results: dict[object, Mapping[str, Any]] = {}
        self.path = path
        self._key = key
        if path.exists() and not path.is_file():
            raise StartupError(f"Cannot use {path}: it is no regular file.")
        try:
            content = path.read_bytes() if path.exists() else b""
            lines, end = content.splitlines(), content.rpartition(b"\n")[2]
            if end.startswith(b'{"'):  # a last line that was cut off
                lines.pop()
            for number, line in enumerate(lines, 1):
                try:
                    result = msgspec.json.decode(line, type=dict[str, Any])
                    if is_good(result):
                        self.results[key(result)] = result
                except (msgspec.MsgspecError, KeyError, TypeError) as error:
                    raise StartupError(f"{path}, line {number}, is no result of an earlier run.") from error
            if len(self.results) < len(lines) or end:
                with whole_file(path) as part:
                    part.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in self.results.values()))
            self._is_new = not path.exists()
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise StartupError(f"Cannot use {path}: {error.strerror}. Name another file for the answers.") from error

    def add_result(self, result: Mapping[str, Any]) -> None:
        """Append *result*. Raises StartupError if there is no room for it."""
        self.results[self._key(result)] = result
        try:
            self._file.write(msgspec.json.encode(result) + b"\n")
        except OSError as error:
            raise StartupError(f"Cannot write {self.path}: {error.strerror}.") from error

    def close(self) -> None:
        """Close the file. Remove it if it was created here and got no results."""
        self._file.close()
        if self._is_new and not self.results:
            self.path.unlink(missing_ok=True)


async def run_all(items: Iterable[T], ask: Callable[[T], Awaitable[None]], at_once: int) -> None:
    """Call *ask* with each of *items*, *at_once* at a time. Items are made one by one, in a thread."""
    iterator, turn, end = iter(items), asyncio.Lock(), object()

    async def client() -> None:
        while True:
            async with turn:
                item: Any = await asyncio.to_thread(next, iterator, end)
            if item is end:
                return
            await ask(item)

    await asyncio.gather(*(client() for _ in range(at_once)))


async def retried(ask: Callable[[], Awaitable[T]], is_transient: Callable[[T], bool]) -> T:
    """Call *ask*, and return its last result.

    While the result is transient, *ask* is called again after some seconds, up to three more times.
    """
    for seconds in RETRY_SECONDS:
        if not is_transient(result := await ask()):
            return result
        await asyncio.sleep(seconds)
    return await ask()
