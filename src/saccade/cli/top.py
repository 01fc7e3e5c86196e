"""`saccade top`: a gateway's workers, load and errors, live in the terminal."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Annotated

from cyclopts import Parameter
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from saccade.cli.admin_port import read_answer, require_key
from saccade.config import Switch
from saccade.consoles import new_console
from saccade.gateway.admin import Board
from saccade.protocol.engine_load import Load

SECONDS = 1.0
MAX_ERRORS = 10
PIPE_COLUMNS = 160


def top(
    *,
    gateway: Annotated[str, Parameter(alias="--url")],
    admin_key: str | None = None,
    once: Switch = False,
) -> None:
    """Show what happens at a gateway now: workers, load, hit rates, breakers, tenants and the last errors.

    Parameters
    ----------
    gateway
        The gateway's --admin-port, as http://127.0.0.1:PORT.
    admin_key
        A key of the admin port. Prefer SACCADE_ADMIN_KEY, which `ps` does not show.
    once
        Print the board once and end, as if stdout is not a terminal.
    """
    key = require_key(admin_key, "`saccade top`")

    def now() -> Board:
        return read_answer(gateway, "/board", key, Board, "saccade top")

    console, board = new_console(), now()
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    if once or not console.is_terminal:
        console.print(frame(board, board))
        return
    # A thread that draws by itself could hold a lock that Ctrl-C needs.
    live = Live(frame(board, board), console=console, screen=True, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), live:
        while True:
            time.sleep(SECONDS)
            before, board = board, now()
            live.update(frame(board, before), refresh=True)


def frame(board: Board, before: Board) -> Group:
    """Return *board* as it is shown; rates are those since *before*."""
    requests = f"{board.num_requests} requests, {board.num_waiting} of them waiting"
    hits = f"cached: {_percent(board.prefix_hit_rate)} of prompt tokens, {_percent(board.encoder_hit_rate)} of images"
    head = Text(f"saccade {board.version}   {_clock(board.time)}   {requests}   {hits}\n", style="bold")
    tenants = (
        (one.tenant, used.requests, used.refused, used.prompt_tokens, used.cached_tokens, used.completion_tokens)
        for one in board.tenants
        for used in [one.usage]
    )
    errors = (
        (_clock(one.time), one.status, one.code, one.route, ": ".join(filter(None, (one.field, one.message))))
        for one in board.errors[:MAX_ERRORS]
    )
    tables = (
        _table(("worker", "state", "running", "waiting", "KV used", "tokens/s", "model"), _workers(board, before)),
        _table(("tenant", "requests", "refused", "prompt tokens", "cached", "completion tokens"), tenants),
        _table(("last errors", "status", "code", "route", "message"), errors),
    )
    return Group(head, *(one for table in tables if table.row_count for one in (table, "")))


def _workers(board: Board, before: Board) -> Iterator[tuple[object, ...]]:
    seconds = board.time - before.time
    loads = {worker.url: worker.load or Load() for worker in before.workers}
    for worker in board.workers:
        load = worker.load or Load()
        num_new = load.generated_tokens_total - loads.get(worker.url, load).generated_tokens_total
        used = _percent(load.kv_usage if load.num_blocks else None)
        rate = max(0, round(num_new / seconds)) if seconds else 0
        yield worker.url, worker.excluded or "ready", load.num_running, load.num_waiting, used, rate, worker.model or ""


def _table(names: Iterable[str], rows: Iterable[tuple[object, ...]]) -> Table:
    table = Table(*names, box=None, header_style="dim", padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%H:%M:%S}"
