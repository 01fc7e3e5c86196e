"""Triton kernels: attention of vision towers and of decodes, rotations and cache writes, norms, gates and convolution.

Attention passes over the keys once, with a running maximum and sum (Milakov & Gimelshein 2018, arXiv:1805.02867; Dao et
al. 2022, arXiv:2205.14135). saccade.nn.backends.triton_attention launches it, saccade.nn.gpu the others. Triton
compiles a kernel again for a number that is 1 or a multiple of 16, and for an address divisible by 16. So
arguments that differ between steps are exempted: lengths, and metadata that begin anywhere in a larger tensor. Shapes:
Q query heads, K key/value heads.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["cu_seqlens"])
def packed_kernel(
    q, k, v, output, cu_seqlens, scale, q_token, q_head, k_token, k_head, v_token, v_head, output_token, head_size,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Attend in both directions from ROWS queries of one sequence and head. Programs: (rows, sequence, head).

    *_token and *_head are the steps in entries between tokens and heads. WIDTH is head_size rounded up.
    """
    sequence, head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = tl.load(cu_seqlens + sequence).to(tl.int64)
    length = tl.load(cu_seqlens + sequence + 1) - first
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS < length:
        channel = tl.arange(0, WIDTH)
        is_row, is_channel = (row < length)[:, None], channel < head_size
        at_row = (first + row)[:, None]
        queries = tl.load(
            q + at_row * q_token + head * q_head + channel[None, :], mask=is_row & is_channel[None, :], other=0.0
        )
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, WIDTH], tl.float32)
        for start in range(0, length, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            is_seen = column < length
            keys = tl.load(
                k + (first + column)[None, :] * k_token + head * k_head + channel[:, None],
                mask=is_seen[None, :] & is_channel[:, None], other=0.0,
            )  # fmt: skip
            scores = tl.dot(queries, keys, input_precision="ieee") * scale
            scores = tl.where(is_seen[None, :], scores, float("-inf"))
            raised = tl.maximum(highest, tl.max(scores, 1))
            shares, shrink = tl.exp(scores - raised[:, None]), tl.exp(highest - raised)
            values = tl.load(
                v + (first + column)[:, None] * v_token + head * v_head + channel[None, :],
                mask=is_seen[:, None] & is_channel[None, :], other=0.0,
            )  # fmt: skip
            result = result * shrink[:, None] + tl.dot(shares.to(values.dtype), values, input_precision="ieee")
            total, highest = total * shrink + tl.sum(shares, 1), raised
        place = output + at_row * output_token + head * head_size + channel[None, :]
        tl.store(place, (result / total[:, None]).to(output.dtype.element_ty), mask=is_row & is_channel[None, :])


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["block_tables", "context_lengths"])
def decode_kernel(
    q, keys, values, output, block_tables, context_lengths, scale, window, soft_cap,
    q_token, q_head, table_row, key_size, value_size, heads_per_kv_head,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Attend from one sequence's query heads that share a key/value head. Programs: (sequence, key/value head).

    Caches are [slots, K, size] without gaps. HEADS and the widths are the numbers of heads and channels, rounded up.
    """
    sequence, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    length = tl.load(context_lengths + sequence)
    member = tl.arange(0, HEADS)
    head = kv_head * heads_per_kv_head + member
    is_head = (member < heads_per_kv_head)[:, None]
    key_channel, value_channel = tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
    is_key, is_value = key_channel < key_size, value_channel < value_size
    queries = tl.load(
        q + sequence * q_token + head[:, None] * q_head + key_channel[None, :],
        mask=is_head & is_key[None, :],
        other=0.0,
    )
    highest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    result = tl.zeros([HEADS, VALUE_WIDTH], tl.float32)
    first = 0 * length
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    for start in range(first, length, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_seen = column < length
        block = tl.load(block_tables + sequence * table_row + column // BLOCK_SIZE, mask=is_seen, other=0).to(tl.int64)
        place = (block * BLOCK_SIZE + column % BLOCK_SIZE) * num_kv_heads + kv_head
        key_columns = tl.load(
            keys + place[None, :] * key_size + key_channel[:, None], mask=is_seen[None, :] & is_key[:, None], other=0.0
        )
        scores = tl.dot(queries, key_columns, input_precision="ieee") * scale
        if HAS_SOFT_CAP:
            # The hyperbolic tangent by the exponential function, which Triton has everywhere.
            scores = soft_cap * (2 / (1 + tl.exp(-2 * scores / soft_cap)) - 1)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        shares, shrink = tl.exp(scores - raised[:, None]), tl.exp(highest - raised)
        value_rows = tl.load(
            values + place[:, None] * value_size + value_channel[None, :],
            mask=is_seen[:, None] & is_value[None, :], other=0.0,
        )  # fmt: skip
        result = result * shrink[:, None] + tl.dot(shares.to(value_rows.dtype), value_rows, input_precision="ieee")
        total, highest = total * shrink + tl.sum(shares, 1), raised
    at = output + (sequence * num_kv_heads * heads_per_kv_head + head)[:, None] * value_size + value_channel[None, :]
    tl.store(at, (result / total[:, None]).to(output.dtype.element_ty), mask=is_head & is_value[None, :])


@triton.jit
def _rounded(x, scale, LARGEST: tl.constexpr):
    """Divide by the scale, and clamp; NaN stays NaN."""
    scaled = tl.maximum(tl.div_rn(x, scale), -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(scaled, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def heads_kernel(
    qkv, weight, cos, sin, slots, rotated, read_values, keys, values, token_step, eps, key_scale, value_scale,
    ROTATED: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    HAS_NORM: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate one of ROTATED query and key heads, and write keys and values to the cache.

    Programs: (token, head). WIDTH is SIZE rounded up. HALF pairs of channels are rotated. With LARGEST, the largest
    number of the cache's format, keys and values are divided by their scales and rounded. Then *rotated* and
    *read_values* get them as a read of the cache returns them.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, WIDTH)
    is_channel, is_rotated = channel < SIZE, channel < 2 * HALF
    row = qkv + token * token_step + head * SIZE
    x = tl.load(row + channel, mask=is_channel, other=0.0).to(tl.float32)
    slot = tl.load(slots + token)
    if head < ROTATED:
        partner = tl.where(channel < HALF, channel + HALF, channel - HALF)
        other = tl.load(row + partner, mask=is_rotated, other=0.0).to(tl.float32)
        if HAS_NORM:
            scale = 1 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
            scales = weight + head * SIZE
            x *= scale * tl.load(scales + channel, mask=is_channel, other=0.0).to(tl.float32)
            other *= scale * tl.load(scales + partner, mask=is_rotated, other=0.0).to(tl.float32)
        angle = token * 2 * HALF + channel
        x *= tl.load(cos + angle, mask=is_rotated, other=1.0).to(tl.float32)
        x += other * tl.load(sin + angle, mask=is_rotated, other=0.0).to(tl.float32)
        result = x.to(rotated.dtype.element_ty)
        key = head - (ROTATED - KV_HEADS)
        if key >= 0:
            if LARGEST > 0:
                # Rounded to the heads' format first, as without a kernel.
                small = _rounded(result.to(tl.float32), key_scale, LARGEST).to(keys.dtype.element_ty)
                result = (small.to(tl.float32) * key_scale).to(rotated.dtype.element_ty)
                tl.store(keys + (slot * KV_HEADS + key) * SIZE + channel, small, mask=is_channel)
            else:
                tl.store(keys + (slot * KV_HEADS + key) * SIZE + channel, result, mask=is_channel)
        tl.store(rotated + (token * ROTATED + head) * SIZE + channel, result, mask=is_channel)
    else:
        place = (slot * KV_HEADS + head - ROTATED) * SIZE + channel
        if LARGEST > 0:
            small = _rounded(x, value_scale, LARGEST).to(values.dtype.element_ty)
            read = (small.to(tl.float32) * value_scale).to(read_values.dtype.element_ty)
            tl.store(read_values + (token * KV_HEADS + head - ROTATED) * SIZE + channel, read, mask=is_channel)
            tl.store(values + place, small, mask=is_channel)
        else:
            tl.store(values + place, x.to(values.dtype.element_ty), mask=is_channel)


@triton.jit
def pairs_kernel(
    x, cos_sin, output, num_heads, token_step, head_step,
    PAIRS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rotate neighbouring channels in HEADS heads of one token. Programs: (token, heads).

    *cos_sin* float32 has a cosine and a sine for each of PAIRS. WIDTH is PAIRS rounded up.
    """
    token, pair = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_pair = pair < PAIRS
    is_here = (head < num_heads)[:, None] & is_pair[None, :]
    cos = tl.load(cos_sin + (token * PAIRS + pair) * 2, mask=is_pair, other=0.0)[None, :]
    sin = tl.load(cos_sin + (token * PAIRS + pair) * 2 + 1, mask=is_pair, other=0.0)[None, :]
    place = x + token * token_step + head[:, None] * head_step + 2 * pair[None, :]
    first = tl.load(place, mask=is_here, other=0.0).to(tl.float32)
    second = tl.load(place + 1, mask=is_here, other=0.0).to(tl.float32)
    at = output + (token * num_heads + head[:, None]) * 2 * PAIRS + 2 * pair[None, :]
    tl.store(at, (first * cos - second * sin).to(output.dtype.element_ty), mask=is_here)
    tl.store(at + 1, (first * sin + second * cos).to(output.dtype.element_ty), mask=is_here)


@triton.jit
def norm_kernel(
    x, weight, gate, output, eps, x_step, gate_step,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Divide the SIZE numbers of a head by their root mean square, and scale them.

    With HAS_GATE, multiply them by SiLU of the head's gates. Programs: (token, head). The steps are between tokens;
    heads have no gap between them. WIDTH is SIZE rounded up.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, WIDTH)
    is_channel = channel < SIZE
    values = tl.load(x + token * x_step + head * SIZE + channel, mask=is_channel, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(values * values, 0) / SIZE + eps)
    result = values * scale * tl.load(weight + channel, mask=is_channel, other=0.0).to(tl.float32)
    if HAS_GATE:
        gates = tl.load(gate + token * gate_step + head * SIZE + channel, mask=is_channel, other=0.0).to(tl.float32)
        result *= gates / (1 + tl.exp(tl.minimum(-gates, 80.0)))
    place = output + (token * tl.num_programs(1) + head) * SIZE + channel
    tl.store(place, result.to(output.dtype.element_ty), mask=is_channel)


@triton.jit
def gated_kernel(x, output, width, COLUMNS: tl.constexpr, IS_SILU: tl.constexpr):
    """Multiply COLUMNS ups by activated gates. Programs: (token, columns)."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < width
    row = x + token * 2 * width + column
    gate = tl.load(row, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(row + width, mask=is_column, other=0.0).to(tl.float32)
    # GELU's approximation by tanh, as a sigmoid.
    inner = gate if IS_SILU else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    result = gate / (1 + tl.exp(tl.minimum(-inner, 80.0))) * up
    tl.store(output + token * width + column, result.to(output.dtype.element_ty), mask=is_column)


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["rows"])
def conv_kernel(
    x, taps, states, rows, output, length, channels, token_step,
    TAPS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Convolve TOKENS tokens of a sequence with the tokens before them, and apply SiLU.

    A sequence's state holds the tokens before its first. Programs: (sequence, tokens, columns). All sequences have
    *length* tokens. If these are at most TOKENS, the new states are written.
    """
    sequence = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_token, is_column = token < length, column < channels
    first = x + sequence * length * token_step
    state = states + tl.load(rows + sequence).to(tl.int64) * (TAPS - 1) * channels
    total = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        source = token + tap - (TAPS - 1)
        is_new, is_old = is_token & (source >= 0), is_token & (source < 0)
        new = tl.load(
            first + source[:, None] * token_step + column[None, :], mask=is_new[:, None] & is_column[None, :], other=0.0
        )
        old = tl.load(
            state + (source[:, None] + TAPS - 1) * channels + column[None, :],
            mask=is_old[:, None] & is_column[None, :], other=0.0,
        )  # fmt: skip
        factors = tl.load(taps + tap * channels + column, mask=is_column, other=0.0)
        total += (new.to(tl.float32) + old.to(tl.float32)) * factors[None, :]
    result = total / (1 + tl.exp(tl.minimum(-total, 80.0)))
    at = output + (sequence * length + token)[:, None] * channels + column[None, :]
    tl.store(at, result.to(output.dtype.element_ty), mask=is_token[:, None] & is_column[None, :])
    if length <= TOKENS:
        # Other threads may still read the old state.
        tl.debug_barrier()
        for place in tl.static_range(TAPS - 1):
            index = length + place - (TAPS - 1)
            input = tl.load(first + index * token_step + column, mask=is_column & (index >= 0), other=0.0)
            older = tl.load(state + (length + place) * channels + column, mask=is_column & (index < 0), other=0.0)
            tl.store(state + place * channels + column, input + older, mask=is_column)
