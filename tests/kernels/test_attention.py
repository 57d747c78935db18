# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Attention kernels against a dense softmax over gathered keys and values."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from vllm.v1.spec_decode.ddtree.kernels.attention import (
    merge_new_rows,
    split_kv_attention,
)
from vllm.v1.spec_decode.ddtree.tree import (
    ancestor_bitmask,
    ancestor_mask,
    depths_from_parents,
)

SEED = int(os.environ.get("DDTREE_TEST_SEED", "20261201"))
NUM_ROWS = 40  # Q of the buffers: two mask words


class Batch:
    """Requests (query_len, context_len, num_nodes) over one paged cache."""

    def __init__(self, requests, device, dtype, heads, kv_heads, dim, page=16, hnd=1):
        gen = torch.Generator().manual_seed(SEED)
        self.requests, self.page = requests, page
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        starts, lens = [0], []
        count = len(requests)
        blocks = 1 + sum(-(-(q + c) // page) for q, c, _ in requests)
        width = max(1, *(-(-(q + c) // page) for q, c, _ in requests)) + 1
        table = torch.zeros(count, width, dtype=torch.int32)
        order = torch.randperm(blocks - 1, generator=gen) + 1
        used = 0
        parents = torch.arange(-1, NUM_ROWS - 1, dtype=torch.int32).repeat(count, 1)
        nodes = torch.zeros(count, dtype=torch.int32)
        for r, (q, c, n) in enumerate(requests):
            starts.append(starts[-1] + q)
            lens.append(q + c)
            need = -(-(q + c) // page)
            table[r, :need] = order[used : used + need]
            used += need
            if n:
                nodes[r] = n
                parents[r] = -1
                for i in range(1, n + 1):
                    parents[r, i] = int(torch.randint(0, i, (), generator=gen))
        self.parents, self.nodes = parents, nodes
        depths = depths_from_parents(parents)
        rows = torch.where(nodes > 0, nodes, NUM_ROWS - 1)
        self.mask = ancestor_mask(parents, rows)
        self.depths = depths
        total = starts[-1]

        def random(*shape):
            return torch.randn(*shape, generator=gen).to(device, dtype)

        self.query = random(total, heads, dim)
        self.key, self.value = (
            random(total, kv_heads, dim),
            random(total, kv_heads, dim),
        )
        cache = random(blocks, kv_heads, page, 2 * dim)
        if not hnd:
            cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
        self.cache = cache
        self.starts = torch.tensor(starts, dtype=torch.int32, device=device)
        self.lens = torch.tensor(lens, dtype=torch.int32, device=device)
        self.table = table.to(device)
        # The step has written its own rows to the cache; others must not be read.
        for r, (q, c, _) in enumerate(requests):
            for i in range(q):
                block, at = int(table[r, (c + i) // page]), (c + i) % page
                token = starts[r] + i
                cache[block, :, at, :dim] = self.key[token]
                cache[block, :, at, dim:] = self.value[token]
        self.tree = SimpleNamespace(
            num_rows=NUM_ROWS,
            b_num_nodes=nodes.to(device),
            b_mask=ancestor_bitmask(parents, rows).to(device),
            b_depths=depths.to(device),
        )

    def expected(self, window=None, context_only=False):
        """Float64 attention [T, heads, D], and log-sum-exp [heads, T]."""
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        lse = torch.full((self.heads, len(out)), float("-inf"), dtype=torch.float64)
        cache, table = self.cache.double().cpu(), self.table.cpu()
        for r, (q, c, n) in enumerate(self.requests):
            start, length = int(self.starts[r]), q + c
            slots = torch.arange(length)
            blocks = table[r, slots // self.page].long()
            kv = cache[blocks, :, slots % self.page]
            k, v = kv[..., : self.dim], kv[..., self.dim :]
            seen = torch.ones(q, length, dtype=torch.bool)
            tree = self.mask[r, :q, :q] if n else torch.ones(q, q).tril().bool()
            seen[:, c:] = False if context_only else tree
            if window is not None:
                depth = self.depths[r, :q] if n else torch.arange(q)
                theirs = torch.cat((torch.arange(c), c + depth))
                seen &= c + depth[:, None] - theirs[None] < window
            for h in range(self.heads):
                g = h // (self.heads // self.kv_heads)
                x = self.query[start : start + q, h].double().cpu()
                scores = x @ k[:, g].T * self.dim**-0.5
                scores = scores.masked_fill(~seen, float("-inf"))
                lse[h, start : start + q] = scores.logsumexp(-1)
                weights = scores.softmax(-1).nan_to_num(0)
                out[start : start + q, h] = weights @ v[:, g]
        return out, lse

    def run(self, window=None):
        out = torch.full_like(self.query, float("nan"))
        split_kv_attention(
            self.query, self.key, self.value, self.cache, out, self.starts, self.lens,
            self.table, self.tree, len(self.requests),
            max(q for q, _, _ in self.requests), len(out), self.dim**-0.5, window,
        )  # fmt: skip
        return out


MIXED = [
    (33, 20, 32),  # a full tree, beyond one mask word
    (9, 0, 8),  # no context
    (6, 47, 3),  # rows beyond the tree
    (1, 31, 0),  # a plain decode
    (5, 16, 0),  # drafts without a tree: causal
]


def close(got, want, dtype):
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert torch.isfinite(got).all()
    error = (got.double().cpu() - want).abs().max()
    assert error < tolerance, error


def dtypes():
    on_gpu = torch.cuda.is_available()
    return [torch.float32, torch.bfloat16] if on_gpu else [torch.float32]


@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page", "hnd"),
    [(2, 2, 16, 16, 1), (4, 1, 64, 32, 0)],
)
def test_split_kv(device, dtype, heads, kv_heads, dim, page, hnd):
    print(f"seed {SEED}")
    batch = Batch(MIXED, device, dtype, heads, kv_heads, dim, page, hnd)
    close(batch.run(), batch.expected()[0], dtype)


@pytest.mark.parametrize("window", [7, 24])
def test_sliding_window_counts_logical_positions(device, window):
    batch = Batch(MIXED[:4], device, torch.float32, 2, 1, 16)
    got, want = batch.run(window), batch.expected(window)[0]
    close(got, want, torch.float32)
    assert (want - batch.expected()[0]).abs().max() > 1e-2


def test_prefill_longer_than_a_tree(device):
    batch = Batch([(9, 11, 8), (70, 13, 0)], device, torch.float32, 2, 1, 16)
    close(batch.run(), batch.expected()[0], torch.float32)


@pytest.mark.parametrize("dtype", dtypes())
def test_merge_with_a_context_result(device, dtype):
    batch = Batch(MIXED, device, dtype, 4, 2, 32)
    context, lse = batch.expected(context_only=True)
    # Where there is no context, FlashAttention leaves what it likes.
    for r, (_, c, _) in enumerate(batch.requests):
        if c == 0:
            rows = slice(int(batch.starts[r]), int(batch.starts[r + 1]))
            context[rows], lse[:, rows] = float("nan"), float("nan")
    out = torch.full_like(batch.query, float("nan"))
    merge_new_rows(
        batch.query, batch.key, batch.value, batch.cache, out,
        context.to(device, dtype), lse.to(device, torch.float32), batch.starts,
        batch.lens, batch.table, batch.tree, len(MIXED), 33, 32**-0.5,
    )  # fmt: skip
    close(out, batch.expected()[0], dtype)


def test_padding_requests_write_nothing(device):
    batch = Batch(MIXED[:2] + [(0, 0, 0)], device, torch.float32, 2, 1, 16)
    close(batch.run(), batch.expected()[0], torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(24, 4, 256), (16, 8, 128)])
def test_large_shapes_and_graphs(device, heads, kv_heads, dim):
    many = [(33, 1000 + 37 * r, 32) for r in range(4)] + [(40, 5000, 39)]
    batch = Batch(many, device, torch.bfloat16, heads, kv_heads, dim)
    want = batch.expected()[0]
    out = torch.zeros_like(batch.query)

    def call():
        split_kv_attention(
            batch.query, batch.key, batch.value, batch.cache, out, batch.starts,
            batch.lens, batch.table, batch.tree, len(many), 40, len(out), dim**-0.5,
        )  # fmt: skip

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    out.zero_()
    graph.replay()
    close(out, want, torch.bfloat16)
