"""A plugin of pytest: Saccade's server in the place of the one that vLLM's tests would start.

The server runs already, and has the names of all their models. JUDGE_SERVER is its address, JUDGE_CHECKPOINT the folder
of its model. Nothing is fetched: the pictures that vLLM's tests take from the network are drawn.
"""

import base64
import io
import os
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import urlopen

import anthropic
import openai
import pytest
import transformers
from PIL import Image, ImageDraw
from stand_in_modules import replace_modules

URL = os.environ["JUDGE_SERVER"]
CHECKPOINT = os.environ["JUDGE_CHECKPOINT"]
KEY = "none"
TIMEOUT = 40
PICTURE = (240, 180)


class RemoteOpenAIServer:
    """The server of this judge, whatever model and flags a test asks for."""

    DUMMY_API_KEY = KEY

    def __init__(self, model: str, flags: list[str], **named: Any) -> None:
        self.url_root = URL

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *given: Any) -> None:
        """The judge ends the server."""

    def url_for(self, *parts: str) -> str:
        """A path's address."""
        return "/".join([URL, *(part.strip("/") for part in parts if part)])

    def get_client(self, **named: Any) -> openai.OpenAI:
        """OpenAI's client."""
        return openai.OpenAI(base_url=f"{URL}/v1", **_options(named))

    def get_async_client(self, **named: Any) -> openai.AsyncOpenAI:
        """The same for coroutines."""
        return openai.AsyncOpenAI(base_url=f"{URL}/v1", **_options(named))

    def get_client_anthropic(self, **named: Any) -> anthropic.Anthropic:
        """Anthropic's client."""
        return anthropic.Anthropic(base_url=URL, **_options(named))

    def get_async_client_anthropic(self, **named: Any) -> anthropic.AsyncAnthropic:
        """The same for coroutines."""
        return anthropic.AsyncAnthropic(base_url=URL, **_options(named))


def _options(named: dict[str, Any]) -> dict[str, Any]:
    return {"api_key": KEY, "max_retries": 0, "timeout": TIMEOUT, **named}


class Platform:
    """A machine without GPUs."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("is_", "supports_")):
            return lambda *given: False
        raise AttributeError(name)

    def device_count(self) -> int:
        """None."""
        return 0


class Hub:
    """Nothing is downloaded: the server has its model."""

    def snapshot_download(self, *given: Any, **named: Any) -> str:
        """The folder of the server's model."""
        return CHECKPOINT


@cache
def tokenizer_of(*given: Any, **named: Any) -> Any:
    """The tokenizer of the server's model, by transformers."""
    return transformers.PreTrainedTokenizerFast.from_pretrained(CHECKPOINT)


def fetch_image(url: str, **named: Any) -> Image.Image:
    """A picture that is served here."""
    with urlopen(url) as answer:
        return Image.open(io.BytesIO(answer.read()))


def encode_image_url(image: Image.Image, **named: Any) -> str:
    """A picture as a data: URL."""
    return f"data:image/png;base64,{base64.b64encode(_png(image)).decode()}"


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _drawn(name: str) -> Image.Image:
    mode = "L" if name.startswith("Gray") else "RGBA" if name.startswith("RGBA") else "RGB"
    image = Image.new("RGB", PICTURE, "white").convert(mode)
    ImageDraw.Draw(image).text((10, 10), name[:8], fill="black", font_size=40)
    return image


class Pictures(BaseHTTPRequestHandler):
    """Answers each path with a drawn picture."""

    def do_GET(self) -> None:
        """Answer."""
        body = _png(_drawn(self.path.strip("/")))
        self.send_response(200)
        self.send_header("Content-Type", "image/png")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given: Any) -> None:
        """Say nothing."""


class LocalAssetServer:
    """Where vLLM's tests take pictures from."""

    def __init__(self, port: int) -> None:
        self._port = port

    def url_for(self, name: str) -> str:
        """A picture's address."""
        return f"http://127.0.0.1:{self._port}/{name}"

    def get_image_asset(self, name: str) -> Image.Image:
        """A picture."""
        return _drawn(name)


@pytest.fixture(scope="session")
def local_asset_server() -> Any:
    """A server of pictures."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    Thread(target=server.serve_forever, daemon=True).start()
    yield LocalAssetServer(server.server_port)
    server.shutdown()


@pytest.fixture
def image_url(request: Any, local_asset_server: LocalAssetServer) -> str:
    """The address of the picture that a test names."""
    return local_asset_server.url_for(request.param)


@pytest.fixture
def image_urls(request: Any, local_asset_server: LocalAssetServer) -> list[str]:
    """Those of several."""
    return [local_asset_server.url_for(name) for name in request.param]


def _unneeded(**named: Any) -> Any:
    return pytest.mark.skipif(True, reason="needs GPUs")


STAND_INS = {
    "RemoteOpenAIServer": RemoteOpenAIServer,
    "ROCM_EXTRA_ARGS": [],
    "VLLM_PATH": Path("/nowhere"),
    "VLLM_S3_BUCKET_URL": "http://127.0.0.1:9",
    "multi_gpu_only": _unneeded,
    "requires_fp8": lambda test: test,
    "current_platform": Platform(),
    "hf_api": Hub,
    "get_tokenizer": tokenizer_of,
    "fetch_image": fetch_image,
    "encode_image_url": encode_image_url,
}
transformers.AutoProcessor = None  # tests that count tokens with a processor of another family fail by name
replace_modules(
    lambda name: name == "tests.utils" or name.partition(".")[0] == "vllm", lambda module, name: STAND_INS[name]
)
