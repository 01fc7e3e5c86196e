"""Declares the family of every architecture that no other one names: the classes of transformers compute it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from saccade.models.family import Family

FAMILY = Family(
    architectures=(),
    placeholder="<image>",
    placeholder_keys=("image_token_id", "image_token_index"),
    library="transformers",
    ships_image_settings=False,
    limits=("On one rank, for images, and without quantised weights; see the classes that were tried below.",),
)


def declare(settings: Mapping[str, Any]) -> Family:
    """Return the declaration for a checkpoint whose Layout has *settings*."""
    placeholder, mark = settings["placeholder"], settings["mark"]
    return replace(
        FAMILY, placeholder=placeholder, template_mark=None if mark == placeholder else mark, image_tag=f"{mark}\n"
    )
