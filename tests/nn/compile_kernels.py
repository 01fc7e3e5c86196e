"""Compile Triton's kernels for a GPU that need not be there: DTYPE WIDTH TILE CAPABILITY. Prints their shared bytes."""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from saccade.nn.backends.triton_kernels import conv_kernel, decode_kernel, gated_kernel, heads_kernel, packed_kernel

POINTERS = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}
FLOATS = ("scale", "soft_cap", "eps")
OTHERS = {"cu_seqlens": "*i32", "block_tables": "*i64", "context_lengths": "*i64", "slots": "*i64"}
OTHERS |= {"rows": "*i64", "taps": "*fp32"}


def shared_bytes(kernel: Any, pointers: str, dtype: str, constants: dict[str, Any], capability: int) -> int:
    """Compile *kernel*, whose tensors of *dtype* are *pointers*."""
    types = dict.fromkeys(kernel.arg_names, "i32")
    types.update(dict.fromkeys(pointers.split(), POINTERS[dtype]))
    types.update({name: "fp32" for name in FLOATS if name in types})
    types.update({name: kind for name, kind in OTHERS.items() if name in types})
    types.update(dict.fromkeys(constants, "constexpr"))
    compiled = triton.compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", capability, 32))
    assert "cubin" in compiled.asm
    return int(compiled.metadata.shared)


def main(dtype: str, width: int, tile: int, capability: int) -> None:
    packed = {"WIDTH": width, "ROWS": tile, "COLUMNS": tile}
    decode = {"BLOCK_SIZE": 16, "HEADS": 16, "KEY_WIDTH": width, "VALUE_WIDTH": width, "COLUMNS": tile}
    decode |= {"HAS_WINDOW": True, "HAS_SOFT_CAP": True}
    heads = {"ROTATED": 10, "KV_HEADS": 2, "SIZE": width, "HALF": width // 2, "WIDTH": width, "HAS_NORM": True}
    conv = {"TAPS": 4, "TOKENS": 16, "COLUMNS": 128}
    found = {
        "packed_kernel": shared_bytes(packed_kernel, "q k v output", dtype, packed, capability),
        "decode_kernel": shared_bytes(decode_kernel, "q keys values output", dtype, decode, capability),
        "heads_kernel": shared_bytes(heads_kernel, "qkv weight cos sin rotated keys values", dtype, heads, capability),
        "gated_kernel": shared_bytes(gated_kernel, "x output", dtype, {"COLUMNS": 1024, "IS_SILU": True}, capability),
        "conv_kernel": shared_bytes(conv_kernel, "x states output", dtype, conv, capability),
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:]))
