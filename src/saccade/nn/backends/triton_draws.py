"""A Triton kernel that draws a token for each row, with passes over the row's logits instead of a sort.

A cut is the smallest number with fewer logits above it than top_k, or with a smaller share of them than top_p. Each
pass tries eight numbers, so a cut takes at most eleven passes. saccade.nn.gpu_draws launches the kernel.
"""

import triton
import triton.language as tl


@triton.jit
def _ordered(x):
    """Return integers that have the same order as the float32 numbers *x*."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _scaled(logits, start, vocabulary, temperature, TILE: tl.constexpr):
    """Load logits from *start* on, divided by the temperature; -inf after the last."""
    token = start + tl.arange(0, TILE)
    return tl.div_rn(tl.load(logits + token, mask=token < vocabulary, other=float("-inf")), temperature)


@triton.jit
def _cut(
    logits, vocabulary, temperature, top, least, most,
    COUNTS: tl.constexpr, TILE: tl.constexpr, TRIES: tl.constexpr,
):  # fmt: skip
    """Return the smallest number that has less than *most* above it, among logits that are at least *least*.

    The result and *least* are in the form that `_ordered` returns. With COUNTS, logits are counted; otherwise their
    shares relative to *top* are added.
    """
    low, high = tl.full([], -(2**31), tl.int64), _ordered(top).to(tl.int64)
    number = tl.arange(0, TRIES) + 1
    while low < high:
        tried = low + (high - low) * number // TRIES
        above = tl.zeros([TRIES, TILE], tl.float32)
        for start in range(0, vocabulary, TILE):
            scaled = _scaled(logits, start, vocabulary, temperature, TILE)
            order = _ordered(scaled)
            weight = tl.where(order >= least, 1.0 if COUNTS else tl.exp(scaled - top), 0.0)
            above += tl.where(order[None, :].to(tl.int64) > tried[:, None], weight[None, :], 0.0)
        fits = tl.sum(above, 1) < most
        # The last one tried is *high*, which fits.
        low = tl.maximum(low, tl.max(tl.where(fits, low, tried + 1), 0))
        high = tl.min(tl.where(fits, tried, high), 0)
    return high.to(tl.int32)


@triton.jit
def draw_kernel(
    logits, greedy, settings, drawn, vocabulary, row_step,
    TILE: tl.constexpr, TRIES: tl.constexpr,
):  # fmt: skip
    """Draw the token of one row by its uniform number, or take the greedy one. Programs: (row).

    *settings* float64 has the rows' temperatures, then their top_p, limits of top_k, min_p and uniform numbers.
    """
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    temperature = tl.load(settings + row).to(tl.float32)
    top_p = tl.load(settings + num_rows + row).to(tl.float32)
    limit = tl.load(settings + 2 * num_rows + row).to(tl.float32)
    min_p = tl.load(settings + 3 * num_rows + row).to(tl.float32)
    uniform = tl.load(settings + 4 * num_rows + row)
    token = tl.load(greedy + row)
    if temperature > 0:
        own = logits + row * row_step
        highest = tl.full([TILE], float("-inf"), tl.float32)
        for start in range(0, vocabulary, TILE):
            highest = tl.maximum(highest, _scaled(own, start, vocabulary, temperature, TILE))
        top = tl.max(highest, 0)
        least = tl.full([], -(2**31), tl.int32)
        if min_p > 0:
            least = _ordered(top + tl.log(min_p))
        if limit < vocabulary:
            least = tl.maximum(least, _cut(own, vocabulary, temperature, top, least, limit, True, TILE, TRIES))
        if top_p < 1:
            total = tl.zeros([TILE], tl.float32)
            for start in range(0, vocabulary, TILE):
                scaled = _scaled(own, start, vocabulary, temperature, TILE)
                total += tl.where(_ordered(scaled) >= least, tl.exp(scaled - top), 0.0)
            most = top_p * tl.sum(total, 0)
            least = tl.maximum(least, _cut(own, vocabulary, temperature, top, least, most, False, TILE, TRIES))
        whole = tl.full([], 0.0, tl.float64)
        for start in range(0, vocabulary, TILE):
            scaled = _scaled(own, start, vocabulary, temperature, TILE)
            whole += tl.sum(tl.where(_ordered(scaled) >= least, tl.exp(scaled - top), 0.0), 0).to(tl.float64)
        target = uniform * whole
        # The tile within which the sum passes the target.
        before, base, first = whole * 0, whole * 0, 0
        for start in range(0, vocabulary, TILE):
            scaled = _scaled(own, start, vocabulary, temperature, TILE)
            after = before + tl.sum(tl.where(_ordered(scaled) >= least, tl.exp(scaled - top), 0.0), 0).to(tl.float64)
            is_here = (before <= target) & (after > target)
            first, base = tl.where(is_here, start, first), tl.where(is_here, before, base)
            before = after
        scaled = _scaled(own, first, vocabulary, temperature, TILE)
        share = tl.where(_ordered(scaled) >= least, tl.exp(scaled - top), 0.0)
        place = tl.arange(0, TILE)
        # Rounding of the tile's sum may leave none that passes: then it is the last one that can be drawn.
        passed = tl.min(tl.where(base + tl.cumsum(share.to(tl.float64), 0) > target, place, TILE), 0)
        last = tl.max(tl.where(share > 0, place, -1), 0)
        chosen = first + tl.minimum(passed, last)
        token = tl.where(last >= 0, chosen.to(tl.int64), token)
    tl.store(drawn + row, token)
