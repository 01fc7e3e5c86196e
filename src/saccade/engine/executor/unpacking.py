"""Dequantise once, at the start, the weights that no kernel of a CPU takes, if the memory allows it."""

import structlog

from saccade.config import GIB
from saccade.engine.config import EngineConfig
from saccade.engine.executor import memory
from saccade.engine.executor.loader import LoadedModel
from saccade.memory_limits import free_bytes
from saccade.nn.layers import layers_of

WORKING_BYTES = 2 * GIB
"""What steps, and the process itself, may take besides weights and caches."""

logger = structlog.get_logger(__name__)


def unpack_once(config: EngineConfig, model: LoadedModel, reasons: list[str]) -> str:
    """Replace the weights that no kernel has packed, for *reasons*, with their values, if memory allows it.

    Return a sentence that says what was done, and what it costs. Call it after `use_operations`.
    """
    layers = [layer for layer in layers_of(model.module) if layer.growth_as_plain > 0]
    growth = sum(layer.growth_as_plain for layer in layers)
    # Ranks on one machine share its memory, and decide alike.
    missing = model.ranks.size * growth - (free_bytes() - _reserved(config, model))
    dtype = str(model.network.dtype).removeprefix("torch.")
    if missing > 0:
        logger.warning(
            "quantised weights are dequantised at each use, which is slow",
            reasons=reasons,
            missing_bytes=missing,
        )
        return (
            f"{len(layers)} layers without a kernel are dequantised at each use, which is slow. With "
            f"{missing / GIB:.1f} GiB more of free memory, they would be held in {dtype}"
        )
    for layer in layers:
        layer.make_plain()
        layer.pack()
    logger.info("weights that no kernel takes were dequantised", reasons=reasons, more_bytes=growth, dtype=dtype)
    return f"{len(layers)} layers without a kernel are held in {dtype}, which takes {growth / GIB:.1f} GiB more"


def _reserved(config: EngineConfig, model: LoadedModel) -> int:
    """Return the bytes that the caches of all ranks, and steps, will take."""
    pool = memory.pool_bytes(config, model, memory.fitting_blocks(config, model))
    return model.ranks.size * (pool + WORKING_BYTES) + config.encoder_cache_bytes
