# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The build kernels give the trees of the PyTorch reference, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm.v1.spec_decode.ddtree.build import build_tree
from vllm.v1.spec_decode.ddtree.kernels import build as kernels

SEED = int(os.environ.get("DDTREE_TEST_SEED", "20261201"))
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "trees.npz"
NEG_INF = float("-inf")


def run(logits, budget, policy, chain_only=None, spare=2):
    """Kernel output for logits [B, L, V], and rows that must stay untouched."""
    batch, length, vocab = logits.shape
    device = logits.device
    rows = batch + spare
    tokens = torch.full((rows, budget), 77, device=device)
    parents = torch.full((rows, budget + 1), 77, dtype=torch.int32, device=device)
    depths, nodes = parents.clone(), parents[:, 0].clone()
    builder = kernels.TreeBuilder(rows, length, budget, vocab, policy, device)
    flat = logits.reshape(batch * length, vocab)
    builder.build(flat, tokens, parents, depths, nodes, chain_only)
    for out in (tokens, parents, depths, nodes):
        assert (out[batch:] == 77).all()
    return tokens[:batch], parents[:batch], depths[:batch], nodes[:batch]


def check(logits, budget, policy):
    tree = build_tree(logits, budget, policy)
    got = run(logits, budget, policy)
    for name, mine in zip(
        ("tokens", "parents", "depths", "num_nodes"), got, strict=True
    ):
        want = getattr(tree, name)
        assert torch.equal(mine, want), (
            f"{name}: {mine[(mine != want).nonzero()[0, 0]]} for "
            f"{want[(mine != want).nonzero()[0, 0]]}"
        )


@pytest.mark.parametrize("case", range(0, 48, 1 if torch.cuda.is_available() else 12))
def test_golden(device, case):
    """All of them on a GPU; the interpreter is slow."""
    with np.load(GOLDEN) as cases:
        logits = torch.from_numpy(cases[f"{case}_logits"]).to(device)
        want = cases[f"{case}_tokens"], cases[f"{case}_parents"]
        budget = int(cases[f"{case}_budget"])
    tokens, parents, _, nodes = run(logits[None].float(), budget, "best_first")
    n = int(nodes[0])
    assert n == len(want[0])
    assert tokens[0, :n].tolist() == want[0].tolist()
    assert parents[0, : n + 1].tolist() == want[1].tolist()


@pytest.mark.parametrize("policy", ["best_first", "spine_first"])
@pytest.mark.parametrize(
    ("batch", "length", "vocab", "budget"),
    [
        (1, 1, 5, 1),
        (3, 15, 97, 15),
        (2, 31, 300, 16),
        (1, 7, 3, 31),
        (2, 15, 1000, 64),
        (1, 4, 700, 127),
    ],
)
def test_equals_reference(device, batch, length, vocab, budget, policy):
    print(f"seed {SEED}")
    gen = torch.Generator().manual_seed(SEED + vocab)
    for scale in (1.0, 4.0):
        logits = scale * torch.randn(batch, length, vocab, generator=gen)
        check(logits.to(device), budget, policy)


@pytest.mark.parametrize("policy", ["best_first", "spine_first"])
def test_ties_and_values_that_count_as_nothing(device, policy):
    gen = torch.Generator().manual_seed(SEED)
    logits = torch.randint(-3, 3, (4, 5, 130), generator=gen).float()
    logits[0, 1, ::3] = NEG_INF
    logits[0, 2, 5] = float("nan")
    logits[1, 0, 7] = float("inf")
    logits[1, 3] = NEG_INF
    logits[2] = 0.0
    logits[2, :, 1::2] = -0.0
    logits[3, 0] = NEG_INF
    check(logits.to(device), 31, policy)


def test_more_ties_than_are_sorted(device):
    """The exact fallback: 2000 equal logits, and 700 equal ones under a peak."""
    assert kernels.CAPACITY < 700
    logits = torch.zeros(1, 2, 2000)
    logits[0, 1, 1300:] = -1.0
    logits[0, 1, 1500] = 2.0
    check(logits.to(device), 40, "best_first")
    logits[0, 1, :1300] = -5.0
    check(logits.to(device), 40, "best_first")
    # Keys so far apart that their difference does not fit int64.
    logits[0, 1, :] = -5.0
    logits[0, 1, 900:905] = -4.0
    logits[0, 1, 1500] = 5.0
    check(logits[:, 1:].to(device), 20, "best_first")


def test_chunks_of_a_large_vocabulary(device, on_gpu):
    gen = torch.Generator().manual_seed(SEED)
    vocab = 151_936 if on_gpu else 9_001
    batch = 8 if on_gpu else 1
    logits = torch.randn(batch, 3, vocab, generator=gen).to(device)
    check(logits, 63, "best_first")
    check(logits.sort(dim=-1, descending=True).values, 63, "best_first")
    if on_gpu:
        check(logits.bfloat16(), 127, "spine_first")


def test_prefix_of_a_larger_budget(device):
    gen = torch.Generator().manual_seed(SEED)
    logits = torch.randn(2, 15, 200, generator=gen).to(device)
    large = run(logits, 40, "best_first")
    small = run(logits, 9, "best_first")
    assert torch.equal(large[0][:, :9], small[0])
    assert torch.equal(large[1][:, :10], small[1])


def test_chain_only_is_a_device_value(device):
    gen = torch.Generator().manual_seed(SEED)
    logits = torch.randn(2, 5, 50, generator=gen).to(device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    for policy in ("best_first", "spine_first"):
        flag.fill_(0)
        tree = build_tree(logits, 12, policy)
        assert torch.equal(run(logits, 12, policy, flag)[1], tree.parents)
        flag.fill_(1)
        tokens, parents, _, nodes = run(logits, 12, policy, flag)
        assert nodes.tolist() == [5, 5]
        assert parents[0].tolist() == [-1, 0, 1, 2, 3, 4] + [-1] * 7
        assert torch.equal(tokens[:, :5], logits.argmax(-1))


def test_rows_with_a_stride(device):
    gen = torch.Generator().manual_seed(SEED)
    wide = torch.randn(2, 6, 80, generator=gen).to(device)
    logits = wide.reshape(12, 80)[:, :70]
    builder = kernels.TreeBuilder(2, 6, 7, 70, "best_first", device)
    tokens = torch.zeros(2, 7, dtype=torch.int64, device=device)
    parents = torch.zeros(2, 8, dtype=torch.int32, device=device)
    builder.build(logits, tokens, parents, parents.clone(), parents[:, 0].clone())
    tree = build_tree(wide[..., :70], 7)
    assert torch.equal(tokens, tree.tokens)
    assert torch.equal(parents, tree.parents)


def test_unknown_policy(device):
    with pytest.raises(ValueError, match="policy must be one of"):
        kernels.TreeBuilder(1, 1, 1, 1, "widest", device)


@pytest.mark.parametrize("shape", [(7, 9), (6, 8)])
def test_logits_that_would_be_read_out_of_bounds(device, shape):
    builder = kernels.TreeBuilder(2, 3, 4, 9, "best_first", device)
    with pytest.raises(ValueError, match="at most 6 rows and at least 9 columns"):
        builder.rank(torch.zeros(shape, device=device))
