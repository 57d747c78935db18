# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The compaction kernel moves what ``plan_moves`` and ``compact_kv`` move."""

from __future__ import annotations

import os

import pytest
import torch

from vllm.v1.spec_decode.ddtree.kernels.kv_compact import CHUNK_WORDS, KVCompactor
from vllm.v1.spec_decode.ddtree.kv_compact import compact_kv, plan_moves

SEED = int(os.environ.get("DDTREE_TEST_SEED", "20261201"))
LENGTH = 4
# Targets that are other rows' sources, a path that stays, no tree, a full path.
PATHS = [
    [0, 2, 3, 4, -1],
    [0, 1, 5, 6, -1],
    [0, 1, 2, -1, -1],
    [0, -1, -1, -1, -1],
    [0, 3, 4, 7, 9],
]
ROWS = [8, 9, 5, 1, 12]
LENS = [21, 9, 30, 17, 40]


def make_cache(gen, blocks, heads, size, content, layout, dtype=torch.float32):
    """[blocks, heads, size, content] of random bytes, with the layout's strides."""
    orders = {"HND": (0, 1, 2, 3), "NHD": (0, 2, 1, 3), "HBND": (1, 0, 2, 3)}
    order = orders[layout]
    shape = (blocks, heads, size, content)
    num_bytes = content * dtype.itemsize
    data = torch.randint(
        0, 256, (*(shape[d] for d in order[:3]), num_bytes), generator=gen
    )
    return data.to(torch.uint8).view(dtype).permute(*order)


def make_table(gen, requests, width, spare=0):
    """Blocks in random order, none twice; ``spare`` columns more in memory."""
    blocks = torch.randperm(requests * width, generator=gen).to(torch.int32)
    table = torch.zeros(requests, width + spare, dtype=torch.int32)
    table[:, :width] = blocks.view(requests, width)
    return table[:, :width] if spare else table


def on(device, cache):
    """A copy with the same strides."""
    out = torch.empty_strided(
        cache.shape, cache.stride(), dtype=cache.dtype, device=device
    )
    return out.copy_(cache)


def moved(cache, table, paths=PATHS, rows=ROWS, lens=LENS):
    """The reference's result; the cache stays as it is."""
    want = on("cpu", cache)
    path = torch.tensor(paths)
    size = cache.shape[2]
    start = torch.tensor(lens) - torch.tensor(rows)
    moves = plan_moves(table, size, start, path, (path >= 0).sum(1))
    assert moves[0].numel() > 0
    raw = want.view(torch.uint8) if want.dtype.itemsize == 1 else want
    compact_kv(raw, *moves, block_size=size, block_dim=0, slot_dim=2)
    return want


def compact(device, mover, tables, paths=PATHS, rows=ROWS, lens=LENS, num_reqs=None):
    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    cu = [sum(rows[:b]) for b in range(len(rows) + 1)]
    counts = [sum(p >= 0 for p in path) for path in paths]
    mover.compact(
        tables, ints(lens), ints(cu), ints(paths), ints(counts), num_reqs or len(rows)
    )


def assert_same(got, want):
    """Bytes, because NaN is not equal to itself."""
    got = got.cpu().contiguous().view(torch.uint8)
    assert torch.equal(got, want.contiguous().view(torch.uint8))


