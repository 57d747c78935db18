# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Attention of rows with a tree, and of any others, over a paged cache.

A request's query sees its context, the slots before its first row, and of its own rows
those that the ancestor bitmask allows, or all earlier ones where there is no tree. One
kernel computes either the rows alone and merges them with a context result that
FlashAttention left (``merge_new_rows``), or splits of the context and the rows, which a
second kernel reduces (``split_kv_attention``). Reference: ``attention`` one level up.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from vllm.triton_utils import tl, triton

# Enough programs for a large GPU; more splits only add work for the reduction.
TARGET_PROGRAMS = 264
MAX_SPLITS = 32


@triton.jit
def _accumulate(q, k, v, visible, scale, m, total, acc, PRECISION: tl.constexpr):
    """One step of the online softmax; masks come before the exponential."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, axis=1))
    # Rows that have seen nothing yet stay at -inf without making NaN.
    safe = tl.where(m_new > float("-inf"), m_new, 0.0)
    p = tl.exp(scores - safe[:, None])
    rescale = tl.exp(m - safe)
    total = total * rescale + tl.sum(p, axis=1)
    acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return m_new, total, acc


@triton.jit
def _attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    cache_ptr,
    out_ptr,
    lse_ptr,
    context_out_ptr,
    context_lse_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    b_num_nodes_ptr,
    b_mask_ptr,
    b_depths_ptr,
    scale,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    cache_block_stride,
    cache_head_stride,
    cache_slot_stride,
    out_split_stride,
    out_stride,
    out_head_stride,
    lse_split_stride,
    lse_stride,
    lse_head_stride,
    context_stride,
    context_head_stride,
    context_lse_head_stride,
    block_table_stride,
    num_rows,
    num_words,
    num_tiles,
    num_splits,
    window,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    MERGE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // num_tiles
    tile = tl.program_id(1) % num_tiles
    split = tl.program_id(2)
    start = tl.load(query_start_loc_ptr + req)
    query_len = tl.load(query_start_loc_ptr + req + 1) - start
    if tile * BLOCK_M >= query_len * GROUP:
        return
    seq_len = tl.load(seq_lens_ptr + req)
    context_len = seq_len - query_len
    nodes = tl.load(b_num_nodes_ptr + req)
    # A tree has at most num_rows rows; anything longer is a prefill.
    is_tree = (nodes > 0) & (query_len <= num_rows)

    lane = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    live = row < query_len
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD
    token = (start + row).to(tl.int64)
    q = tl.load(
        query_ptr
        + (token * query_stride + head * query_head_stride)[:, None]
        + dim[None, :],
        mask=live[:, None] & in_head[None, :],
        other=0.0,
    )
    depth = row
    if HAS_WINDOW:
        known = tl.load(
            b_depths_ptr + req * num_rows + row, mask=live & is_tree, other=0
        )
        depth = tl.where(is_tree, known, row)

    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    column = tl.arange(0, BLOCK_N)

    if split < num_splits:
        first = tl.zeros([], dtype=tl.int32)
        if HAS_WINDOW:
            first = tl.maximum(context_len - window + 1, 0)
        share = tl.cdiv(tl.cdiv(context_len - first, num_splits), BLOCK_N) * BLOCK_N
        begin = first + split * share
        end = tl.minimum(begin + share, context_len)
        table = block_table_ptr + req * block_table_stride
        for at in range(begin, end, BLOCK_N):
            slot = at + column
            inside = slot < end
            block = tl.load(table + slot // PAGE, mask=inside, other=0).to(tl.int64)
            place = (
                block * cache_block_stride
                + kv_head * cache_head_stride
                + (slot % PAGE) * cache_slot_stride
            )
            where = place[:, None] + dim[None, :]
            mask = inside[:, None] & in_head[None, :]
            k = tl.load(cache_ptr + where, mask=mask, other=0.0)
            v = tl.load(cache_ptr + where + HEAD, mask=mask, other=0.0)
            visible = live[:, None] & inside[None, :]
            if HAS_WINDOW:
                oldest = context_len + depth - window
                visible = visible & (slot[None, :] > oldest[:, None])
            m, total, acc = _accumulate(
                q, k, v, visible, scale, m, total, acc, PRECISION
            )
    else:
        # No row sees a later one, so the tile's last row bounds the loop.
        last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, query_len)
        for at in range(0, last, BLOCK_N):
            other = at + column
            inside = other < query_len
            place = (start + other).to(tl.int64)
            mask = inside[:, None] & in_head[None, :]
            k = tl.load(
                key_ptr
                + (place * key_stride + kv_head * key_head_stride)[:, None]
                + dim[None, :],
                mask=mask,
                other=0.0,
            )
            v = tl.load(
                value_ptr
                + (place * value_stride + kv_head * value_head_stride)[:, None]
                + dim[None, :],
                mask=mask,
                other=0.0,
            )
            visible = other[None, :] <= row[:, None]
            if HAS_WINDOW:
                theirs = tl.load(
                    b_depths_ptr + req * num_rows + other,
                    mask=inside & is_tree,
                    other=0,
                )
                theirs = tl.where(is_tree, theirs, other)
                near = depth[:, None] - theirs[None, :] < window
                visible = visible & near
            # One or two words of mask a row, not one gather for each pair.
            words = b_mask_ptr + (req * num_rows + row) * num_words + at // 32
            word = tl.load(words, mask=live & is_tree, other=-1)[:, None]
            if BLOCK_N > 32:
                more = live & is_tree & (at // 32 + 1 < num_words)
                high = tl.load(words + 1, mask=more, other=-1)[:, None]
                word = tl.where(column[None, :] < 32, word, high)
            allowed = ((word >> (other % 32)[None, :]) & 1) != 0
            visible = visible & allowed & live[:, None] & inside[None, :]
            m, total, acc = _accumulate(
                q, k, v, visible, scale, m, total, acc, PRECISION
            )

    some = total > 0
    lse = tl.where(some, m + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    acc = acc / tl.where(some, total, 1.0)[:, None]
    if MERGE:
        has_context = live & (context_len > 0)
        context_lse = tl.load(
            context_lse_ptr + head * context_lse_head_stride + token,
            mask=has_context,
            other=float("-inf"),
        )
        context = tl.load(
            context_out_ptr
            + (token * context_stride + head * context_head_stride)[:, None]
            + dim[None, :],
            mask=has_context[:, None] & in_head[None, :],
            other=0.0,
        )
        top = tl.maximum(lse, context_lse)
        top = tl.where(top > float("-inf"), top, 0.0)
        mine = tl.exp(lse - top)
        theirs = tl.exp(context_lse - top)
        both = mine + theirs
        both = tl.where(both > 0, both, 1.0)
        acc = acc * (mine / both)[:, None]
        acc += context.to(tl.float32) * (theirs / both)[:, None]
    else:
        tl.store(
            lse_ptr
            + split * lse_split_stride
            + token * lse_stride
            + head * lse_head_stride,
            lse,
            mask=live,
        )
    tl.store(
        out_ptr
        + split.to(tl.int64) * out_split_stride
        + (token * out_stride + head * out_head_stride)[:, None]
        + dim[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=live[:, None] & in_head[None, :],
    )


@triton.jit
def _reduce_kernel(
    parts_ptr,
    lse_ptr,
    out_ptr,
    part_split_stride,
    part_stride,
    part_head_stride,
    lse_split_stride,
    lse_stride,
    lse_head_stride,
    out_stride,
    out_head_stride,
    num_parts,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.arange(0, BLOCK_S)
    dim = tl.arange(0, BLOCK_D)
    lse = tl.load(
        lse_ptr + part * lse_split_stride + token * lse_stride + head * lse_head_stride,
        mask=part < num_parts,
        other=float("-inf"),
    )
    top = tl.max(lse, axis=0)
    top = tl.where(top > float("-inf"), top, 0.0)
    weight = tl.exp(lse - top)
    total = tl.sum(weight, axis=0)
    weight = weight / tl.where(total > 0, total, 1.0)
    # A split without a slot of the context has weight 0 and was stored as 0.
    values = tl.load(
        parts_ptr
        + (part.to(tl.int64) * part_split_stride)[:, None]
        + token * part_stride
        + head * part_head_stride
        + dim[None, :],
        mask=(part < num_parts)[:, None] & (dim < HEAD)[None, :],
        other=0.0,
    )
    out = tl.sum(values * weight[:, None], axis=0)
    tl.store(
        out_ptr + token * out_stride + head * out_head_stride + dim,
        out.to(out_ptr.dtype.element_ty),
        mask=dim < HEAD,
    )


class Tiles(NamedTuple):
    """Sizes of a launch."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


