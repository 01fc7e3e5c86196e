"""Let torchvision's Python half import beside a torch build that cannot load its compiled half.

torchvision registers fake kernels for two operators at import; their schemas live in the compiled half. Declaring the
schemas is enough for the image transforms, which are written in Python over torch.
"""

import importlib
import warnings

import torch


def import_torchvision() -> None:
    """Import torchvision, declaring what its import needs; does nothing where it already works."""
    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torchvision")


_KEPT: list[torch.library.Library] = []  # a Library's definitions die with it
