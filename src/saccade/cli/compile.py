"""`saccade compile`: compile ahead what the first start of a model on a GPU would compile."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from saccade.cli.flags import ENGINE, check_without_model, engine_config, model_folder
from saccade.cli.output import aligned
from saccade.cli.screen import StartProgress, size
from saccade.consoles import new_console
from saccade.engine.config import EngineSettings
from saccade.engine.installed import require_engine
from saccade.log_setup import log_warnings
from saccade.protocol.engine_ipc import EngineProgress

if TYPE_CHECKING:
    from saccade.engine.compile_ahead import Stage
    from saccade.protocol.description import Description

PAGE = '"Compiling ahead" in docs/gpu.md says how to take these folders into an image.'


def compile(model: str | None = None, *, engine: EngineSettings = ENGINE) -> None:
    """Compile ahead every kernel that the first start of a model on this GPU would compile.

    It starts the model's engine, with the flags that `saccade serve` or `saccade worker` shall have, and ends it. So
    the next start finds all kernels. Weights are read only if they are quantised; else random ones take their place.

    Parameters
    ----------
    model
        A folder in hub layout, or a hub id. Without it, the small model that ships with Saccade.
    """
    require_engine()
    from saccade.engine.compile_ahead import compile_ahead, needs_weights, refuse_without_gpu  # they import torch

    check_without_model(engine)
    refuse_without_gpu(engine)
    flags = dataclasses.replace(engine, load_format="dummy")
    folder = model_folder(model, flags)
    if needs_weights(folder, engine):
        flags, folder = engine, model_folder(model, engine)
    config = engine_config(model, folder, flags)
    log_warnings()
    with StartProgress(new_console(stderr=True)) as progress:
        description, stages = compile_ahead(config, lambda *report: progress.show(EngineProgress(*report)))
    _show(new_console(soft_wrap=True), description, stages)


def _show(console: Console, description: "Description", stages: "Sequence[Stage]") -> None:
    from saccade.nn.backends.kernel_caches import kernel_caches

    names = description.attention_backend, description.mm_encoder_attn_backend
    for name, reason in zip(names, description.backend_reasons, strict=False):
        console.print(f"attention: {name} ({reason})", highlight=False)
    rows = [(stage.name, f"{stage.seconds:.1f}", _words(stage.kernels)) for stage in stages if stage.kernels]
    seconds = sum(stage.seconds for stage in stages)
    if rows:
        console.print(*aligned([("stage of the start", "seconds", "compiled"), *rows], 1), sep="\n", highlight=False)
        console.print(f"The whole start took {seconds:.0f} s. The next one with these flags compiles nothing.")
    else:
        console.print(f"Nothing was compiled: this start, of {seconds:.0f} s, found every kernel that it needs.")
    caches = [(cache, cache.counts()) for cache in kernel_caches()]
    folders = [
        (str(cache.folder), size(cache.num_bytes()), cache.variable, _words(counts))
        for cache, counts in caches
        if any(counts.values())
    ]
    if folders:
        console.print(*aligned([("folder", "size", "moved by", "compiled"), *folders], 1), sep="\n", highlight=False)
        console.print(PAGE, highlight=False)


def _words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items() if count)
