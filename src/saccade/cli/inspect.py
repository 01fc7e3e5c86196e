"""`saccade inspect`: show a model's input for images, by the gateway's own code, or where a chat would go."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from cyclopts import Group, Parameter
from PIL import Image
from rich.console import Console
from rich.table import Table

from saccade import models
from saccade.cli.admin_port import call, require_key
from saccade.cli.bundled import bundled
from saccade.engine.config import EngineConfig
from saccade.engine.executor.fingerprint import model_fingerprint
from saccade.engine.executor.weight_files import weight_files
from saccade.errors import RequestError, StartupError
from saccade.gateway.chat import NO_FILE, ChatMessage, ChatRequest, ContentPart, ImageUrl
from saccade.gateway.config import GatewayConfig
from saccade.gateway.images.collect import EncodedImage
from saccade.gateway.images.decode_pool.pool import DecodePool
from saccade.gateway.images.media import Media
from saccade.gateway.prompt.draft import Draft, PromptDrafter
from saccade.gateway.request import Limits, Request
from saccade.gateway.served_models.served_model import ServedModel
from saccade.gateway.tenants.account import EVERYBODY, Account
from saccade.gateway.workers.prompt import media_runs
from saccade.identity.blocks import block_keys, root_key
from saccade.media.decode import decode
from saccade.media.header import ImageLimits, MediaLimits, read_header
from saccade.models.files import read_model_files
from saccade.supervisor.checkpoint import resolve_model
from saccade.telemetry import Metrics

BLOCK_SIZE = 16
SHOWN_IDS = 12
UNBOUNDED = 1 << 40


@dataclass
class Stopwatch:
    """The times of stages, in ms."""

    stages: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, stage: str) -> None:
        """Record the time since the last lap as *stage*."""
        now = time.perf_counter()
        self.stages[stage] = self.stages.get(stage, 0.0) + 1000 * (now - self._last)
        self._last = now


async def draft_of(served: ServedModel, encoded: list[bytes], question: str) -> tuple[list[EncodedImage], Draft]:
    """Return images and prompt of one message: the images, then the question. Raises RequestError."""
    config = GatewayConfig(media_limits=MediaLimits(images=len(encoded)))
    limits, metrics = Limits.of(config), Metrics()
    media = Media(config, DecodePool(config), limits.admission, metrics)
    prompts = PromptDrafter(config.media_limits, metrics, media.threads)
    parts = [ContentPart(type="image_url", image_url=ImageUrl(url=NO_FILE)) for _ in encoded]
    message = ChatMessage("user", [*parts, ContentPart(type="text", text=question)])
    request = ChatRequest(model=served.name, messages=[message])
    chat = prompts.read(served, request)
    sources = [replace(source, content=content) for source, content in zip(chat.images, encoded, strict=True)]
    with Request.begin(limits, Account(EVERYBODY), client=None) as call:
        images = await media.images.collect(call, served, sources, salt=b"")
    layouts = [image.layout for image in images]
    return images, await prompts.draft(served, request, chat, layouts)


def resized(image: EncodedImage, served: ServedModel, watch: Stopwatch) -> npt.NDArray[np.uint8]:
    """Decode and resize *image* as a decode process does; return uint8 [h, w, 3]. Raises RequestError."""
    layout = image.layout
    watch.lap("report")
    pixels = decode(image.encoded, ImageLimits(), served.declaration.keeps_alpha)
    watch.lap("decode")
    patches = np.empty(layout.pixel_shape, dtype=np.uint8)
    family = models.load_pixels(served.family)(image.settings)
    family.write(pixels, layout, patches)
    watch.lap("resize and patches")
    return np.ascontiguousarray(family.to_image(patches, layout))


@Parameter(name="*", group=Group("Where a chat would go", sort_key=1))
@dataclass(frozen=True)
class RouteFlags:
    """The running gateway to ask."""

    gateway: str | None = None
    "The admin port of a running gateway, as http://127.0.0.1:PORT."
    admin_key: str | None = None
    "A key of the admin port. Prefer SACCADE_ADMIN_KEY, which `ps` does not show."
    api_key: str | None = None
    "The API key of the tenant that would send the chat; needed if the gateway has API keys."
    json: Annotated[bool, Parameter(negative="")] = False
    "Print the gateway's answer as JSON."


ROUTE_FLAGS = RouteFlags()


def inspect(
    model: str,
    images: tuple[Path, ...] = (),
    /,
    *,
    question: str = "What is in this image?",
    out: Path = Path(),
    blocks: Annotated[bool, Parameter(negative="")] = False,
    route: RouteFlags = ROUTE_FLAGS,
) -> None:
    """Show a model's input for images: grids, token ids with spans, hashes, block keys, timings.

    With --gateway: show which worker of a running gateway a chat would go to, and why.

    Parameters
    ----------
    model
        A folder in hub layout, or a hub id; without it, the small model that ships with Saccade. With --gateway a
        chat: the body of a chat completion request, a JSON file.
    images
        Image files, all in one user message.
    question
        The text that follows the images.
    out
        Folder for the resized images, each written as PNG; by default the current one.
    blocks
        Show the key of every KV block, not only the first and the last.
    """
    if route.gateway is not None:
        if images:
            raise StartupError("With --gateway name one file: `saccade inspect --gateway URL CHAT.json`.")
        show_route(route.gateway, route.admin_key, route.api_key, Path(model), as_json=route.json)
        return
    if Path(model).expanduser().is_file():  # no model is a file: the first word is an image
        model, images = str(bundled("model")), (Path(model), *images)
    if not images:
        raise StartupError(f"There is no image {model}. Name at least one: `saccade inspect [MODEL] IMAGE...`.")
    folder = resolve_model(model, weights=False)
    watch = Stopwatch()
    served = ServedModel.from_files(folder.name, read_model_files(folder), UNBOUNDED)
    watch.lap("load model files")
    media, draft = asyncio.run(draft_of(served, [_read(path) for path in images], question))
    watch.lap("header, hash, template, tokenize")
    console = Console()
    for path, image in zip(images, media, strict=True):
        _show_image(console, path, image, _write_resized(path, image, served, out, watch))
    _show_prompt(console, served, draft)
    _show_keys(console, folder, media, draft, all_of_them=blocks)
    timings = (f"{stage}: {ms:.1f} ms" for stage, ms in watch.stages.items() if stage != "report")
    console.print("  ".join(timings), highlight=False, soft_wrap=True)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"Cannot read {path}: {error.strerror}.") from error


def _write_resized(path: Path, image: EncodedImage, served: ServedModel, out: Path, watch: Stopwatch) -> Path:
    """Write the resized image as PNG and return its path."""
    layout = image.layout
    target = out / f"{path.stem}.{layout.resized_width}x{layout.resized_height}.png"
    try:
        Image.fromarray(resized(image, served, watch)).save(target)
    except RequestError as error:
        raise StartupError(f"{path}: {error.message}") from error
    except OSError as error:
        raise StartupError(f"Cannot write {target}: {error.strerror}.") from error
    return target


def _show_image(console: Console, path: Path, image: EncodedImage, target: Path) -> None:
    header, layout = read_header(image.encoded), image.layout
    frames, rows, columns = layout.grid
    width, height = header.upright
    table = Table.grid(padding=(0, 2))
    table.add_row("image", f"{path} ({header.format}, {width}x{height}, orientation {header.orientation})")
    table.add_row("resized", f"{layout.resized_width}x{layout.resized_height}, written to {target}")
    table.add_row("grid", f"{frames} x {rows} x {columns} = {frames * rows * columns} patches")
    nbytes = layout.num_pixel_bytes
    table.add_row("on the wire", f"{layout.pixel_dtype} {list(layout.pixel_shape)}, {nbytes} bytes")
    table.add_row("tokens", str(layout.num_tokens))
    table.add_row("content_hash", image.content_hash.hex())
    console.print(table, markup=False, highlight=False, soft_wrap=True)
    console.print()


def _show_prompt(console: Console, served: ServedModel, draft: Draft) -> None:
    console.print(f"prompt: {len(draft.token_ids)} tokens", highlight=False)
    table = Table("from", "to", "what", "token ids", "text", box=None)
    position = 0
    for span in chain.from_iterable(draft.spans):
        _add_text(table, served, draft.token_ids, position, span.start)
        end = span.start + span.length
        identifier = f"{draft.token_ids[span.start]} x {span.length}"
        table.add_row(str(span.start), str(end), "image", identifier, "")
        position = end
    _add_text(table, served, draft.token_ids, position, len(draft.token_ids))
    console.print(table, markup=False, highlight=False)
    console.print()


def _add_text(table: Table, served: ServedModel, token_ids: list[int], start: int, end: int) -> None:
    if start < end:
        ids = " ".join(map(str, token_ids[start : min(end, start + SHOWN_IDS)]))
        more = " ..." if end - start > SHOWN_IDS else ""
        text = repr(served.tokenizer.decode(token_ids[start:end]))
        table.add_row(str(start), str(end), "text", ids + more, text)


def _show_keys(console: Console, folder: Path, images: Sequence[EncodedImage], draft: Draft, all_of_them: bool) -> None:
    """Print block keys as an engine with default settings computes them without an API key.

    Prints only the first and the last, unless *all_of_them* is true.
    """
    runs = media_runs(zip((image.content_hash for image in images), draft.spans, strict=True))
    try:
        weight_files(folder)
    except StartupError:
        console.print("block keys depend on the weights, which this folder does not have")
        return
    root = root_key(model_fingerprint(EngineConfig(str(folder), folder.name), read_model_files(folder)), b"")
    keys = block_keys(root, draft.token_ids, runs, BLOCK_SIZE)
    console.print(f"full KV blocks of {BLOCK_SIZE} tokens: {len(keys)}", highlight=False)
    table = Table("block", "tokens", "key", box=None)
    numbers = range(len(keys)) if all_of_them or len(keys) <= 2 else (0, len(keys) - 1)
    for number in numbers:
        table.add_row(str(number), f"{number * BLOCK_SIZE}-{(number + 1) * BLOCK_SIZE}", keys[number].hex())
    console.print(table, markup=False, highlight=False)
    if len(numbers) < len(keys):
        console.print("`--blocks` shows all keys.", highlight=False)
    console.print()


def show_route(gateway: str, admin_key: str | None, api_key: str | None, chat: Path, *, as_json: bool) -> None:
    """Print where *chat*, the body of a chat completion request as a JSON file, would go. Raises StartupError.

    *gateway* is the URL of the admin port; *api_key* names the tenant whose caches count.
    """
    key = require_key(admin_key)
    answer = call(gateway, "/route", key, _read(chat), api_key)
    if as_json:
        print(msgspec.json.format(answer).decode())
    else:
        print(*_lines(msgspec.json.decode(answer)), sep="\n")


def _lines(route: dict[str, Any]) -> Iterator[str]:
    """Yield *route* for people: the choice first, then every worker with the sum of its cost."""
    yield f"worker    {route['worker']}: {route['reason']}"
    yield f"model     {route['model']}"
    yield f"prompt    {route['prompt_tokens']} tokens"
    for image in route["pictures"]:
        yield f"image     {image['tokens']} tokens from {image['start']} on"
    yield f"policy    {route['policy']}"
    for one in route["candidates"]:
        why = f" ({one['exactness_reason']})" if one["exactness_reason"] else ""
        total = one["cost"].pop("total")
        terms = " + ".join(
            f"{value:g} {name.replace('picture_tokens', 'image_tokens').replace('_', ' ')}"
            for name, value in one["cost"].items()
        )
        yield ""
        yield f"{one['worker']}{', chosen' if one['chosen'] else ''}"
        yield f"  {one['exactness']}{why}: holds {one['overlap_blocks']} of {one['num_blocks']} blocks"
        yield f"  cost {total:g} = {terms}"
    for one in route["excluded"]:
        yield ""
        yield f"{one['worker']}, not a candidate: {one['reason']}"
