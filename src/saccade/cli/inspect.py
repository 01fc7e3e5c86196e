"""`saccade inspect`: what the model will see of pictures, by the gateway's own steps."""

import asyncio
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pybase64
from PIL import Image
from rich.console import Console
from rich.table import Table

from saccade import models
from saccade.engine.loader import fingerprint, weight_files
from saccade.errors import RequestError, StartupError
from saccade.gateway.media_pool import MediaPool, MediaPoolConfig
from saccade.gateway.openai import ChatMessage, ContentPart, ImageUrl
from saccade.gateway.prepare import Draft, Picture, Preparer
from saccade.gateway.served_model import ServedModel
from saccade.identity.blocks import MediaRun, block_keys, root_key
from saccade.media.decode import decode
from saccade.media.header import PictureLimits, read_header
from saccade.media.resize import resize
from saccade.models.files import read_model_files
from saccade.protocol.description import Description
from saccade.supervisor.checkpoint import resolve_model
from saccade.telemetry import Metrics

BLOCK_SIZE = 16
SHOWN_IDS = 12


@dataclass
class Stopwatch:
    """What each stage took, in ms."""

    stages: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, stage: str) -> None:
        """Book the time since the last lap as *stage*."""
        now = time.perf_counter()
        self.stages[stage] = self.stages.get(stage, 0.0) + 1000 * (now - self._last)
        self._last = now


def inspect(
    model: str, images: tuple[Path, ...], /, *, question: str = "What is in this picture?", out: Path | None = None
) -> None:
    """Show what a model will see of pictures: grids, token ids with spans, hashes, block keys, timings.

    Parameters
    ----------
    model
        A folder in hub layout, or a hub id.
    images
        Picture files, asked about together in one turn.
    question
        The text that follows the pictures.
    out
        Folder for the resized pictures, each written as PNG; by default beside the picture.
    """
    if not images:
        raise StartupError("Name at least one picture: `saccade inspect MODEL IMAGE...`.")
    folder = resolve_model(model)
    watch = Stopwatch()
    served = _served_model(folder)
    watch.lap("load model files")
    draft = asyncio.run(_draft(served, [_read(path) for path in images], question))
    watch.lap("header, hash, template, tokenize")
    console = Console()
    for path, picture in zip(images, draft.pictures, strict=True):
        written = _write_resized(path, picture, served, out, watch)
        _show_picture(console, path, picture, written)
    _show_prompt(console, served, draft)
    _show_keys(console, folder, draft)
    console.print("  ".join(f"{stage}: {ms:.1f} ms" for stage, ms in watch.stages.items() if stage != "report"), highlight=False)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"Cannot read {path}: {error.strerror}.") from error


def _served_model(folder: Path) -> ServedModel:
    """The gateway's half of the model, as if a worker had described it."""
    description = Description(
        model=folder.name,
        fingerprint=b"",
        files=read_model_files(folder),
        max_model_len=1 << 30,
        max_num_seqs=1,
        block_size=BLOCK_SIZE,
        num_blocks=0,
        dtype="",
        device="",
        shm_namespace="",
        version="",
    )
    return ServedModel.from_description(description)


async def _draft(served: ServedModel, encoded: list[bytes], question: str) -> Draft:
    limits = PictureLimits()
    preparer = Preparer(MediaPool(MediaPoolConfig(limits=limits)), Metrics(), limits, len(encoded))
    urls = [f"data:image;base64,{pybase64.b64encode(content).decode()}" for content in encoded]
    pictures = [ContentPart(type="image_url", image_url=ImageUrl(url=url)) for url in urls]
    return await preparer.draft(served, [ChatMessage("user", [*pictures, ContentPart(type="text", text=question)])])


def _write_resized(path: Path, picture: Picture, served: ServedModel, out: Path | None, watch: Stopwatch) -> Path:
    """Take the picture through the decode process's steps and write what comes out of the resize."""
    layout = picture.layout
    watch.lap("report")
    try:
        pixels = decode(picture.encoded, PictureLimits())
    except RequestError as error:
        raise StartupError(f"{path}: {error.message}") from error
    watch.lap("decode")
    patches = np.empty(layout.pixel_shape, dtype=np.uint8)
    models.load_pixels(served.family)(served.layout.settings).write(pixels, layout, patches)
    watch.lap("resize and patches")
    planes = resize(pixels, layout.resized_height, layout.resized_width)
    target = (out or path.parent) / f"{path.stem}.{layout.resized_width}x{layout.resized_height}.png"
    Image.fromarray(np.ascontiguousarray(planes.transpose(1, 2, 0))).save(target)
    watch.lap("report")
    return target


def _show_picture(console: Console, path: Path, picture: Picture, written: Path) -> None:
    header, layout = read_header(picture.encoded), picture.layout
    frames, rows, columns = layout.grid
    width, height = header.upright
    table = Table.grid(padding=(0, 2))
    table.add_row("picture", f"{path} ({header.format}, {width}x{height}, orientation {header.orientation})")
    table.add_row("resized", f"{layout.resized_width}x{layout.resized_height}, written to {written}")
    table.add_row("grid", f"{frames} x {rows} x {columns} = {frames * rows * columns} patches")
    table.add_row("on the wire", f"{layout.pixel_dtype} {list(layout.pixel_shape)}, {math.prod(layout.pixel_shape)} bytes")
    table.add_row("tokens", str(layout.num_tokens))
    table.add_row("content_hash", picture.content_hash.hex())
    console.print(table, markup=False, highlight=False, soft_wrap=True)
    console.print()


def _show_prompt(console: Console, served: ServedModel, draft: Draft) -> None:
    console.print(f"prompt: {len(draft.token_ids)} tokens", highlight=False)
    table = Table("from", "to", "what", "token ids", "text", box=None)
    position = 0
    for span in draft.spans:
        _add_text(table, served, draft.token_ids, position, span.start)
        end = span.start + span.length
        identifier = f"{draft.token_ids[span.start]} x {span.length}"
        table.add_row(str(span.start), str(end), "picture", identifier, "")
        position = end
    _add_text(table, served, draft.token_ids, position, len(draft.token_ids))
    console.print(table, markup=False, highlight=False)
    console.print()


def _add_text(table: Table, served: ServedModel, token_ids: list[int], start: int, end: int) -> None:
    if start < end:
        shown = " ".join(map(str, token_ids[start : min(end, start + SHOWN_IDS)]))
        more = " ..." if end - start > SHOWN_IDS else ""
        text = repr(served.tokenizer.decode(token_ids[start:end]))
        table.add_row(str(start), str(end), "text", shown + more, text)


def _show_keys(console: Console, folder: Path, draft: Draft) -> None:
    """Block keys as the engine computes them, for the tenant without a key."""
    pictures = zip(draft.pictures, draft.spans, strict=True)
    runs = [MediaRun(span.start, span.length, picture.content_hash) for picture, span in pictures]
    root = root_key(fingerprint(read_model_files(folder), weight_files(folder)), b"")
    table = Table("block", "tokens", "key", box=None)
    for number, key in enumerate(block_keys(root, draft.token_ids, runs, BLOCK_SIZE)):
        table.add_row(str(number), f"{number * BLOCK_SIZE}-{(number + 1) * BLOCK_SIZE}", key.hex())
    console.print(table, markup=False, highlight=False)
    console.print()
