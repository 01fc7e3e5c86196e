"""Weight formats, written from their descriptions with numpy and loops: the reference for saccade.nn.formats.

Each has the tensors of a weight as a checkpoint stores them, from random weights, and what they stand for.
"""

from collections.abc import Callable
from functools import partial
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


def _zeros_and_scales(weight: torch.Tensor, bits: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes [O, I], zero points and scales [O, I / group], each number from 0 to 2^bits - 1."""
    rows, columns = weight.shape
    grouped = weight.numpy().reshape(rows, -1, group)
    low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
    scale = ((high - low) / (2**bits - 1)).astype(np.float16).astype(np.float32)
    scale[scale == 0] = 1
    zero = np.clip(np.round(-low / scale), 1, 2**bits - 1).astype(np.int64)
    codes = np.round(grouped / scale[..., None]) + zero[..., None]
    return np.clip(codes, 0, 2**bits - 1).astype(np.int64).reshape(rows, columns), zero, scale


def _packed(numbers: np.ndarray, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Return the numbers of each row packed into words, the last word filled with zeros.

    order[n] is which of a word's numbers has the place n.
    """
    count = 32 // bits
    order = list(range(count)) if order is None else order
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % count)))
    words = np.zeros((len(padded), padded.shape[1] // count), np.int64)
    for place, number in enumerate(order):
        words |= padded[:, number::count] << (place * bits)
    return torch.from_numpy(np.where(words >= 2**31, words - 2**32, words).astype(np.int32))


def _unpacked(words: torch.Tensor, bits: int, order: list[int] | None = None) -> np.ndarray:
    count = 32 // bits
    order = list(range(count)) if order is None else order
    numbers = np.zeros((len(words), words.shape[1] * count), np.int64)
    for place, number in enumerate(order):
        numbers[:, number::count] = words.numpy().astype(np.int64) % 2**32 >> (place * bits) & (2**bits - 1)
    return numbers


def _from_codes(codes: np.ndarray, zero: np.ndarray, scale: np.ndarray, group: int) -> np.ndarray:
    """Return (code - zero) * scale [O, I] in float32; zero points may have more rows than there are codes."""
    output = np.zeros(codes.shape, np.float32)
    for column in range(codes.shape[1]):
        one = column // group
        output[:, column] = (codes[:, column] - zero[: len(codes), one]).astype(np.float32) * scale[:, one]
    return output


def write_int4_zeros(weight: torch.Tensor) -> Tensors:
    """Groups of 32 columns with a zero point, of which eight rows share a word."""
    codes, zero, scale = _zeros_and_scales(weight, 4, 32)
    return {
        "weight_packed": _packed(codes, 4), "weight_scale": torch.from_numpy(scale),
        "weight_zero_point": _packed(zero.T, 4).T.contiguous(), "weight_shape": torch.tensor(weight.shape),
    }  # fmt: skip


def read_int4_zeros(tensors: Tensors) -> np.ndarray:
    """Return the weight in float32."""
    codes, zero = _unpacked(tensors["weight_packed"], 4), _unpacked(tensors["weight_zero_point"].T, 4).T
    return _from_codes(codes, zero, tensors["weight_scale"].float().numpy(), 32)


def write_int8_rows(weight: torch.Tensor) -> Tensors:
    """Four values of eight bits a word, stored as value + 128; a scale for each row."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int64) + 128
    return {
        "weight_packed": _packed(codes.numpy(), 8), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)
    }  # fmt: skip


def read_int8_rows(tensors: Tensors) -> np.ndarray:
    """Return the weight in float32."""
    codes = _unpacked(tensors["weight_packed"], 8)[:, : tensors["weight_shape"][1]]
    return (codes - 128).astype(np.float32) * tensors["weight_scale"].float().numpy()


def write_w8a8(weight: torch.Tensor) -> Tensors:
    """A signed byte a value, a scale for each row; a scale of activations, which only static arithmetic needs."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
    values = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.tensor([0.5])}


def read_w8a8(tensors: Tensors) -> np.ndarray:
    """Return the weight in float32."""
    return tensors["weight"].numpy().astype(np.float32) * tensors["weight_scale"].float().numpy()


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def write_awq(weight: torch.Tensor) -> Tensors:
    """Groups of 32 inputs, stored [inputs, outputs]; eight outputs a word, in the order 0 2 4 6 1 3 5 7."""
    codes, zero, scale = _zeros_and_scales(weight, 4, 32)
    return {
        "qweight": _packed(codes.T, 4, AWQ_ORDER), "qzeros": _packed(zero.T, 4, AWQ_ORDER),
        "scales": torch.from_numpy(scale.T.copy()).half(),
    }  # fmt: skip


def read_awq(tensors: Tensors) -> np.ndarray:
    """Return the weight in float32."""
    codes, zero = (_unpacked(tensors[name], 4, AWQ_ORDER).T for name in ("qweight", "qzeros"))
    scale = tensors["scales"].float().numpy().T
    return _from_codes(codes[: len(scale)], zero, scale, 32)


def _write_gptq(weight: torch.Tensor, bits: int, less: int) -> Tensors:
    """Groups of 32 inputs, stored [inputs, outputs]; several inputs a word; zero points *less* than they are."""
    codes, zero, scale = _zeros_and_scales(weight, bits, 32)
    return {
        "qweight": _packed(codes, bits).T.contiguous(), "qzeros": _packed(zero.T - less, bits),
        "scales": torch.from_numpy(scale.T.copy()).half(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // 32,
    }  # fmt: skip


def _read_gptq(tensors: Tensors, bits: int, less: int) -> np.ndarray:
    codes, zero = _unpacked(tensors["qweight"].T, bits), _unpacked(tensors["qzeros"], bits).T + less
    return _from_codes(codes, zero, tensors["scales"].float().numpy().T, 32)


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


def write_nvfp4_packed(weight: torch.Tensor) -> Tensors:
    """As write_nvfp4, but with the inverse of the whole weight's scale."""
    stored = write_nvfp4(weight)
    return {
        "weight_packed": stored["weight"], "weight_scale": stored["weight_scale"],
        "weight_global_scale": 1 / stored["weight_scale_2"].reshape(1), "input_global_scale": torch.tensor([3.0]),
    }  # fmt: skip


def read_nvfp4_packed(tensors: Tensors) -> np.ndarray:
    """Return the weight in float32."""
    packed, whole = tensors["weight_packed"].numpy(), np.float32(tensors["weight_global_scale"].item())
    scale = E4M3[tensors["weight_scale"].view(torch.uint8).numpy()] / whole
    output = np.zeros((len(packed), 2 * packed.shape[1]), np.float32)
    output[:, 0::2], output[:, 1::2] = E2M1[packed & 15], E2M1[packed >> 4]
    return output * scale.repeat(16, 1)


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
BYTES = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": BYTES,
            "input_activations": {**BYTES, "strategy": "token", "dynamic": True},
        }
    },
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def _packed_config(**weights: object) -> dict[str, object]:
    return {**COMPRESSED, "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**GROUP, **weights}}}}


NVFP4_PACKED = {
    **COMPRESSED,
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
        }
    },
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
NVFP4 = {"quant_algo": "NVFP4", "group_size": 16}
REFERENCES = {
    "int4": Reference(write_int4, read_int4, COMPRESSED, "ignore"),
    "fp8": Reference(write_fp8, read_fp8, FP8, "modules_to_not_convert"),
    "nvfp4": Reference(write_nvfp4, read_nvfp4, NVFP4, "exclude_modules", in_own_file=True),
    "fp8 rows": Reference(write_fp8_rows, read_fp8_scaled, FLOAT, "ignore"),
    "fp8 tensor": Reference(
        write_fp8_tensor, read_fp8_scaled, {"quant_algo": "FP8"}, "exclude_modules", in_own_file=True
    ),
    "int4 zeros": Reference(write_int4_zeros, read_int4_zeros, _packed_config(symmetric=False), "ignore"),
    "int8 rows": Reference(
        write_int8_rows, read_int8_rows, _packed_config(num_bits=8, strategy="channel", group_size=None), "ignore"
    ),
    "w8a8": Reference(write_w8a8, read_w8a8, W8A8, "ignore"),
    "awq": Reference(write_awq, read_awq, AWQ, "modules_to_not_convert"),
    "gptq": Reference(
        partial(_write_gptq, bits=4, less=1), partial(_read_gptq, bits=4, less=1), GPTQ, "modules_to_not_convert"
    ),
    "gptq int8": Reference(
        partial(_write_gptq, bits=8, less=0),
        partial(_read_gptq, bits=8, less=0),
        {**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"},
        "modules_to_not_convert",
    ),
    "nvfp4 packed": Reference(write_nvfp4_packed, read_nvfp4_packed, NVFP4_PACKED, "ignore"),
}
"""By the name that tests give them."""
