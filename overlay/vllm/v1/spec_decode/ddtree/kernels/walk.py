# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Walks the verified trees, one program per request. Reference: ``sampler.walk``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.triton_utils import tl, triton

if TYPE_CHECKING:
    from vllm.v1.spec_decode.ddtree.tree_state import TreeState


@triton.jit
def _walk_kernel(
    node_tokens_ptr,
    draft_tokens_ptr,
    cu_num_logits_ptr,
    b_parents_ptr,
    b_num_nodes_ptr,
    sampled_ptr,
    num_sampled_ptr,
    b_path_ptr,
    b_num_sampled_ptr,
    num_rows,
    path_len,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK_Q)
    hop = tl.arange(0, BLOCK_P)
    start = tl.load(cu_num_logits_ptr + req).to(tl.int64)
    nodes = tl.load(b_num_nodes_ptr + req)
    node = (row > 0) & (row <= nodes)
    parent = tl.load(b_parents_ptr + req * num_rows + row, mask=node, other=-2)
    draft = tl.load(draft_tokens_ptr + start + row, mask=node, other=-1).to(tl.int64)

    token = tl.load(node_tokens_ptr + start).to(tl.int64)
    path = tl.where(hop == 0, 0, -1)
    sampled = tl.where(hop == 0, token, tl.full([BLOCK_P], -1, dtype=tl.int64))
    current = nodes * 0
    depth = nodes * 0
    going = nodes > 0
    while going:
        match = node & (parent == current) & (draft == token)
        child = tl.min(tl.where(match, row, BLOCK_Q), axis=0)
        going = (child < BLOCK_Q) & (depth + 1 < path_len)
        current = tl.where(going, child, current)
        depth = tl.where(going, depth + 1, depth)
        token = tl.load(node_tokens_ptr + start + current).to(tl.int64)
        path = tl.where(hop == depth, current, path)
        sampled = tl.where(hop == depth, token, sampled)

    mask = hop < path_len
    tl.store(b_path_ptr + req * path_len + hop, path, mask=mask)
    tl.store(sampled_ptr + req * path_len + hop, sampled, mask=mask)
    tl.store(num_sampled_ptr + req, depth + 1)
    tl.store(b_num_sampled_ptr + req, depth + 1)


def walk(
    node_tokens: torch.Tensor,
    draft_tokens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    tree: TreeState,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Follow the child that the target sampled; the last sampled token is the bonus.

    Args:
        node_tokens: [num_logits] int64, the target's token at every row.
        draft_tokens: [num_logits] integer, the token of every row; row 0 is the root.
        cu_num_logits: [B + 1] int32, first row of each request.
        tree: The buffers of this step; ``b_path`` and ``b_num_sampled`` are written.

    Returns:
        ``sampled`` [B, L + 1] int64, accepted tokens, then the bonus, then -1, and
        ``num_sampled`` [B] int32. A request without a tree gets its first row's token.
    """
    batch_size = cu_num_logits.shape[0] - 1
    path_len = tree.b_path.shape[1]
    sampled = node_tokens.new_empty(batch_size, path_len)
    num_sampled = tree.b_num_sampled.new_empty(batch_size)
    _walk_kernel[(batch_size,)](
        node_tokens,
        draft_tokens,
        cu_num_logits,
        tree.b_parents,
        tree.b_num_nodes,
        sampled,
        num_sampled,
        tree.b_path,
        tree.b_num_sampled,
        tree.num_rows,
        path_len,
        BLOCK_Q=triton.next_power_of_2(tree.num_rows),
        BLOCK_P=triton.next_power_of_2(path_len),
        num_warps=1,
    )
    return sampled, num_sampled
