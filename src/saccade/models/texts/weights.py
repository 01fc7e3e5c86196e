"""Map names of checkpoint tensors to the network's parameters."""

from saccade.models.backbones.names import target_of
from saccade.models.network import Target

PREFIXES = (("model.", "language_model."),)


def target(name: str) -> Target:
    """Return the target of the checkpoint tensor *name*."""
    return target_of(name, PREFIXES)
