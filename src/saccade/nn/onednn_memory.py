"""The memory of weights that oneDNN has packed for products.

oneDNN packs a weight [O, I] in blocks of outputs, and hides the layout. In the one that is known here, words of 32 bits
have successive inputs of an output, and the same words of a block's outputs follow each other (BA16a64b4a, or one like
it). Callers compare what they find with values that they know, so that no other layout is misread.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch

BLOCKS = (64, 48, 32, 16)
"""The sizes of blocks that are tried."""

WORD, LINE = 4, 64
"""The bytes of a word, and those to which the inputs of an output are padded."""


@dataclass(frozen=True)
class PackedMemory:
    """The memory of *packed* as words int32 [blocks, words of an output, outputs of a block], with *rest* after them.

    An output has *num_inputs* weights in *dtype*.
    """

    packed: torch.Tensor
    words_BWR: torch.Tensor
    rest: torch.Tensor
    dtype: torch.dtype
    num_inputs: int

    def rows(self, ids_N: torch.Tensor) -> torch.Tensor:
        """Return the weights [N, I] of outputs int64 [N]."""
        size = self.words_BWR.shape[2]
        words_NW = self.words_BWR[ids_N // size, :, ids_N % size].contiguous()
        return words_NW.view(self.dtype)[:, : self.num_inputs]

    def copy(self) -> "PackedMemory":
        """Return the memory of a copy of *packed*, read like this one."""
        packed = self.packed.clone()
        readings = possible_memory(packed, (packed.shape[0], self.num_inputs), self.dtype)
        return next(other for other in readings if other.words_BWR.shape == self.words_BWR.shape)


def possible_memory(packed: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Iterator[PackedMemory]:
    """Yield readings of *packed*, a weight of *shape* [O, I] in *dtype*; at most one is right."""
    num_outputs, num_inputs = shape
    num_words = -(-num_inputs * dtype.itemsize // LINE) * LINE // WORD
    num_bytes = torch.ops.mkldnn._nbytes(packed)
    for size in BLOCKS:
        num_blocks = -(-num_outputs // size)
        count = num_blocks * num_words * size
        if count * WORD <= num_bytes:
            memory = (ctypes.c_char * num_bytes).from_address(torch.ops.mkldnn.data_ptr(packed))
            words, rest = torch.frombuffer(memory, dtype=torch.int32, count=num_bytes // WORD).tensor_split((count,))
            yield PackedMemory(packed, words.view(num_blocks, num_words, size), rest, dtype, num_inputs)