@functools.cache
def _large_shared_memory(device: torch.device) -> bool:
    """Whether a program may use 200 KB of shared memory, as on sm_90; sm_86: 99 KB."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def _tiles(query: torch.Tensor, lanes: int, merge: bool, programs: int = 1) -> Tiles:
    """Tile sizes for ``lanes`` rows times heads of a group.

    Args:
        query: For its head size, dtype and device.
        lanes: Rows of the longest request, times heads of a group.
        merge: Own rows only, merged with a context's result.
        programs: Requests times KV heads; counts where ``merge``.
    """
    block_d = max(16, triton.next_power_of_2(query.shape[2]))
    row_bytes = block_d * query.element_size()
    if row_bytes > 512:  # float32 with heads of more than 128
        return Tiles(16, 16, block_d, 4, 1)
    wide = row_bytes == 512
    if merge:
        # Measured on sm_90: small programs until there are plenty of them.
        small = programs * triton.cdiv(lanes, 16)
        if small <= TARGET_PROGRAMS:
            return Tiles(16, 64 if lanes > 96 else 32, block_d, 4, 1)
        if small <= 2 * TARGET_PROGRAMS:
            return Tiles(16, 32, block_d, 4, 1)
        return Tiles(64, 16 if wide else 32, block_d, 4, 1)
    # Each tile of rows reads the whole context, so larger tiles read it less often.
    if _large_shared_memory(query.device):
        if lanes > 64:
            return Tiles(128, 64 if not wide else 32, block_d, 8, 2)
        return Tiles(64 if lanes > 32 else 32, 64, block_d, 4, 2)
    return Tiles(32 if wide else 64, 32 if wide else 64, block_d, 4, 1 + wide)


def _launch(
    grid, query, key, value, cache, out, lse, context, block_table, tree, scale,
    query_start_loc, seq_lens, window, num_tiles, num_splits, tiles,
) -> None:  # fmt: skip
    context_out, context_lse = context if context is not None else (query, query)
    split_out = (0, *out.stride()[:2]) if out.dim() == 3 else out.stride()[:3]
    lse_strides = lse.stride() if lse is not None else (0, 0, 0)
    _attention_kernel[grid](
        query,
        key,
        value,
        cache,
        out,
        lse,
        context_out,
        context_lse,
        query_start_loc,
        seq_lens,
        block_table,
        tree.b_num_nodes,
        tree.b_mask,
        tree.b_depths,
        scale,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        *split_out,
        *lse_strides,
        context_out.stride(0),
        context_out.stride(1),
        context_lse.stride(0),
        block_table.stride(0),
        tree.num_rows,
        tree.b_mask.shape[2],
        num_tiles,
        num_splits,
        window or 0,
        GROUP=query.shape[1] // key.shape[1],
        HEAD=query.shape[2],
        PAGE=cache.shape[2],
        HAS_WINDOW=window is not None,
        MERGE=context is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=tiles.block_d,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def merge_new_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    context_out: torch.Tensor,
    context_lse: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    tree,
    num_reqs: int,
    max_query_len: int,
    scale: float,
) -> None:
    """Attend to the query's own rows and merge with the context's result.

    Args:
        query: [T, heads, D], last dimension contiguous, as all below.
        key, value: [T, kv_heads, D], of this step.
        cache: [blocks, kv_heads, page, 2 * D]; not read here.
        out: [T, heads, D], written for the rows of the requests.
        context_out: [T, heads, D], softmax over the context alone. Not read where a
            request has no context.
        context_lse: [heads, T] float32, natural logarithm.
        query_start_loc: [>= num_reqs + 1] int32.
        seq_lens: [>= num_reqs] int32, slots in use, the query's included.
        block_table: [>= num_reqs, max_blocks] int32.
        tree: Buffers with ``b_num_nodes``, ``b_mask``, ``b_depths``.
        num_reqs: Requests to serve, the first ones of the batch.
        max_query_len: Rows of the longest of them.
        scale: Of the scores.
    """
    lanes = max_query_len * (query.shape[1] // key.shape[1])
    tiles = _tiles(query, lanes, merge=True, programs=num_reqs * key.shape[1])
    num_tiles = triton.cdiv(lanes, tiles.block_m)
    _launch(
        (num_reqs, key.shape[1] * num_tiles, 1),
        query, key, value, cache, out, None, (context_out, context_lse), block_table,
        tree, scale, query_start_loc, seq_lens, None, num_tiles, 0, tiles,
    )  # fmt: skip


def split_kv_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    tree,
    num_reqs: int,
    max_query_len: int,
    num_tokens: int,
    scale: float,
    window: int | None = None,
) -> None:
    """Attend to context and rows in one kernel, then reduce over the splits.

    Serves trees, causal rows and prefills of any length; in float32 without TF32.

    Args:
        query, key, value, out, query_start_loc, seq_lens, block_table, tree, num_reqs,
        max_query_len, scale: As in ``merge_new_rows``.
        cache: [blocks, kv_heads, page, 2 * D]: keys, then values; any strides but
            the last.
        num_tokens: Rows of ``out`` that belong to those requests.
        window: Sliding window in tokens, the row's own included, by logical position;
            None for full attention.
    """
    heads, head_size = query.shape[1], query.shape[2]
    lanes = max_query_len * (heads // key.shape[1])
    tiles = _tiles(query, lanes, merge=False)
    num_tiles = triton.cdiv(lanes, tiles.block_m)
    programs = num_reqs * key.shape[1] * num_tiles
    # Known without the lengths, hence fixed within a captured graph.
    target = TARGET_PROGRAMS if query.is_cuda else 2 * programs  # interpreted: slow
    num_splits = min(MAX_SPLITS - 1, max(1, target // programs))
    num_parts = num_splits + 1
    parts = query.new_empty(
        num_parts, num_tokens, heads, head_size, dtype=torch.float32
    )
    lse = parts.new_empty(num_parts, num_tokens, heads)
    _launch(
        (num_reqs, key.shape[1] * num_tiles, num_parts),
        query, key, value, cache, parts, lse, None, block_table,
        tree, scale, query_start_loc, seq_lens, window, num_tiles, num_splits, tiles,
    )  # fmt: skip
    _reduce_kernel[(num_tokens, heads)](
        parts,
        lse,
        out,
        *parts.stride()[:3],
        *lse.stride(),
        out.stride(0),
        out.stride(1),
        num_parts,
        HEAD=head_size,
        BLOCK_D=tiles.block_d,
        BLOCK_S=triton.next_power_of_2(num_parts),
        num_warps=2,
    )
