"""`saccade models`: the models in the hub's cache, and the supported architectures."""

from collections.abc import Sequence

from saccade.cli.output import aligned
from saccade.cli.screen import size
from saccade.engine.installed import has_engine
from saccade.errors import StartupError
from saccade.models import families, family_of, has_network
from saccade.models.files import parse_json, read_model_files
from saccade.protocol.model_files import CONFIG
from saccade.supervisor.cached_models import CachedModel, cached_models


def models() -> None:
    """Show the models in the hub's cache with their disk space and memory, and the supported architectures.

    The memory is that of the weights on this machine, computed from the shapes in config.json if the engine is
    installed. The caches come on top: on a CPU at most 1 GiB for the KV cache and 1 GiB for encoded images, if the
    flags do not say otherwise.
    """
    cached = cached_models()
    print("In the hub's cache:" if cached else "The hub's cache has no model. `saccade pull ID` fetches one.")
    if cached:
        _show([("model", "family", "disk", "weights in memory"), *map(_row, cached)])
    print("\nSupported:")
    engines = {True: "", False: "workers of vLLM, SGLang and TokenSpeed only"}
    supported = [(name, " ".join(one.architectures), engines[has_network(name)]) for name, one in families().items()]
    _show([("family", "architectures in config.json", ""), *supported])


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

    try:
        config, network = empty_network(files)
        dtype = choose_dtype("auto", choose_device("auto"), config)
    except StartupError:
        return model.name, family, disk, "its files are not complete"
    if "quantization_config" in config:
        return model.name, family, disk, "as on disk: it is quantised"
    memory = size(count_parameters(network) * dtype.itemsize)
    return model.name, family, disk, f"{memory} in {dtype}".replace("torch.", "")


def _show(rows: Sequence[tuple[str, ...]]) -> None:
    for line in aligned(rows, num_numbers=0):
        print(f"  {line}")
