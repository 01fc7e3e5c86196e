"""Terminal output during a start, and the summary when the server is ready."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from saccade import models
from saccade.cli.client import DEFAULT_URL
from saccade.cli.costs import EXAMPLE, image_cost
from saccade.config import GIB, MIB
from saccade.errors import RequestError, StartupError
from saccade.gateway.config import MediaSettings, ServerSettings
from saccade.models.files import parse_json
from saccade.protocol.description import Description
from saccade.protocol.engine_ipc import EngineProgress
from saccade.protocol.model_files import CONFIG
from saccade.transport import shared_memory

QUESTION = "What does it say?"
TEXT_QUESTION = "What can you do?"
"""For a model that reads text only."""


WORTH_ROUNDING = GIB // 2
"""Bytes that int8 must save for a start to mention it: half of a GiB in bfloat16."""

REMOTE_CODE = "--trust-remote-code has no effect: code that ships with a model is never run."


class _Percentage(ProgressColumn):
    """A column with the completed part of the total, empty until the total is known."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.percentage:.0f} %")


class StartProgress:
    """Shows the progress of a start: a bar on a terminal, else a line for each stage. Use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._stage = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), _Percentage())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("starting the engine", total=None)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def show(self, message: EngineProgress) -> None:
        """Show one message of the engine."""
        if self._bar is not None:
            self._bar.update(self._task, description=message.stage, completed=message.done, total=message.total or None)
        elif message.stage != self._stage:
            self._console.print(message.stage, markup=False, highlight=False)
        self._stage = message.stage

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def show_summary(
    console: Console,
    description: Description,
    address: str,
    commands: Sequence[str] = (),
    num_copies: int = 1,
    media: MediaSettings | None = None,
) -> None:
    """Print the summary of a start; *commands* are lines to paste into a shell. Figures are for each copy.

    *media* has the gateway's settings, or is None for a worker, which does not know them.
    """
    tokens = description.num_blocks * description.block_size
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(min_width=len(address))  # the address must not be truncated
    table.add_row(
        "model",
        description.model if num_copies == 1 else f"{description.model}, {num_copies} copies; figures are each one's",
    )
    if description.note:
        table.add_row("", description.note)
    if library := _library(description):
        table.add_row("network", f"computed by the classes of the library {library}")
    table.add_row("device", f"{description.device}, {description.dtype}")
    if weights := _weights(description):
        table.add_row("weights", weights)
    if description.attention_backend:
        names = [description.attention_backend]
        if description.mm_encoder_attn_backend:
            names.append(f"vision encoder: {description.mm_encoder_attn_backend}")
        for label, name, reason in zip(("attention", ""), names, description.backend_reasons, strict=False):
            table.add_row(label, f"{name} ({reason})")
    dtype = "" if description.kv_cache_dtype in ("", description.dtype) else f", {description.kv_cache_dtype}"
    table.add_row("KV cache", f"{description.num_blocks} blocks of {description.block_size} ({tokens} tokens){dtype}")
    if description.window:
        blocks, tokens = description.num_window_blocks, description.num_window_blocks * description.block_size
        table.add_row("", f"{blocks} blocks ({tokens} tokens) in layers with a window of {description.window} tokens")
    for label, text in zip(("an image", ""), _image_costs(description, media), strict=False):
        table.add_row(label, text)
    table.add_row("context", f"{description.max_model_len} tokens")
    table.add_row("at a time", f"{description.max_num_seqs} requests")
    if description.role != "both":
        at = description.kv_transfer_address
        table.add_row("role", description.role if at is None else f"{description.role}, KV transfers at {at}")
    table.add_row("address", address)
    console.print(table, markup=False, highlight=False, soft_wrap=True)
    if commands:
        console.print("\nTry it:", *commands, sep="\n", markup=False, highlight=False, soft_wrap=True)


def _library(description: Description) -> str | None:
    """Return the library whose classes compute the network; None if that is Saccade's own code, or no file tells."""
    try:
        return models.families()[models.family_of(parse_json(description.files, CONFIG))].library
    except StartupError:
        return None


def _weights(description: Description) -> str:
    """Return the formats of quantised weights, or what int8 would save of plain ones; "" if that is little."""
    if description.weight_formats or description.rounding_saves < WORTH_ROUNDING:
        return description.weight_formats
    return (
        f"plain. With --quantization int8 they would take {size(description.rounding_saves)} less; `saccade quantize` "
        "writes a copy that has them in int8."
    )


