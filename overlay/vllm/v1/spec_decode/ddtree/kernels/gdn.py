# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Gated delta layers over trees: convolution, and the masked solve with its outputs.

Reference: ``gdn`` one level up, which has the mathematics. Both kernels only read a
request's state. What the commit needs later, the layer's inputs, they leave in
``GDNScratch``; ``gdn_commit`` moves the states along the accepted paths.
"""

from __future__ import annotations

import torch

from vllm.triton_utils import tl, triton

NORM_EPSILON = tl.constexpr(1e-6)
CONV_CHANNELS = 512
BLOCK_KEY = 64


class GDNScratch:
    """Inputs of one layer's rows, kept from the forward pass to the commit.

    Args:
        max_num_reqs: R, most requests of a batch.
        max_num_tokens: T, most tokens of the requests that have at most Q rows.
        channels, value_heads, width: C, Hv and W.
        dtype: The model's.
        device: The model's.

    Attributes:
        x: [R (W - 1) + T, C], the convolution's histories of all requests, oldest row
            first, then the rows in the order of the batch.
        first: R (W - 1), the batch's first row in ``x``.
        gates: [T, 2, Hv] float32, log decay and write strength.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_num_tokens: int,
        channels: int,
        value_heads: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.first = max_num_reqs * (width - 1)
        self.x = torch.zeros(
            self.first + max_num_tokens, channels, dtype=dtype, device=device
        )
        self.gates = torch.zeros(
            max_num_tokens, 2, value_heads, device=device, dtype=torch.float32
        )

    @property
    def num_bytes(self) -> int:
        """Size of both buffers."""
        return sum(b.numel() * b.element_size() for b in (self.x, self.gates))


