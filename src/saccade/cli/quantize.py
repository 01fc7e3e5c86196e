"""`saccade quantize`: write a copy of a model with rounded weights."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from saccade.cli.screen import StartProgress, size
from saccade.consoles import new_console
from saccade.engine.installed import require_engine
from saccade.protocol.engine_ipc import EngineProgress
from saccade.supervisor.checkpoint import resolve_model


def quantize(
    model: str, out: Path, /, *, format: Annotated[Literal["int8", "int4"], Parameter(alias="-f")] = "int8"
) -> None:
    """Write a copy of a model with weights rounded to int8 or int4, for a CPU.

    The copy has the weights that `saccade serve MODEL --quantization` computes at each start. It is in the format of
    compressed-tensors, which vLLM reads, too. All other files of the model are copied. While it runs, the command takes
    a few GiB of memory, whatever the model's size. If it is interrupted, nothing appears at OUT.

    Parameters
    ----------
    model
        A folder in hub layout, or a hub id.
    out
        The folder of the copy. It must not exist, or be empty.
    format
        int8 rounds the weights of text decoder, vision encoder and head to 8 bits; int4 those of the text to 4 bits.
    """
    require_engine()
    from saccade.engine.quantize.copy import write_rounded_copy  # it imports torch

    folder = resolve_model(model)
    try:
        with StartProgress(new_console(stderr=True)) as progress:
            copied = write_rounded_copy(
                folder, out.expanduser(), format, lambda *report: progress.show(EngineProgress(*report))
            )
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(f"Interrupted. Nothing was written to {out}.") from interrupt
    rounded = " and ".join(f"{count} weights in {name}" for name, count in sorted(copied.num_rounded.items()))
    print(
        f"{out} has {rounded}: {size(copied.num_bytes)} instead of {size(copied.num_bytes_before)}. "
        f"Serve it: `saccade serve {out}`."
    )
