# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""tree: masks, depths, truncation, selection, chains and the checks."""

import dataclasses

import pytest
import torch
from _load import load
from _oracle import generator, naive_ancestors, plain_logits, randint, random_parents

tree_module = load("tree")
build = load("build")
TreeBatch = tree_module.TreeBatch


def built(case, batch=3, budget=12):
    return build.build_tree(plain_logits(generator(case), batch, 5, 20), budget)


def batch_of_parents(case, batch, budget):
    gen = generator(case)
    parents = torch.tensor([random_parents(gen, budget) for _ in range(batch)])
    sizes = torch.tensor([randint(gen, 0, budget) for _ in range(batch)])
    return parents.to(torch.int32), sizes.to(torch.int32)


@pytest.mark.parametrize("budget", [1, 2, 7, 31, 32, 63, 64, 127])
def test_mask_depths_and_words_against_climbing(budget):
    parents, sizes = batch_of_parents(budget, 4, budget)
    mask = tree_module.ancestor_mask(parents, sizes)
    words = tree_module.ancestor_bitmask(parents, sizes)
    depths = tree_module.depths_from_parents(parents)
    assert words.dtype == torch.int32
    assert words.shape == (4, budget + 1, -(-(budget + 1) // 32))
    for b in range(4):
        climb = parents[b].tolist()
        for i in range(budget + 1):
            seen = naive_ancestors(climb, i)
            assert int(depths[b, i]) == len(seen) - 1
            if i > int(sizes[b]):
                seen = {i}
            assert set(mask[b, i].nonzero().flatten().tolist()) == seen
            for j in range(budget + 1):
                bit = (int(words[b, i, j // 32]) >> (j % 32)) & 1
                assert bit == (j in seen), (b, i, j)


def test_mask_is_within_the_causal_mask():
    parents, sizes = batch_of_parents(500, 3, 40)
    mask = tree_module.ancestor_mask(parents, sizes)
    assert torch.equal(mask, mask.tril())
    assert mask.diagonal(dim1=1, dim2=2).all()


def test_a_long_chain_is_followed_to_the_root():
    chain = TreeBatch.chain(torch.arange(127)[None])
    mask = tree_module.ancestor_mask(chain.parents, chain.num_nodes)
    assert torch.equal(mask[0], torch.ones(128, 128).tril().bool())
    assert torch.equal(tree_module.depths_from_parents(chain.parents), chain.depths)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 100, 128])
def test_pack_and_unpack(size):
    gen = generator(600 + size)
    mask = torch.rand(2, 5, size, generator=gen) < 0.5
    words = tree_module.pack_mask(mask)
    assert torch.equal(tree_module.unpack_mask(words, size), mask)
    full = tree_module.pack_mask(torch.ones(1, 32, dtype=torch.bool))
    assert full.tolist() == [[-1]]


def test_chain():
    tree = TreeBatch.chain(torch.tensor([[5, 5, 7], [1, 2, 3]]), torch.tensor([3, 1]))
    tree_module.check_tree(tree)
    assert tree.tokens.tolist() == [[5, 5, 7], [1, -1, -1]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, -1, -1]]
    assert tree.depths.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert tree.num_nodes.tolist() == [3, 1]
    assert (tree.batch_size, tree.budget) == (2, 3)


def test_chain_copies_its_tokens():
    tokens = torch.tensor([[1, 2]])
    tree = TreeBatch.chain(tokens)
    tokens += 5
    assert tree.tokens.tolist() == [[1, 2]]


def test_truncate_per_request():
    tree = built(1)
    cut = tree.truncate(torch.tensor([0, 5, 99]))
    tree_module.check_tree(cut)
    assert cut.num_nodes.tolist() == [0, 5, 12]
    assert torch.equal(cut.tokens[1, :5], tree.tokens[1, :5])
    assert torch.equal(cut.tokens[2], tree.tokens[2])
    assert torch.equal(cut.scores[1, :5], tree.scores[1, :5])
    assert (cut.scores[1, 5:] == float("-inf")).all()
    assert tree.num_nodes.tolist() == [12, 12, 12]
    assert tree.truncate(-3).num_nodes.tolist() == [0, 0, 0]


def test_every_prefix_is_a_tree_with_the_same_mask():
    tree = built(2)
    whole = tree_module.ancestor_mask(tree.parents, tree.num_nodes)
    for n in range(13):
        cut = tree.truncate(n)
        tree_module.check_tree(cut, 20)
        mask = tree_module.ancestor_mask(cut.parents, cut.num_nodes)
        assert torch.equal(mask[:, : n + 1], whole[:, : n + 1])


def test_select_moves_whole_requests():
    tree = built(3).truncate(torch.tensor([2, 7, 12]))
    picked = tree.select(torch.tensor([2, 0, 2], dtype=torch.int32))
    tree_module.check_tree(picked)
    for name in ("tokens", "parents", "depths", "num_nodes", "scores"):
        value, source = getattr(picked, name), getattr(tree, name)
        assert torch.equal(value, source[torch.tensor([2, 0, 2])]), name


def test_empty():
    tree = TreeBatch.empty(2, 4)
    tree_module.check_tree(tree)
    assert tree.num_nodes.tolist() == [0, 0]
    assert tree.valid.tolist() == [[True] + [False] * 4] * 2
    mask = tree_module.ancestor_mask(tree.parents, tree.num_nodes)
    assert torch.equal(mask[0], torch.eye(5, dtype=torch.bool))


def broken(field, b, i, value):
    tree = built(4).truncate(torch.tensor([12, 12, 10]))
    getattr(tree, field)[b, i] = value
    return tree


@pytest.mark.parametrize(
    ("field", "b", "i", "value", "row", "why"),
    [
        ("parents", 1, 0, 0, 0, "root's parent"),
        ("depths", 2, 0, 1, 0, "root's depth"),
        ("parents", 1, 4, 4, 4, "earlier row"),
        ("parents", 1, 4, -1, 4, "earlier row"),
        ("depths", 0, 6, 9, 6, "parent's depth"),
        ("tokens", 1, 2, -1, 3, "vocabulary"),
        ("tokens", 1, 2, 20, 3, "vocabulary"),
        ("tokens", 2, 10, 3, 11, "invalid row"),
        ("parents", 2, 12, 0, 12, "invalid row"),
    ],
)
def test_check_names_request_row_and_rule(field, b, i, value, row, why):
    with pytest.raises(ValueError, match=f"request {b}, row {row}: .*{why}"):
        tree_module.check_tree(broken(field, b, i, value), 20)


def test_check_finds_twins():
    tree = TreeBatch.chain(torch.tensor([[4, 4, 6]]))
    tree.parents[0, 2] = 0
    tree.depths[0, 2:] = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="request 0, row 2: .*sibling"):
        tree_module.check_tree(tree)


def test_check_names_sizes_shapes_and_dtypes():
    tree = built(5)
    tree.num_nodes[1] = 13
    with pytest.raises(ValueError, match="request 1: num_nodes 13"):
        tree_module.check_tree(tree)
    for name, value in (
        ("parents", tree.parents.long()),
        ("depths", tree.depths[:, 1:]),
        ("scores", tree.scores.double()),
    ):
        with pytest.raises(ValueError, match=name):
            tree_module.check_tree(dataclasses.replace(built(5), **{name: value}))
