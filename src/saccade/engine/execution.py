"""What a network is computed by: a backend, and threads."""

from dataclasses import dataclass

from saccade.engine.config import EngineConfig
from saccade.engine.loader import LoadedModel
from saccade.engine.threads import Threads, choose_threads
from saccade.nn.backends import choose_backend, load_backend
from saccade.nn.context import Backend
from saccade.nn.linear import pack_all


@dataclass(frozen=True)
class Execution:
    """The backend has the network's weights in its own layout."""

    backend: Backend
    threads: Threads


def prepare(config: EngineConfig, model: LoadedModel) -> Execution:
    """Choose both for a loaded model, and lay out its weights. Raises StartupError where the backend cannot do it."""
    threads = choose_threads(config.threads, model.num_parameters)
    name = choose_backend(config.attention_backend, model.device, model.dtype, model.network.kv_spec.head_dim)
    backend = load_backend(name, threads.count)
    pack_all(model.network, backend)
    return Execution(backend, threads)
