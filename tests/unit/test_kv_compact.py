# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""kv_compact: moves against one-by-one copies, layouts, dtypes and aliasing."""

import pytest
import torch
from _load import load
from _oracle import generator, randint

kv = load("kv_compact")


def random_step(gen, batch, block_size, depth, budget):
    """A block table without shared blocks, starts, and paths of unequal lengths."""
    starts = [randint(gen, 0, 3 * block_size) for _ in range(batch)]
    per_request = -(-(3 * block_size + budget + 1) // block_size)
    num_blocks = batch * per_request + 1
    blocks = torch.randperm(num_blocks - 1, generator=gen) + 1
    table = blocks.view(batch, per_request).to(torch.int32)
    path = torch.full((batch, depth + 1), -1, dtype=torch.int32)
    lengths = []
    for b in range(batch):
        accepted = randint(gen, 0, min(depth, budget))
        rows = torch.randperm(budget, generator=gen)[:accepted].sort().values + 1
        path[b, 0] = 0
        path[b, 1 : accepted + 1] = rows
        lengths.append(accepted + 1)
    return table, torch.tensor(starts), path, torch.tensor(lengths), num_blocks


def copy_one_by_one(cache, table, block_size, start, path, num_sampled):
    """cache [blocks, block_size, ...]; ascending depth never overwrites a source."""
    for b in range(len(start)):
        for d in range(int(num_sampled[b])):
            src, dst = int(start[b] + path[b, d]), int(start[b]) + d
            src_block = int(table[b, src // block_size])
            dst_block = int(table[b, dst // block_size])
            row = cache[src_block, src % block_size].clone()
            cache[dst_block, dst % block_size] = row


def run(cache, step, block_size, block_dim, slot_dim):
    src, dst = kv.plan_moves(step[0], block_size, *step[1:])
    kv.compact_kv(
        cache, src, dst, block_size=block_size, block_dim=block_dim, slot_dim=slot_dim
    )


@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 128])
@pytest.mark.parametrize("case", range(6))
def test_equals_one_by_one(case, block_size):
    gen = generator(case)
    batch, depth = randint(gen, 1, 6), randint(gen, 1, 15)
    *step, num_blocks = random_step(gen, batch, block_size, depth, 31)
    cache = torch.rand(num_blocks, block_size, 2, 3, generator=gen)
    expected = cache.clone()
    copy_one_by_one(expected, step[0], block_size, *step[1:])
    run(cache, step, block_size, 0, 1)
    assert torch.equal(cache, expected)


LAYOUTS = {
    "kv outermost": ((2, 0, 0, 2, 4), 1, 2),
    "kv behind blocks": ((0, 2, 0, 2, 4), 0, 2),
    "heads before slots": ((2, 0, 3, 0, 4), 1, 3),
    "slots innermost": ((2, 0, 3, 4, 0), 1, -1),
    "slots before blocks": ((0, 2, 0, 4), 2, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    shape, block_dim, slot_dim = LAYOUTS[layout]
    gen = generator(100)
    *step, num_blocks = random_step(gen, 4, 8, 7, 20)
    shape = list(shape)
    shape[block_dim], shape[slot_dim] = num_blocks, 8
    cache = torch.rand(shape, generator=gen)
    expected = cache.clone()
    copy_one_by_one(
        expected.movedim((block_dim, slot_dim), (0, 1)), step[0], 8, *step[1:]
    )
    before = cache.clone()
    run(cache, step, 8, block_dim, slot_dim)
    assert torch.equal(cache, expected)
    assert not torch.equal(cache, before)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.uint8,
        torch.int64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
def test_bytes_are_copied_as_they_are(dtype):
    """Random bytes hold NaNs of many kinds and negative zeros."""
    gen = generator(101)
    *step, num_blocks = random_step(gen, 3, 4, 7, 20)
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(
        0, 256, (num_blocks, 4, 6 * size), generator=gen, dtype=torch.uint8
    )
    expected = raw.clone()
    copy_one_by_one(expected, step[0], 4, *step[1:])
    assert not torch.equal(raw, expected)
    run(raw.view(dtype), step, 4, 0, 1)
    assert torch.equal(raw, expected)


def test_strided_view_leaves_its_surroundings_alone():
    gen = generator(102)
    *step, num_blocks = random_step(gen, 3, 4, 7, 20)
    base = torch.rand(num_blocks, 6, 2, 5, generator=gen)
    expected = base.clone()
    copy_one_by_one(expected[:, 1:5, :, 1:4], step[0], 4, *step[1:])
    run(base[:, 1:5, :, 1:4], step, 4, 0, 1)
    assert torch.equal(base, expected)


def test_destinations_that_are_sources():
    """Rows 2, 3, 4 move to 1, 2, 3: reading after writing would repeat row 2."""
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    path = torch.tensor([[0, 2, 3, 4]], dtype=torch.int32)
    src, dst = kv.plan_moves(table, 4, torch.tensor([1]), path, torch.tensor([4]))
    assert src.tolist() == [4 + 3, 0, 1]  # positions 3, 4, 5
    assert dst.tolist() == [4 + 2, 4 + 3, 0]  # positions 2, 3, 4
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        cache = torch.arange(8.0).view(2, 4, 1)
        kv.compact_kv(
            cache, src[order], dst[order], block_size=4, block_dim=0, slot_dim=1
        )
        assert cache.flatten().tolist() == [1, 1, 2, 3, 4, 5, 7, 0]


def test_swapped_rows():
    cache = torch.tensor([[1.0, 2.0]])
    slots = torch.tensor([0, 1])
    kv.compact_kv(cache, slots, slots.flip(0), block_size=2, block_dim=0, slot_dim=1)
    assert cache.tolist() == [[2.0, 1.0]]


def test_only_displaced_rows_are_planned():
    table = torch.arange(6, dtype=torch.int32).view(3, 2)
    path = torch.tensor([[0, 1, 2, 5], [0, 1, 2, 3], [0, 7, -1, -1]])
    start = torch.tensor([0, 0, 3])
    src, dst = kv.plan_moves(table, 8, start, path, torch.tensor([4, 4, 2]))
    assert (src.tolist(), dst.tolist()) == ([5, 42], [3, 36])
    assert src.dtype == dst.dtype == torch.int64


def test_padding_and_unsampled_requests_move_nothing():
    """Path entries behind num_sampled are stale, and beyond the block table."""
    table = torch.zeros(3, 1, dtype=torch.int32)
    path = torch.tensor([[0, 900], [0, 5], [-1, -1]])
    start = torch.tensor([0, 0, 0])
    src, dst = kv.plan_moves(table, 8, start, path, torch.tensor([1, 0, 0]))
    assert (src.numel(), dst.numel()) == (0, 0)
    cache = torch.rand(1, 8, 2)
    before = cache.clone()
    kv.compact_kv(cache, src, dst, block_size=8, block_dim=0, slot_dim=1)
    assert torch.equal(cache, before)


def test_beyond_the_block_table_is_named():
    table = torch.zeros(2, 1, dtype=torch.int32)
    path = torch.tensor([[0, 1], [0, 3]])
    with pytest.raises(ValueError, match="request 1: slot position 8 is beyond"):
        kv.plan_moves(table, 8, torch.tensor([0, 5]), path, torch.tensor([2, 2]))


def test_bad_dimensions_are_named():
    slots = torch.tensor([0])
    cache = torch.zeros(2, 4, 1)
    with pytest.raises(ValueError, match="both 1"):
        kv.compact_kv(cache, slots, slots, block_size=4, block_dim=1, slot_dim=-2)
    with pytest.raises(ValueError, match="expected block_size 8"):
        kv.compact_kv(cache, slots, slots, block_size=8, block_dim=0, slot_dim=1)
