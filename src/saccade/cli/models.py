"""`saccade models`: the models in the hub's cache, recommended ones, and the supported architectures."""

from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from saccade.cli.output import aligned
from saccade.cli.recommended_models import Machine, multiplies_bfloat16, recommend
from saccade.cli.screen import size
from saccade.config import Count
from saccade.engine.gpu_devices import has_gpu
from saccade.engine.installed import has_engine
from saccade.errors import StartupError
from saccade.memory_limits import allowed_bytes
from saccade.models import families, family_of, has_network
from saccade.models.family import Purpose
from saccade.models.files import parse_json, read_model_files
from saccade.protocol.model_files import CONFIG
from saccade.supervisor.cached_models import CachedModel, cached_models


def models(
    *,
    purpose: Annotated[Purpose | None, Parameter(show_default=False)] = None,
    memory: Annotated[Count | None, Parameter(show_default=False)] = None,
) -> None:
    """Show the models in the hub's cache with their disk space and memory, models for this machine, and all families.

    The memory is that of the weights on this machine, computed from the shapes in config.json if the engine is
    installed. The caches come on top: on a CPU at most 1 GiB for the KV cache and 1 GiB for encoded images, if the
    flags do not say otherwise.

    Parameters
    ----------
    purpose
        What a model is for: chat, documents, boxes or video; by default a model for each.
    memory
        Bytes of memory of the machine to choose for, such as 24Gi; by default those of this machine or its GPU.
    """
    cached = cached_models()
    print("In the hub's cache:" if cached else "The hub's cache has no model. `saccade pull ID` fetches one.")
    if cached:
        _show([("model", "family", "disk", "weights in memory"), *map(_row, cached)])
    _show_recommended(purpose, memory)
    print("\nSupported:")
    engines = {True: "", False: "workers of vLLM, SGLang and TokenSpeed only"}
    supported = [(name, " ".join(one.architectures), engines[has_network(name)]) for name, one in families().items()]
    _show([("family", "architectures in config.json", ""), *supported])


def _show_recommended(purpose: Purpose | None, memory: int | None) -> None:
    machine = _machine(memory)
    place = "of a GPU" if machine.has_gpu else "without a GPU"
    rows = [
        (one, size(machine.weight_bytes(release)), f"saccade serve {release.name}")
        for one, release in recommend(machine, purpose)
    ]
    print(f"\nTo begin with, for {size(machine.memory_bytes)} of memory {place}:")
    if rows:
        _show([("for", "weights in memory", "command"), *rows])
    else:
        print("  none: the smallest takes more memory. The bundled model fits everywhere: saccade serve")


def _machine(memory: int | None) -> Machine:
    """Return this machine, with *memory* bytes if they are given."""
    if has_gpu():
        return Machine(memory or _gpu_bytes() or allowed_bytes(), has_gpu=True, parameter_bytes=2)
    return Machine(memory or allowed_bytes(), has_gpu=False, parameter_bytes=2 if multiplies_bfloat16() else 4)


def _gpu_bytes() -> int:
    """Return the memory of the first GPU; 0 if torch is not installed, or does not see it."""
    if not has_engine():
        return 0
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0


def _row(model: CachedModel) -> tuple[str, str, str, str]:
    disk = size(model.num_bytes)
    try:
        files = read_model_files(model.folder)
        family = family_of(parse_json(files, CONFIG))
    except StartupError:
        return model.name, "not supported", disk, ""
    if not has_engine():
        return model.name, family, disk, ""
    # It imports torch, which takes seconds.
    from saccade.engine.executor.loader import choose_device, choose_dtype, count_parameters, empty_network
    from saccade.engine.executor.weight_formats import read_quantisation

    try:
        config, network = empty_network(files)
        dtype = choose_dtype("auto", choose_device("auto"), config)
        quantisation = read_quantisation(config, model.folder)
    except StartupError:
        return model.name, family, disk, "its files are not complete, or the engine refuses them"
    if quantisation is not None:
        return model.name, family, disk, f"as on disk: {quantisation.formats}"
    memory = size(count_parameters(network) * dtype.itemsize)
    return model.name, family, disk, f"{memory} in {dtype}".replace("torch.", "")


def _show(rows: Sequence[tuple[str, ...]]) -> None:
    for line in aligned(rows, num_numbers=0):
        print(f"  {line}")
