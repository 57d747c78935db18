# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Inputs of the drafter after a step with trees.

Takes the place of upstream's ``prepare_dflash_inputs`` (0.26.0, v1/worker/gpu/
spec_decode/dflash/speculator.py), which takes the accepted tokens for the leading
rows. Here the context rows are gathered along the accepted path, at most L + 1 per
tree, so that the host knows the shapes without knowing the path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

if TYPE_CHECKING:
    from vllm.v1.spec_decode.ddtree.tree_state import TreeState
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers


@triton.jit
def _slots(block_table_ptr, position, block_size, limit, mask, PAD: tl.constexpr):
    """Slot ids of positions; PAD beyond ``limit`` or where masked out."""
    good = mask & (position >= 0) & (position < limit)
    block = tl.load(block_table_ptr + position // block_size, mask=good, other=0)
    slot = block.to(tl.int64) * block_size + position % block_size
    return tl.where(good, slot, PAD)


@triton.jit
def _prepare_tree_inputs_kernel(
    # Outputs
    input_ids_ptr,
    query_positions_ptr,
    out_query_start_loc_ptr,
    out_seq_lens_ptr,
    query_slots_ptr,
    context_rows_ptr,
    context_positions_ptr,
    context_slots_ptr,
    sample_indices_ptr,
    sample_pos_ptr,
    sample_idx_mapping_ptr,
    # The target's step
    query_start_loc_ptr,
    cu_num_logits_ptr,
    seq_lens_ptr,
    idx_mapping_ptr,
    context_start_ptr,
    b_path_ptr,
    b_num_sampled_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    last_sampled_ptr,
    next_prefill_tokens_ptr,
    block_table_ptr,
    block_table_stride,
    # Scalars
    mask_token_id,
    block_size,
    num_query,
    num_draft,
    path_len,
    max_num_reqs,
    max_num_tokens,
    max_model_len,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    part = tl.program_id(1)
    num_reqs = tl.num_programs(0)
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    start = tl.load(query_start_loc_ptr + req)
    query_len = tl.load(query_start_loc_ptr + req + 1) - start
    first = tl.load(cu_num_logits_ptr + req)
    rows = tl.load(cu_num_logits_ptr + req + 1) - first
    has_path = (rows > 1) & (rows == query_len)
    seq_len = tl.load(seq_lens_ptr + req).to(tl.int64)
    # seq_lens counts slots, so this is the last token whose K/V is final.
    last_pos = seq_len - tl.load(num_rejected_ptr + req) - 1
    # Blocks are allocated for positions below this one only.
    limit = tl.minimum(max_model_len, block_table_stride * block_size).to(tl.int64)
    table = block_table_ptr + req.to(tl.int64) * block_table_stride

    out = tl.load(context_start_ptr + req)
    num_context = tl.load(context_start_ptr + req + 1) - out
    j = part * BLOCK + tl.arange(0, BLOCK)

    # Context: the accepted path, or the query's own rows.
    is_context = j < num_context
    accepted = tl.load(b_num_sampled_ptr + req)
    on_path = is_context & has_path & (j < accepted)
    node = tl.load(
        b_path_ptr + req.to(tl.int64) * path_len + j,
        mask=on_path & (j < path_len),
        other=0,
    )
    offset = tl.where(has_path, node, tl.where(is_context, j, 0))
    position = seq_len - query_len + j
    final = tl.where(has_path, on_path, is_context & (position <= last_pos))
    tl.store(context_rows_ptr + out + j, (start + offset).to(tl.int64), mask=is_context)
    tl.store(
        context_positions_ptr + out + j,
        tl.where(final, position, 0),
        mask=is_context,
    )
    context_slot = _slots(table, position, block_size, limit, final, PAD)
    tl.store(context_slots_ptr + out + j, context_slot, mask=is_context)

    # Query: the bonus token, then mask tokens.
    q = j - num_context
    is_query = (q >= 0) & (q < num_query)
    if tl.load(num_sampled_ptr + req) > 0:
        bonus = tl.load(last_sampled_ptr + slot).to(tl.int32)
    else:  # a prefill that goes on: the next prompt token
        bonus = tl.load(next_prefill_tokens_ptr + slot).to(tl.int32)
    query_pos = last_pos + 1 + q
    query_index = req * num_query + q
    token = tl.where(q == 0, bonus, mask_token_id)
    tl.store(input_ids_ptr + query_index, token, mask=is_query)
    tl.store(
        query_positions_ptr + query_index,
        tl.minimum(query_pos, max_model_len - 1),
        mask=is_query,
    )
    query_slot = _slots(table, query_pos, block_size, limit, is_query, PAD)
    tl.store(query_slots_ptr + query_index, query_slot, mask=is_query)

    is_sample = is_query & (q > 0)
    sample = req * num_draft + q - 1
    tl.store(sample_indices_ptr + sample, query_index.to(tl.int64), mask=is_sample)
    tl.store(sample_pos_ptr + sample, query_pos, mask=is_sample)
    tl.store(sample_idx_mapping_ptr + sample, slot.to(tl.int32), mask=is_sample)

    if part == 0:
        tl.store(out_query_start_loc_ptr + req, req * num_query)
        tl.store(out_seq_lens_ptr + req, (last_pos + 1 + num_query).to(tl.int32))
        if req == num_reqs - 1:
            # Padding that captured graphs of more requests read.
            lane = tl.arange(0, BLOCK)
            end = num_reqs * num_query
            for i in range(num_reqs, max_num_reqs + 1, BLOCK):
                at = i + lane
                tl.store(out_query_start_loc_ptr + at, end, mask=at < max_num_reqs + 1)
                tl.store(out_seq_lens_ptr + at, 0, mask=at < max_num_reqs)
            for i in range(num_reqs * num_draft, max_num_reqs * num_draft, BLOCK):
                at = i + lane
                inside = at < max_num_reqs * num_draft
                tl.store(sample_indices_ptr + at, 0, mask=inside)
                tl.store(sample_pos_ptr + at, 0, mask=inside)
                tl.store(sample_idx_mapping_ptr + at, -1, mask=inside)
            for i in range(end, max_num_tokens, BLOCK):
                at = i + lane
                tl.store(query_slots_ptr + at, PAD, mask=at < max_num_tokens)


def prepare_tree_inputs(
    input_buffers: InputBuffers,
    query_slots: torch.Tensor,
    context_rows: torch.Tensor,
    context_positions: torch.Tensor,
    context_slots: torch.Tensor,
    sample_indices: torch.Tensor,
    sample_pos: torch.Tensor,
    sample_idx_mapping: torch.Tensor,
    input_batch: InputBatch,
    context_start: torch.Tensor,
    max_context: int,
    tree: TreeState,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    last_sampled: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    mask_token_id: int,
    num_query: int,
    num_draft: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
) -> None:
    """Write the drafter's context and queries of all requests, for one KV group.

    A request whose rows all have logits and that had drafts scheduled gives the rows
    of ``b_path``; any other gives its own rows up to the last valid one. Rows of the
    layout that are not used keep a valid row number and get PAD as slot. So do
    positions beyond ``max_model_len`` or the block table, context and queries alike
    (upstream clamps the block and writes there).

    Args:
        input_buffers: The drafter's; ids, positions, query starts and lengths.
        query_slots: [max_num_tokens] int64, out.
        context_rows: [max_num_tokens] int64, out: rows of the target's batch.
        context_positions: [max_num_tokens] int64, out: logical positions.
        context_slots: [max_num_tokens] int64, out.
        sample_indices, sample_pos: [R * L] int64, out.
        sample_idx_mapping: [R * L] int32, out.
        input_batch: The target's step.
        context_start: [num_reqs + 1] int32, the layout: first row of each request.
        max_context: Rows of the largest request.
        tree: The buffers, after the walk.
        num_sampled, num_rejected: [num_reqs] int32.
        last_sampled, next_prefill_tokens: [R] integer, slot order.
        block_table: [>= num_reqs, max_blocks] int32, batch order.
        block_size: Of the kernel.
        mask_token_id: The drafter's.
        num_query: 1 + L.
        num_draft: L.
        max_num_reqs, max_num_tokens, max_model_len: Sizes of the buffers.
    """
    num_reqs = input_batch.num_reqs
    width = max_context + num_query
    block = min(256, triton.next_power_of_2(width))
    _prepare_tree_inputs_kernel[(num_reqs, triton.cdiv(width, block))](
        input_buffers.input_ids,
        input_buffers.positions,
        input_buffers.query_start_loc,
        input_buffers.seq_lens,
        query_slots,
        context_rows,
        context_positions,
        context_slots,
        sample_indices,
        sample_pos,
        sample_idx_mapping,
        input_batch.query_start_loc,
        input_batch.cu_num_logits,
        input_batch.seq_lens,
        input_batch.idx_mapping,
        context_start,
        tree.b_path,
        tree.b_num_sampled,
        num_sampled,
        num_rejected,
        last_sampled,
        next_prefill_tokens,
        block_table,
        block_table.stride(0),
        mask_token_id,
        block_size,
        num_query,
        num_draft,
        tree.b_path.shape[1],
        max_num_reqs,
        max_num_tokens,
        max_model_len,
        PAD=PAD_SLOT_ID,
        BLOCK=block,
    )
