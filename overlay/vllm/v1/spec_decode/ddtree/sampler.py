# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Walks verified trees: from the root to the child that the target sampled.

The target's token is sampled at every row with the request's own parameters. The walk
follows the child that equals it and stops where there is none; the last sampled token
is the bonus. No draft probability is used, so the output has the target's distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .tree import TreeBatch


def walk(
    tree: TreeBatch, node_tokens: Tensor, max_depth: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the accepted path of every request.

    Args:
        tree: The trees that were verified, budget N.
        node_tokens: The target's token at every row, [B, Q] integer. Values at
            invalid rows are ignored.
        max_depth: D, the most nodes that can be accepted; L is enough. N by default.
            A deeper tree is walked to depth D only, which is still lossless.

    Returns:
        sampled: [B, D + 1] int64, accepted tokens, then the bonus, then -1.
        num_sampled: [B] int32, accepted nodes + 1.
        path: [B, D + 1] int32, rows of the accepted nodes, root first, then -1.
            Strictly increasing, and ``path[:, d] >= d``. ``sampled[:, d]`` is
            the target's token at row ``path[:, d]``.

    Raises:
        ValueError: ``node_tokens`` is not [B, Q].
    """
    if node_tokens.shape != tree.parents.shape:
        raise ValueError(
            f"node_tokens has shape {list(node_tokens.shape)}, expected "
            f"{list(tree.parents.shape)}"
        )
    node_tokens = node_tokens.to(torch.int64)
    batch_size, num_rows = node_tokens.shape
    device = node_tokens.device
    depth_limit = tree.budget if max_depth is None else min(max_depth, tree.budget)

    # A node is reached if its parent's sampled token is the node's own token.
    parents = tree.parents[:, 1:].to(torch.int64).clamp(min=0)
    matches = node_tokens.gather(1, parents) == tree.tokens
    matches &= tree.valid[:, 1:]

    # next_row[r] is the first matching child of row r. num_rows means none.
    none = num_rows
    rows = torch.arange(1, num_rows, device=device)
    next_row = torch.full((batch_size, num_rows + 1), none, device=device)
    next_row.scatter_reduce_(1, parents, torch.where(matches, rows, none), "amin")

    width = (tree.budget if max_depth is None else max_depth) + 1
    path = torch.full((batch_size, width), none, device=device)
    path[:, 0] = 0
    for depth in range(1, depth_limit + 1):
        path[:, depth, None] = next_row.gather(1, path[:, depth - 1, None])

    accepted = path < none
    sampled = node_tokens.gather(1, path.clamp(max=num_rows - 1))
    return (
        sampled.masked_fill(~accepted, -1),
        accepted.sum(1, dtype=torch.int32),
        path.masked_fill(~accepted, -1).to(torch.int32),
    )
