"""Triton's kernels compile for GPUs, which needs none, and fit into their shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from saccade.nn.backends.triton_attention import tile_size

PROGRAM = Path(__file__).with_name("compile_kernels.py")
SHARED_BYTES = 99 << 10
"""What a block may use on GPUs of compute capability 8.6 and 8.9, the least of those that are served."""


@pytest.mark.conformance
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("width", [16, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_kernels_compile_and_fit(dtype: str, width: int, capability: int, tmp_path: Path) -> None:
    tile = tile_size(width, getattr(torch, dtype))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(PROGRAM), dtype, str(width), str(tile), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shared_bytes = json.loads(done.stdout)
    assert shared_bytes.keys() == {"packed_kernel", "decode_kernel", "heads_kernel", "gated_kernel", "conv_kernel"}
    assert max(shared_bytes.values()) <= SHARED_BYTES
