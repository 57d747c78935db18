# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Each part of the tree path switched off in turn: something must notice.

Without these, a test that cannot fail would look like one that passes.
"""

from __future__ import annotations

import pytest
import torch

import ddtree_cpu as cpu

TREE = cpu.ddtree(31)


@pytest.fixture(scope="module")
def healthy(prompts) -> cpu.Run:
    with cpu.engine(TREE) as llm:
        return cpu.decode(llm, prompts)


def mutated(prompts) -> cpu.Run:
    with cpu.engine(TREE) as llm:
        return cpu.decode(llm, prompts)


def wrong(run: cpu.Run, reference: cpu.Run) -> int:
    return sum(a != b for a, b in zip(run.tokens, reference.tokens, strict=True))


def test_healthy(healthy, plain, prompts):
    assert wrong(healthy, plain(prompts)) == 0


def test_without_kv_compaction(monkeypatch, prompts, plain):
    from vllm.v1.spec_decode.ddtree.v1_runner import DDTreeRunner

    monkeypatch.setattr(DDTreeRunner, "_compact", lambda self, step: None)
    assert wrong(mutated(prompts), plain(prompts)) > len(prompts) // 4


def test_without_depth_positions(monkeypatch, prompts, plain):
    from vllm.v1.spec_decode.ddtree.v1_runner import DDTreeRunner

    monkeypatch.setattr(DDTreeRunner, "_write_depth_positions", lambda self, step: None)
    assert wrong(mutated(prompts), plain(prompts)) > len(prompts) // 4


def test_without_ancestor_mask(monkeypatch, prompts, plain):
    from vllm.v1.spec_decode.ddtree.v1_runner import DDTreeRunner

    def causal(tree):
        rows = tree.parents.shape[1]
        mask = torch.ones(rows, rows, dtype=torch.bool).tril()
        return mask.expand(tree.batch_size, -1, -1)

    monkeypatch.setattr(DDTreeRunner, "_ancestor_mask", staticmethod(causal))
    assert wrong(mutated(prompts), plain(prompts)) > len(prompts) // 4


def test_without_the_drafters_path_gather(monkeypatch, prompts, plain, healthy):
    """Changes no text, only acceptance: the assertion is on tokens per step."""
    from vllm.v1.spec_decode.ddtree.v1_runner import DDTreeRunner

    def linear(self):
        step = self.step
        rows = None if step is None else torch.arange(step.positions.shape[0])
        return None if step is None else (step.positions, rows)

    monkeypatch.setattr(DDTreeRunner, "drafter_context", linear)
    run = mutated(prompts)
    assert wrong(run, plain(prompts)) == 0
    assert run.tokens_per_step < 0.97 * healthy.tokens_per_step


def test_with_depth_positions_for_the_drafters_context(
    monkeypatch, prompts, plain, healthy
):
    """Nodes of one depth would race for a slot: acceptance again."""
    from vllm.v1.spec_decode.ddtree.v1_runner import DDTreeRunner

    right = DDTreeRunner.drafter_context

    def depths(self):
        found = right(self)
        if found is None:
            return None
        total = found[0].shape[0]
        return self.runner.positions[:total].clone(), found[1]

    monkeypatch.setattr(DDTreeRunner, "drafter_context", depths)
    run = mutated(prompts)
    assert wrong(run, plain(prompts)) == 0
    assert run.tokens_per_step < 0.97 * healthy.tokens_per_step


def test_trees_of_other_requests(monkeypatch, prompts, plain):
    """Trees stored under the wrong request: caught as foreign drafts, no harm."""
    from vllm.v1.spec_decode.ddtree.v1_runner import DDTreeRunner

    right = DDTreeRunner.store

    def swapped(self, tree):
        drafts = right(self, tree)
        ids = list(self.drafted)
        self.drafted = dict(
            zip(ids, list(self.drafted.values())[1:] + [None], strict=True)
        )
        return drafts

    monkeypatch.setattr(DDTreeRunner, "store", swapped)
    assert wrong(mutated(prompts), plain(prompts)) == 0
