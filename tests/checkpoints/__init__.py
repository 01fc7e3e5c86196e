"""Tiny checkpoints in hub layout, written the way the releases are: file names, file contents, 4.x config.json.

CHECKPOINTS holds what a gateway reads of each release; the writers in NETWORKS write weights too.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from checkpoints import (
    gemma3,
    gemma4,
    glm_v,
    internvl,
    kimi_k3,
    kimi_k25,
    llava,
    mistral3,
    paddleocr_vl,
    phi3_v,
    qwen,
    qwen_networks,
    smolvlm,
    texts,
)
from checkpoints.qwen3_vl import write_qwen3_vl

CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    **{name: partial(qwen.write, name=name) for name in qwen.RELEASES},
    "kimi_k25": kimi_k25.write,
    **{name: partial(internvl.write, name=name) for name in internvl.TEXTS},
    "kimi_k3": kimi_k3.write,
    **{name: partial(glm_v.write, name=name) for name in glm_v.CONFIGS},
    "llava": llava.write_llava,
    "llava_next": llava.write_llava_next,
    "phi3_v": phi3_v.write,
    "paddleocr_vl": paddleocr_vl.write,
    **{name: partial(mistral3.write, name=name) for name in mistral3.RELEASES},
    "gemma3": gemma3.write,
    **{name: partial(smolvlm.write, name=name) for name in smolvlm.ARCHITECTURES},
    **{name: partial(gemma4.write, name=name) for name in gemma4.RELEASES},
}
"""Writers by the release's name: each fills an empty folder with the files of a gateway and returns it."""

NETWORKS: dict[str, Callable[[Path], Path]] = {
    "qwen3_vl": write_qwen3_vl,
    "kimi_k25": kimi_k25.write_network,
    **{name: partial(internvl.write_network, name=name) for name in internvl.TEXTS},
    **{name: partial(glm_v.write_network, name=name) for name in glm_v.CONFIGS},
    **{name: partial(qwen_networks.write, name=name) for name in qwen_networks.CONFIGS},
    "llava": llava.write_llava_network,
    "llava_next": llava.write_llava_next_network,
    "phi3_v": phi3_v.write_network,
    "paddleocr_vl": paddleocr_vl.write_network,
    **{name: partial(mistral3.write_network, name=name) for name in mistral3.RELEASES},
    "gemma3": gemma3.write_network,
    **{name: partial(smolvlm.write_network, name=name) for name in smolvlm.ARCHITECTURES},
    **{name: partial(gemma4.write_network, name=name) for name in gemma4.RELEASES},
}
"""Writers of whole checkpoints, tiny, random, float32, by the release's name."""

TEXTS: dict[str, Callable[[Path], Path]] = {name: partial(texts.write, name=name) for name in texts.CONFIGS}
"""The same of models that read text only."""

__all__ = ["CHECKPOINTS", "NETWORKS", "TEXTS", "write_qwen3_vl"]
