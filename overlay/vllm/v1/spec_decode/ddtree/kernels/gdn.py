# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Gated delta layers over trees: the masked solve with its outputs.

Reference: ``gdn`` one level up, which has the mathematics. ``gdn_conv`` comes before
it. The kernel only reads a request's state. What the commit needs later stays in
``GDNScratch``; ``gdn_commit`` moves the states along the accepted paths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm.triton_utils import tl, triton

from .gdn_conv import GDNScratch

NORM_EPSILON = tl.constexpr(1e-6)


class Tiles(NamedTuple):
    """How a program of the solve works.

    Attributes:
        rows: Rows of a block; the second block of two sees the first's results.
        key, value: Key and value dimensions at a time.
        warps: Of a program.
        invert: Whether a block's system is inverted; else it is iterated.
    """

    rows: int
    key: int
    value: int
    warps: int
    invert: bool


def choose_tiles(num_rows: int, key_size: int, num_heads: int) -> Tiles:
    """Tiles for trees of so many rows, from a sweep on an H200.

    Registers hold [rows, rows] and [rows, value]. Small value tiles give a small batch
    more programs, but each of them solves anew.

    Args:
        num_rows: Q.
        key_size: Dk.
        num_heads: Value heads of all requests.
    """
    rows = min(64, max(16, triton.next_power_of_2(num_rows)))
    size = max(16, triton.next_power_of_2(key_size))
    if rows == 16:
        return Tiles(rows, min(128, size), 64, 4, True)
    value = 32 if rows == 64 and num_heads <= 96 else 64
    return Tiles(rows, min(64, size), value, 4, False)


@triton.jit
def unit_inverse(
    system, SIZE: tl.constexpr, ROUNDS: tl.constexpr, PRECISION: tl.constexpr
):
    """Inverse of the identity plus a strictly lower triangular [SIZE, SIZE].

    SIZE is 2 ** ROUNDS. Every round doubles the diagonal blocks that are inverted,
    which is forward substitution; powers of the matrix would cancel badly where keys
    repeat.
    """
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    for step in tl.static_range(ROUNDS):
        below = (row >> step != column >> step) & (
            row >> (step + 1) == column >> (step + 1)
        )
        below = tl.where(below, system, 0.0)
        if step > 0:
            below = tl.dot(inverse, below, input_precision=PRECISION)
            below = tl.dot(below, inverse, input_precision=PRECISION)
        inverse -= below
    return inverse


@triton.jit
def dot_state(x, state, PRECISION: tl.constexpr):
    """x [Q, K] of the model's dtype times the transpose of a float32 state [V, K].

    Three bfloat16 numbers hold a float32, and the products are exact.
    """
    if x.dtype == tl.bfloat16:
        high = state.to(tl.bfloat16)
        rest = state - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(x, tl.trans(low))
        total = tl.dot(x, tl.trans(middle), total)
        total = tl.dot(x, tl.trans(high), total)
    else:
        x = x.to(tl.float32)
        total = tl.dot(x, tl.trans(state), input_precision=PRECISION)
    return total


@triton.jit
def dot_keys(left, keys, PRECISION: tl.constexpr):
    """float32 left [V, P] times keys [P, K] of the model's dtype, as exactly."""
    if keys.dtype == tl.bfloat16:
        high = left.to(tl.bfloat16)
        rest = left - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(low, keys)
        total = tl.dot(middle, keys, total)
        total = tl.dot(high, keys, total)
    else:
        total = tl.dot(left, keys.to(tl.float32), input_precision=PRECISION)
    return total


@triton.jit
def _seen(
    b_mask_ptr, line, num_words, row, column, live, is_tree, NUM_WORDS: tl.constexpr
):
    """[Q, Q]: a row sees its ancestors and itself; without a tree all earlier rows."""
    seen = (column[None, :] <= row[:, None]) & live[:, None]
    for word in tl.static_range(NUM_WORDS):
        bits = tl.load(
            b_mask_ptr + (line + row) * num_words + word,
            mask=live & is_tree,
            other=-1,
        )
        here = column // 32 == word
        set_ = ((bits[:, None] >> (column % 32)[None, :]) & 1) != 0
        seen = seen & (set_ | (~here)[None, :])
    return seen


