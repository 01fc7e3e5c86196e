"""Decides which output head a network has if its configuration ties the head to the embedding.

Fine-tunes and conversions often declare a tied head but store one of their own. The network then uses the stored head,
as in transformers.
"""

import structlog

from saccade.engine.executor.weight_fields import WEIGHT
from saccade.engine.executor.weight_files import Checkpoint, StoredTensor
from saccade.engine.executor.weight_plan import PLAIN_DTYPES
from saccade.models.network import Network

logger = structlog.get_logger(__name__)


def settle_head(network: Network, checkpoint: Checkpoint) -> None:
    """Give a tied *network* a head of its own if *checkpoint* has one that is not the embedding.

    That is a head with other values in the network's dtype, or a quantised one. All ranks compare the whole tensors,
    and so they agree.
    """
    if not network.is_tied:
        return
    heads = [tensor for tensor in checkpoint.tensors.values() if network.is_head(tensor.name)]
    own = [head.name for head in heads if not _is_embedding(head, network, checkpoint)]
    if own:
        network.untie()
        logger.info("the head is not the embedding, although tie_word_embeddings ties them; it is loaded", tensors=own)


def _is_embedding(head: StoredTensor, network: Network, checkpoint: Checkpoint) -> bool:
    """Return whether *head* equals the embedding, or is the only tensor for both."""
    place = network.locate(head.name)
    if head.dtype not in PLAIN_DTYPES or not head.name.endswith(f".{WEIGHT}"):
        return False
    others = [one for one in checkpoint.tensors.values() if one != head and network.locate(one.name) == place]
    return all(one.dtype in PLAIN_DTYPES and checkpoint.agree(head, one, network.dtype) for one in others)
