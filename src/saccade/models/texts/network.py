"""The network of models that read text only: an embedding, a decoder and a head."""

from saccade.models.backbones.decoder import TextDecoder
from saccade.models.backbones.grouped_query_text import GroupedQueryDecoder
from saccade.models.backbones.hybrid_text import HybridDecoder
from saccade.models.backbones.scaled_query_text import ScaledQueryDecoder
from saccade.models.backbones.text_config import DecoderConfig, HybridConfig, TextConfig
from saccade.models.backbones.text_network import TextNetwork
from saccade.models.backbones.windowed_config import WindowedConfig
from saccade.models.backbones.windowed_text import WindowedDecoder
from saccade.models.network import Target
from saccade.models.texts import weights
from saccade.nn.parallel import Ranks


class Network(TextNetwork):
    """The engine's network for these families. Parameters are empty until the loader has filled them."""

    @staticmethod
    def decoder(text: DecoderConfig, ranks: Ranks) -> TextDecoder:
        """Return the decoder that *text* configures."""
        match text:
            case WindowedConfig():
                return WindowedDecoder(text, ranks)
            case HybridConfig():
                return HybridDecoder(text, ranks)
            case TextConfig(query_scaling=None):
                return GroupedQueryDecoder(text, ranks)
            case TextConfig():
                return ScaledQueryDecoder(text, ranks)
        raise TypeError(f"no decoder is known for {type(text)}")

    def target(self, name: str) -> Target | None:
        """Return the parameter for the release's tensor *name*; None if it is not needed."""
        return weights.hybrid_target(name) if isinstance(self.spec.text, HybridConfig) else weights.target(name)
