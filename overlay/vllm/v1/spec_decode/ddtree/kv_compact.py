# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Moves the K/V rows of accepted nodes to where a chain would have put them.

Node ``i`` of a tree is verified in slot position ``start + i``. Once the path is
known, the row of ``path[d]`` belongs at ``start + d``. The slots behind it hold
rejected nodes, and the next step overwrites them.

Plan once a step, then move in every cache that shares the block table.
"""

from __future__ import annotations

import torch
from torch import Tensor


def plan_moves(
    block_table: Tensor,
    block_size: int,
    start: Tensor,
    path: Tensor,
    num_sampled: Tensor,
) -> tuple[Tensor, Tensor]:
    """Lists the rows that have to move.

    A slot id is ``block * block_size + offset``. Rows that already are where they
    belong (``path[d] == d``) are left out.

    Args:
        block_table: Blocks of each request, [B, max_blocks] integer.
        block_size: Slots per block.
        start: Slot position of the root row, [B] integer.
        path: Accepted rows, root first, [B, L + 1] integer; padding is ignored.
        num_sampled: Valid entries of ``path``, [B] integer. 0 or 1 moves nothing.

    Returns:
        ``src`` and ``dst``, [M] int64 each, in request order, then depth order. No
        destination occurs twice, but one move's destination may be another's source.

    Raises:
        ValueError: A row that has to move lies beyond its request's block table.
    """
    path = path.to(torch.int64)
    depth = torch.arange(path.shape[1], device=path.device)
    moved = (depth < num_sampled.unsqueeze(1)) & (path != depth)
    request, to_row = moved.nonzero(as_tuple=True)
    first = start.to(torch.int64)[request]
    src_position = first + path[request, to_row]
    dst_position = first + to_row
    beyond = src_position >= block_table.shape[1] * block_size
    if beyond.any():
        m = int(beyond.nonzero()[0])
        raise ValueError(
            f"request {int(request[m])}: slot position {int(src_position[m])} is "
            f"beyond its {block_table.shape[1]} blocks of {block_size}"
        )
    blocks = block_table.to(torch.int64)

    def slots(position: Tensor) -> Tensor:
        block = blocks[request, position // block_size]
        return block * block_size + position % block_size

    return slots(src_position), slots(dst_position)


def compact_kv(
    cache: Tensor,
    src_slots: Tensor,
    dst_slots: Tensor,
    *,
    block_size: int,
    block_dim: int,
    slot_dim: int,
) -> None:
    """Copies cache rows in place, as if all of them were moved at the same instant.

    All sources are read before the first write, because the destination of one row can
    be the source of another. Bytes are copied as they are, for any dtype.

    Args:
        cache: One layer's cache, any shape, dtype and strides; for example
            [2, blocks, block_size, heads, head_dim] with ``block_dim=1, slot_dim=2``.
        src_slots: [M] int64, slot ids from ``plan_moves``.
        dst_slots: [M] int64, no id twice.
        block_size: Slots per block, the size of ``slot_dim``.
        block_dim: The dimension that counts blocks.
        slot_dim: The dimension that counts slots within a block.

    Raises:
        ValueError: The dimensions are the same one, or the block size differs.
    """
    block_dim %= cache.dim()
    slot_dim %= cache.dim()
    if block_dim == slot_dim:
        raise ValueError(f"block_dim and slot_dim are both {block_dim}")
    if cache.shape[slot_dim] != block_size:
        raise ValueError(
            f"cache has {cache.shape[slot_dim]} slots in dimension {slot_dim}, "
            f"expected block_size {block_size}"
        )
    if src_slots.numel() == 0:
        return
    rows = cache.movedim((block_dim, slot_dim), (0, 1))
    gathered = rows[src_slots // block_size, src_slots % block_size]
    rows[dst_slots // block_size, dst_slots % block_size] = gathered
