# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""build: golden trees, a heap oracle, the order of ties, budgets and policies."""

import numpy as np
import pytest
import torch
from _load import GOLDEN, load
from _oracle import NEG_INF, generator, heap_tree, plain_logits, randint, tied_logits

tree_module = load("tree")
build = load("build")
POLICIES = build.POLICIES


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "trees.npz") as cases:
        yield {key: cases[key] for key in cases.files}


def lists(tree, b=0):
    """Tokens, parents and depths of the valid nodes of request b."""
    n = int(tree.num_nodes[b])
    return (
        tree.tokens[b, :n].tolist(),
        tree.parents[b, 1 : n + 1].tolist(),
        tree.depths[b, 1 : n + 1].tolist(),
    )


def as_lists(oracle):
    return oracle.tokens, oracle.parents, oracle.depths


@pytest.mark.parametrize("case", range(48))
def test_golden(golden, case):
    logits = torch.from_numpy(golden[f"{case}_logits"])
    tree = build.build_tree(logits[None], int(golden[f"{case}_budget"]))
    tree_module.check_tree(tree, logits.shape[1])
    expected_parents = golden[f"{case}_parents"]
    n = len(expected_parents) - 1
    assert int(tree.num_nodes) == n
    tokens, parents, depths = lists(tree)
    assert tokens == golden[f"{case}_tokens"].tolist()
    assert depths == golden[f"{case}_depths"].tolist()
    assert [-1, *parents] == expected_parents.tolist()
    mask = tree_module.ancestor_mask(tree.parents, tree.num_nodes)
    seen = mask[0, : n + 1, : n + 1].numpy()
    assert np.array_equal(seen, golden[f"{case}_visibility"])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [plain_logits, tied_logits])
@pytest.mark.parametrize("case", range(30))
def test_equals_heap_oracle(case, make, policy):
    gen = generator(case)
    batch, length = randint(gen, 1, 5), randint(gen, 1, 31)
    vocab = (1, 2, 3, 7, 40, 300)[randint(gen, 0, 5)]
    budget = (1, 2, 7, 31, 127, randint(gen, 1, 127))[randint(gen, 0, 5)]
    logits = make(gen, batch, length, vocab)
    tree = build.build_tree(logits, budget, policy)
    tree_module.check_tree(tree, vocab)
    for b in range(batch):
        expected = heap_tree(logits[b], budget, policy)
        n = len(expected.tokens)
        assert lists(tree, b) == as_lists(expected), f"request {b}"
        assert tree.scores[b, :n].tolist() == expected.scores
        assert (tree.scores[b, n:] == NEG_INF).all()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", ["low_id_first", "early_first", "sibling_first"])
def test_tied_inputs_tell_every_order_rule(rule, policy):
    """The inputs above would expose each rule of the order if it were turned round."""
    told = 0
    for case in range(40):
        logits = tied_logits(generator(case), 1, 6, 7)[0]
        right = heap_tree(logits, 31, policy)
        told += as_lists(right) != as_lists(heap_tree(logits, 31, policy, **{rule: 0}))
    assert told >= 3


def test_equal_logits_take_lower_ids_first():
    tree = build.build_tree(torch.zeros(1, 1, 50), 5)
    assert lists(tree) == ([0, 1, 2, 3, 4], [0] * 5, [1] * 5)


def test_ties_across_the_top_k_boundary():
    """Six tokens tie for two places: the lowest ids get them, at any vocabulary."""
    for vocab in (40, 1000, 5000):
        logits = torch.full((2, 1, vocab), -5.0)
        logits[:, :, 33] = 2.0
        logits[:, :, [30, 9, 12, 38, 21, 3]] = 1.0
        logits[1, :, 2] = -0.0  # sorts as 0.0
        logits[1, :, 1] = 0.0
        tree = build.build_tree(logits, 3)
        assert lists(tree, 0)[0] == [33, 3, 9]
        wide = build.build_tree(logits, 8)
        assert lists(wide, 1)[0] == [33, 3, 9, 12, 21, 30, 38, 1]


@pytest.mark.parametrize("shift", [-100.0, -4.0, 0.0, 100.0])
def test_boundary_ties_of_any_sign(shift):
    levels = torch.randint(0, 6, (1, 1, 500), generator=generator(10))
    logits = levels * 1.5 + shift
    for budget in (3, 100, 300, 499):
        expected = heap_tree(logits[0], budget)
        assert lists(build.build_tree(logits, budget)) == as_lists(expected)


