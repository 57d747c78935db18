# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Greedy float32: DDTree gives the tokens of plain decoding, never fewer a step."""

from __future__ import annotations

import pytest
from conftest import assert_same

import ddtree_cpu as cpu

POSITIONS = 15
POLICIES = ("best_first", "spine_first")


@pytest.fixture(scope="module")
def many() -> list[str]:
    return cpu.heldout(200)


@pytest.fixture(scope="module")
def chain_run(prompts) -> cpu.Run:
    """Stock DFlash on the same prompts."""
    with cpu.engine(cpu.chain(POSITIONS)) as llm:
        return cpu.decode(llm, prompts)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [1, 7, 16, 31, 63])
def test_batch_of_8_equals_plain(many, plain, budget, policy):
    with cpu.engine(cpu.ddtree(budget, policy)) as llm:
        run = cpu.decode(llm, many)
        assert llm.llm_engine.vllm_config.use_v2_model_runner is False
    assert_same(run, plain(many))
    assert run.tokens_per_step > 1.3


@pytest.mark.parametrize(
    ("budget", "policy"), [(16, "best_first"), (31, "spine_first")]
)
def test_batch_of_1_equals_plain(prompts, plain, budget, policy):
    with cpu.engine(cpu.ddtree(budget, policy), max_num_seqs=1) as llm:
        run = cpu.decode(llm, prompts)
    assert_same(run, plain(prompts))


def test_largest_budget(prompts, plain):
    with cpu.engine(cpu.ddtree(127)) as llm:
        run = cpu.decode(llm, prompts[:8])
    assert_same(run, plain(prompts[:8]))


def test_chain_shaped_tree_equals_stock_dflash(prompts, plain, chain_run):
    """The first acceptance test: parent = i - 1, N = L, step for step."""
    with cpu.engine(cpu.ddtree(POSITIONS, "spine_first")) as llm:
        run = cpu.decode(llm, prompts)
    assert run.tokens == chain_run.tokens == plain(prompts).tokens
    assert run.steps == chain_run.steps


def test_shorter_chain_equals_stock_dflash(prompts):
    """A budget below L under spine_first is a shorter chain."""
    with cpu.engine(cpu.chain(5)) as llm:
        want = cpu.decode(llm, prompts)
    with cpu.engine(cpu.ddtree(5, "spine_first", num_draft_positions=5)) as llm:
        run = cpu.decode(llm, prompts)
    assert run.tokens == want.tokens
    assert run.steps == want.steps


@pytest.mark.parametrize("budget", [15, 31])
def test_spine_first_accepts_no_less_than_the_chain(budget):
    """On every set of prompts; at budget L it is the chain itself."""
    rows = cpu.heldout_rows(60)
    texts = [row["text"] for row in rows]
    with cpu.engine(cpu.chain(POSITIONS)) as llm:
        chain = cpu.decode(llm, texts)
    with cpu.engine(cpu.ddtree(budget, "spine_first")) as llm:
        run = cpu.decode(llm, texts)
    assert run.tokens == chain.tokens
    steps: dict[str, list[int]] = {}
    for row, tree, line in zip(rows, run.steps, chain.steps, strict=True):
        found = steps.setdefault(row["set"], [0, 0])
        found[0] += len(tree)
        found[1] += len(line)
    print(steps)
    assert len(steps) == 3
    for name, (tree, line) in steps.items():
        assert tree == line if budget == POSITIONS else tree < line, name


def test_acceptance_grows_with_the_budget(prompts, chain_run):
    means = []
    for budget in (7, 31, 63):
        with cpu.engine(cpu.ddtree(budget)) as llm:
            means.append(cpu.decode(llm, prompts).tokens_per_step)
    assert means == sorted(means)
    assert means[-1] > 1.1 * chain_run.tokens_per_step