@triton.jit
def _conv_kernel(
    x_ptr,
    out_ptr,
    scratch_ptr,
    state_ptr,
    state_index_ptr,
    weight_ptr,
    bias_ptr,
    query_start_loc_ptr,
    b_parents_ptr,
    b_num_nodes_ptr,
    x_stride,
    out_stride,
    scratch_stride,
    scratch_first,
    state_stride,
    state_channel_stride,
    state_slot_stride,
    index_stride,
    weight_stride,
    num_rows,
    channels,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    req = (tl.program_id(0) // num_rows).to(tl.int64)
    row = tl.program_id(0) % num_rows
    start = tl.load(query_start_loc_ptr + req).to(tl.int64)
    length = tl.load(query_start_loc_ptr + req + 1) - start
    index = tl.load(state_index_ptr + req * index_stride).to(tl.int64)
    # Longer queries than a tree's are prefills; state 0 is nobody's.
    if (row >= length) | (length > num_rows) | (index <= 0):
        return
    is_tree = tl.load(b_num_nodes_ptr + req) > 0
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    history = state_ptr + index * state_stride + channel * state_channel_stride
    kept = scratch_ptr + channel

    own = tl.load(x_ptr + (start + row) * x_stride + channel, mask=inside, other=0.0)
    tl.store(kept + (scratch_first + start + row) * scratch_stride, own, mask=inside)
    if row == 0:
        for slot in tl.static_range(WIDTH - 1):
            old = tl.load(history + slot * state_slot_stride, mask=inside, other=0.0)
            place = req * (WIDTH - 1) + slot
            tl.store(kept + place * scratch_stride, old, mask=inside)

    weight = weight_ptr + channel * weight_stride
    tap = tl.load(weight + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)
    total = own.to(tl.float32) * tap
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    hop = row
    for back in tl.static_range(1, WIDTH):
        # Below zero: a row of the history, -1 being its newest.
        known = tl.load(
            b_parents_ptr + req * num_rows + tl.maximum(hop, 0),
            mask=is_tree & (hop >= 0),
            other=0,
        )
        hop = tl.where(is_tree & (hop >= 0), known, hop - 1)
        from_rows = hop >= 0
        value = tl.load(
            x_ptr + (start + tl.maximum(hop, 0)) * x_stride + channel,
            mask=inside & from_rows,
            other=0.0,
        ).to(tl.float32)
        slot = tl.maximum(WIDTH - 1 + hop, 0)
        value += tl.load(
            history + slot * state_slot_stride,
            mask=inside & (hop < 0),
            other=0.0,
        ).to(tl.float32)
        tap = tl.load(weight + (WIDTH - 1 - back), mask=inside, other=0.0)
        total += value * tap.to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(
        out_ptr + (start + row) * out_stride + channel,
        total.to(out_ptr.dtype.element_ty),
        mask=inside,
    )


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
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
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
    row = tl.arange(0, BLOCK_Q)
    column = tl.arange(0, BLOCK_Q)
    live = row < length
    token = start + row
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_value = value < VALUE_SIZE

    step = tl.load(a_ptr + token * a_stride + head, mask=live, other=0.0)
    step = step.to(tl.float32) + tl.load(dt_bias_ptr + head).to(tl.float32)
    # As upstream: the linear part of softplus beyond 20.
    step = tl.where(step <= 20.0, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))), step)
    g = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32)) * step
    beta = tl.load(b_ptr + token * b_stride + head, mask=live, other=0.0)
    beta = tl.sigmoid(beta.to(tl.float32))
    if tl.program_id(2) == 0:
        kept = gates_ptr + token * 2 * VALUE_HEADS + head
        tl.store(kept, g, mask=live)
        tl.store(kept + VALUE_HEADS, beta, mask=live)

    # Ancestors and the row itself; without a tree all earlier rows.
    seen = (column[None, :] <= row[:, None]) & live[:, None]
    for word in tl.static_range(NUM_WORDS):
        bits = tl.load(
            b_mask_ptr + (req * num_rows + row) * num_words + word,
            mask=live & is_tree,
            other=-1,
        )
        here = column // 32 == word
        set_ = ((bits[:, None] >> (column % 32)[None, :]) & 1) != 0
        seen = seen & (set_ | (~here)[None, :])
    total = tl.sum(tl.where(seen, g[None, :], 0.0), axis=1)
    # The mask comes before the exponential: beside the path the sign is any.
    decay = tl.where(seen, total[:, None] - total[None, :], float("-inf"))
    decay = tl.exp(decay)

    key_head = head // (VALUE_HEADS // KEY_HEADS)
    query = mixed_ptr + token * mixed_stride + key_head * KEY_SIZE
    key = query + KEY_HEADS * KEY_SIZE
    state = state_ptr + index * state_stride + (head * VALUE_SIZE + value) * KEY_SIZE
    dim = tl.arange(0, BLOCK_K)
    products = tl.zeros([BLOCK_Q, BLOCK_Q], dtype=tl.float32)
    key_state = tl.zeros([BLOCK_Q, BLOCK_V], dtype=tl.float32)
    query_state = tl.zeros([BLOCK_Q, BLOCK_V], dtype=tl.float32)
    key_square = tl.zeros([BLOCK_Q], dtype=tl.float32)
    query_square = tl.zeros([BLOCK_Q], dtype=tl.float32)
    for at in range(0, KEY_SIZE, BLOCK_K):
        mask = live[:, None] & (at + dim < KEY_SIZE)[None, :]
        k = tl.load(key[:, None] + (at + dim)[None, :], mask=mask, other=0.0)
        q = tl.load(query[:, None] + (at + dim)[None, :], mask=mask, other=0.0)
        s = tl.load(
            state[:, None] + (at + dim)[None, :],
            mask=in_value[:, None] & (at + dim < KEY_SIZE)[None, :],
            other=0.0,
        ).to(tl.float32)
        # Products of bfloat16 numbers are exact; the norms come in afterwards.
        products += tl.dot(k, tl.trans(k), input_precision=PRECISION)
        k = k.to(tl.float32)
        q = q.to(tl.float32)
        key_square += tl.sum(k * k, axis=1)
        query_square += tl.sum(q * q, axis=1)
        key_state += tl.dot(k, tl.trans(s), input_precision=PRECISION)
        query_state += tl.dot(q, tl.trans(s), input_precision=PRECISION)
    key_norm = 1.0 / tl.sqrt(key_square + NORM_EPSILON)
    query_norm = scale / tl.sqrt(query_square + NORM_EPSILON)

    begin = tl.exp(total)
    system = products * decay * (beta * key_norm)[:, None] * key_norm[None, :]
    system = tl.where(column[None, :] < row[:, None], system, 0.0)
    v = tl.load(
        mixed_ptr
        + (token * mixed_stride)[:, None]
        + (2 * KEY_HEADS * KEY_SIZE + head * VALUE_SIZE + value)[None, :],
        mask=live[:, None] & in_value[None, :],
        other=0.0,
    ).to(tl.float32)
    right = beta[:, None] * (v - (begin * key_norm)[:, None] * key_state)
    # A row of depth d is exact after d rounds, as by forward substitution, since its
    # ancestors are exact by then; powers of the system would cancel badly.
    deepest = tl.max(tl.sum(seen.to(tl.int32), axis=1), axis=0)
    u = right
    for _ in range(1, deepest):
        u = right - tl.dot(system, u, input_precision=PRECISION)

    products = tl.zeros([BLOCK_Q, BLOCK_Q], dtype=tl.float32)
    for at in range(0, KEY_SIZE, BLOCK_K):
        mask = live[:, None] & (at + dim < KEY_SIZE)[None, :]
        k = tl.load(key[:, None] + (at + dim)[None, :], mask=mask, other=0.0)
        q = tl.load(query[:, None] + (at + dim)[None, :], mask=mask, other=0.0)
        products += tl.dot(q, tl.trans(k), input_precision=PRECISION)
    products = products * decay * query_norm[:, None] * key_norm[None, :]
    out = (begin * query_norm)[:, None] * query_state
    out += tl.dot(products, u, input_precision=PRECISION)
    tl.store(
        out_ptr
        + (token * out_stride + head * out_head_stride)[:, None]
        + value[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=live[:, None] & in_value[None, :],
    )


def tree_conv(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    state_indices: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    tree,
    num_reqs: int,
    out: torch.Tensor,
    scratch: GDNScratch,
    silu: bool = True,
) -> None:
    """Convolve every row with its ancestors; one launch, the state is only read.

    Args:
        x: [T, C], last dimension contiguous, rows of any stride.
        conv_state: [blocks, C, W - 1], oldest slot first, any strides.
        state_indices: [>= num_reqs] integer, any stride. 0 and less: no request.
        weight: [C, W].
        bias: [C] or None.
        query_start_loc: [>= num_reqs + 1] int32.
        tree: Buffers with ``b_parents`` and ``b_num_nodes``.
        num_reqs: Requests. One with more rows than a tree is left out.
        out: [T, C], written; last dimension contiguous.
        scratch: Gets history and rows.
        silu: Whether SiLU comes after.
    """
    channels, width = weight.shape
    grid = (num_reqs * tree.num_rows, triton.cdiv(channels, CONV_CHANNELS))
    _conv_kernel[grid](
        x,
        out,
        scratch.x,
        conv_state,
        state_indices,
        weight,
        bias if bias is not None else weight,
        query_start_loc,
        tree.b_parents,
        tree.b_num_nodes,
        x.stride(0),
        out.stride(0),
        scratch.x.stride(0),
        scratch.first,
        *conv_state.stride(),
        state_indices.stride(0),
        weight.stride(0),
        tree.num_rows,
        channels,
        WIDTH=width,
        HAS_BIAS=bias is not None,
        SILU=silu,
        BLOCK_C=CONV_CHANNELS,
        num_warps=4,
    )


def tree_delta_rule(
    mixed: torch.Tensor,
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
        mixed: [T, C], after the convolution: q, k [Hk, Dk] each, v [Hv, Dv].
        a, b: [T, Hv], last dimension contiguous.
        a_log, dt_bias: [Hv].
        ssm_state: [blocks, Hv, Dv, Dk], contiguous but for the first dimension.
        state_indices, query_start_loc, num_reqs: As in ``tree_conv``.
        tree: Buffers with ``b_mask`` and ``b_num_nodes``.
        key_heads: Hk.
        out: [T, Hv, Dv], written; last dimension contiguous.
        scratch: Gets the gates.
    """
    value_heads, value_size, key_size = ssm_state.shape[1:]
    block_q = max(16, triton.next_power_of_2(tree.num_rows))
    # Registers hold [Q, Q] and [Q, V]; more programs than tiles help a small batch.
    block_v = 32 if block_q <= 64 else 16
    grid = (num_reqs, value_heads, triton.cdiv(value_size, block_v))
    _delta_kernel[grid](
        mixed,
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
        mixed.stride(0),
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
        BLOCK_Q=block_q,
        BLOCK_K=min(BLOCK_KEY, max(16, triton.next_power_of_2(key_size))),
        BLOCK_V=block_v,
        PRECISION="tf32x3",
        num_warps=4 if block_q <= 64 else 8,
        num_stages=1,
    )