def test_negative_zero_ties_with_zero():
    logits = torch.tensor([0.0, -0.0, 0.0, -0.0]).view(1, 1, 4)
    assert lists(build.build_tree(logits, 2))[0] == [0, 1]
    assert lists(build.build_tree(-logits, 2))[0] == [0, 1]


def test_earlier_insertion_wins_then_sibling():
    """Two positions, two equal tokens each: all nodes of a depth have one score."""
    tree = build.build_tree(torch.zeros(1, 2, 2), 6)
    # Row 1 inserts its sibling (depth 1, better), then its child. Row 2, a child.
    # Row 3 is row 1's child, as that one is older; it inserts its sibling last.
    assert lists(tree) == ([0, 1, 0, 0, 1, 1], [0, 0, 1, 2, 1, 2], [1, 1, 2, 2, 2, 2])
    # A certain second token: sibling and child of row 1 tie, and the sibling is older.
    certain = torch.tensor([[[0.0, 0.0], [0.0, NEG_INF]]])
    assert lists(build.build_tree(certain, 3)) == ([0, 1, 0], [0, 0, 1], [1, 1, 2])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [plain_logits, tied_logits])
@pytest.mark.parametrize("case", range(4))
def test_prefix_is_the_tree_of_a_smaller_budget(case, make, policy):
    gen = generator(100 + case)
    logits = make(gen, 3, randint(gen, 1, 9), (2, 5, 100)[randint(gen, 0, 2)])
    full = build.build_tree(logits, 40, policy)
    for budget in (1, 2, 3, 8, 9, 10, 20, 39):
        cut = full.truncate(budget)
        tree_module.check_tree(cut)
        small = build.build_tree(logits, budget, policy)
        for b in range(3):
            assert lists(cut, b) == lists(small, b)


@pytest.mark.parametrize("make", [plain_logits, tied_logits])
def test_batch_composition_does_not_matter(make):
    gen = generator(200)
    logits = make(gen, 6, 8, 30)
    together = build.build_tree(logits, 25)
    order = torch.randperm(6, generator=gen)
    permuted = build.build_tree(logits[order], 25)
    for name in ("tokens", "parents", "depths", "num_nodes", "scores"):
        expected = getattr(together, name)[order]
        assert torch.equal(getattr(permuted, name), expected), name
    for b in range(6):
        assert lists(build.build_tree(logits[b : b + 1], 25)) == lists(together, b)


def test_same_input_same_tree():
    logits = tied_logits(generator(201), 4, 15, 40)
    first = build.build_tree(logits, 63)
    for _ in range(3):
        again = build.build_tree(logits.clone(), 63)
        assert torch.equal(first.tokens, again.tokens)
        assert torch.equal(first.parents, again.parents)


@pytest.mark.parametrize("case", range(6))
def test_spine_first_has_the_spine_then_the_best(case):
    gen = generator(300 + case)
    length, vocab = randint(gen, 1, 12), 20
    logits = plain_logits(gen, 2, length, vocab)
    top = logits.argmax(-1)
    for budget in (1, length, length + 1, 3 * length + 5):
        tree = build.build_tree(logits, budget, "spine_first")
        spine = min(budget, length)
        for b in range(2):
            tokens, parents, depths = lists(tree, b)
            assert len(tokens) == min(budget, int(tree.num_nodes[b]))
            assert tokens[:spine] == top[b, :spine].tolist()
            assert parents[:spine] == list(range(spine))
            assert depths[:spine] == list(range(1, spine + 1))
            rest = tree.scores[b, spine : int(tree.num_nodes[b])]
            assert (rest.diff() <= 0).all()


