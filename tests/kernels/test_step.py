# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Step, walk, compaction and drafter inputs against the PyTorch references."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from vllm.v1.spec_decode.ddtree import kv_compact as reference
from vllm.v1.spec_decode.ddtree.kernels.context import prepare_tree_inputs
from vllm.v1.spec_decode.ddtree.kernels.kv_compact import KVCompactor
from vllm.v1.spec_decode.ddtree.kernels.step import (
    prepare_step,
    shift_positions,
    store_drafts,
)
from vllm.v1.spec_decode.ddtree.kernels.walk import walk
from vllm.v1.spec_decode.ddtree.sampler import walk as walk_reference
from vllm.v1.spec_decode.ddtree.tree import (
    TreeBatch,
    ancestor_bitmask,
    depths_from_parents,
    unpack_mask,
)
from vllm.v1.spec_decode.ddtree.tree_state import TreeState

SEED = int(os.environ.get("DDTREE_TEST_SEED", "20261201"))
BUDGET, POSITIONS = 35, 6


def make_state(device, slots=5) -> TreeState:
    """A different tree in every slot, none in slot 3."""
    print(f"seed {SEED}")
    gen = torch.Generator().manual_seed(SEED)
    state = TreeState(slots, BUDGET, POSITIONS, device)
    for slot in range(slots):
        n = 0 if slot == 3 else BUDGET - 5 * slot
        parents = torch.full((BUDGET + 1,), -1, dtype=torch.int32)
        depths = [0]
        for i in range(1, n + 1):
            parent = int(torch.randint(max(0, i - 6), i, (), generator=gen))
            while depths[parent] >= POSITIONS:
                parent = int(parents[parent])
            parents[i] = parent
            depths.append(depths[parent] + 1)
        state.parents[slot] = parents.to(device)
        state.depths[slot] = depths_from_parents(parents[None])[0].to(device)
        state.num_nodes[slot] = n
    return state


