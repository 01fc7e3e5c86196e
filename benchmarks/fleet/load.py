"""Clients that ask about images, and what the answers say of caches."""

import asyncio
import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.fleet.plan import Plan
from benchmarks.fleet.running import NotMeasured
from benchmarks.gateway.photos import write_photos
from benchmarks.measured import MODEL

SYSTEM = "You look at images for somebody who cannot see them. Say what is there, and nothing else."
"""Longer than a block: prompts share what stands before their images."""

QUESTION = "What is in this image?"
ANSWER_TOKENS = 2


@dataclass(frozen=True)
class Asked:
    """What an answer says of its prompt."""

    prompt_tokens: int
    cached_tokens: int

    def best_rate(self, block_size: int) -> float:
        """The most of the prompt that can be cached, since the last token is always computed."""
        return (self.prompt_tokens - 1) // block_size * block_size / self.prompt_tokens


def chats(images: Sequence[Path], system: bool = True) -> list[dict[str, Any]]:
    """Return the body of a request about each of *images*, which are JPEG files, with or without *system* message."""
    before = [{"role": "system", "content": SYSTEM}] if system else []
    bodies = []
    for path in images:
        url = f"data:image/jpeg;base64,{base64.b64encode(path.read_bytes()).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
        messages = [*before, {"role": "user", "content": content}]
        bodies.append({"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0})
    return bodies


def photos(folder: Path, plan: Plan) -> list[Path]:
    """Return the images of *plan* and one more, distinct and of one size; written where they are not there."""
    return write_photos(folder / "{}x{}".format(*plan.size), plan.num_images + 1, *plan.size)


def ask_all(url: str, bodies: Sequence[dict[str, Any]], numbers: Sequence[int], num_clients: int) -> list[Asked]:
    """Ask bodies[number] for each of *numbers*, by so many clients at the same time. Raises NotMeasured."""
    return asyncio.run(_ask_all(url, bodies, numbers, num_clients))


async def _ask_all(url: str, bodies: Sequence[dict[str, Any]], numbers: Sequence[int], num_clients: int) -> list[Asked]:
    waiting = iter(numbers)
    answers: list[Asked] = []
    async with aiohttp.ClientSession(f"{url}/", timeout=aiohttp.ClientTimeout(total=300)) as session:

        async def client(own: Iterator[int]) -> None:
            for number in own:
                answers.append(await _ask(session, bodies[number]))

        await asyncio.gather(*(client(waiting) for _ in range(num_clients)))
    return answers


async def _ask(session: aiohttp.ClientSession, body: dict[str, Any]) -> Asked:
    try:
        async with session.post("v1/chat/completions", json=body) as response:
            answer = await response.json()
            if response.status != 200:
                raise NotMeasured(f"a request failed with {response.status}: {answer}")
    except aiohttp.ClientError as error:
        raise NotMeasured(f"a request failed: {error!r}") from error
    usage = answer["usage"]
    return Asked(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
