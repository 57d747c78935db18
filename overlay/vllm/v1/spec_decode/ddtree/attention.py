# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Target attention under an ancestor mask: plain PyTorch reference.

The oracle for later kernels and the CPU path. A request's queries are the last
``query_len`` of its ``seq_len`` slots. Without a tree they are causal. With a tree
of n nodes the last 1 + n rows are root and nodes: each row sees the context before
the root and, among the tree rows, its ancestors and itself (design, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from .gdn_v1 import PendingTree


@dataclass(slots=True)
class TreeMask:
    """Ancestor masks of one verify batch, in batch order.

    Attributes:
        mask: [B, Q, Q] bool, row i may see row j; rows past the tree are unused.
        num_nodes: n per request, B integers; 0 means no tree, plain causal.
        parents: [B, Q] int32, as in ``TreeBatch``; only recurrent layers need them.
        layer_inputs: What the recurrent layers need again after the walk, by layer
            name and batch row.
    """

    mask: torch.Tensor
    num_nodes: list[int]
    parents: torch.Tensor | None = None
    layer_inputs: dict[str, dict[int, PendingTree]] = field(default_factory=dict)


def request_mask(
    query_len: int,
    seq_len: int,
    causal: bool = True,
    tree: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Visibility of one request's queries over its slots.

    Args:
        query_len: Rows of this request in the batch.
        seq_len: Slots of this request, its queries included.
        causal: False for a drafter block, where all slots are visible.
        tree: [1 + n, 1 + n] bool ancestor mask of the last 1 + n rows, or None.

    Returns:
        [query_len, seq_len] bool, or None where every slot is visible.

    Raises:
        ValueError: The tree has more rows than the request has queries.
    """
    if not causal or (query_len == 1 and tree is None):
        return None
    mask = torch.ones(query_len, seq_len, dtype=torch.bool)
    mask = mask.tril_(diagonal=seq_len - query_len)
    if tree is not None:
        rows = tree.shape[0]
        if rows > query_len:
            raise ValueError(f"tree of {rows} rows in a request of {query_len} queries")
        mask[-rows:, -rows:] = tree
    return mask


def gather_kv(
    kv_cache: torch.Tensor, block_ids: torch.Tensor, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read one request's keys and values from the paged cache.

    Args:
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], row-major
            slots with K and V packed in the last dimension.
        block_ids: [ceil(seq_len / block_size)] int, blocks in order.
        seq_len: Slots to read.

    Returns:
        Keys and values, each [num_kv_heads, seq_len, head_size].
    """
    pages = kv_cache.index_select(0, block_ids)
    rows = pages.transpose(0, 1).flatten(1, 2)[:, :seq_len]
    key, value = rows.chunk(2, dim=-1)
    return key, value


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Grouped-query attention of one request under an explicit mask.

    Args:
        query: [query_len, num_heads, head_size].
        key: [num_kv_heads, seq_len, head_size].
        value: As ``key``.
        mask: [query_len, seq_len] bool or None for all visible.
        scale: Factor of the logits.

    Returns:
        [query_len, num_heads, head_size], dtype of ``query``.
    """
    query_len, num_heads, head_size = query.shape
    groups = num_heads // key.shape[0]
    # Heads that share a KV head become further rows, so K and V are not repeated.
    rows = query.view(query_len, -1, groups, head_size).permute(1, 2, 0, 3)
    rows = rows.reshape(-1, groups * query_len, head_size)
    if mask is not None:
        mask = mask.repeat(groups, 1)
    out = F.scaled_dot_product_attention(
        rows[None], key[None], value[None], attn_mask=mask, scale=scale
    )[0]
    out = out.view(-1, groups, query_len, head_size).permute(2, 0, 1, 3)
    return out.reshape(query_len, num_heads, head_size)


def store_kv(
    kv_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write new keys and values into their slots; negative slots are padding.

    Args:
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size].
        key: [num_tokens, num_kv_heads, head_size]; may be longer than the mapping.
        value: As ``key``.
        slot_mapping: [num_slots] int64, block * block_size + offset.
    """
    rows = torch.cat((key, value), dim=-1)[: slot_mapping.shape[0]]
    valid = slot_mapping >= 0
    if not bool(valid.all()):
        rows, slot_mapping = rows[valid], slot_mapping[valid]
    block_size = kv_cache.shape[2]
    slots = kv_cache.transpose(1, 2)
    slots[slot_mapping // block_size, slot_mapping % block_size] = rows.to(
        kv_cache.dtype
    )
