"""Let torchvision's Python half import beside a torch build that cannot load its compiled half.

torchvision registers fake kernels for two operators at import; their schemas live in the compiled half, which is made for
torch's default build. Declaring the schemas is enough for the image transforms, which are written in Python over torch.
"""

import importlib
import importlib.util
import warnings
from pathlib import Path

import torch


def import_torchvision() -> None:
    """Import torchvision, declaring what its import needs where its compiled half cannot."""
    if not hasattr(torch.ops.torchvision, "nms") and not _loads_compiled_half():
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torchvision")


def _loads_compiled_half() -> bool:
    """Whether it fits this torch; a schema that is declared twice would end the process."""
    spec = importlib.util.find_spec("torchvision")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for compiled in Path(folder).glob("_C*.so"):
            try:
                torch.ops.load_library(compiled)
            except OSError:
                return False
    return hasattr(torch.ops.torchvision, "nms")


_KEPT: list[torch.library.Library] = []  # a Library's definitions die with it
