"""Triton kernels around the grouped products of experts: the choice of experts, the order of rows, and the sum.

saccade.nn.gpu launches the choice, saccade.nn.grouped_experts the others. Shapes: N tokens, K experts of a token,
M = N * K choices.
"""

import triton
import triton.language as tl


@triton.jit
def choice_kernel(
    logits, ids, weights, row_step,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, CHOICES: tl.constexpr, SLOTS: tl.constexpr, RENORMALISES: tl.constexpr,
):  # fmt: skip
    """Choose one token's CHOICES most probable experts; in a tie, the first.

    Programs: (token). WIDTH and SLOTS are EXPERTS and CHOICES, rounded up to powers of two.
    """
    token = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, WIDTH), tl.arange(0, SLOTS)
    is_expert = expert < EXPERTS
    scores = tl.load(logits + token * row_step + expert, mask=is_expert, other=float("-inf")).to(tl.float32)
    shares = tl.exp(scores - tl.max(scores, 0))
    total = tl.sum(shares, 0)
    left = tl.where(is_expert, shares, -1.0)
    chosen_ids = tl.zeros([SLOTS], tl.int32)
    chosen = tl.zeros([SLOTS], tl.float32)
    for number in tl.static_range(CHOICES):
        highest = tl.max(left, 0)
        best = tl.min(tl.where(left == highest, expert, WIDTH), 0)
        chosen_ids = tl.where(slot == number, best, chosen_ids)
        chosen = tl.where(slot == number, highest, chosen)
        left = tl.where(expert == best, -1.0, left)
    if RENORMALISES:
        total = tl.sum(chosen, 0)
    place = token * CHOICES + slot
    tl.store(ids + place, chosen_ids.to(tl.int64), mask=slot < CHOICES)
    tl.store(weights + place, chosen / total, mask=slot < CHOICES)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["ids"])
def places_kernel(ids, places, ends, count, TILE: tl.constexpr):
    """Give each of an expert's choices a row after those of earlier experts, in the order of tokens.

    Programs: (expert). Choices of other ranks' experts get -1. *ends* gets the row after each expert's last one.
    """
    expert, num_experts = tl.program_id(0), tl.num_programs(0)
    place = 0 * count
    for start in range(0, count, TILE):
        choice = start + tl.arange(0, TILE)
        is_choice = choice < count
        id = tl.load(ids + choice, mask=is_choice, other=-1)
        place += tl.sum(((id >= 0) & (id < expert)).to(tl.int32), 0)
        is_other = is_choice & ((id < 0) | (id >= num_experts)) & (expert == 0)
        tl.store(places + choice, tl.full([TILE], -1, tl.int32), mask=is_other)
    for start in range(0, count, TILE):
        choice = start + tl.arange(0, TILE)
        is_own = (tl.load(ids + choice, mask=choice < count, other=-1) == expert).to(tl.int32)
        tl.store(places + choice, place + tl.cumsum(is_own, 0) - 1, mask=is_own > 0)
        place += tl.sum(is_own, 0)
    tl.store(ends + expert, place)


@triton.jit
def rows_kernel(x, places, rows, width, row_step, CHOICES: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy the row of a choice's token to the choice's place. Programs: (choice, columns)."""
    choice, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.load(places + choice).to(tl.int64)
    is_column = (column < width) & (place >= 0)
    values = tl.load(x + (choice // CHOICES) * row_step + column, mask=is_column, other=0.0)
    tl.store(rows + place * width + column, values, mask=is_column)


@triton.jit
def sum_kernel(results, places, weights, output, width, CHOICES: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the weighted results of a token's experts. Programs: (token, columns)."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < width
    total = tl.zeros([COLUMNS], tl.float32)
    for number in tl.static_range(CHOICES):
        place = tl.load(places + token * CHOICES + number).to(tl.int64)
        weight = tl.load(weights + token * CHOICES + number).to(tl.float32)
        values = tl.load(results + place * width + column, mask=is_column & (place >= 0), other=0.0)
        total += weight * values.to(tl.float32)
    tl.store(output + token * width + column, total.to(output.dtype.element_ty), mask=is_column)