def ints(values, device, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


def test_step(device):
    """Full tree, truncated tree, drafts without a tree, a prompt tail, a decode."""
    state = make_state(device)
    order = [2, 0, 3, 1, 4]
    rows = [26, 10, 8, 9, 1]
    queries = [26, 10, 8, 12, 1]
    starts = [0]
    logits = [0]
    for q, r in zip(queries, rows, strict=True):
        starts.append(starts[-1] + q)
        logits.append(logits[-1] + r)
    positions = torch.arange(starts[-1], device=device) + 100
    planes = (torch.arange(starts[-1], device=device) + 500).repeat(3, 1)
    before = positions.clone()
    state.b_num_nodes.fill_(9)
    state.b_path.fill_(4)
    prepare_step(
        state, ints(order, device), ints(starts, device), ints(logits, device),
        positions, 4, 5,
    )  # fmt: skip
    # The fifth request is padding here: its slot must not be read.
    assert state.b_num_nodes.tolist() == [25, 9, 0, 0, 0]
    assert (state.b_path == -1).all() and (state.b_num_sampled == 0).all()
    for r, slot in enumerate(order[:2]):
        n = int(state.b_num_nodes[r])
        want = TreeBatch(
            torch.zeros(1, BUDGET, dtype=torch.int64),
            state.parents[slot, None].cpu(),
            state.depths[slot, None].cpu(),
            torch.tensor([BUDGET], dtype=torch.int32),
        ).truncate(n)
        assert torch.equal(state.b_parents[r].cpu(), want.parents[0])
        assert torch.equal(state.b_depths[r].cpu(), want.depths[0])
        mask = ancestor_bitmask(want.parents, want.num_nodes)[0]
        assert torch.equal(state.b_mask[r].cpu(), mask)
        delta = torch.arange(n + 1) - want.depths[0, : n + 1]
        span = slice(starts[r], starts[r] + n + 1)
        assert torch.equal((before - positions)[span].cpu(), delta)
    assert torch.equal(before[starts[2] :], positions[starts[2] :])
    chain = torch.arange(-1, BUDGET, dtype=torch.int32)[None]
    causal = ancestor_bitmask(chain, torch.tensor([BUDGET]))[0]
    assert torch.equal(state.b_mask[2].cpu(), causal)
    assert torch.equal(state.b_mask[4].cpu(), causal)

    shift_positions(planes, state, ints(starts, device), 4)
    assert torch.equal(planes[2] - 500, positions - 100)

    state.d_parents.copy_(torch.randint_like(state.d_parents, 50))
    state.d_num_nodes.copy_(ints([5, 6, 7, 8, 9], device))
    untouched = state.parents[4].clone()
    store_drafts(state, ints(order[:4], device), 4)
    assert torch.equal(state.parents[2], state.d_parents[0])
    assert state.num_nodes.tolist()[:4] == [6, 8, 5, 7]
    assert torch.equal(state.parents[4], untouched)


def test_walk(device):
    state = make_state(device)
    gen = torch.Generator().manual_seed(SEED + 1)
    rows = [int(n) + 1 for n in state.num_nodes]
    rows[3] = 8  # drafts scheduled, but no tree
    starts = [0]
    for r in rows:
        starts.append(starts[-1] + r)
    cu = ints(starts, device)
    order = ints([0, 1, 2, 3, 4], device)
    positions = torch.zeros(starts[-1], dtype=torch.int64, device=device)
    prepare_step(state, order, cu, cu, positions, 5, 5)
    longest = 0
    for _ in range(4):
        draft = torch.randint(0, 2, (starts[-1],), generator=gen, dtype=torch.int32)
        node = torch.randint(0, 2, (starts[-1],), generator=gen)
        sampled, count = walk(node.to(device), draft.to(device), cu, state)
        for r in range(5):
            span = slice(starts[r], starts[r] + rows[r])
            tokens = torch.full((1, BUDGET), -1)
            tokens[0, : rows[r] - 1] = draft[span][1:]
            tree = TreeBatch(
                tokens,
                state.b_parents[r, None].cpu(),
                state.b_depths[r, None].cpu(),
                state.b_num_nodes[r, None].cpu(),
            )
            padded = torch.zeros(1, BUDGET + 1, dtype=torch.int64)
            padded[0, : rows[r]] = node[span]
            want = walk_reference(tree, padded, POSITIONS)
            assert sampled[r].tolist() == want[0][0].tolist()
            assert int(count[r]) == int(want[1]) == int(state.b_num_sampled[r])
            assert state.b_path[r].tolist() == want[2][0].tolist()
            longest = max(longest, int(count[r]))
    assert longest > 2


@pytest.mark.parametrize("hnd", [True, False])
def test_compaction(device, hnd):
    """Two groups of different block size, paths that alias, a shared tensor."""
    gen = torch.Generator().manual_seed(SEED)
    path = ints([[0, 2, 3, 4, -1], [0, 1, 5, 6, 9], [0, 1, 2, -1, -1]], device)
    sampled = ints([4, 5, 3], device)
    rows, lens = [8, 12, 4], [21, 40, 9]
    cu = ints([0, 8, 20, 24], device)
    start = [n - r for n, r in zip(lens, rows, strict=True)]
    groups, tables, wants = [], [], []
    for size in (4, 16):
        caches = []
        width = -(-40 // size) + 1
        table = torch.randperm(3 * width, generator=gen)[: 3 * width]
        table = table.view(3, width).to(torch.int32)
        for _ in range(2):
            cache = torch.randn(3 * width, 2, size, 12, generator=gen)
            if not hnd:
                cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
            want = cache.clone()
            moves = reference.plan_moves(
                table, size, torch.tensor(start), path.cpu(), sampled.cpu()
            )
            assert len(moves[0]) > 0
            reference.compact_kv(want, *moves, block_size=size, block_dim=0, slot_dim=2)
            caches.append(cache.to(device))
            wants.append((caches[-1], want))
        groups.append([*caches, caches[0]])
        tables.append(table.to(device))
    mover = KVCompactor(groups, 4, device)
    assert mover.num_layers == 4
    mover.compact(tables, ints(lens, device), cu, path, sampled, 3)
    for got, want in wants:
        assert torch.equal(got.cpu(), want)


def test_rows_that_cannot_be_moved(device):
    with pytest.raises(ValueError, match="64-bit words"):
        odd = torch.zeros(2, 1, 16, 3, device=device)
        KVCompactor([[odd]], 4, device)


def test_drafter_inputs(device):
    """A path, drafts without a tree, a prefill that goes on, and the end of it."""
    state = TreeState(6, BUDGET, 3, device)
    queries, rows = [9, 5, 7, 4], [9, 5, 1, 1]
    starts, logits = ints([0, 9, 14, 21, 25], device), ints([0, 9, 14, 15, 16], device)
    lens, rejected = [30, 20, 7, 12], [6, 4, 0, 0]
    state.b_path[0] = ints([0, 4, 7, -1], device)
    state.b_num_sampled[0] = 3
    state.b_path[1, 0], state.b_num_sampled[1] = 0, 1
    counts = [4, 4, 7, 4]
    context_start = ints([0, 4, 8, 15, 19], device)
    size, limit, draft = 4, 28, 3
    table = torch.arange(6 * 10, dtype=torch.int32, device=device).view(6, 10) + 1
    buffers = SimpleNamespace(
        input_ids=ints([-5] * 40, device),
        positions=ints([-5] * 40, device, torch.int64),
        query_start_loc=ints([-5] * 7, device),
        seq_lens=ints([-5] * 6, device),
    )
    query_slots, ctx_rows, ctx_pos, ctx_slots = (
        torch.full((40,), -5, device=device) for _ in range(4)
    )
    indices, pos = (torch.full((18,), -5, device=device) for _ in range(2))
    mapping = ints([-5] * 18, device)
    batch = SimpleNamespace(
        num_reqs=4,
        query_start_loc=starts,
        cu_num_logits=logits,
        seq_lens=ints(lens, device),
        idx_mapping=ints([5, 2, 0, 1], device),
    )
    prepare_tree_inputs(
        buffers, query_slots, ctx_rows, ctx_pos, ctx_slots, indices, pos, mapping,
        batch, context_start, 7, state, ints([3, 1, 0, 1], device),
        ints(rejected, device), ints([10, 11, 12, 13, 14, 15], device, torch.int64),
        ints([20, 21, 22, 23, 24, 25], device, torch.int64), table, size, 99, 4, draft,
        6, 40, limit,
    )  # fmt: skip

    def slot(request, position):
        if position >= limit:
            return -1
        return int(table[request, position // size]) * size + position % size

    want_rows, want_slots = [], []
    for r, count in enumerate(counts):
        for j in range(count):
            position = lens[r] - queries[r] + j
            if rows[r] > 1:
                used = j < int(state.b_num_sampled[r])
                offset = int(state.b_path[r, j]) if used else 0
            else:
                used, offset = True, j
            want_rows.append(int(starts[r]) + offset)
            want_slots.append(slot(r, position) if used else -1)
            if used:
                assert int(ctx_pos[int(context_start[r]) + j]) == position
    assert ctx_rows[:19].tolist() == want_rows
    assert ctx_slots[:19].tolist() == want_slots
    for r in range(4):
        first = lens[r] - rejected[r]
        span = slice(4 * r, 4 * r + 4)
        bonus = [15, 12, 20, 11][r]
        assert buffers.input_ids[span].tolist() == [bonus, 99, 99, 99]
        places = [first + q for q in range(4)]
        clamped = [min(p, limit - 1) for p in places]
        assert buffers.positions[span].tolist() == clamped
        assert query_slots[span].tolist() == [slot(r, p) for p in places]
        assert int(buffers.seq_lens[r]) == first + 4
        assert indices[3 * r : 3 * r + 3].tolist() == [4 * r + i for i in (1, 2, 3)]
        assert mapping[3 * r : 3 * r + 3].tolist() == [[5, 2, 0, 1][r]] * 3
    assert buffers.query_start_loc.tolist() == [0, 4, 8, 12, 16, 16, 16]
    assert buffers.seq_lens[4:].tolist() == [0, 0]
    assert (query_slots[16:] == -1).all()
    assert (mapping[12:] == -1).all() and (indices[12:] == 0).all()


def forest(state, gen, sizes):
    """Random trees of the given sizes in slot order; junk behind the valid rows."""
    for slot, n in enumerate(sizes):
        parents = torch.full((state.num_rows,), -1, dtype=torch.int32)
        depths = torch.zeros(state.num_rows, dtype=torch.int32)
        for i in range(1, n + 1):
            parent = int(torch.randint(0, i, (), generator=gen))
            while depths[parent] >= state.num_positions:
                parent = int(parents[parent])
            parents[i], depths[i] = parent, depths[parent] + 1
        parents[n + 1 :], depths[n + 1 :] = 55, 66
        state.parents[slot] = parents.to(state.device)
        state.depths[slot] = depths.to(state.device)
        state.num_nodes[slot] = n


def offsets(lengths):
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


@pytest.mark.parametrize("budget", [1, 15, 31, 32, 64])
def test_step_equals_reference(device, budget):
    """Unequal trees, longer and shorter schedules, and padding, against tree.py."""
    print(f"seed {SEED}")
    gen = torch.Generator().manual_seed(SEED + budget)
    length = min(budget, 5)
    state = TreeState(7, budget, length, device)
    half = (budget + 1) // 2
    sizes = [budget, half, 1, 0, budget, budget, half]
    forest(state, gen, sizes)
    order = [6, 4, 3, 0, 5]
    # All nodes scheduled, a prefix, no tree, more rows than nodes, a prompt tail.
    rows = [half + 1, max(2, half), budget + 1, budget + 1, budget + 1]
    queries = [*rows[:4], rows[4] + 3]
    if half < budget:
        rows[0] = queries[0] = half + 2
    want_nodes = [half, rows[1] - 1, 0, budget, 0]
    starts, logits = offsets(queries), offsets(rows)
    total = starts[-1]
    # The positions of each request are linear, from a start of its own.
    linear = torch.cat(
        [torch.arange(q) + 1000 * (r + 1) for r, q in enumerate(queries)]
    )
    positions = torch.cat((linear, torch.full((3,), 7))).to(device)
    pointer = positions.data_ptr()
    for stale in (state.b_parents, state.b_depths, state.b_mask, state.b_path):
        stale.fill_(123)
    state.b_num_nodes.fill_(3)
    state.b_num_sampled.fill_(3)
    prepare_step(
        state, ints(order, device), ints([*starts, total, total], device),
        ints(logits, device), positions, 5, 6,
    )  # fmt: skip
    assert positions.data_ptr() == pointer
    assert state.b_num_nodes.tolist()[:6] == [*want_nodes, 0]
    assert state.b_num_sampled.tolist()[:6] == [0] * 6
    assert (state.b_path[:6] == -1).all()
    assert (state.b_path[6] == 123).all() and (state.b_mask[6] == 123).all()

    row = torch.arange(budget + 1, dtype=torch.int32)
    full = torch.tensor([budget], dtype=torch.int32)
    causal = row[None] - 1, row[None], ancestor_bitmask(row[None] - 1, full)
    want_positions = linear.clone()
    for r in range(6):
        if r < 5 and want_nodes[r] > 0:
            n = want_nodes[r]
            valid = row <= n
            parents = state.parents[order[r], None].cpu().masked_fill(~valid, -1)
            depths = state.depths[order[r], None].cpu().masked_fill(~valid, 0)
            assert torch.equal(depths, depths_from_parents(parents))
            want = parents, depths, ancestor_bitmask(parents, torch.tensor([n]))
            first = starts[r]
            want_positions[first : first + n + 1] = 1000 * (r + 1) + depths[0, : n + 1]
        else:
            want = causal
        for name, value in zip(("parents", "depths", "mask"), want, strict=True):
            got = getattr(state, f"b_{name}")[r].cpu()
            assert torch.equal(got, value[0]), f"{name} of request {r}"
    assert torch.equal(positions.cpu()[:total], want_positions)
    assert (positions[total:] == 7).all()


def test_step_without_drafts(device):
    """Trees in the slots, but decodes and prompt chunks only: nothing moves."""
    gen = torch.Generator().manual_seed(SEED)
    state = TreeState(3, 8, 4, device)
    forest(state, gen, [8, 8, 8])
    positions = torch.arange(14, device=device) + 40
    before = positions.clone()
    prepare_step(
        state, ints([2, 0, 1], device), ints([0, 1, 10, 14], device),
        ints([0, 1, 2, 3], device), positions, 3, 3,
    )  # fmt: skip
    assert state.b_num_nodes.tolist() == [0, 0, 0]
    assert torch.equal(positions, before)
    planes = before.repeat(3, 1)
    shift_positions(planes, state, ints([0, 1, 10, 14], device), 3)
    assert torch.equal(planes, before.repeat(3, 1))


def test_causal_rows_see_all_before_them(device):
    state = TreeState(1, 40, 4, device)
    prepare_step(
        state, ints([0], device), ints([0, 41], device), ints([0, 41], device),
        torch.arange(41, device=device), 1, 1,
    )  # fmt: skip
    seen = unpack_mask(state.b_mask[0].cpu(), 41)
    assert torch.equal(seen, torch.ones(41, 41, dtype=torch.bool).tril())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_planes_with_a_stride(device, dtype):
    """Planes in a wider buffer: rows of padding requests and other tokens stay."""
    gen = torch.Generator().manual_seed(SEED)
    state = TreeState(4, 9, 3, device)
    forest(state, gen, [9, 4, 9, 0])
    starts = [0, 5, 15, 20]
    cu = ints([*starts, 20], device)
    positions = torch.arange(20, device=device)
    prepare_step(state, ints([1, 2, 3], device), cu, cu, positions, 3, 4)
    shift = torch.arange(20, device=device) - positions
    assert shift[1:5].any() and shift[5:15].any() and not shift[15:].any()
    wide = torch.randint(0, 900, (3, 26), generator=gen).to(device, dtype)
    want = wide.clone()
    want[:, 2:22] -= shift.to(dtype)
    shift_positions(wide[:, 2:24], state, cu, 3)
    assert torch.equal(wide, want)


def test_drafts_go_to_their_slots(device):
    """All three arrays of each drafted tree, and no other slot."""
    gen = torch.Generator().manual_seed(SEED)
    state = TreeState(6, 10, 4, device)
    drafted = state.d_parents, state.d_depths, state.d_num_nodes
    stored = state.parents, state.depths, state.num_nodes
    for tensor in (*drafted, *stored):
        values = torch.randint(0, 90, tensor.shape, generator=gen, dtype=torch.int32)
        tensor.copy_(values)
    before = [tensor.clone() for tensor in stored]
    order = [4, 1, 5]
    store_drafts(state, ints(order, device), 3)
    for got, old, new in zip(stored, before, drafted, strict=True):
        want = old.clone()
        want[order] = new[:3]
        assert torch.equal(got, want)
