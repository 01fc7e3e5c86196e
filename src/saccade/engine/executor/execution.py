"""Choose the attention backends, operations and threads of a network."""

from dataclasses import dataclass

from saccade.engine.config import EngineConfig
from saccade.engine.executor.loader import LoadedModel
from saccade.engine.executor.threads import Threads, choose_threads
from saccade.nn.backends import load_backend, load_vision_backend
from saccade.nn.context import AttentionBackend, VisionAttentionBackend
from saccade.nn.layers import use_operations
from saccade.nn.ops import resolve
from saccade.nn.parallel import ALONE, Ranks


@dataclass(frozen=True)
class Execution:
    """How the steps of one loaded model are computed."""

    backend: AttentionBackend
    vision_backend: VisionAttentionBackend
    threads: Threads
    ranks: Ranks = ALONE


def prepare(config: EngineConfig, model: LoadedModel) -> Execution:
    """Choose how to compute a loaded model, and pack its weights. Raises StartupError if a backend cannot."""
    network = model.network
    backend = load_backend(config.attention_backend)
    vision_backend = load_vision_backend(config.mm_encoder_attn_backend, network.device, network.dtype)
    use_operations(model.module, resolve(network.device.type, network.dtype))
    threads = choose_threads(config.threads, model.num_parameters, model.ranks.size)
    return Execution(backend, vision_backend, threads, model.ranks)
