"""Terminal output during a start, and the summary when the server is ready."""

import json
import shlex
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from saccade.cli.torch_build import installed_torch, unused_cuda
from saccade.protocol.description import Description
from saccade.protocol.engine_ipc import EngineProgress


class _Percentage(ProgressColumn):
    """A column with the completed part of the total, empty until the total is known."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.percentage:.0f} %")


class StartProgress:
    """Show the progress of an engine's start: a bar on a terminal, else a line per stage. Use as a context manager."""

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


def show_summary(console: Console, description: Description, address: str, command: str | None = None) -> None:
    """Print the summary of a start; *command* is a line to paste into a shell."""
    tokens = description.num_blocks * description.block_size
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(min_width=len(address))  # the address must not be truncated
    table.add_row("model", description.model)
    table.add_row("device", f"{description.device}, {description.dtype}")
    if description.mm_encoder_attn_backend:
        names = (description.attention_backend, f"vision encoder: {description.mm_encoder_attn_backend}")
        for label, name, reason in zip(("attention", ""), names, description.backend_reasons, strict=False):
            table.add_row(label, f"{name} ({reason})")
    dtype = "" if description.kv_cache_dtype in ("", description.dtype) else f", {description.kv_cache_dtype}"
    table.add_row("KV cache", f"{description.num_blocks} blocks of {description.block_size} ({tokens} tokens){dtype}")
    table.add_row("context", f"{description.max_model_len} tokens")
    table.add_row("at a time", f"{description.max_num_seqs} requests")
    if description.role != "both":
        at = description.kv_transfer_address
        table.add_row("role", description.role if at is None else f"{description.role}, KV transfers at {at}")
    table.add_row("address", address)
    console.print(table, markup=False, highlight=False, soft_wrap=True)
    if command is not None:
        console.print(f"\nTry it:\n{command}", markup=False, highlight=False, soft_wrap=True)


def curl(url: str, model: str, image: Path, with_key: bool) -> str:
    """Return a shell command that asks *model* at *url*, the root of the API, about *image*.

    The body goes through a pipe: an argument may have 128 KiB, which a photo exceeds.
    """
    mark = "IMAGE"
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{mark}"}},
        {"type": "text", "text": "What does it say?"},
    ]
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": parts}]})
    before, _, after = body.rpartition(mark)
    key = ' -H "Authorization: Bearer $SACCADE_API_KEY"' if with_key else ""
    before, name, after = map(shlex.quote, (before, str(image), after))
    return (
        f"{{ printf %s {before}; base64 -w0 {name}; printf %s {after}; }} | "
        f'curl {shlex.quote(url + "/chat/completions")} -H "Content-Type: application/json"{key} -d @-'
    )


def warn_of_unused_cuda(console: Console) -> None:
    """Print a warning if torch is a CUDA build and the machine has no GPU."""
    if sentence := unused_cuda(installed_torch()):
        console.print(f"saccade: {sentence}", markup=False, highlight=False, soft_wrap=True)


def warn_of_remote_code(console: Console) -> None:
    """Print a warning that --trust-remote-code has no effect."""
    console.print("saccade: --trust-remote-code has no effect: code that ships with a model is never run.")