def test_scores_are_path_log_probabilities():
    gen = generator(400)
    logits = plain_logits(gen, 2, 5, 30)
    tree = build.build_tree(logits, 40)
    log_probs = logits.double().log_softmax(-1)
    for b in range(2):
        tokens, parents, depths = lists(tree, b)
        sums = [0.0]
        for token, parent, depth in zip(tokens, parents, depths, strict=True):
            sums.append(sums[parent] + float(log_probs[b, depth - 1, token]))
        expected = torch.tensor(sums[1:], dtype=torch.float64)
        assert torch.allclose(tree.scores[b].double(), expected, atol=1e-4)
        assert (tree.scores[b].diff() <= 0).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_num_positions_per_request(policy):
    logits = plain_logits(generator(500), 4, 6, 10)
    usable = torch.tensor([0, 1, 4, 6])
    tree = build.build_tree(logits, 20, policy, num_positions=usable)
    tree_module.check_tree(tree, 10)
    assert tree.num_nodes.tolist() == [0, 10, 20, 20]
    for b in range(1, 4):
        expected = heap_tree(logits[b, : usable[b]], 20, policy)
        assert lists(tree, b) == as_lists(expected)
    one = build.build_tree(logits, 20, policy, num_positions=4)
    assert lists(one, 2) == lists(tree, 2)
    assert (
        int(build.build_tree(logits, 20, policy, num_positions=0).num_nodes.max()) == 0
    )


def test_fewer_candidates_than_budget():
    logits = plain_logits(generator(501), 1, 3, 2)
    tree = build.build_tree(logits, 127)
    tree_module.check_tree(tree, 2)
    assert int(tree.num_nodes) == 2 + 4 + 8


@pytest.mark.parametrize("bad", [float("nan"), NEG_INF, float("inf")])
@pytest.mark.parametrize("policy", POLICIES)
def test_unusable_logits_are_never_drafted(bad, policy):
    logits = plain_logits(generator(502), 3, 3, 4)
    logits[0, 0, 2] = bad  # one token
    logits[1, 1, :] = bad  # a whole position
    logits[2] = bad
    tree = build.build_tree(logits, 30, policy)
    tree_module.check_tree(tree, 4)
    assert tree.num_nodes.tolist() == [3 + 12 + 15, 4, 0]
    first_level = tree.parents[0, 1:] == 0
    assert 2 not in tree.tokens[0][first_level]
    assert tree.scores[0].isfinite().all()
    cleaned = logits.masked_fill(~logits.isfinite(), NEG_INF)
    for b in range(2):
        assert lists(tree, b) == as_lists(heap_tree(cleaned[b], 30, policy))


def test_a_spine_that_ends_early():
    """After position 2 nothing can be drafted; the budget goes to what is left."""
    logits = plain_logits(generator(503), 1, 4, 8)
    logits[0, 2, :] = NEG_INF
    tree = build.build_tree(logits, 12, "spine_first")
    assert lists(tree) == as_lists(heap_tree(logits[0], 12, "spine_first"))
    assert int(tree.num_nodes) == 12
    assert int(tree.depths.max()) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_rank_as_float32(dtype):
    logits = plain_logits(generator(504), 2, 4, 200).to(dtype)
    tree = build.build_tree(logits, 15)
    same = build.build_tree(logits.float(), 15)
    assert torch.equal(tree.tokens, same.tokens)
    assert tree.scores.dtype == torch.float32


def test_top_k_limits_ranks():
    logits = plain_logits(generator(505), 1, 2, 50)
    tree = build.build_tree(logits, 20, top_k=2)
    assert int(tree.num_nodes) == 2 + 4
    best_two = logits.topk(2).indices[0]
    tokens, _, depths = lists(tree)
    for token, depth in zip(tokens, depths, strict=True):
        assert token in best_two[depth - 1]


def test_input_is_left_alone():
    logits = tied_logits(generator(506), 2, 3, 9)
    before = logits.clone()
    build.build_tree(logits, 7, "spine_first", num_positions=2)
    assert torch.equal(logits, before)


def test_no_requests_and_no_positions():
    assert build.build_tree(torch.zeros(0, 3, 5), 4).tokens.shape == (0, 4)
    empty = build.build_tree(torch.zeros(2, 0, 5), 4)
    tree_module.check_tree(empty)
    assert empty.num_nodes.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"logits": torch.zeros(3, 5)}, "logits"),
        ({"logits": torch.zeros(1, 3, 5, dtype=torch.int64)}, "logits"),
        ({"budget": 0}, "budget"),
        ({"top_k": 0}, "top_k"),
        ({"policy": "widest"}, "policy.*widest"),
        ({"num_positions": torch.tensor([1, 2])}, "num_positions"),
    ],
)
def test_bad_arguments_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        build.build_tree(**{"logits": torch.zeros(1, 3, 5), "budget": 4, **arguments})
