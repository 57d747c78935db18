# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Puts the step's trees into batch order, and drafted trees into slot order.

One launch each, without a look at the host. The bitmask's reference is
``tree.ancestor_bitmask``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.triton_utils import tl, triton

if TYPE_CHECKING:
    from vllm.v1.spec_decode.ddtree.tree_state import TreeState


@triton.jit
def _prepare_step_kernel(
    idx_mapping_ptr,
    query_start_loc_ptr,
    cu_num_logits_ptr,
    positions_ptr,
    parents_ptr,
    depths_ptr,
    num_nodes_ptr,
    b_parents_ptr,
    b_depths_ptr,
    b_num_nodes_ptr,
    b_mask_ptr,
    b_path_ptr,
    b_num_sampled_ptr,
    num_reqs,
    num_rows,
    num_words,
    path_len,
    BLOCK_Q: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK_Q)
    word = tl.arange(0, BLOCK_W)
    hop = tl.arange(0, BLOCK_P)
    in_batch = req < num_reqs
    slot = tl.load(idx_mapping_ptr + req, mask=in_batch, other=0).to(tl.int64)
    start = tl.load(query_start_loc_ptr + req, mask=in_batch, other=0)
    end = tl.load(query_start_loc_ptr + req + 1, mask=in_batch, other=0)
    first = tl.load(cu_num_logits_ptr + req, mask=in_batch, other=0)
    last = tl.load(cu_num_logits_ptr + req + 1, mask=in_batch, other=0)
    rows = last - first
    # A row with a prompt tail before its drafts is verified as plain causal.
    is_tree = in_batch & (rows >= 2) & (end - start == rows)
    nodes = tl.load(num_nodes_ptr + slot, mask=is_tree, other=0)
    nodes = tl.minimum(nodes, tl.maximum(rows - 1, 0))

    causal = nodes == 0
    valid = row <= nodes
    in_row = row < num_rows
    source = slot * num_rows + row
    parent = tl.load(parents_ptr + source, mask=valid & in_row, other=-1)
    depth = tl.load(depths_ptr + source, mask=valid & in_row, other=0)
    parent = tl.where(causal, row - 1, parent)
    depth = tl.where(causal, row, depth)

    # Every row climbs its own ancestors; a row beyond the tree sees only itself.
    mask = tl.zeros([BLOCK_Q, BLOCK_W], dtype=tl.int32)
    above = row
    one = tl.full([BLOCK_Q, BLOCK_W], 1, dtype=tl.int32)
    for _ in range(path_len):
        live = above >= 0
        safe = tl.where(live, above, 0)
        bit = one << (safe % 32)[:, None]
        hit = live[:, None] & ((safe // 32)[:, None] == word[None, :])
        mask = mask | tl.where(hit, bit, 0)
        above = tl.load(
            parents_ptr + slot * num_rows + safe,
            mask=live & valid & in_row,
            other=-1,
        )
    # All rows up to the own one.
    count = row[:, None] + 1 - 32 * word[None, :]
    some = one << (tl.minimum(tl.maximum(count, 0), 31))
    lower = tl.where(count >= 32, -1, tl.where(count <= 0, 0, some - 1))
    mask = tl.where(causal, lower, mask)

    target = req * num_rows + row
    tl.store(b_parents_ptr + target, parent, mask=in_row)
    tl.store(b_depths_ptr + target, depth, mask=in_row)
    tl.store(
        b_mask_ptr + target[:, None] * num_words + word[None, :],
        mask,
        mask=in_row[:, None] & (word < num_words)[None, :],
    )
    tl.store(b_num_nodes_ptr + req, nodes)
    tl.store(b_num_sampled_ptr + req, 0)
    tl.store(b_path_ptr + req * path_len + hop, -1, mask=hop < path_len)

    # The slot of row i is start + i, its position start + depth.
    moved = (row > 0) & valid & (nodes > 0)
    here = positions_ptr + start + row
    position = tl.load(here, mask=moved, other=0)
    tl.store(here, position - (row - depth), mask=moved)


def prepare_step(
    tree: TreeState,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    positions: torch.Tensor,
    num_reqs: int,
    num_reqs_padded: int,
) -> None:
    """Gather the trees that this step verifies and correct the positions in place.

    A request has a tree in this step if its slot has one, all its rows have logits,
    and drafts are scheduled; a truncated schedule takes a prefix. All others, and the
    padding rows, become causal: ``b_num_nodes`` 0, depth ``i`` and the lower triangle
    as mask. The accepted paths of the last step are cleared.

    Args:
        tree: The buffers; the ``b_`` ones are written.
        idx_mapping: [num_reqs] int32, batch row to slot.
        query_start_loc: [>= num_reqs + 1] int32.
        cu_num_logits: [num_reqs + 1] int32.
        positions: [T] int64, linear; row ``i`` of a tree becomes start + depth.
        num_reqs: Requests in the batch.
        num_reqs_padded: Rows of a captured graph, at least ``num_reqs``.
    """
    num_words = tree.b_mask.shape[2]
    path_len = tree.b_path.shape[1]
    _prepare_step_kernel[(num_reqs_padded,)](
        idx_mapping,
        query_start_loc,
        cu_num_logits,
        positions,
        tree.parents,
        tree.depths,
        tree.num_nodes,
        tree.b_parents,
        tree.b_depths,
        tree.b_num_nodes,
        tree.b_mask,
        tree.b_path,
        tree.b_num_sampled,
        num_reqs,
        tree.num_rows,
        num_words,
        path_len,
        BLOCK_Q=triton.next_power_of_2(tree.num_rows),
        BLOCK_W=triton.next_power_of_2(num_words),
        BLOCK_P=triton.next_power_of_2(path_len),
        num_warps=4,
    )


@triton.jit
def _shift_positions_kernel(
    positions_ptr,
    plane_stride,
    query_start_loc_ptr,
    b_depths_ptr,
    b_num_nodes_ptr,
    num_rows,
    BLOCK_Q: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)
    nodes = tl.load(b_num_nodes_ptr + req)
    row = tl.arange(0, BLOCK_Q)
    moved = (row > 0) & (row <= nodes)
    start = tl.load(query_start_loc_ptr + req)
    depth = tl.load(b_depths_ptr + req * num_rows + row, mask=moved, other=0)
    here = positions_ptr + plane * plane_stride + start + row
    position = tl.load(here, mask=moved, other=0)
    tl.store(here, position - (row - depth), mask=moved)


def shift_positions(
    positions: torch.Tensor,
    tree: TreeState,
    query_start_loc: torch.Tensor,
    num_reqs: int,
) -> None:
    """Correct multi-dimensional RoPE positions, after ``prepare_step``.

    All planes advance by one per generated token, so one correction fits all.

    Args:
        positions: [planes, T] integer, last dimension contiguous; changed in place.
        tree: The buffers of this step.
        query_start_loc: [>= num_reqs + 1] int32.
        num_reqs: Requests in the batch.
    """
    _shift_positions_kernel[(num_reqs, positions.shape[0])](
        positions,
        positions.stride(0),
        query_start_loc,
        tree.b_depths,
        tree.b_num_nodes,
        tree.num_rows,
        BLOCK_Q=triton.next_power_of_2(tree.num_rows),
        num_warps=1,
    )


@triton.jit
def _store_drafts_kernel(
    idx_mapping_ptr,
    d_parents_ptr,
    d_depths_ptr,
    d_num_nodes_ptr,
    parents_ptr,
    depths_ptr,
    num_nodes_ptr,
    num_rows,
    BLOCK_Q: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    row = tl.arange(0, BLOCK_Q)
    mask = row < num_rows
    source = req * num_rows + row
    target = slot * num_rows + row
    parent = tl.load(d_parents_ptr + source, mask=mask, other=-1)
    depth = tl.load(d_depths_ptr + source, mask=mask, other=0)
    tl.store(parents_ptr + target, parent, mask=mask)
    tl.store(depths_ptr + target, depth, mask=mask)
    tl.store(num_nodes_ptr + slot, tl.load(d_num_nodes_ptr + req))


def store_drafts(tree: TreeState, idx_mapping: torch.Tensor, num_reqs: int) -> None:
    """Copy the drafted trees' shapes to their slots; the runner copies the tokens.

    Args:
        tree: The buffers; ``d_`` is read, the slot order is written.
        idx_mapping: [num_reqs] int32, batch row to slot, no slot twice.
        num_reqs: Requests in the batch.
    """
    _store_drafts_kernel[(num_reqs,)](
        idx_mapping,
        tree.d_parents,
        tree.d_depths,
        tree.d_num_nodes,
        tree.parents,
        tree.depths,
        tree.num_nodes,
        tree.num_rows,
        BLOCK_Q=triton.next_power_of_2(tree.num_rows),
        num_warps=1,
    )
