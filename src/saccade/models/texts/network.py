"""A decoder between its embedding and its head, without a tower."""

from saccade.models.backbones.grouped_query_text import GroupedQueryDecoder
from saccade.models.backbones.text_network import TextNetwork
from saccade.models.texts.weights import target


class Network(TextNetwork):
    """The engine's network of the families. Parameters are empty until the loader has filled them."""

    decoder, target = GroupedQueryDecoder, staticmethod(target)