@triton.jit
def _delta_kernel(
    mixed_ptr,
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    state_ptr,
    state_index_ptr,
    out_ptr,
    gates_ptr,
    query_start_loc_ptr,
    b_num_nodes_ptr,
    b_mask_ptr,
    scale,
    mixed_stride,
    a_stride,
    b_stride,
    state_stride,
    index_stride,
    out_stride,
    out_head_stride,
    num_rows,
    num_words,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROUNDS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    start = tl.load(query_start_loc_ptr + req).to(tl.int64)
    length = tl.load(query_start_loc_ptr + req + 1) - start
    index = tl.load(state_index_ptr + req * index_stride).to(tl.int64)
    if (length == 0) | (length > num_rows) | (index <= 0):
        return
    is_tree = tl.load(b_num_nodes_ptr + req) > 0
    line = req * num_rows
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_value = value < VALUE_SIZE
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    query = mixed_ptr + key_head * KEY_SIZE
    key = query + KEY_HEADS * KEY_SIZE
    state = state_ptr + index * state_stride + (head * VALUE_SIZE + value) * KEY_SIZE
    dim = tl.arange(0, BLOCK_K)
    a_log = tl.load(a_log_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)

    # Rows beyond the first block see that one through what it leaves behind: u, the
    # sums of g, g itself, and the keys' norms.
    u_before = tl.zeros([BLOCK_Q, BLOCK_V], dtype=tl.float32)
    total_before = tl.zeros([BLOCK_Q], dtype=tl.float32)
    g_before = tl.zeros([BLOCK_Q], dtype=tl.float32)
    norm_before = tl.zeros([BLOCK_Q], dtype=tl.float32)
    for block in tl.static_range(BLOCKS):
        row = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
        live = row < length
        token = start + row
        step = tl.load(a_ptr + token * a_stride + head, mask=live, other=0.0)
        step = step.to(tl.float32) + dt_bias
        # As upstream: the linear part of softplus beyond 20.
        soft = tl.log(1.0 + tl.exp(tl.minimum(step, 20.0)))
        g = -tl.exp(a_log) * tl.where(step <= 20.0, soft, step)
        beta = tl.load(b_ptr + token * b_stride + head, mask=live, other=0.0)
        beta = tl.sigmoid(beta.to(tl.float32))
        if tl.program_id(2) == 0:
            kept = gates_ptr + token * 2 * VALUE_HEADS + head
            tl.store(kept, g, mask=live)
            tl.store(kept + VALUE_HEADS, beta, mask=live)

        seen = _seen(b_mask_ptr, line, num_words, row, row, live, is_tree, NUM_WORDS)
        total = tl.sum(tl.where(seen, g[None, :], 0.0), axis=1)
        if block > 0:
            seen_before = _seen(
                b_mask_ptr, line, num_words, row, row - BLOCK_Q, live, is_tree,
                NUM_WORDS,
            )  # fmt: skip
            total += tl.sum(tl.where(seen_before, g_before[None, :], 0.0), axis=1)
            cross_key = tl.zeros([BLOCK_Q, BLOCK_Q], dtype=tl.float32)
            cross_query = tl.zeros([BLOCK_Q, BLOCK_Q], dtype=tl.float32)

        key_key = tl.zeros([BLOCK_Q, BLOCK_Q], dtype=tl.float32)
        query_key = tl.zeros([BLOCK_Q, BLOCK_Q], dtype=tl.float32)
        key_state = tl.zeros([BLOCK_Q, BLOCK_V], dtype=tl.float32)
        query_state = tl.zeros([BLOCK_Q, BLOCK_V], dtype=tl.float32)
        key_square = tl.zeros([BLOCK_Q], dtype=tl.float32)
        query_square = tl.zeros([BLOCK_Q], dtype=tl.float32)
        for at in range(0, KEY_SIZE, BLOCK_K):
            mask = live[:, None] & (at + dim < KEY_SIZE)[None, :]
            place = (token * mixed_stride)[:, None] + (at + dim)[None, :]
            k = tl.load(key + place, mask=mask, other=0.0)
            q = tl.load(query + place, mask=mask, other=0.0)
            s = tl.load(
                state[:, None] + (at + dim)[None, :],
                mask=in_value[:, None] & (at + dim < KEY_SIZE)[None, :],
                other=0.0,
            ).to(tl.float32)
            # Products of bfloat16 numbers are exact; the norms come in afterwards.
            key_key += tl.dot(k, tl.trans(k), input_precision=PRECISION)
            query_key += tl.dot(q, tl.trans(k), input_precision=PRECISION)
            key_state += dot_state(k, s, PRECISION)
            query_state += dot_state(q, s, PRECISION)
            key_square += tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1)
            query_square += tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=1)
            if block > 0:
                k_before = tl.load(
                    key + place - BLOCK_Q * mixed_stride,
                    mask=(row - BLOCK_Q < length)[:, None]
                    & (at + dim < KEY_SIZE)[None, :],
                    other=0.0,
                )
                cross_key += tl.dot(k, tl.trans(k_before), input_precision=PRECISION)
                cross_query += tl.dot(q, tl.trans(k_before), input_precision=PRECISION)
        key_norm = 1.0 / tl.sqrt(key_square + NORM_EPSILON)
        query_norm = scale / tl.sqrt(query_square + NORM_EPSILON)

        begin = tl.exp(total)
        # The mask comes before the exponential: beside the path the sign is any.
        decay = tl.where(seen, total[:, None] - total[None, :], float("-inf"))
        decay = tl.exp(decay) * key_norm[None, :]
        system = key_key * decay * (beta * key_norm)[:, None]
        system = tl.where(row[None, :] < row[:, None], system, 0.0)
        v = tl.load(
            mixed_ptr
            + (token * mixed_stride)[:, None]
            + (2 * KEY_HEADS * KEY_SIZE + head * VALUE_SIZE + value)[None, :],
            mask=live[:, None] & in_value[None, :],
            other=0.0,
        ).to(tl.float32)
        right = beta[:, None] * (v - (begin * key_norm)[:, None] * key_state)
        out = begin[:, None] * query_state
        if block > 0:
            decay_before = tl.where(
                seen_before, total[:, None] - total_before[None, :], float("-inf")
            )
            decay_before = tl.exp(decay_before) * norm_before[None, :]
            cross_key = cross_key * decay_before * (beta * key_norm)[:, None]
            right -= tl.dot(cross_key, u_before, input_precision=PRECISION)
            cross_query = cross_query * decay_before
            out += tl.dot(cross_query, u_before, input_precision=PRECISION)
        if ROUNDS > 0:
            inverse = unit_inverse(system, BLOCK_Q, ROUNDS, PRECISION)
            u = tl.dot(inverse, right, input_precision=PRECISION)
        else:
            # A row is exact after as many rounds as it has ancestors here, as by
            # forward substitution. Powers of the system, even its square, would cancel
            # badly where keys repeat.
            deepest = tl.max(tl.sum(seen.to(tl.int32), axis=1), axis=0)
            u = right
            for _ in range(1, deepest):
                u = right - tl.dot(system, u, input_precision=PRECISION)
        out += tl.dot(query_key * decay, u, input_precision=PRECISION)
        out = out * query_norm[:, None]
        tl.store(
            out_ptr
            + (token * out_stride + head * out_head_stride)[:, None]
            + value[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=live[:, None] & in_value[None, :],
        )
        if block + 1 < BLOCKS:
            u_before, total_before, g_before, norm_before = u, total, g, key_norm


def tree_delta_rule(
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_state: torch.Tensor,
    state_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    tree,
    num_reqs: int,
    key_heads: int,
    out: torch.Tensor,
    scratch: GDNScratch,
) -> None:
    """Solve and give the outputs of all rows; one launch, the state is only read.

    Args:
        a, b: [T, Hv], last dimension contiguous.
        a_log, dt_bias: [Hv].
        ssm_state: [blocks, Hv, Dv, Dk], contiguous but for the first dimension.
        state_indices, query_start_loc, num_reqs: As in ``gdn_conv.tree_conv``.
        tree: Buffers with ``b_mask`` and ``b_num_nodes``.
        key_heads: Hk.
        out: [T, Hv, Dv], written; last dimension contiguous.
        scratch: Has q, k [Hk, Dk] each and v [Hv, Dv] of the rows after the
            convolution, as ``tree_conv`` left them; gets the gates.
    """
    value_heads, value_size, key_size = ssm_state.shape[1:]
    tiles = choose_tiles(tree.num_rows, key_size, num_reqs * value_heads)
    grid = (num_reqs, value_heads, triton.cdiv(value_size, tiles.value))
    _delta_kernel[grid](
        scratch.mixed,
        a,
        b,
        a_log,
        dt_bias,
        ssm_state,
        state_indices,
        out,
        scratch.gates,
        query_start_loc,
        tree.b_num_nodes,
        tree.b_mask,
        key_size**-0.5,
        scratch.mixed.stride(0),
        a.stride(0),
        b.stride(0),
        ssm_state.stride(0),
        state_indices.stride(0),
        out.stride(0),
        out.stride(1),
        tree.num_rows,
        tree.b_mask.shape[2],
        KEY_HEADS=key_heads,
        VALUE_HEADS=value_heads,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        NUM_WORDS=tree.b_mask.shape[2],
        BLOCKS=triton.cdiv(tree.num_rows, tiles.rows),
        BLOCK_Q=tiles.rows,
        BLOCK_K=tiles.key,
        BLOCK_V=tiles.value,
        ROUNDS=tiles.rows.bit_length() - 1 if tiles.invert else 0,
        PRECISION="tf32x3",
        num_warps=tiles.warps,
        num_stages=1,
    )
