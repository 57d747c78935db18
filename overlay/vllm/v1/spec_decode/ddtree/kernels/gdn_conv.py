# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Gated delta layers over trees: the convolution, and what a layer keeps of its rows.

Reference: ``gdn.tree_conv`` one level up. The kernel only reads a request's history;
it leaves that and the layer's inputs in ``GDNScratch`` for the solve (``gdn``) and for
the commit (``gdn_commit``).
"""

from __future__ import annotations

import torch

from vllm.triton_utils import tl, triton

CONV_CHANNELS = 512


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
        mixed: [T, C], the rows after the convolution; model dtype.
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
        self.mixed = torch.zeros(max_num_tokens, channels, dtype=dtype, device=device)
        self.gates = torch.zeros(
            max_num_tokens, 2, value_heads, device=device, dtype=torch.float32
        )

    @property
    def num_bytes(self) -> int:
        """Size of the buffers."""
        buffers = self.x, self.mixed, self.gates
        return sum(b.numel() * b.element_size() for b in buffers)


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


def tree_conv(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    state_indices: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    tree,
    num_reqs: int,
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
        scratch: Gets histories, rows and results.
        silu: Whether SiLU comes after.
    """
    channels, width = weight.shape
    grid = (num_reqs * tree.num_rows, triton.cdiv(channels, CONV_CHANNELS))
    _conv_kernel[grid](
        x,
        scratch.mixed,
        scratch.x,
        conv_state,
        state_indices,
        weight,
        bias if bias is not None else weight,
        query_start_loc,
        tree.b_parents,
        tree.b_num_nodes,
        x.stride(0),
        scratch.mixed.stride(0),
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
