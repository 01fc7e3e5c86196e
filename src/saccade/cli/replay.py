"""`saccade replay`: run recorded steps again, and compare."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from cyclopts import Parameter
from rich.console import Console

from saccade.cli import exit_codes
from saccade.consoles import new_console
from saccade.engine.installed import require_engine
from saccade.errors import StartupError
from saccade.supervisor.checkpoint import resolve_model

if TYPE_CHECKING:
    from saccade.engine.recording import Machine, ReplayResult


def replay(
    file: Path,
    /,
    *,
    model: Annotated[str | None, Parameter(show_default=False)] = None,
    device: Annotated[Literal["cpu", "cuda"] | None, Parameter(show_default=False)] = None,
) -> int:
    """Run recorded steps again, and compare the results.

    Exit status: 0 if all results are equal, 1 if some differ, 2 if the recording cannot be replayed here.

    Parameters
    ----------
    file
        A segment that `--record-steps` wrote.
    model
        A folder in hub layout, or a hub id; by default the folder of the recording.
    device
        The device of the network; by default that of the recording.
    """
    require_engine()
    from saccade.engine.recording import Recording, Replay  # they import torch
    from saccade.engine.startup import fresh_engine

    console = new_console(soft_wrap=True)
    try:
        recording = Recording(file)
        recording.check_images()
        settings = {"model_dir": None if model is None else str(resolve_model(model)), "device": device}
        changes = {name: value for name, value in settings.items() if value is not None}
        engine, machine = fresh_engine(recording.header, changes)
    except StartupError as error:
        new_console(stderr=True, soft_wrap=True).print(f"saccade: {error.message}")
        return exit_codes.CANNOT_REPLAY
    others = _differing(recording.header.machine, machine)
    for name, recorded, here in others:
        console.print(f"{name}: recorded with {recorded}, here {here}")
    compared = "token ids only" if others else "token ids and log probabilities, to the last bit"
    console.print(f"Compared are {compared}.")
    outcome = Replay(engine.executor, is_exact=not others).run_records(recording.records())
    engine.close()
    _show(console, outcome)
    return 0 if outcome.first is None else exit_codes.DIFFERENT


def _differing(recorded: "Machine", here: "Machine") -> list[tuple[str, object, object]]:
    """Return the fields in which two machines differ, with both values."""
    one, other = (msgspec.structs.asdict(machine) for machine in (recorded, here))
    return [(name, one[name], other[name]) for name in one if one[name] != other[name]]


def _show(console: Console, outcome: "ReplayResult") -> None:
    if (first := outcome.first) is not None:
        where = "" if first.row is None else f", row {first.row}, sequence {first.sequence_id}"
        console.print(f"First difference: step {first.number}{where}")
        console.print(f"  expected {first.expected}")
        console.print(f"  got      {first.got}")
    console.print(
        f"{outcome.num_steps} steps with {outcome.num_tokens} tokens were compared; "
        f"{len(outcome.different)} of {len(outcome.sequence_ids)} sequences differ."
    )
