"""Attention of vision encoders on a CPU by OpenVINO's operator in bfloat16, for long sequences.

Scores are rounded to bfloat16 before the softmax, so errors are three to six times as large as those of PyTorch's own
function (docs/decisions/052-attention-by-openvino.md). Shapes: N tokens, H heads, D head size.
"""

from typing import NamedTuple

import numpy as np
import torch

from saccade.nn.backends import onednn_attention
from saccade.nn.backends.workload import Workload, not_in_bfloat16_on_cpu
from saccade.nn.context import Heads
from saccade.nn.openvino import openvino, opset13

LEAST_TOKENS = 2048
"""Shorter sequences are left to oneDNN: its threads are awake, and OpenVINO has its own."""

TO_HEADS = (0, 2, 1, 3)
"""From [1, N, H, D] to [1, H, N, D], and back."""


class Form(NamedTuple):
    """What a compiled operator depends on: shapes of the heads, the factor of the scores, and the number of threads."""

    num_heads: int
    head_size: int
    scale: float
    num_threads: int


class VisionAttentionBackend(onednn_attention.VisionAttentionBackend):
    """Implements nn.context.VisionAttentionBackend: long sequences with OpenVINO, the rest as onednn does."""

    name = "openvino"

    def __init__(self) -> None:
        self._core = openvino.Core()
        self._compiled: dict[Form, openvino.InferRequest] = {}

    @staticmethod
    def unavailable(workload: Workload) -> str | None:
        """Return why this backend would not compute *workload* faster; None if it does."""
        return not_in_bfloat16_on_cpu(workload)

    def attend_long(self, heads_NHD: Heads, scale: float | None) -> torch.Tensor:
        """Return the attention [N, H * D] within one sequence."""
        num_tokens, num_heads, head_size = heads_NHD[0].shape
        if num_tokens < LEAST_TOKENS:
            return super().attend_long(heads_NHD, scale)
        form = Form(num_heads, head_size, head_size**-0.5 if scale is None else scale, torch.get_num_threads())
        call = self._compiled.get(form)
        if call is None:
            call = self._compiled[form] = _compiled(self._core, form)
        output_NHD = heads_NHD[0].new_empty(heads_NHD[0].shape)
        call.set_output_tensor(_shared(output_NHD))
        call.infer([_shared(tensor.contiguous()) for tensor in heads_NHD])
        return output_NHD.flatten(1)


def _compiled(core: openvino.Core, form: Form) -> openvino.InferRequest:
    """Compile the operator for sequences of any length, which takes some hundredths of a second."""
    inputs = [opset13.parameter([1, -1, form.num_heads, form.head_size], openvino.Type.bf16) for _ in range(3)]
    order = opset13.constant(np.array(TO_HEADS))
    heads = [opset13.transpose(tensor, order) for tensor in inputs]
    # The mask of zero hides nothing; the operator takes a scale only after a mask.
    numbers = [opset13.constant(number, openvino.Type.bf16) for number in (0.0, form.scale)]
    attended = opset13.transpose(opset13.scaled_dot_product_attention(*heads, *numbers), order)
    settings = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": form.num_threads}
    return core.compile_model(openvino.Model([attended], inputs), "CPU", settings).create_infer_request()


def _shared(tensor_NHD: torch.Tensor) -> openvino.Tensor:
    """Return the memory of a bfloat16 tensor without gaps as a tensor [1, N, H, D] of OpenVINO."""
    words = tensor_NHD.view(torch.int16).unsqueeze(0).numpy()
    return openvino.Tensor(words, openvino.Shape(words.shape), openvino.Type.bf16)
