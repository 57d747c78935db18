# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""sampler: the walk, against golden paths and a walk written with loops."""

import numpy as np
import pytest
import torch
from _load import GOLDEN, load
from _oracle import generator, naive_walk, plain_logits, randint

build = load("build")
sampler = load("sampler")
TreeBatch = load("tree").TreeBatch


def luring_tokens(gen, tree, vocab):
    """Target tokens [B, Q] that often equal one of the row's children."""
    batch, rows = tree.parents.shape
    tokens = torch.randint(0, vocab, (batch, rows), generator=gen)
    for b in range(batch):
        for i in torch.randperm(tree.budget, generator=gen).tolist():
            parent = int(tree.parents[b, i + 1])
            if parent >= 0 and randint(gen, 0, 9) < 8:
                tokens[b, parent] = tree.tokens[b, i]
    return tokens


def check_walk(tree, node_tokens, result):
    """Compares with the naive walk; returns the accepted lengths."""
    sampled, num_sampled, path = result
    lengths = []
    for b in range(tree.batch_size):
        n = int(tree.num_nodes[b])
        expected, rows = naive_walk(
            tree.tokens[b, :n].tolist(),
            tree.parents[b, 1 : n + 1].tolist(),
            node_tokens[b].tolist(),
        )
        m = int(num_sampled[b])
        assert path[b, :m].tolist() == rows, f"request {b}"
        assert sampled[b, :m].tolist() == expected
        assert (path[b, m:] == -1).all()
        assert (sampled[b, m:] == -1).all()
        lengths.append(m - 1)
    return lengths


@pytest.mark.parametrize("case", range(48))
def test_golden(case):
    with np.load(GOLDEN / "trees.npz") as cases:
        logits = torch.from_numpy(cases[f"{case}_logits"])
        budget = int(cases[f"{case}_budget"])
        posterior = torch.from_numpy(cases[f"{case}_posterior"])
        accepted = cases[f"{case}_accepted"].tolist()
        bonus = int(cases[f"{case}_bonus"])
    tree = build.build_tree(logits[None], budget)
    node_tokens = torch.zeros(1, budget + 1, dtype=torch.int64)
    node_tokens[0, : len(posterior)] = posterior
    sampled, num_sampled, path = sampler.walk(tree, node_tokens, logits.shape[0])
    assert int(num_sampled) == len(accepted)
    assert path[0, : len(accepted)].tolist() == accepted
    assert int(sampled[0, len(accepted) - 1]) == bonus


@pytest.mark.parametrize("policy", build.POLICIES)
@pytest.mark.parametrize("case", range(12))
def test_equals_naive_walk(case, policy):
    gen = generator(case)
    length, vocab = randint(gen, 1, 12), (2, 5, 50)[randint(gen, 0, 2)]
    budget = (1, 7, 31, 127)[randint(gen, 0, 3)]
    batch = randint(gen, 1, 6)
    tree = build.build_tree(plain_logits(gen, batch, length, vocab), budget, policy)
    node_tokens = luring_tokens(gen, tree, vocab)
    check_walk(tree, node_tokens, sampler.walk(tree, node_tokens, length))
    sizes = torch.tensor([randint(gen, 0, budget) for _ in range(batch)])
    cut = tree.truncate(sizes)
    check_walk(cut, node_tokens, sampler.walk(cut, node_tokens, length))


def test_random_walks_go_deep_and_differ():
    """Guards the test above: its inputs must reach beyond the first node."""
    gen = generator(50)
    tree = build.build_tree(plain_logits(gen, 16, 8, 5), 60)
    node_tokens = luring_tokens(gen, tree, 5)
    lengths = check_walk(tree, node_tokens, sampler.walk(tree, node_tokens, 8))
    assert max(lengths) >= 4
    assert len(set(lengths)) >= 3


def test_path_is_strictly_increasing_and_at_least_its_depth():
    gen = generator(51)
    tree = build.build_tree(plain_logits(gen, 8, 8, 4), 50)
    _, num_sampled, path = sampler.walk(tree, luring_tokens(gen, tree, 4), 8)
    for b in range(8):
        rows = path[b, : num_sampled[b]]
        assert (rows.diff() > 0).all()
        assert (rows >= torch.arange(len(rows))).all()
        assert (tree.depths[b, rows.long()] == torch.arange(len(rows))).all()


