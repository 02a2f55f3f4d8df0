"""Triton kernels of the causal spatial projection. Importing this module imports Triton: see :mod:`smlp.ops.first_use`.

All sums are taken in float32 and in one order, which depends on shapes alone: no atomics, and the settings among which
the fastest is chosen (:mod:`smlp.ops.triton_spatial`) differ in the size of a tile, never in the steps of a sum.

Letters: ``B`` sequences, ``n`` tokens (n <= T), ``h`` heads, ``c`` features of one head. The columns of a product are
the B * c pairs of sequence and feature.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _wide(number):
    """Convert to int64: a tensor may have more than 2^31 elements."""
    return number + tl.zeros((), dtype=tl.int64)


@triton.jit
def _product(left, right, total, WIDEN: tl.constexpr):
    """Return ``total + left @ right``."""
    if WIDEN:  # Triton's interpreter reads the bits of bfloat16 as integers
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total)


@triton.jit(do_not_specialize=["num_tokens"])
def project(
    x, weight, bias, gate, grad, out, grad_gate,
    num_tokens, context, width, num_columns,
    x_seq, x_token, x_head, x_feature,
    weight_head, weight_row, weight_step,
    bias_head, bias_token,
    gate_seq, gate_token, gate_head, gate_feature,
    grad_seq, grad_token, grad_head, grad_feature,
    out_seq, out_token,
    TRANSPOSED: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``y = tril(W) x + b``, or of ``tril(W)^T x``, and what follows from it.

    Without ``gate``, ``out = y``. With it, ``out = y * gate``. With ``grad`` too, the gradient of ``y * gate``:
    ``grad_gate = grad * y`` and ``out = grad * gate``, which is the gradient of y.

    ``out`` and ``grad_gate`` are contiguous (B, n, h, c); all else comes with strides. ``weight_row`` and
    ``weight_step`` are those of the rows of the product and of its sums: the launcher swaps them where TRANSPOSED.
    Grid: tiles, heads. BLOCK_M is a multiple of BLOCK_K.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    num_row_tiles = tl.cdiv(num_tokens, BLOCK_M)
    row_tile = tile % num_row_tiles  # those of the same columns follow each other, which keeps x in the cache
    column_tile = tile // num_row_tiles
    if not TRANSPOSED:
        row_tile = num_row_tiles - 1 - row_tile  # in both cases the longest sums begin first
    first_row = row_tile * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = (columns < num_columns)[None, :]
    sequences = (columns // width).to(tl.int64)
    features = (columns % width).to(tl.int64)
    steps = tl.arange(0, BLOCK_K)
    # A mask over neighbours in memory must not depend on num_tokens, or they are loaded one by one; rows of W that
    # exist and are not wanted do no harm, as their results are not stored.
    in_context = (rows < context)[:, None]
    weight_tile = weight + head * weight_head + rows.to(tl.int64)[:, None] * weight_row + steps[None, :] * weight_step
    x_tile = (
        x + head * x_head + (sequences * x_seq + features * x_feature)[None, :] + steps.to(tl.int64)[:, None] * x_token
    )
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if not TRANSPOSED:
        for start in range(0, first_row, BLOCK_K):
            weight_block = tl.load(weight_tile + _wide(start) * weight_step, mask=in_context, other=0.0)
            x_block = tl.load(x_tile + _wide(start) * x_token, mask=is_column, other=0.0)
            total = _product(weight_block, x_block, total, WIDEN)
    for start in range(first_row, tl.minimum(first_row + BLOCK_M, num_tokens), BLOCK_K):
        at = start + steps
        inside = in_context & (at < context)[None, :]
        weight_block = tl.load(weight_tile + _wide(start) * weight_step, mask=inside, other=0.0)
        if TRANSPOSED:
            seen = (at[None, :] >= rows[:, None]) & (at < num_tokens)[None, :]
        else:
            seen = at[None, :] <= rows[:, None]
        weight_block = tl.where(seen, weight_block, 0.0)  # whatever lies above the diagonal, NaN too
        is_token = (at < num_tokens)[:, None]
        x_block = tl.load(x_tile + _wide(start) * x_token, mask=is_token & is_column, other=0.0)
        total = _product(weight_block, x_block, total, WIDEN)
    if TRANSPOSED:
        for start in range(first_row + BLOCK_M, num_tokens, BLOCK_K):
            is_token = start + steps < num_tokens
            inside = in_context & is_token[None, :]
            weight_block = tl.load(weight_tile + _wide(start) * weight_step, mask=inside, other=0.0)
            x_block = tl.load(x_tile + _wide(start) * x_token, mask=is_token[:, None] & is_column, other=0.0)
            total = _product(weight_block, x_block, total, WIDEN)

    wanted = (rows < num_tokens)[:, None] & is_column
    row = rows.to(tl.int64)[:, None]
    place = head * width + row * out_token + (sequences * out_seq + features)[None, :]
    if bias is not None:
        bias_tile = bias + head * bias_head + rows * bias_token
        total += tl.load(bias_tile, mask=rows < num_tokens, other=0.0).to(tl.float32)[:, None]
    if gate is not None:
        gate_tile = (
            gate + head * gate_head + row * gate_token + (sequences * gate_seq + features * gate_feature)[None, :]
        )
        factor = tl.load(gate_tile, mask=wanted, other=0.0).to(tl.float32)
        if grad is not None:
            grad_tile = (
                grad + head * grad_head + row * grad_token + (sequences * grad_seq + features * grad_feature)[None, :]
            )
            given = tl.load(grad_tile, mask=wanted, other=0.0).to(tl.float32)
            tl.store(grad_gate + place, given * total, mask=wanted)
            total = given
        total = total * factor
    tl.store(out + place, total, mask=wanted)


@triton.jit
def _lower_tile(number):
    """Return the row and column of a tile, counted row by row through the lower triangle."""
    row = ((tl.sqrt(8.0 * number.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > number, row - 1, row)  # how a GPU rounds a square root is not specified
    row = tl.where((row + 1) * (row + 2) // 2 <= number, row + 1, row)
    return row, number - row * (row + 1) // 2


@triton.jit
def _store_lower(out, total, row_tile, column_tile, strip, context, STRIP: tl.constexpr, BLOCK: tl.constexpr):
    """Store some rows of a lower tile of (T, T), and zeros in its mirror image above the diagonal."""
    within = tl.arange(0, STRIP)[:, None] + strip * STRIP
    across = tl.arange(0, BLOCK)[None, :]
    rows, columns = row_tile * BLOCK + within, column_tile * BLOCK + across
    total = tl.where(columns <= rows, total, 0.0)
    place = rows.to(tl.int64) * context + columns
    tl.store(out + place, total, mask=(rows < context) & (columns < context))
    if row_tile != column_tile:
        rows, columns = column_tile * BLOCK + within, row_tile * BLOCK + across
        place = rows.to(tl.int64) * context + columns
        zeros = tl.zeros((STRIP, BLOCK), dtype=tl.float32)
        tl.store(out + place, zeros, mask=(rows < context) & (columns < context))


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def weight_gradient(
    grad, x, out,
    num_tokens, context, num_seqs, width,
    grad_seq, grad_token, grad_head, grad_feature,
    x_seq, x_token, x_head, x_feature,
    SPLIT: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute one lower tile of ``sum over B, c of grad[m] x[k]``, or one of several parts of that sum.

    ``out`` is the gradient (h, T, T), contiguous; where SPLIT, float32 parts (parts, h, tiles, BLOCK, BLOCK) for
    :func:`add_parts`. Grid: lower tiles, heads, parts.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    row_tile, column_tile = _lower_tile(tile)
    blocks_of_width = tl.cdiv(width, BLOCK_C)
    num_steps = num_seqs * blocks_of_width
    steps_of_part = tl.cdiv(num_steps, tl.num_programs(2))
    first = part * steps_of_part
    last = tl.minimum(first + steps_of_part, num_steps)
    last = tl.where(row_tile * BLOCK < num_tokens, last, first)  # weights of later positions: nothing to add up
    rows = row_tile * BLOCK + tl.arange(0, BLOCK)
    columns = column_tile * BLOCK + tl.arange(0, BLOCK)
    lanes = tl.arange(0, BLOCK_C)
    is_row, is_column = (rows < num_tokens)[:, None], (columns < num_tokens)[None, :]
    grad_rows = grad + head * grad_head + rows.to(tl.int64)[:, None] * grad_token
    x_columns = x + head * x_head + columns.to(tl.int64)[None, :] * x_token
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for step in range(first, last):
        sequence = _wide(step // blocks_of_width)
        features = (step % blocks_of_width) * BLOCK_C + lanes
        is_feature = features < width
        features = features.to(tl.int64)
        grad_tile = grad_rows + (sequence * grad_seq + features * grad_feature)[None, :]
        x_tile = x_columns + (sequence * x_seq + features * x_feature)[:, None]
        grad_block = tl.load(grad_tile, mask=is_row & is_feature[None, :], other=0.0)
        x_block = tl.load(x_tile, mask=is_feature[:, None] & is_column, other=0.0)
        total = _product(grad_block, x_block, total, WIDEN)
    if SPLIT:
        number = (part * tl.num_programs(1) + head) * tl.num_programs(0) + tile
        within = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(out + number * BLOCK * BLOCK + within, total)
    else:
        _store_lower(out + head * context * context, total, row_tile, column_tile, 0, context, BLOCK, BLOCK)


@triton.jit(do_not_specialize=["num_parts"])
def add_parts(parts, out, context, num_parts, STRIP: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the parts of :func:`weight_gradient`, first to last. Grid: lower tiles, heads, strips of a tile."""
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    strip = tl.program_id(2)
    within = (strip * STRIP + tl.arange(0, STRIP)[:, None]) * BLOCK + tl.arange(0, BLOCK)[None, :]
    number = head * tl.num_programs(0) + tile
    part_tile = parts + number * BLOCK * BLOCK + within
    stride = _wide(tl.num_programs(1)) * tl.num_programs(0) * BLOCK * BLOCK
    total = tl.zeros((STRIP, BLOCK), dtype=tl.float32)
    for _ in range(num_parts):
        total += tl.load(part_tile)
        part_tile += stride
    row_tile, column_tile = _lower_tile(tile)
    _store_lower(out + head * context * context, total, row_tile, column_tile, strip, context, STRIP, BLOCK)
