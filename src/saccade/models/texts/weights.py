"""Maps checkpoint tensor names to the network's parameters."""

from saccade.models.backbones.names import DELTA_NET, FUSED, target_of
from saccade.models.network import Target

PREFIXES = (("model.language_model.", "language_model."), ("model.", "language_model."))
"""The second is that of the classes; transformers keeps the first, a whole model's, when it saves its text alone."""
OTHER_PARTS = ("mtp.", "model.visual.")
"""The draft layer and the tower, which releases of Qwen3.5's text may have; transformers leaves them out, too."""


def target(name: str) -> Target:
    """Return the target of the checkpoint tensor *name*."""
    return target_of(name, PREFIXES)


def hybrid_target(name: str) -> Target | None:
    """Return the target of a tensor in Qwen3.5's text network; None for unsupported parts."""
    return None if name.startswith(OTHER_PARTS) else target_of(name, PREFIXES, (*DELTA_NET, *FUSED))
