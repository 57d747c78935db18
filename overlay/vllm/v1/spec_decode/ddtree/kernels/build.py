# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Builds the trees on the device, inside the drafter's captured graph.

Three launches: the maximum and the sum of exponentials of every chunk of the
vocabulary; the K best tokens of every draft position; the best-first growth of every
request's tree. Reference: ``build.build_tree`` one package level up, whose order on
ties is kept: by logit, then by lower token id, then by time of insertion.
"""

from __future__ import annotations

import torch

from vllm.triton_utils import tl, triton

from ..build import POLICIES, SPINE_FIRST

# Elements of the vocabulary per program of the first launch.
PART = 4096
# Chunks that a program of the second launch holds in registers.
MAX_CHUNKS = 4096
# Candidates that the second launch sorts; more are cut exactly, but slowly.
CAPACITY = 512


@triton.jit
def _clean(x):
    """Float32 without NaN or +inf, which count as -inf, and without -0.0."""
    x = x.to(tl.float32) + 0.0
    return tl.where((x == x) & (x < float("inf")), x, float("-inf"))


@triton.jit
def _ordered(x):
    """Int32 keys with the order of float32 values."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(key):
    """The float32 values of ``_ordered`` keys."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _chunk_stats_kernel(
    logits_ptr,
    logits_stride,
    chunk_max_ptr,
    num_chunks,
    part_max_ptr,
    part_sum_ptr,
    vocab_size,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    chunk = part * (PART // CHUNK) + tl.arange(0, PART // CHUNK)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(
        logits_ptr + row * logits_stride + token,
        mask=token < vocab_size,
        other=float("-inf"),
    )
    x = _clean(x)
    chunk_max = tl.max(x, axis=1)
    tl.store(
        chunk_max_ptr + row * num_chunks + chunk, chunk_max, mask=chunk < num_chunks
    )
    top = tl.max(chunk_max, axis=0)
    safe = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum(tl.sum(tl.exp(x - safe), axis=1), axis=0)
    tl.store(part_max_ptr + row * tl.num_programs(1) + part, top)
    tl.store(part_sum_ptr + row * tl.num_programs(1) + part, total)


@triton.jit
def _candidate_keys(
    logits_ptr, chunk_ids_ptr, first, count, vocab_size,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Packed keys of a tile of listed chunks: by logit, then by lower token id."""
    lane = tl.arange(0, TILE)
    which = first + lane // CHUNK
    chunk = tl.load(chunk_ids_ptr + which, mask=which < count, other=0)
    token = chunk * CHUNK + lane % CHUNK
    live = (which < count) & (token < vocab_size)
    x = _clean(tl.load(logits_ptr + token, mask=live, other=float("-inf")))
    key = (_ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    return key, live & (x > float("-inf"))


@triton.jit
def _top_k_kernel(
    logits_ptr,
    logits_stride,
    chunk_max_ptr,
    num_chunks,
    part_max_ptr,
    part_sum_ptr,
    num_parts,
    chunk_ids_ptr,
    keys_ptr,
    log_probs_ptr,
    tokens_ptr,
    vocab_size,
    top_k,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    chunk_ids_ptr += row * num_chunks
    keys_ptr += row * CAPACITY
    NEG: tl.constexpr = -0x7F800001  # _ordered(-inf)

    # Log-sum-exp, in a fixed order.
    part = tl.arange(0, BLOCK_PARTS)
    part_max = tl.load(
        part_max_ptr + row * num_parts + part,
        mask=part < num_parts,
        other=float("-inf"),
    )
    part_sum = tl.load(
        part_sum_ptr + row * num_parts + part, mask=part < num_parts, other=0.0
    )
    top = tl.max(part_max, axis=0)
    safe = tl.where(top > float("-inf"), top, 0.0)
    scale = tl.where(part_max > float("-inf"), tl.exp(part_max - safe), 0.0)
    lse = safe + tl.log(tl.sum(part_sum * scale, axis=0))

    # The K-th largest chunk maximum bounds the K-th largest logit from below, since
    # K chunks have an element that large. Found by bisection on the ordered bits.
    chunk = tl.arange(0, BLOCK_C)
    best = tl.load(
        chunk_max_ptr + row * num_chunks + chunk,
        mask=chunk < num_chunks,
        other=float("-inf"),
    )
    order = _ordered(best)
    low = tl.full([], NEG, dtype=tl.int64)  # at least K keys are >= low, or all count
    high = tl.max(order, axis=0).to(tl.int64) + 1  # fewer than K keys are >= high
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum((order.to(tl.int64) >= middle).to(tl.int32), axis=0) >= top_k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    chosen = (order.to(tl.int64) >= low) & (best > float("-inf"))
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(chunk_ids_ptr + place, chunk, mask=chosen)
    count = tl.sum(chosen.to(tl.int32), axis=0)
    tl.debug_barrier()

    # All elements of those chunks that reach the bound.
    bound = low << 32
    PER_TILE: tl.constexpr = TILE // CHUNK
    total = count * 0
    for first in range(0, count, PER_TILE):
        key, live = _candidate_keys(
            logits_ptr, chunk_ids_ptr, first, count, vocab_size, CHUNK, TILE
        )
        keep = live & (key >= bound)
        where = total + tl.cumsum(keep.to(tl.int32), axis=0) - 1
        tl.store(keys_ptr + where, key, mask=keep & (where < CAPACITY))
        total += tl.sum(keep.to(tl.int32), axis=0)

    if total > CAPACITY:
        # Many ties: bisect on whole keys, which are distinct. `high - low` may
        # overflow, so the middle is the sum of halves.
        low = bound
        high = (tl.max(order, axis=0).to(tl.int64) + 1) << 32
        while low + 1 < high:
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            above = count * 0
            for first in range(0, count, PER_TILE):
                key, live = _candidate_keys(
                    logits_ptr, chunk_ids_ptr, first, count, vocab_size, CHUNK, TILE
                )
                above += tl.sum((live & (key >= middle)).to(tl.int32), axis=0)
            enough = above >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        total = count * 0
        for first in range(0, count, PER_TILE):
            key, live = _candidate_keys(
                logits_ptr, chunk_ids_ptr, first, count, vocab_size, CHUNK, TILE
            )
            keep = live & (key >= low)
            where = total + tl.cumsum(keep.to(tl.int32), axis=0) - 1
            tl.store(keys_ptr + where, key, mask=keep & (where < CAPACITY))
            total += tl.sum(keep.to(tl.int32), axis=0)
    tl.debug_barrier()

    # Keys are distinct, so a key's rank is the number of larger ones.
    lane = tl.arange(0, CAPACITY)
    keys = tl.load(keys_ptr + lane, mask=lane < total, other=0)
    rank = tl.zeros([CAPACITY], dtype=tl.int32)
    for first in range(0, total, 16):
        other = first + tl.arange(0, 16)
        rival = tl.load(keys_ptr + other, mask=other < total, other=0)
        larger = (rival[None, :] > keys[:, None]) & (other < total)[None, :]
        rank += tl.sum(larger.to(tl.int32), axis=1)
    value = _unordered((keys >> 32).to(tl.int32))
    token = 0x7FFFFFFF - (keys & 0xFFFFFFFF)
    found = (lane < total) & (rank < top_k)
    out = row * top_k
    tl.store(log_probs_ptr + out + rank, value - lse, mask=found)
    tl.store(tokens_ptr + out + rank, token.to(tl.int32), mask=found)
    blank = (lane >= total) & (lane < top_k)
    tl.store(log_probs_ptr + out + lane, float("-inf"), mask=blank)
    tl.store(tokens_ptr + out + lane, -1, mask=blank)


@triton.jit
def _grow_kernel(
    log_probs_ptr,
    candidates_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    num_nodes_ptr,
    chain_only_ptr,
    num_draft,
    top_k,
    budget,
    SPINE: tl.constexpr,
    HAS_CHAIN_ONLY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    log_probs_ptr += req * num_draft * top_k
    candidates_ptr += req * num_draft * top_k
    NEG: tl.constexpr = -0x7F800001  # _ordered(-inf)

    chain_only = False
    if HAS_CHAIN_ONLY:
        chain_only = tl.load(chain_only_ptr) != 0

    # A frontier entry's column is its rank of insertion: node i inserts its sibling
    # in column 2i - 1 and its child in column 2i. Keys pack score and column, so that
    # one maximum finds the highest score and, among equals, the first insertion.
    column = tl.arange(0, BLOCK_F)
    empty = tl.full([BLOCK_F], NEG, dtype=tl.int64) << 32
    frontier = empty | (0x7FFFFFFF - column).to(tl.int64)
    score = tl.load(log_probs_ptr)
    newest = score  # score of the last inserted child
    key = (_ordered(score).to(tl.int64) << 32) | 0x7FFFFFFF
    frontier = tl.where(column == 0, key, frontier)

    # Per row: place in the table and parent; bits of its score and of its parent's.
    # Separate words, because their look-ups then do not wait for one another.
    row = tl.arange(0, BLOCK_N)
    links = tl.zeros([BLOCK_N], dtype=tl.int32)
    scores = tl.zeros([BLOCK_N], dtype=tl.int32)
    bases = tl.zeros([BLOCK_N], dtype=tl.int32)
    count = tl.full([], 0, dtype=tl.int32)
    on_spine = score > float("-inf")
    i = tl.full([], 1, dtype=tl.int32)
    more = on_spine
    while more:
        best = tl.max(frontier, axis=0)
        picked = 0x7FFFFFFF - (best & 0xFFFFFFFF)
        picked = picked.to(tl.int32)
        score = _unordered((best >> 32).to(tl.int32))
        if SPINE or HAS_CHAIN_ONLY:
            on_spine = on_spine & (newest > float("-inf"))
            force = on_spine
            if not SPINE:
                force = on_spine & chain_only
            picked = tl.where(force, 2 * i - 2, picked)
            score = tl.where(force, newest, score)
            if HAS_CHAIN_ONLY:
                score = tl.where(chain_only & (on_spine == 0), float("-inf"), score)
        more = score > float("-inf")
        if more:
            # Who inserted it: the child of node picked / 2, or a sibling.
            source = (picked + 1) // 2
            here = row == source
            link = tl.sum(tl.where(here, links, 0), axis=0)
            own_bits = tl.sum(tl.where(here, scores, 0), axis=0)
            base_bits = tl.sum(tl.where(here, bases, 0), axis=0)
            place = link & 0xFFFF
            is_child = (picked % 2) == 0
            is_first = picked == 0
            depth = place // top_k
            place = tl.where(is_child, (depth + 1) * top_k, place + 1)
            place = tl.where(is_first, 0, place)
            parent = tl.where(is_child, source, link >> 16)
            depth = place // top_k
            rank = place % top_k
            # The parent's score as it was when the entry was inserted; the root's is 0.
            base_bits = tl.where(is_child, own_bits, base_bits)
            base = base_bits.to(tl.float32, bitcast=True)
            has_sibling = rank + 1 < top_k
            has_child = depth + 1 < num_draft
            sibling = tl.load(
                log_probs_ptr + place + 1, mask=has_sibling, other=float("-inf")
            )
            child = tl.load(
                log_probs_ptr + (depth + 1) * top_k,
                mask=has_child,
                other=float("-inf"),
            )
            sibling = base + sibling
            newest = score + child
            links = tl.where(row == i, (parent << 16) | place, links)
            bits = score.to(tl.int32, bitcast=True)
            scores = tl.where(row == i, bits, scores)
            bases = tl.where(row == i, base_bits, bases)
            frontier = tl.where(
                column == picked,
                empty | (0x7FFFFFFF - column).to(tl.int64),
                frontier,
            )
            at = 2 * i - 1
            key = (_ordered(sibling).to(tl.int64) << 32) | (0x7FFFFFFF - at).to(
                tl.int64
            )
            frontier = tl.where(column == at, key, frontier)
            key = (_ordered(newest).to(tl.int64) << 32) | (0x7FFFFFFF - at - 1).to(
                tl.int64
            )
            frontier = tl.where(column == at + 1, key, frontier)
            count = i
            i += 1
            more = i <= budget

    node = (row > 0) & (row <= count)
    place = links & 0xFFFF
    parent = links >> 16
    token = tl.load(candidates_ptr + place, mask=node, other=-1)
    mask = row <= budget
    out = req * (budget + 1) + row
    tl.store(parents_ptr + out, tl.where(node, parent, -1), mask=mask)
    tl.store(depths_ptr + out, tl.where(node, place // top_k + 1, 0), mask=mask)
    tl.store(
        tokens_ptr + req * budget + row - 1,
        token.to(tl.int64),
        mask=mask & (row > 0),
    )
    tl.store(num_nodes_ptr + req, count)


class TreeBuilder:
    """Workspaces, allocated once, and the launches.

    Args:
        max_num_reqs: Most requests in a batch.
        num_draft: L, draft positions.
        budget: N, nodes per tree, 1..127.
        vocab_size: V, columns of the logits.
        policy: ``best_first`` or ``spine_first``.
        device: Where the logits are.

    Raises:
        ValueError: The policy is unknown.
    """

    def __init__(
        self,
        max_num_reqs: int,
        num_draft: int,
        budget: int,
        vocab_size: int,
        policy: str,
        device: torch.device,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(
                f"policy must be one of {', '.join(POLICIES)}, got {policy!r}"
            )
        self.num_draft = num_draft
        self.budget = budget
        self.vocab_size = vocab_size
        self.spine_first = policy == SPINE_FIRST
        self.top_k = min(budget, vocab_size)
        chunk = triton.next_power_of_2(triton.cdiv(vocab_size, MAX_CHUNKS))
        self.chunk = max(1, chunk)
        self.num_chunks = triton.cdiv(vocab_size, self.chunk)
        self.num_parts = triton.cdiv(vocab_size, PART)
        rows = max_num_reqs * num_draft

        def space(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(rows, *shape, dtype=dtype, device=device)

        self.chunk_max = space(self.num_chunks, dtype=torch.float32)
        self.chunk_ids = space(self.num_chunks, dtype=torch.int32)
        self.part_max = space(self.num_parts, dtype=torch.float32)
        self.part_sum = space(self.num_parts, dtype=torch.float32)
        self.keys = space(CAPACITY, dtype=torch.int64)
        self.log_probs = space(self.top_k, dtype=torch.float32)
        self.candidates = space(self.top_k, dtype=torch.int32)

    def rank(self, logits: torch.Tensor) -> None:
        """Fill ``log_probs`` and ``candidates`` [rows, K] from logits [rows, V].

        Raises:
            ValueError: More rows than there is space for, or fewer columns than V.
        """
        rows, columns = logits.shape
        if rows > self.keys.shape[0] or columns < self.vocab_size:
            raise ValueError(
                f"logits must have at most {self.keys.shape[0]} rows and at least "
                f"{self.vocab_size} columns, got {list(logits.shape)}"
            )
        part = max(PART, self.chunk)
        num_parts = triton.cdiv(self.vocab_size, part)
        _chunk_stats_kernel[(rows, num_parts)](
            logits,
            logits.stride(0),
            self.chunk_max,
            self.num_chunks,
            self.part_max,
            self.part_sum,
            self.vocab_size,
            CHUNK=self.chunk,
            PART=part,
            num_warps=4,
        )
        _top_k_kernel[(rows,)](
            logits,
            logits.stride(0),
            self.chunk_max,
            self.num_chunks,
            self.part_max,
            self.part_sum,
            num_parts,
            self.chunk_ids,
            self.keys,
            self.log_probs,
            self.candidates,
            self.vocab_size,
            self.top_k,
            CHUNK=self.chunk,
            BLOCK_C=triton.next_power_of_2(self.num_chunks),
            BLOCK_PARTS=triton.next_power_of_2(num_parts),
            TILE=max(1024, self.chunk),
            CAPACITY=CAPACITY,
            num_warps=8,
        )

    def grow(
        self,
        num_reqs: int,
        tokens: torch.Tensor,
        parents: torch.Tensor,
        depths: torch.Tensor,
        num_nodes: torch.Tensor,
        chain_only: torch.Tensor | None = None,
    ) -> None:
        """Grow the trees of the first ``num_reqs`` requests from what ``rank`` left."""
        _grow_kernel[(num_reqs,)](
            self.log_probs,
            self.candidates,
            tokens,
            parents,
            depths,
            num_nodes,
            chain_only,
            self.num_draft,
            self.top_k,
            self.budget,
            SPINE=self.spine_first,
            HAS_CHAIN_ONLY=chain_only is not None,
            BLOCK_N=triton.next_power_of_2(self.budget + 1),
            BLOCK_F=triton.next_power_of_2(2 * self.budget + 1),
            num_warps=1,
        )

    def build(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        parents: torch.Tensor,
        depths: torch.Tensor,
        num_nodes: torch.Tensor,
        chain_only: torch.Tensor | None = None,
    ) -> None:
        """Build one tree per request; rows beyond the batch are left alone.

        Args:
            logits: [B * L, V] floating point, last dimension contiguous.
            tokens: [R, N] int64, out.
            parents, depths: [R, Q] int32, out.
            num_nodes: [R] int32, out.
            chain_only: [1] int32 on the device; not 0 gives spines only.

        Raises:
            ValueError: See ``rank``.
        """
        self.rank(logits)
        num_reqs = logits.shape[0] // self.num_draft
        self.grow(num_reqs, tokens, parents, depths, num_nodes, chain_only)
