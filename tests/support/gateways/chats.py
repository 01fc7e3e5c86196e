"""Chats for tests, in the OpenAI form and in the form the reference takes, and the client that sends them."""

import base64
import io
from typing import Any

import anthropic
import httpx2
import numpy as np
import openai
from PIL import Image

Part = str | Image.Image


def random_image(width: int, height: int, seed: int) -> Image.Image:
    """An image with structure at every scale, different for every seed."""
    noise = np.random.default_rng(seed)
    coarse = Image.fromarray(noise.integers(0, 256, (5, 7, 3), dtype=np.uint8)).resize((width, height))
    fine = noise.integers(-20, 21, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(coarse) + fine, 0, 255).astype(np.uint8))


def data_url(image: Image.Image, image_format: str = "PNG") -> str:
    """The image as a data: URL."""
    buffer = io.BytesIO()
    image.save(buffer, image_format)
    return f"data:image/{image_format.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def openai_client(url: str, **options: Any) -> openai.OpenAI:
    """An openai client of a server on loopback, which keeps no socket between requests and so need not be closed."""
    transport = openai.DefaultHttpxClient(verify=False, limits=httpx2.Limits(max_keepalive_connections=0))
    return openai.OpenAI(
        base_url=f"{url}/v1", **{"max_retries": 0, "api_key": "none", "http_client": transport, **options}
    )


def anthropic_client(url: str, **options: Any) -> anthropic.Anthropic:
    """An anthropic client of a server on loopback, which keeps no socket between requests."""
    transport = anthropic.DefaultHttpxClient(verify=False, limits=httpx2.Limits(max_keepalive_connections=0))
    return anthropic.Anthropic(
        base_url=url, **{"max_retries": 0, "api_key": "none", "http_client": transport, **options}
    )


def openai_messages(*parts: Part, system: str | None = None) -> list[Any]:
    """One user turn of texts and images in the given order, after an optional system turn."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    before = [{"role": "system", "content": system}] if system is not None else []
    return [*before, {"role": "user", "content": content}]


def reference_messages(*parts: Part, system: str | None = None) -> tuple[list[Any], list[Image.Image]]:
    """The same chat as the reference takes it, and its images in order."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
    before = [{"role": "system", "content": system}] if system is not None else []
    return [*before, {"role": "user", "content": content}], [part for part in parts if not isinstance(part, str)]