def _image_costs(description: Description, media: MediaSettings | None) -> list[str]:
    """Return lines about the cost of an example image; none if the files do not tell, or the model takes no images."""
    width, height = EXAMPLE
    of_example, settings = f"of {width}x{height}", media or MediaSettings()
    if width * height > settings.max_image_pixels:
        return [f"{of_example}: refused, since --max-image-pixels is {settings.max_image_pixels}"]
    try:
        if not takes_images(description):
            return []
        cost = image_cost(
            description.files,
            description.dtype,
            description.kv_cache_dtype,
            processor_kwargs=settings.mm_processor_kwargs,
        )
    except RequestError as error:
        return [f"{of_example}: refused. {error.message}"]
    except StartupError:
        return []
    memory = f"{size(cost.kv_bytes)} of KV cache, {size(cost.encoder_bytes)} of encoder cache"
    unless = "" if media is not None else ", unless its gateway has --mm-processor-kwargs"
    lines = [f"{of_example}: {cost.num_tokens} tokens, {cost.num_patches} patches, {memory}{unless}"]
    if cost.checkpoint_bytes:
        lines.append(
            f"a checkpoint of the recurrent states: {size(cost.checkpoint_bytes)}; "
            f"{description.num_state_checkpoints} fit"
        )
    return lines


def size(num_bytes: float) -> str:
    """Return a number of bytes in readable form: `1.5 GiB`."""
    unit, name = next(((unit, name) for unit, name in ((GIB, "GiB"), (MIB, "MiB")) if num_bytes >= unit), (1024, "KiB"))
    return f"{num_bytes / unit:.3g} {name}"


def takes_images(description: Description) -> bool:
    """Return whether the model takes images, and not text alone."""
    return models.takes_images(models.family_of(parse_json(description.files, CONFIG)))


def curl(url: str, model: str, image: Path | None, server: ServerSettings) -> str:
    """Return a shell command that asks *model* at *url*, the API's root at *server*, about *image*, if any.

    The body goes through a pipe: an argument may have at most 128 KiB, which a photo exceeds.
    """
    mark = "IMAGE"
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{mark}"}},
        {"type": "text", "text": QUESTION},
    ]
    content = TEXT_QUESTION if image is None else parts
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": content}]})
    options = ' -H "Authorization: Bearer $SACCADE_API_KEY"' if server.api_keys or server.api_keys_file else ""
    if server.uds is not None:
        options += f" --unix-socket {shlex.quote(str(server.uds))}"
    if server.tls.certfile is not None:
        options += " --cacert AUTHORITY.pem" + " --cert CLIENT.pem --key CLIENT.key" * (server.tls.cert_reqs == 2)
    request = f'curl {shlex.quote(url + "/chat/completions")} -H "Content-Type: application/json"{options} -d'
    if image is None:
        return f"{request} {shlex.quote(body)}"
    before, _, after = body.rpartition(mark)
    before, name, after = map(shlex.quote, (before, str(image), after))
    return f"{{ printf %s {before}; base64 -w0 {name}; printf %s {after}; }} | {request} @-"


def ask_command(url: str, image: Path | None) -> str:
    """Return a shell command that asks the server at *url*, the root of the API, about *image*, if any."""
    at = "" if url == DEFAULT_URL else f" --url {shlex.quote(url)}"
    words = f'"{TEXT_QUESTION}"' if image is None else f'{shlex.quote(str(image))} "{QUESTION}"'
    return f"{own_program()} ask {words}{at}"


def own_program() -> str:
    """Return how a shell calls this program: `saccade` if that is on the PATH, else its path."""
    path = Path(sys.executable).with_name("saccade")
    return shlex.quote(str(path)) if shutil.which("saccade") is None and path.exists() else "saccade"


def warn(console: Console, *problems: str | None) -> None:
    """Print a line for each of *problems*, but none for "" and None."""
    for problem in filter(None, problems):
        console.print(f"saccade: {problem}", markup=False, highlight=False, soft_wrap=True)


def open_host(server: ServerSettings) -> str:
    """Return a warning if other machines can reach the server and it has no keys, else ""."""
    if server.host not in ("0.0.0.0", "::") or server.api_keys or server.api_keys_file:  # noqa: S104
        return ""
    return (
        f"with --host {server.host} and no key, everybody who reaches this machine can use the model. "
        "Set --api-key or --api-keys-file."
    )


def shared_memory_problem(num_bytes: int, folder: Path = shared_memory.FOLDER) -> str:
    """Return why *folder* cannot take the *num_bytes* of --shared-memory-bytes, and what to do; "" if it can."""
    free = shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else 0
    if free >= num_bytes:
        return ""
    little = f"has {size(free)} free, less than --shared-memory-bytes ({size(num_bytes)})"
    return (
        f"{folder} {little if free else 'is not writable'}. Pixels that do not fit travel inside messages, which is "
        f"slower. In Docker, pass --shm-size={2 * num_bytes // MIB}m."
    )
