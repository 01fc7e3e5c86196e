"""`saccade inspect`: show a model's input for images, which the gateway's own code makes, or where a chat would go."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Group, Parameter
from PIL import Image
from rich.console import Console
from rich.table import Table

from saccade.cli.admin_port import call, require_key
from saccade.cli.bundled import bundled
from saccade.cli.model_input import Patches, Stopwatch, model_input, preview_of
from saccade.consoles import new_console
from saccade.engine.config import EngineConfig
from saccade.engine.executor.fingerprint import model_fingerprint
from saccade.engine.executor.weight_index import weight_files
from saccade.errors import RequestError, StartupError
from saccade.fleet.prompt import media_runs
from saccade.gateway.images.encoded_image import EncodedImage
from saccade.gateway.prompt.prompt_builder import PromptTokens
from saccade.gateway.served_models.served_model import ServedModel
from saccade.identity.blocks import block_keys, root_key
from saccade.media.header import read_header
from saccade.models.files import read_model_files
from saccade.supervisor.checkpoint import resolve_model

BLOCK_SIZE = 16
SHOWN_IDS = 12
UNBOUNDED = 1 << 40


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
        Files of images, PDFs and videos, all in one user message.
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
    media, prompt, patches = model_input(served, [_read(path) for path in images], question, watch)
    console = new_console()
    for path, image, of_page in zip(_paths_of(images, media), media, patches, strict=True):
        _show_image(console, path, image, _write_resized(path, image, of_page, served, out, watch))
    _show_prompt(console, served, prompt)
    _show_keys(console, folder, media, prompt, all_of_them=blocks)
    console.print(str(watch), soft_wrap=True)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"Cannot read {path}: {error.strerror}.") from error


def _paths_of(paths: Sequence[Path], images: Sequence[EncodedImage]) -> Iterator[Path]:
    """Yield the path of each of *images*; a PDF has several images."""
    numbers = itertools.accumulate(image.page is None or image.page.number == 0 for image in images)
    return (paths[number - 1] for number in numbers)


def _write_resized(
    path: Path, image: EncodedImage, patches: Patches | None, served: ServedModel, out: Path, watch: Stopwatch
) -> Path | None:
    """Write the resized image as PNG and return its path; None for a video."""
    layout, page = image.layout, "" if image.page is None else f".{image.page.number + 1}"
    target = out / f"{path.stem}{page}.{layout.resized_width}x{layout.resized_height}.png"
    try:
        pixels = preview_of(image, patches, served, watch)
        if pixels is None:
            return None
        Image.fromarray(pixels).save(target)
    except RequestError as error:
        raise StartupError(f"{path}: {error.message}") from error
    except OSError as error:
        raise StartupError(f"Cannot write {target}: {error.strerror}.") from error
    return target


def _title(path: Path, image: EncodedImage) -> tuple[str, str]:
    """Return what *image* is, and what its file says about it."""
    page, video = image.page, image.video
    if page is not None:
        return "page", f"{page.number + 1} of {path} (PDF, {page.width}x{page.height})"
    if video is not None:
        frames = f"{video.num_frames} frames, {video.fps:.3g} a second, {len(image.layout.frames)} of them taken"
        return "video", f"{path} ({video.width}x{video.height}, {frames})"
    header = read_header(image.encoded)
    width, height = header.upright
    return "image", f"{path} ({header.format}, {width}x{height}, orientation {header.orientation})"


def _show_image(console: Console, path: Path, image: EncodedImage, target: Path | None) -> None:
    layout = image.layout
    frames, rows, columns = layout.grid
    table = Table.grid(padding=(0, 2))
    table.add_row(*_title(path, image))
    place = "" if target is None else f", written to {target}"
    table.add_row("resized", f"{layout.resized_width}x{layout.resized_height}{place}")
    table.add_row("grid", f"{frames} x {rows} x {columns} = {frames * rows * columns} patches")
    nbytes = layout.num_pixel_bytes
    table.add_row("on the wire", f"{layout.pixel_dtype} {list(layout.pixel_shape)}, {nbytes} bytes")
    table.add_row("tokens", str(layout.num_tokens))
    table.add_row("content_hash", image.content_hash.hex())
    console.print(table, markup=False, soft_wrap=True)
    console.print()


def _show_prompt(console: Console, served: ServedModel, prompt: PromptTokens) -> None:
    console.print(f"prompt: {len(prompt.token_ids)} tokens")
    table = Table("from", "to", "what", "token ids", "text", box=None)
    position = 0
    for span in chain.from_iterable(prompt.spans):
        _add_text(table, served, prompt.token_ids, position, span.start)
        end = span.start + span.length
        identifier = f"{prompt.token_ids[span.start]} x {span.length}"
        table.add_row(str(span.start), str(end), "image", identifier, "")
        position = end
    _add_text(table, served, prompt.token_ids, position, len(prompt.token_ids))
    console.print(table, markup=False)
    console.print()


def _add_text(table: Table, served: ServedModel, token_ids: list[int], start: int, end: int) -> None:
    if start < end:
        ids = " ".join(map(str, token_ids[start : min(end, start + SHOWN_IDS)]))
        more = " ..." if end - start > SHOWN_IDS else ""
        text = repr(served.tokenizer.decode(token_ids[start:end]))
        table.add_row(str(start), str(end), "text", ids + more, text)


def _show_keys(
    console: Console, folder: Path, images: Sequence[EncodedImage], prompt: PromptTokens, all_of_them: bool
) -> None:
    """Print block keys as an engine with default settings computes them without an API key.

    Prints only the first and the last, unless *all_of_them* is true.
    """
    runs = media_runs(zip((image.content_hash for image in images), prompt.spans, strict=True))
    try:
        weight_files(folder)
    except StartupError as error:
        console.print(f"block keys depend on the weights: {error}", highlight=False)
        return
    root = root_key(model_fingerprint(EngineConfig(str(folder), folder.name), read_model_files(folder)), b"")
    keys = block_keys(root, prompt.token_ids, runs, BLOCK_SIZE)
    console.print(f"full KV blocks of {BLOCK_SIZE} tokens: {len(keys)}")
    table = Table("block", "tokens", "key", box=None)
    numbers = range(len(keys)) if all_of_them or len(keys) <= 2 else (0, len(keys) - 1)
    for number in numbers:
        table.add_row(str(number), f"{number * BLOCK_SIZE}-{(number + 1) * BLOCK_SIZE}", keys[number].hex())
    console.print(table, markup=False)
    if len(numbers) < len(keys):
        console.print("`--blocks` shows all keys.")
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
    """Yield the lines that show *route*: the choice first, then every worker with the sum of its cost."""
    yield f"worker    {route['worker']}: {route['reason']}"
    yield f"model     {route['model']}"
    yield f"prompt    {route['prompt_tokens']} tokens"
    for image in route["images"]:
        yield f"image     {image['tokens']} tokens from {image['start']} on"
    yield f"policy    {route['policy']}"
    for one in route["candidates"]:
        why = f" ({one['exactness_reason']})" if one["exactness_reason"] else ""
        cost, weight = one["cost"], one.get("recompute_weight", 1.0)  # gateways of earlier releases have none
        total = cost.pop("total")
        prompt, image, *others = (f"{value:g} {name.replace('_', ' ')}" for name, value in cost.items())
        work = " + ".join([f"{weight:g} x ({prompt} + {image})", *others])
        speed, share = one.get("weight", 1.0), one.get("share")
        yield ""
        canary = "" if share is None else f", a canary with {100 * share:g} % of the conversations"
        yield f"{one['worker']}{', chosen' if one['chosen'] else ''}{canary}"
        yield f"  {one['exactness']}{why}: holds {one['overlap_blocks']} of {one['num_blocks']} blocks"
        yield f"  cost {total:g} = {work if speed == 1 else f'({work}) / weight {speed:g}'}"
    for one in route["excluded"]:
        yield ""
        yield f"{one['worker']}, not a candidate: {one['reason']}"
