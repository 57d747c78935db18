# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Moves accepted K/V rows in all layers and KV groups in one launch.

Reference: ``kv_compact.plan_moves`` and ``compact_kv``. Bytes are moved as they are,
so any dtype and any layout of strides will do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm.triton_utils import tl, triton

WORD = 8  # bytes
CHUNK_WORDS = 128


@triton.jit
def _compact_kernel(
    layer_ptr,
    table_ptr,
    seq_lens_ptr,
    cu_num_logits_ptr,
    path_ptr,
    num_sampled_ptr,
    path_len,
    NUM_FIELDS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
):
    layer = tl.program_id(0)
    req = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)

    num_sampled = tl.load(num_sampled_ptr + req)
    depth = tl.arange(0, BLOCK_D)
    walked = (depth > 0) & (depth < num_sampled)
    row = tl.load(path_ptr + req * path_len + depth, mask=walked, other=0)
    moved = walked & (row != depth)
    if tl.max(moved.to(tl.int32), axis=0) == 0:
        return

    fields = layer_ptr + layer * NUM_FIELDS
    base = tl.load(fields).to(tl.pointer_type(tl.int64))
    block_stride = tl.load(fields + 1)
    head_stride = tl.load(fields + 2)
    slot_stride = tl.load(fields + 3)
    chunks = tl.load(fields + 4)
    words = tl.load(fields + 5)
    heads = tl.load(fields + 6)
    block_size = tl.load(fields + 7).to(tl.int32)
    group = tl.load(fields + 8)
    if part >= heads * chunks:
        return
    head = part // chunks
    offset = (part % chunks) * CHUNK + tl.arange(0, CHUNK)

    table = tl.load(table_ptr + 2 * group).to(tl.pointer_type(tl.int32))
    table += req * tl.load(table_ptr + 2 * group + 1)
    # Positions fit 32 bits, and 64-bit divisions are slow.
    seq_len = tl.load(seq_lens_ptr + req)
    first = tl.load(cu_num_logits_ptr + req)
    last = tl.load(cu_num_logits_ptr + req + 1)
    start = seq_len - (last - first)
    source = start + row
    target = start + depth
    from_block = tl.load(table + source // block_size, mask=moved, other=0)
    to_block = tl.load(table + target // block_size, mask=moved, other=0)
    from_slot = from_block.to(tl.int64) * block_stride
    from_slot += (source % block_size) * slot_stride
    to_slot = to_block.to(tl.int64) * block_stride
    to_slot += (target % block_size) * slot_stride

    mask = moved[:, None] & (offset < words)[None, :]
    within = (head * head_stride + offset)[None, :]
    content = tl.load(base + from_slot[:, None] + within, mask=mask, other=0)
    # A target can be another row's source: no store before the last load.
    tl.debug_barrier()
    tl.store(base + to_slot[:, None] + within, content, mask=mask)


class KVCompactor:
    """Device tables of the caches, made once, and the launch.

    Args:
        groups: Per KV-cache group, the caches of the layers that move, each
            [blocks, kv_heads, block_size, content] with any strides. A tensor that
            occurs twice in a group (layers that share KV) is moved once; layers of
            different groups can share a tensor, in blocks of their own.
        num_positions: L, the most rows that one request can move.
        device: Where the caches are.

    Raises:
        ValueError: A cache's rows are not whole 64-bit words, or not contiguous.
    """

    NUM_FIELDS = 9

    def __init__(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        num_positions: int,
        device: torch.device,
    ) -> None:
        self.path_len = num_positions + 1
        self.device = device
        fields: list[list[int]] = []
        seen: set[tuple[int, int]] = set()
        self.max_parts = 0
        for group, caches in enumerate(groups):
            for cache in caches:
                key = (cache.data_ptr(), group)
                if key in seen:
                    continue
                seen.add(key)
                fields.append(self._fields(cache, group))
                self.max_parts = max(self.max_parts, fields[-1][4] * fields[-1][6])
        self.num_layers = len(fields)
        self.layers = torch.tensor(fields, dtype=torch.int64, device=device)
        self._tables: torch.Tensor | None = None
        self._table_key: tuple[tuple[int, int], ...] = ()

    def _fields(self, cache: torch.Tensor, group: int) -> list[int]:
        size = cache.element_size()
        strides = [s * size for s in cache.stride()]
        num_bytes = cache.shape[3] * size
        odd = [n for n in (*strides[:3], num_bytes, cache.data_ptr()) if n % WORD]
        if odd or cache.stride(3) != 1:
            raise ValueError(
                f"a K/V cache of shape {list(cache.shape)}, strides "
                f"{list(cache.stride())} and dtype {cache.dtype} has rows that are no "
                "whole 64-bit words; tree_budget cannot move them."
            )
        words = num_bytes // WORD
        return [
            cache.data_ptr(),
            strides[0] // WORD,
            strides[1] // WORD,
            strides[2] // WORD,
            -(-words // CHUNK_WORDS),
            words,
            cache.shape[1],
            cache.shape[2],
            group,
        ]

    def compact(
        self,
        block_tables: Sequence[torch.Tensor],
        seq_lens: torch.Tensor,
        cu_num_logits: torch.Tensor,
        path: torch.Tensor,
        num_sampled: torch.Tensor,
        num_reqs: int,
    ) -> None:
        """Move row ``path[d]`` to row ``d`` of every request, in all caches.

        Args:
            block_tables: Per KV-cache group, [>= num_reqs, max_blocks] int32, in
                kernel block size and batch order; the same memory in every step.
            seq_lens: [>= num_reqs] int32, slots in use, this step's included.
            cu_num_logits: [num_reqs + 1] int32; the root's slot is ``seq_len`` less
                the request's rows.
            path: [>= num_reqs, L + 1] int32, accepted rows, root first.
            num_sampled: [>= num_reqs] int32, valid entries of ``path``.
            num_reqs: Requests in the batch.
        """
        if self.num_layers == 0:
            return
        key = tuple((t.data_ptr(), t.stride(0)) for t in block_tables)
        if self._tables is None or key != self._table_key:
            self._tables = torch.tensor(key, dtype=torch.int64, device=self.device)
            self._table_key = key
        _compact_kernel[(self.num_layers, num_reqs, self.max_parts)](
            self.layers,
            self._tables,
            seq_lens,
            cu_num_logits,
            path,
            num_sampled,
            self.path_len,
            NUM_FIELDS=self.NUM_FIELDS,
            BLOCK_D=triton.next_power_of_2(self.path_len),
            CHUNK=CHUNK_WORDS,
            num_warps=4,
        )
