# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The walk kernel finds the paths of ``sampler.walk``."""

from __future__ import annotations

import os

import pytest
import torch

from vllm.v1.spec_decode.ddtree.kernels.walk import walk
from vllm.v1.spec_decode.ddtree.sampler import walk as reference
from vllm.v1.spec_decode.ddtree.tree import TreeBatch, depths_from_parents
from vllm.v1.spec_decode.ddtree.tree_state import TreeState

SEED = int(os.environ.get("DDTREE_TEST_SEED", "20261201"))


def random_trees(sizes, budget, reach, vocab, gen) -> TreeBatch:
    """A parent is at most ``reach`` rows above its child; siblings may be twins."""
    tree = TreeBatch.empty(len(sizes), budget)
    tree.num_nodes.copy_(torch.tensor(sizes))
    for b, n in enumerate(sizes):
        for i in range(1, n + 1):
            tree.parents[b, i] = torch.randint(max(0, i - reach), i, (), generator=gen)
        tree.tokens[b, :n] = torch.randint(0, vocab, (n,), generator=gen)
    tree.depths = depths_from_parents(tree.parents)
    return tree


def check(device, tree, rows, length, node_tokens, dtype=torch.int64) -> list[int]:
    """Walk packed rows, ``rows[b]`` of each request, and compare all outputs."""
    batch, budget = tree.tokens.shape
    state = TreeState(batch + 2, budget, length, device)
    state.b_parents[:batch] = tree.parents.to(device)
    state.b_depths[:batch] = tree.depths.to(device)
    state.b_num_nodes[:batch] = tree.num_nodes.to(device)
    state.b_path.fill_(77)
    state.b_num_sampled.fill_(77)
    cu = torch.tensor([sum(rows[:b]) for b in range(batch + 1)], dtype=torch.int32)
    # Row 0 is the root, whose token must not count as a draft.
    drafts = torch.cat((node_tokens[:, :1], tree.tokens), dim=1)
    # Rows beyond a tree look like good children, but are none.
    drafts = torch.where(drafts < 0, node_tokens[:, :1], drafts)
    keep = torch.arange(budget + 1) < torch.tensor(rows)[:, None]
    sampled, num_sampled = walk(
        node_tokens[keep].to(device),
        drafts[keep].to(device, dtype),
        cu.to(device),
        state,
    )
    want = reference(tree, node_tokens, length)
    assert sampled.dtype == torch.int64 and num_sampled.dtype == torch.int32
    assert torch.equal(sampled.cpu(), want[0])
    assert torch.equal(num_sampled.cpu(), want[1])
    assert torch.equal(state.b_num_sampled[:batch].cpu(), want[1])
    assert torch.equal(state.b_path[:batch].cpu(), want[2])
    assert (state.b_path[batch:] == 77).all()
    assert (state.b_num_sampled[batch:] == 77).all()
    return num_sampled.tolist()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("budget", "length", "reach", "vocab"),
    [(1, 1, 1, 2), (7, 3, 3, 2), (16, 15, 2, 2), (31, 15, 5, 3), (64, 64, 1, 1)],
)
def test_equals_reference(device, budget, length, reach, vocab, dtype):
    """Unequal trees, one of them none, some with more rows than nodes."""
    print(f"seed {SEED}")
    gen = torch.Generator().manual_seed(SEED + budget)
    counts = []
    for _ in range(6):
        sizes = [budget, (budget + 1) // 2, 0, 1, budget]
        tree = random_trees(sizes, budget, reach, vocab, gen)
        rows = [budget + 1, sizes[1] + 1, budget + 1, min(4, budget + 1), budget + 1]
        tokens = torch.randint(0, vocab, (5, budget + 1), generator=gen)
        counts += check(device, tree, rows, length, tokens, dtype)
    assert min(counts) == 1
    assert max(counts) > min(2, budget)


@pytest.mark.parametrize("length", [1, 2, 5, 8, 12])
def test_depth_limit(device, length):
    """A chain that is accepted as a whole is cut at L; the last token is the bonus."""
    tokens = torch.arange(100, 108).repeat(2, 1)
    tree = TreeBatch.chain(tokens, torch.tensor([8, 4]))
    nodes = torch.cat((tokens, torch.tensor([[7], [7]])), dim=1)
    counts = check(device, tree, [9, 5], length, nodes)
    assert counts == [min(length, 8) + 1, min(length, 4) + 1]


def test_first_of_twins(device):
    """Two children with the sampled token: the lower row is followed."""
    tree = TreeBatch.empty(1, 5)
    tree.parents[0] = torch.tensor([-1, 0, 0, 0, 2, 3])
    tree.depths = depths_from_parents(tree.parents)
    tree.tokens[0] = torch.tensor([8, 9, 9, 4, 4])
    tree.num_nodes[0] = 5
    nodes = torch.tensor([[9, 0, 4, 4, 1, 2]])
    assert check(device, tree, [6], 3, nodes) == [3]


def test_no_tree_in_the_batch(device):
    """Decodes and drafts without a tree give the first row's token."""
    tree = TreeBatch.empty(3, 6)
    nodes = torch.full((3, 7), 5)
    assert check(device, tree, [1, 7, 1], 4, nodes) == [1, 1, 1]


def test_own_rows_only(device):
    """A request reads its own rows only: the neighbours' match, its own do not."""
    tree = TreeBatch.chain(torch.tensor([[3, 3], [4, 4], [3, 3]]))
    nodes = torch.full((3, 3), 3)
    assert check(device, tree, [3, 3, 3], 2, nodes) == [3, 1, 3]
