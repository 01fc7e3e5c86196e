"""Experts against a loop over tokens, what they cost, and how ranks share them."""

from typing import Any

import pytest
import torch
from launches import Launches
from tables import table
from torch.nn import functional

from saccade.errors import StartupError
from saccade.nn import gpu, grouped_experts, ops
from saccade.nn.experts import Experts
from saccade.nn.formats.quantised import QuantisedExperts
from saccade.nn.ops import softmax_top_k
from saccade.nn.parallel import Ranks

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 10, 24, 7, 3


def layer(num_experts: int = EXPERTS, ranks: Ranks | None = None) -> Experts:
    """A layer with the weights of its rank; those of all ranks are the same draw."""
    draw = torch.Generator().manual_seed(0)
    made = Experts(num_experts, HIDDEN, INTERMEDIATE, ranks or Ranks())
    own = slice(made.first, made.first + len(made.gate_up_proj))
    gate_up = torch.randn(num_experts, 2 * INTERMEDIATE, HIDDEN, generator=draw)[own] / HIDDEN**0.5
    down = torch.randn(num_experts, HIDDEN, INTERMEDIATE, generator=draw)[own] / INTERMEDIATE**0.5
    width = made.down_proj.shape[2]
    part = slice(made.ranks.rank * width, (made.ranks.rank + 1) * width) if width < INTERMEDIATE else slice(None)
    made.gate_up_proj.data = gate_up.unflatten(1, (2, -1))[:, :, part].flatten(1, 2)
    made.down_proj.data = down[:, :, part].contiguous()
    return made


