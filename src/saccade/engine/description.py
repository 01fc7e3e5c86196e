"""What an engine says of itself."""

from importlib.metadata import PackageNotFoundError, version

from saccade.engine.config import EngineConfig
from saccade.engine.loader import LoadedModel
from saccade.engine.runner import ModelRunner
from saccade.protocol.description import Description
from saccade.transport.shared_memory import readers


def describe(
    config: EngineConfig, model: LoadedModel, runner: ModelRunner, max_model_len: int, num_blocks: int
) -> Description:
    """Return the description of an engine that serves *model* with *num_blocks* KV blocks."""
    return Description(
        model=config.model,
        aliases=config.aliases,
        fingerprint=model.fingerprint,
        files=model.files,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        num_blocks=num_blocks,
        dtype=str(runner.dtype).removeprefix("torch."),
        device=str(runner.device),
        shm_namespace=readers(),
        version=_version(),
        takes_resets=True,
        enable_prefix_caching=config.enable_prefix_caching,
        gpu_memory_utilization=config.gpu_memory_utilization if runner.device.type == "cuda" else None,
    )


def _version() -> str:
    try:
        return version("saccade")
    except PackageNotFoundError:
        return "unknown"
