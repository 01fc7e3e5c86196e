"""Weight formats, written from their descriptions with numpy and loops: the reference for saccade.nn.formats.

Each has the tensors of a weight as a checkpoint stores them, from random weights, and what they stand for.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]
BLOCK = 128


def _e4m3(code: int) -> np.float32:
    """Sign, four bits of exponent with the bias 7, three bits of mantissa; no infinities (arXiv:2209.05433)."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return np.float32("nan")
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return np.float32(-size if sign else size)


def _e2m1(code: int) -> np.float32:
    """Sign, two bits of exponent with the bias 1, one bit of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return np.float32(-size if sign else size)


E4M3 = np.array([_e4m3(code) for code in range(256)], np.float32)
E2M1 = np.array([_e2m1(code) for code in range(16)], np.float32)


def _codes(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the index of the nearest number of *table*."""
    distance = np.abs(values[..., None] - np.nan_to_num(table, nan=np.inf))
    return distance.argmin(-1)


def write_int4(weight: torch.Tensor) -> Tensors:
    """Groups of 32 columns; eight values of four bits a word, the first lowest, stored as value + 8."""
    rows, columns = weight.shape
    scale = (weight.reshape(rows, -1, 32).abs().amax(-1) / 7).to(torch.bfloat16)
    codes = (weight / scale.float().repeat_interleave(32, 1)).round().clamp(-8, 7).to(torch.int64) + 8
    words = (codes.reshape(rows, -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor([rows, columns])}


def read_int4(tensors: Tensors) -> np.ndarray:
    """Return the weight in float32."""
    words = tensors["weight_packed"].numpy().astype(np.int64) % 2**32
    scale = tensors["weight_scale"].float().numpy()
    output = np.zeros(tensors["weight_shape"].tolist(), np.float32)
    for place in range(8):
        output[:, place::8] = (words >> 4 * place & 15) - 8
    for group in range(scale.shape[1]):
        output[:, group * 32 : (group + 1) * 32] *= scale[:, group : group + 1]
    return output


def write_fp8(weight: torch.Tensor) -> Tensors:
    """Blocks of 128 x 128; those at the edges are smaller."""
    rows, columns = weight.shape
    scale = torch.zeros(-(-rows // BLOCK), -(-columns // BLOCK))
    values = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    for i, j in np.ndindex(*scale.shape):
        block = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
        scale[i, j] = weight[block].abs().max() / 448
        values[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scale}


def read_fp8(tensors: Tensors) -> np.ndarray:
    """Return the weight in float32."""
    values = E4M3[tensors["weight"].view(torch.uint8).numpy()]
    scale = tensors["weight_scale_inv"].numpy()
    for i, j in np.ndindex(*scale.shape):
        values[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] *= scale[i, j]
    return values


def write_nvfp4(weight: torch.Tensor) -> Tensors:
    """Groups of 16 columns; two values a byte, the first lower; a scale of the whole weight beside that of a group."""
    rows = len(weight)
    largest = weight.reshape(rows, -1, 16).abs().amax(-1)
    whole = largest.max() / (6 * 448)
    scale = (largest / 6 / whole).to(torch.float8_e4m3fn)
    divisor = (scale.float() * whole).repeat_interleave(16, 1)
    codes = torch.from_numpy(_codes((weight / divisor).numpy(), E2M1)).to(torch.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return {
        "weight": packed, "weight_scale": scale, "weight_scale_2": whole.reshape(()),
        "input_scale": torch.tensor(0.25),
    }  # fmt: skip


def read_nvfp4(tensors: Tensors) -> np.ndarray:
    """Return the weight in float32."""
    packed = tensors["weight"].numpy()
    scale = E4M3[tensors["weight_scale"].view(torch.uint8).numpy()] * np.float32(tensors["weight_scale_2"].item())
    output = np.zeros((len(packed), 2 * packed.shape[1]), np.float32)
    output[:, 0::2], output[:, 1::2] = E2M1[packed & 15], E2M1[packed >> 4]
    for group in range(scale.shape[1]):
        output[:, group * 16 : (group + 1) * 16] *= scale[:, group : group + 1]
    return output


def write_fp8_tensor(weight: torch.Tensor) -> Tensors:
    """One scale, for the whole weight; another for activations, which a reader of weights does not need."""
    scale = weight.abs().max() / 448
    return {
        "weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale.reshape(()),
        "input_scale": torch.tensor(0.5),
    }  # fmt: skip


def write_fp8_rows(weight: torch.Tensor) -> Tensors:
    """A scale for each row."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    return {"weight": (weight / scale.float()).to(torch.float8_e4m3fn), "weight_scale": scale}


def read_fp8_scaled(tensors: Tensors) -> np.ndarray:
    """Return the weight in float32: one scale [] or [1], or one for each row [rows, 1]."""
    values = E4M3[tensors["weight"].view(torch.uint8).numpy()]
    scales = tensors["weight_scale"].float().numpy().reshape(-1)
    for row in range(len(values)):
        values[row] *= scales[row % len(scales)]
    return values


class Reference(NamedTuple):
    """How to *write* a weight's tensors and to *read* them; what config.json says, with an *ignore* key.

    With *in_own_file*, hf_quant_config.json says it instead.
    """

    write: Callable[[torch.Tensor], Tensors]
    read: Callable[[Tensors], np.ndarray]
    config: dict[str, object]
    ignore: str
    in_own_file: bool = False


GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP}},
}
ROWS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
FLOAT = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": ROWS}},
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
NVFP4 = {"quant_algo": "NVFP4", "group_size": 16}
REFERENCES = {
    "int4": Reference(write_int4, read_int4, COMPRESSED, "ignore"),
    "fp8": Reference(write_fp8, read_fp8, FP8, "modules_to_not_convert"),
    "nvfp4": Reference(write_nvfp4, read_nvfp4, NVFP4, "exclude_modules", in_own_file=True),
    "fp8 rows": Reference(write_fp8_rows, read_fp8_scaled, FLOAT, "ignore"),
    "fp8 tensor": Reference(
        write_fp8_tensor, read_fp8_scaled, {"quant_algo": "FP8"}, "exclude_modules", in_own_file=True
    ),
}
"""By the name that tests give them."""