@pytest.mark.parametrize("layout", ["HND", "NHD", "HBND"])
@pytest.mark.parametrize(
    ("size", "heads", "content", "dtype"),
    [
        (4, 2, 12, torch.float32),
        (16, 1, 8, torch.bfloat16),
        (16, 3, 40, torch.uint8),
        # More words than a program moves at once.
        (8, 2, 2 * CHUNK_WORDS + 6, torch.float32),
    ],
)
def test_equals_reference(device, layout, size, heads, content, dtype):
    print(f"seed {SEED}")
    gen = torch.Generator().manual_seed(SEED + size)
    width = -(-max(LENS) // size)
    table = make_table(gen, len(ROWS), width)
    cache = make_cache(gen, table.numel(), heads, size, content, layout, dtype)
    got = on(device, cache)
    mover = KVCompactor([[got]], LENGTH, device)
    compact(device, mover, [table.to(device)])
    assert_same(got, moved(cache, table))


def test_groups_of_different_block_sizes(device):
    """Unequal layers, heads and contents, and a table with a stride, in one launch."""
    gen = torch.Generator().manual_seed(SEED)
    groups, tables, pairs = [], [], []
    for size, spare, shapes in (
        (4, 3, [(2, 12, "NHD"), (1, 300, "HND")]),
        (16, 0, [(3, 8, "HND"), (2, 2, "NHD"), (1, 12, "HBND")]),
    ):
        width = -(-max(LENS) // size) + 1
        table = make_table(gen, len(ROWS), width, spare)
        blocks = len(ROWS) * width
        caches = [make_cache(gen, blocks, h, size, c, lay) for h, c, lay in shapes]
        got = [on(device, cache) for cache in caches]
        groups.append(got)
        wide = torch.zeros(len(ROWS), width + spare, dtype=torch.int32, device=device)
        wide[:, :width] = table.to(device)
        tables.append(wide[:, :width])
        pairs += zip(got, (moved(cache, table) for cache in caches), strict=True)
    # A group whose layers do not move still has a block table.
    groups.insert(1, [])
    tables.insert(1, torch.zeros(5, 1, dtype=torch.int32, device=device))
    mover = KVCompactor(groups, LENGTH, device)
    assert mover.num_layers == 5
    compact(device, mover, tables)
    for got, want in pairs:
        assert_same(got, want)


@pytest.mark.parametrize(
    "path",
    [
        [0, 2, 3, 4, 5],
        [0, 1, 5, 6, -1],
        [0, 4, 5, 6, 7],
        [0, 1, 2, 3, 7],
        [0, 3, -1, -1, -1],
    ],
)
@pytest.mark.parametrize("size", [1, 2, 16])
def test_aliasing_paths(device, path, size):
    """Also across blocks, where source and target differ in block and offset."""
    gen = torch.Generator().manual_seed(SEED)
    table = make_table(gen, 1, -(-13 // size))
    cache = make_cache(gen, table.numel(), 2, size, 4, "NHD")
    got = on(device, cache)
    mover = KVCompactor([[got]], LENGTH, device)
    compact(device, mover, [table.to(device)], [path], [8], [13])
    assert_same(got, moved(cache, table, [path], [8], [13]))


def test_nothing_to_move(device):
    """Paths that stay where they are, and requests behind the batch."""
    gen = torch.Generator().manual_seed(SEED)
    table = make_table(gen, 3, 2)
    cache = make_cache(gen, 6, 1, 16, 4, "HND")
    got = on(device, cache)
    mover = KVCompactor([[got]], LENGTH, device)
    paths = [[0, 1, 2, 3, 4], [0, -1, -1, -1, -1], [0, 2, 3, -1, -1]]
    rows, lens = [5, 1, 6], [20, 9, 30]
    compact(device, mover, [table.to(device)], paths, rows, lens, num_reqs=2)
    assert_same(got, cache)
    # num_sampled 0: no tree was walked; the path is not read.
    zero = torch.zeros(3, dtype=torch.int32, device=device)
    starts = torch.tensor([0, 5, 6, 12], dtype=torch.int32, device=device)
    junk = torch.full((3, 5), 99, dtype=torch.int32, device=device)
    mover.compact([table.to(device)], zero + 30, starts, junk, zero, 3)
    assert_same(got, cache)


def test_random_steps(device):
    """The same compactor step after step, on a cache that keeps changing."""
    print(f"seed {SEED}")
    gen = torch.Generator().manual_seed(SEED + 1)
    size, batch = 4, 4
    table = make_table(gen, batch, 8)
    cache = make_cache(gen, table.numel(), 2, size, 4, "HND")
    got, on_device = on(device, cache), table.to(device)
    mover = KVCompactor([[got]], LENGTH, device)
    for _ in range(5):
        rows = torch.randint(6, 13, (batch,), generator=gen).tolist()
        lens = [r + int(torch.randint(0, 20, (), generator=gen)) for r in rows]
        paths = []
        for r in rows:
            taken = torch.randperm(r - 1, generator=gen)[:LENGTH].sort().values + 1
            count = int(torch.randint(1, LENGTH + 1, (), generator=gen))
            path = [0, *taken[-count:].tolist()]
            paths.append(path + [-1] * (LENGTH + 1 - len(path)))
        compact(device, mover, [on_device], paths, rows, lens)
        cache = moved(cache, table, paths, rows, lens)
        assert_same(got, cache)


def test_other_block_tables(device):
    """Tables that were allocated anew are found."""
    gen = torch.Generator().manual_seed(SEED)
    size, width = 16, 3
    first, second = (make_table(gen, len(ROWS), width) for _ in range(2))
    cache = make_cache(gen, len(ROWS) * width, 1, size, 4, "HND")
    got = on(device, cache)
    mover = KVCompactor([[got]], LENGTH, device)
    kept = first.to(device).clone()
    compact(device, mover, [kept])
    compact(device, mover, [second.to(device).clone()])
    assert_same(got, moved(moved(cache, first), second))


def test_shared_tensor_is_moved_once(device):
    """Twice would be wrong: [0, 2, 3, 4] is not the same as itself applied twice."""
    gen = torch.Generator().manual_seed(SEED)
    table = make_table(gen, len(ROWS), 3)
    cache = make_cache(gen, table.numel(), 2, 16, 4, "HND")
    once = moved(cache, table)
    assert not torch.equal(moved(once, table), once)
    got = on(device, cache)
    other = on(device, cache)
    mover = KVCompactor([[got, other, got.view(got.shape)]], LENGTH, device)
    assert mover.num_layers == 2
    compact(device, mover, [table.to(device)])
    assert_same(got, once)
    assert_same(other, once)


def test_pool_of_two_groups(device):
    """Upstream gives one memory pool to a layer of every group, with other blocks.

    See ``kv_cache_utils``: "layers of different groups have different block table,
    they will use different parts of the shared Tensor".
    """
    gen = torch.Generator().manual_seed(SEED)
    both = make_table(gen, 2 * len(ROWS), 3)
    full, sliding = both[: len(ROWS)], both[len(ROWS) :]
    cache = make_cache(gen, both.numel(), 2, 16, 4, "HND")
    got = on(device, cache)
    mover = KVCompactor([[got], [got]], LENGTH, device)
    compact(device, mover, [full.to(device), sliding.to(device)])
    assert_same(got, moved(moved(cache, full), sliding))


def test_no_layers(device):
    mover = KVCompactor([[], []], LENGTH, device)
    assert mover.num_layers == 0
    compact(device, mover, [])


@pytest.mark.parametrize(
    "case", ["odd content", "odd slot stride", "odd address", "content with a stride"]
)
def test_rows_that_cannot_be_moved(device, case):
    flat = torch.zeros(4096, dtype=torch.bfloat16, device=device)
    cache = {
        "odd content": flat[: 4 * 32 * 7].view(4, 2, 16, 7),
        "odd slot stride": flat[: 4 * 32 * 10].view(4, 2, 16, 10)[..., :8],
        "odd address": flat[1 : 1 + 4 * 32 * 8].view(4, 2, 16, 8),
        "content with a stride": flat[: 4 * 32 * 8].view(4, 2, 8, 16).transpose(2, 3),
    }[case]
    with pytest.raises(ValueError, match="64-bit words; tree_budget cannot move"):
        KVCompactor([[cache]], LENGTH, device)
