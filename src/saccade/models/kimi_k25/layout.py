"""Computes an image's grid and token count from its dimensions. Runs in the gateway, without torch."""

from collections.abc import Mapping
from typing import Any

from saccade.models.preprocessing.navit_layout import NavitLayout
from saccade.models.preprocessing.navit_settings import resolve


class Layout(NavitLayout):
    """The layout of Kimi-K2.5's images, which have at most 16384 patches by default."""

    def __init__(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None:
        self.settings = resolve(config, preprocessor)
