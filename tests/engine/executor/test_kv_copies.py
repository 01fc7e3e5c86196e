"""Copies of KV state to bytes and back, for every kind of layer. [eng] 40"""

from collections.abc import Sequence

import pytest
import torch
from tables import table

from saccade.engine.core.step import KvReceive, KvSend
from saccade.engine.executor import kv_copies
from saccade.engine.executor.caches import BlockFormat, Caches, CacheSizes
from saccade.models.spec import KvSpec, Latent, Paged, Recurrent

KINDS: dict[str, list[KvSpec]] = {
    "paged": [Paged(2, 8, 6), Paged(1, 4, 4)],
    "latent": [Latent(12, 4)],
    "recurrent": [Paged(2, 8, 8), Recurrent(((3, 5), (7,)), ("float32", "network"))],
}
SIZES = CacheSizes(num_blocks=6, block_size=4, num_rows=3, num_checkpoints=1, num_window_blocks=5)
CPU = torch.device("cpu")


def caches(specs: Sequence[KvSpec], dtype: torch.dtype, blocks: torch.dtype, seed: int) -> Caches:
    made = Caches(specs, SIZES, dtype, CPU, BlockFormat(blocks))
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors(made):
        # Every bit pattern, NaN included.
        tensor.copy_(torch.randint(0, 256, tensor.shape, generator=generator, dtype=torch.uint8))
    return made


def tensors(made: Caches) -> list[torch.Tensor]:
    """The caches' tensors, as bytes; live states only."""
    found: list[torch.Tensor] = []
    for layer in made.layers:
        parts = layer.live if hasattr(layer, "live") else [part for part in layer if isinstance(part, torch.Tensor)]
        found += [part.view(torch.uint8) for part in parts if isinstance(part, torch.Tensor)]
    return found


@table("blocks", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@table("kind", KINDS)
def test_state_arrives_in_other_places_bit_for_bit(kind: str, blocks: torch.dtype) -> None:
    dtype = torch.bfloat16 if blocks == torch.bfloat16 else torch.float32
    source, target = (caches(KINDS[kind], dtype, blocks, seed) for seed in (1, 2))
    before = [tensor.clone() for tensor in tensors(target)]
    row = 2 if kind == "recurrent" else None
    content = kv_copies.read_blocks(source, KvSend((4, 1), row))
    state = kv_copies.state_nbytes(source) if row is not None else 0
    assert len(content) == 2 * kv_copies.block_nbytes(source) + state
    kv_copies.write_blocks(target, KvReceive((0, 5), content, 0 if row is not None else None))
    for ours, theirs, old in zip(tensors(target), tensors(source), before, strict=True):
        is_state = len(old) == SIZES.num_rows
        moved = {0: 2} if is_state else {0: 4, 5: 1}
        for index in range(len(old)):
            expected = theirs[moved[index]] if index in moved else old[index]
            assert torch.equal(ours[index], expected)


def test_blocks_of_layers_with_a_window_have_their_own_numbers() -> None:
    specs = [Paged(2, 8, 6), Paged(1, 4, 4, window=9), Latent(12, 4)]
    source, target = (caches(specs, torch.float32, torch.float32, seed) for seed in (1, 2))
    before = [tensor.clone() for tensor in tensors(target)]
    content = kv_copies.read_blocks(source, KvSend((4, 1), window_blocks=(3,)))
    assert len(content) == 2 * kv_copies.block_nbytes(source) + kv_copies.window_nbytes(source)
    assert kv_copies.window_nbytes(source) == 4 * 2 * 4 * 4
    kv_copies.write_blocks(target, KvReceive((0, 5), content, window_blocks=(2,)))
    for ours, theirs, old in zip(tensors(target), tensors(source), before, strict=True):
        moved = {2: 3} if len(old) == SIZES.num_window_blocks else {0: 4, 5: 1}
        for index in range(len(old)):
            assert torch.equal(ours[index], theirs[moved[index]] if index in moved else old[index])


def test_states_without_blocks_and_empty_copies() -> None:
    source = caches(KINDS["recurrent"], torch.float32, torch.float32, 1)
    assert len(kv_copies.read_blocks(source, KvSend((), 1))) == kv_copies.state_nbytes(source)
    assert kv_copies.read_blocks(source, KvSend(())) == b""
    kv_copies.write_blocks(source, KvReceive((), b""))


@pytest.mark.parametrize("excess", [-1, 1])
def test_content_of_wrong_size_writes_nothing(excess: int) -> None:
    target = caches(KINDS["paged"], torch.float32, torch.float32, 1)
    before = [tensor.clone() for tensor in tensors(target)]
    with pytest.raises(ValueError, match="bytes was received"):
        kv_copies.write_blocks(target, KvReceive((1,), bytes(kv_copies.block_nbytes(target) + excess)))
    assert all(map(torch.equal, tensors(target), before))