def routed(num_tokens: int, num_experts: int = EXPERTS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(num_tokens, num_experts, generator=draw)
    return torch.randn(num_tokens, HIDDEN, generator=draw), *softmax_top_k(logits, TOP_K, True)


def by_token(made: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same in float64, token by token."""
    total = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            gate, up = (made.gate_up_proj[expert].double() @ x[token].double()).chunk(2)
            total[token] += weight * (made.down_proj[expert].double() @ (functional.silu(gate) * up))
    return total


@table("dtype", [torch.float32, torch.bfloat16])
@table("num_tokens", [1, 2, 50])
def test_equals_a_loop_over_tokens(num_tokens: int, dtype: torch.dtype) -> None:
    made = layer().to(dtype)
    x, ids, weights = routed(num_tokens)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    result = made(x.to(dtype), ids, weights)
    assert result.dtype == dtype
    exact = by_token(made, x.to(dtype), ids, weights)
    torch.testing.assert_close(result.double(), exact, atol=tolerance, rtol=tolerance)


def test_a_token_s_result_does_not_depend_on_its_batch() -> None:
    x, ids, weights = routed(50)
    whole = layer()(x, ids, weights)
    alone = torch.cat([layer()(*(tensor[token : token + 1] for tensor in (x, ids, weights))) for token in range(50)])
    torch.testing.assert_close(whole, alone, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("num_experts", [EXPERTS, 40 * EXPERTS])
def test_cost_grows_with_active_experts(monkeypatch: pytest.MonkeyPatch, num_experts: int) -> None:
    """Rows and calls of matrix products, counted: as many for 400 experts as for 10."""
    rows: list[int] = []

    def counted(x: torch.Tensor, *others: Any) -> torch.Tensor:
        rows.append(len(x))
        return functional.linear(x, *others)

    x, ids, weights = routed(8)
    ids[:, :] = torch.tensor([1, 4, 9])
    ids[0] = torch.tensor([2, 4, 9])
    made = layer(num_experts)
    monkeypatch.setattr(ops, "functional", type("Counting", (), {"linear": staticmethod(counted)}))
    made(x, ids, weights)
    assert sum(rows) == 2 * 8 * TOP_K  # gate and up in one product, then down
    assert sorted(rows) == sorted(2 * [7, 1, 8, 8])


@pytest.mark.parametrize(("size", "share"), [(2, (5, 7)), (5, (2, 7)), (7, (10, 1))])
def test_ranks_share_experts_or_their_width(size: int, share: tuple[int, int]) -> None:
    class Silent(Ranks):
        """A rank whose sum over the ranks is its own part."""

        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return x

    x, ids, weights = routed(20)
    parts = [layer(ranks=Silent(rank, size)) for rank in range(size)]
    assert {(len(part.gate_up_proj), part.down_proj.shape[2]) for part in parts} == {share}
    total = torch.stack([part(x, ids, weights) for part in parts]).sum(0)
    torch.testing.assert_close(total, layer()(x, ids, weights), atol=1e-5, rtol=1e-5)


def test_ranks_that_cannot_share_are_refused() -> None:
    with pytest.raises(StartupError, match="7 channels in each expert"):
        Experts(EXPERTS, HIDDEN, INTERMEDIATE, Ranks(0, 4))
    with pytest.raises(StartupError, match="7 channels in each expert"):
        Experts(EXPERTS, HIDDEN, INTERMEDIATE, Ranks(0, 20))  # copies would be summed twice


def test_only_asked_for_matrices_are_read() -> None:
    class Packed:
        """Matrices in a format that is unpacked one by one."""

        def __init__(self, matrices: torch.Tensor) -> None:
            self.matrices = matrices
            self.asked: list[int] = []

        def __len__(self) -> int:
            return len(self.matrices)

        def __getitem__(self, expert: int, /) -> torch.Tensor:
            self.asked.append(expert)
            return self.matrices[expert]

    made = layer()
    gate_up, down = Packed(made.gate_up_proj), Packed(made.down_proj)
    x, ids, weights = routed(2)
    result = ops.experts(x, gate_up, down, ids, weights)
    assert gate_up.asked == down.asked == sorted(set(ids.flatten().tolist()))
    torch.testing.assert_close(result, made(x, ids, weights), atol=0, rtol=0)


def test_softmax_top_k() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    ids, weights = softmax_top_k(logits, 2, False)
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, logits.softmax(-1)[:, 1:3])
    _, renormalised = softmax_top_k(logits.bfloat16(), 2, True)
    torch.testing.assert_close(renormalised, weights / weights.sum())
    assert renormalised.dtype == torch.float32


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # rows that nothing has written or reads
@table("num_tokens", [1, 50])
@table("first", [0, 3])
def test_grouped_products_equal_the_plain_ones(num_tokens: int, first: int) -> None:
    """torch's grouped product runs on a CPU too. Experts below *first* are other ranks', and so are the last ones."""
    draw = torch.Generator().manual_seed(0)
    gate_up = (torch.randn(6, 2 * 16, HIDDEN, generator=draw) / HIDDEN**0.5).bfloat16()
    down = (torch.randn(6, HIDDEN, 16, generator=draw) / 4).bfloat16()
    x, ids, weights = routed(num_tokens)
    arguments = (x.bfloat16(), gate_up, down, ids - first, weights)
    grouped = grouped_experts.experts(*arguments)
    assert grouped is not None
    assert grouped.dtype == torch.bfloat16
    plain = ops.experts(*arguments)
    torch.testing.assert_close(grouped, plain, atol=2**-7, rtol=2**-7)
    assert bool(grouped.isfinite().all())


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_grouped_products_leave_the_host_alone() -> None:
    """No kernel but these is started: none reads a value back."""
    draw = torch.Generator().manual_seed(0)
    gate_up, down = (torch.randn(shape, generator=draw).bfloat16() for shape in ((6, 32, HIDDEN), (6, HIDDEN, 16)))
    x, ids, weights = routed(5)
    x, counter = x.bfloat16(), Launches()
    with torch.no_grad(), counter:
        grouped_experts.experts(x, gate_up, down, ids, weights)
    products = ["_grouped_mm.default"] * 2
    assert counter.names == ["places_kernel", "rows_kernel", *products, "gated_kernel", *products, "sum_kernel"]


@table("dtype", [torch.float32, torch.bfloat16])
@table(("num_experts", "num_chosen"), [(6, 2), (128, 8), (130, 3)])
@table("renormalises", [True, False])
def test_experts_are_chosen_in_one_launch(
    renormalises: bool, num_experts: int, num_chosen: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(num_experts)
    # All differ, also in bfloat16.
    logits = torch.stack([torch.randperm(num_experts, generator=draw) for _ in range(3)]).to(dtype) / 16
    found = gpu.softmax_top_k(logits, num_chosen, renormalises)
    assert found is not None
    expected = softmax_top_k(logits, num_chosen, renormalises)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=0, rtol=1e-5)


def test_of_equal_experts_the_first_are_chosen() -> None:
    found = gpu.softmax_top_k(torch.tensor([[0.0, 1.0, 0.0, 1.0, 1.0]]), 4, True)
    assert found is not None
    ids, weights = found
    assert ids.tolist() == [[1, 3, 4, 0]]
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
    assert gpu.softmax_top_k(torch.zeros(1, 2000), 2, True) is None


def test_grouped_products_decline_what_they_cannot_take() -> None:
    made = layer().bfloat16()  # down_proj's rows have 7 values
    x, ids, weights = routed(5)
    assert grouped_experts.experts(x.bfloat16(), made.gate_up_proj, made.down_proj, ids, weights) is None
    matrices = QuantisedExperts((), 1, torch.bfloat16)
    assert grouped_experts.experts(x.bfloat16(), matrices, matrices, ids, weights) is None
