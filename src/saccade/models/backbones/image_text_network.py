"""The shared base of networks with a vision tower and a text decoder. It normalises pixels.

Shapes: N rows of pixels, I values per row.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from saccade.models.backbones.text_network import TextNetwork
from saccade.models.family import Layout
from saccade.nn.ops import normalise_pixels
from saccade.nn.parallel import ALONE, Ranks


class ImageTextNetwork(TextNetwork):
    """A text decoder and the parts for images. A family adds its *layout*, `build`, `prepare` and `encode`."""

    layout: ClassVar[type[Layout]]

    def __init__(
        self, spec: Any, config: Mapping[str, Any], preprocessor: Mapping[str, Any], ranks: Ranks = ALONE
    ) -> None:
        super().__init__(spec, config, preprocessor, ranks)
        settings = self.layout(config, preprocessor).settings
        self.mean_std = [settings["image_mean"], settings["image_std"]]
        self.scaled_mean_std = torch.empty(0)
        self.build(spec, ranks)

    def build(self, spec: Any, ranks: Ranks) -> None:
        """Create the parts for images."""
        raise NotImplementedError

    def finish(self) -> None:
        """Compute the values that derive from loaded weights and their device. Call once, after loading."""
        super().finish()
        self.scaled_mean_std = torch.tensor(self.mean_std, dtype=torch.float32, device=self.device) * 255

    def normalised(self, pixels_NI: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return *pixels_NI* normalised as in the family's processor. Its uint8 rows hold one channel after another."""
        mean, std = self.scaled_mean_std
        # This order and precision give the same bits as the reference processor, which folds 1/255 into mean and std.
        return normalise_pixels(pixels_NI, mean, std, dtype)
