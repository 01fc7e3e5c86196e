"""Parameters cut over ranks: the pieces of all ranks are the whole, and impossible cuts are refused."""

import pytest
import torch
from tables import table

from saccade.errors import StartupError
from saccade.nn.layers import Embedding, Linear
from saccade.nn.parallel import ALONE, Ranks, Sharding, shards_of


def piece_of(full: torch.Tensor, sharding: Sharding, ranks: Ranks) -> torch.Tensor:
    """What one rank holds of *full*."""
    borders = [sum(sharding.parts[:part]) for part in range(len(sharding.parts))]
    pieces = [
        full.narrow(sharding.dim, borders[piece.part] + piece.source, piece.length) for piece in sharding.pieces(ranks)
    ]
    return torch.cat(pieces, sharding.dim)


def on_rank(full: Linear, layer: Linear, ranks: Ranks) -> Linear:
    """*layer* with its part of the parameters of *full*."""
    for name, parameter in layer.named_parameters():
        parameter.data = piece_of(getattr(full, name).data, layer.shardings[name], ranks)
    return layer


@pytest.fixture
def full() -> Linear:
    """Three partitions, of 8 heads of 3 channels and twice 2 heads of 3 channels."""
    layer = Linear(20, (24, 6, 6))
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return layer


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_outputs_of_all_ranks_are_the_whole(full: Linear, size: int) -> None:
    x = torch.randn(5, 20)
    expected = full(x).split((24, 6, 6), dim=1)
    for rank in range(size):
        ranks = Ranks(rank, size)
        cut = Linear(20, (24, 6, 6), split="outputs", units=(8, 2, 2), ranks=ranks)
        found = on_rank(full, cut, ranks)(x).split(cut.partitions, dim=1)
        for number, (whole, own, units) in enumerate(zip(expected, found, (8, 2, 2), strict=True)):
            width = 3 * ranks.share(units)
            # With fewer heads than ranks, neighbours hold copies of one.
            start = rank * units // size * 3
            torch.testing.assert_close(own, whole[:, start : start + width], msg=f"partition {number}, rank {rank}")


@pytest.mark.parametrize("size", [2, 5])
def test_inputs_of_all_ranks_add_up(full: Linear, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual = torch.randn(3, 20), torch.randn(3, 36)
    sums: list[torch.Tensor] = []
    monkeypatch.setattr(Ranks, "all_reduce", lambda _, x: sums.append(x) or x)
    cuts = [
        on_rank(full, Linear(20, (24, 6, 6), split="inputs", ranks=Ranks(rank, size)), Ranks(rank, size))
        for rank in range(size)
    ]
    for rank, cut in enumerate(cuts):
        cut(x.chunk(size, 1)[rank])
    assert all(cut.bias is not None for cut in cuts)
    whole = sum(sums, full.bias)
    torch.testing.assert_close(whole, full(x))
    # The sum over ranks, with the bias once.
    monkeypatch.setattr(Ranks, "all_reduce", lambda *_: sum(sums))
    torch.testing.assert_close(cuts[1].add_to(residual, x.chunk(size, 1)[1]), residual + full(x))
    torch.testing.assert_close(cuts[0](x.chunk(size, 1)[0], torch.relu), torch.relu(full(x)))


@table(("num_ids", "size", "share"), [(12, 2, 6), (12, 1, 12), (13, 2, 13)])
def test_each_rank_embeds_its_part_of_the_ids(num_ids: int, size: int, share: int) -> None:
    """The vectors that the ranks sum are those of the whole table; ranks that cannot share it have all of it."""
    whole = Embedding(num_ids, 3)
    whole.weight.data = torch.randn(num_ids, 3)
    ids = torch.tensor([0, num_ids - 1, 5, 6, 5])
    summands: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "all_reduce", lambda _, x: summands.append(x) or x)
        for rank in range(size):
            own = Embedding(num_ids, 3, Ranks(rank, size))
            assert len(own.weight) == share
            own.weight.data = piece_of(whole.weight.data, own.shardings["weight"], Ranks(rank, size))
            found = own(ids)
    torch.testing.assert_close(sum(summands, torch.zeros(5, 3)) if summands else found, whole(ids), atol=0, rtol=0)


@pytest.mark.parametrize(("count", "size", "share"), [(8, 2, 4), (2, 8, 1), (3, 3, 1), (1, 4, 1)])
def test_heads_are_shared(count: int, size: int, share: int) -> None:
    assert Ranks(0, size).share(count) == share
    assert shards_of(count, Ranks(0, size)) == min(count, size)


@pytest.mark.parametrize(("count", "size"), [(12, 8), (3, 2), (16, 6)])
def test_heads_that_cannot_be_shared_are_refused(count: int, size: int) -> None:  # [eng] 37
    with pytest.raises(StartupError, match=rf"--tensor-parallel-size is {size}, but the model has {count} heads"):
        Ranks(0, size).share(count)


@pytest.mark.parametrize(("count", "size"), [(12, 8), (2, 4)])
def test_heads_whose_results_are_summed_are_not_copied(count: int, size: int) -> None:
    """With copies of query heads, the next matrix would be cut into other pieces than what it multiplies."""
    assert Ranks(0, 4).divide(8) == 2
    with pytest.raises(StartupError, match=rf"--tensor-parallel-size is {size}, but the model has {count} heads"):
        Ranks(0, size).divide(count)


def test_matrices_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(StartupError, match="258 rows or columns cannot be cut into 4"):
        Linear(8, (258, 258), split="outputs", ranks=Ranks(0, 4))
    with pytest.raises(StartupError, match="30 rows or columns cannot be cut into 4"):
        Linear(30, 8, split="inputs", ranks=Ranks(0, 4))


def test_alone_nothing_is_exchanged() -> None:
    x = torch.ones(2)
    assert ALONE.all_reduce(x) is x
    assert ALONE.broadcast(x, 0) is ALONE.gather(x) is x
    assert ALONE.any_of([True, False]) == [True, False]


@table("units", [4, 2, 1])
@table(("size", "shared"), [(2, 1), (4, 2), (8, 4), (6, 2)])
def test_ranks_that_share_attention_hold_the_parts_that_the_loader_reads(size: int, shared: int, units: int) -> None:
    """B8: The loader cuts by the place among all ranks, attention by that among those who share it."""
    cut = Sharding((12, 12), 0, (shards_of(units, Ranks(0, shared)),) * 2)
    every = [Ranks(rank, size).sharing_attention(shared) for rank in range(size)]
    for ranks in every:
        assert [*cut.pieces(ranks)] == [*cut.pieces(ranks.attention)]
        assert ranks.attention.size == shared
    places = [ranks.attention.rank for ranks in every]
    assert places == sorted(places)
    assert [places.count(place) for place in range(shared)] == [size // shared] * shared


def test_attention_is_cut_over_all_ranks_unless_fewer_share_it() -> None:
    ranks = Ranks(1, 4, cuts_encoder=True)
    assert ranks.sharing_attention(4).attention == ranks.attention == ranks == ranks.encoder
    shared = ranks.sharing_attention(2)
    # The encoder is cut as attention is, or not at all.
    assert shared.encoder is shared.attention
    assert Ranks(1, 4).sharing_attention(2).encoder == ALONE
    with pytest.raises(StartupError, match="--attention-tensor-parallel-size is 2, but the model has 3 heads"):
        shared.attention.divide(3)
    assert Linear(8, 12, split="inputs", ranks=Ranks(1, 4).sharing_attention(1).attention).summed_over is None