def test_shapes_and_dtypes():
    tree = build.build_tree(plain_logits(generator(52), 2, 3, 9), 7)
    sampled, num_sampled, path = sampler.walk(
        tree, torch.zeros(2, 8, dtype=torch.int32), 3
    )
    assert (sampled.shape, sampled.dtype) == ((2, 4), torch.int64)
    assert (num_sampled.shape, num_sampled.dtype) == ((2,), torch.int32)
    assert (path.shape, path.dtype) == ((2, 4), torch.int32)
    wide = sampler.walk(tree, torch.zeros(2, 8, dtype=torch.int64))
    assert wide[0].shape == (2, 8)
    deep = sampler.walk(tree, torch.zeros(2, 8, dtype=torch.int64), 20)
    assert deep[0].shape == (2, 21)
    assert torch.equal(deep[1], wide[1])


def test_chain_is_accepted_up_to_the_first_difference():
    tree = TreeBatch.chain(torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7]]))
    node_tokens = torch.tensor([[5, 6, 7, 8], [5, 9, 7, 8], [4, 6, 7, 8]])
    sampled, num_sampled, path = sampler.walk(tree, node_tokens)
    assert num_sampled.tolist() == [4, 2, 1]
    assert sampled.tolist() == [[5, 6, 7, 8], [5, 9, -1, -1], [4, -1, -1, -1]]
    assert path.tolist() == [[0, 1, 2, 3], [0, 1, -1, -1], [0, -1, -1, -1]]


def test_no_tree_samples_the_root_only():
    tree = TreeBatch.empty(2, 3)
    node_tokens = torch.tensor([[-1, -1, -1, -1], [7, 7, 7, 7]])
    sampled, num_sampled, path = sampler.walk(tree, node_tokens)
    assert num_sampled.tolist() == [1, 1]
    assert sampled[1].tolist() == [7, -1, -1, -1]
    assert path.tolist() == [[0, -1, -1, -1]] * 2


@pytest.mark.parametrize("stale", [-1, 0, 9])
def test_invalid_nodes_never_match_whatever_they_hold(stale):
    """Rows behind num_nodes keep a stale tree that would match."""
    tree = TreeBatch.chain(torch.full((1, 4), stale))
    tree.num_nodes[0] = 1
    sampled, num_sampled, path = sampler.walk(tree, torch.full((1, 5), stale))
    assert int(num_sampled) == 2
    assert path.tolist() == [[0, 1, -1, -1, -1]]


def test_first_of_twins():
    tree = TreeBatch.chain(torch.tensor([[3, 3, 3]]))
    tree.parents[0, 1:] = 0
    assert sampler.walk(tree, torch.tensor([[3, 1, 1, 1]]))[2][0, 1] == 1


def test_max_depth_stops_the_walk():
    tree = TreeBatch.chain(torch.tensor([[1, 2, 3, 4]]))
    node_tokens = torch.tensor([[1, 2, 3, 4, 5]])
    sampled, num_sampled, _ = sampler.walk(tree, node_tokens, 2)
    assert sampled.tolist() == [[1, 2, 3]]
    assert int(num_sampled) == 3


def test_requests_do_not_mix():
    """Equal trees hide a wrong request map; these differ in tokens and size."""
    gen = generator(53)
    logits = plain_logits(gen, 5, 6, 8)
    tree = build.build_tree(logits, 20).truncate(torch.tensor([20, 0, 3, 11, 20]))
    node_tokens = luring_tokens(gen, tree, 8)
    together = sampler.walk(tree, node_tokens, 6)
    for b in range(5):
        alone = sampler.walk(tree.select(torch.tensor([b])), node_tokens[b, None], 6)
        for whole, single in zip(together, alone, strict=True):
            assert torch.equal(whole[b], single[0])


def test_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r"node_tokens has shape \[1, 3\]"):
        sampler.walk(TreeBatch.empty(1, 3), torch.zeros(1, 3, dtype=torch.int64))
