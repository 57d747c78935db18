# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The bundled hybrid pair on the V2 runner: tree, chain and plain decoding, float32."""

from __future__ import annotations

import pytest
from _v2 import (
    POSITIONS,
    assert_same_but_for_ties,
    ddtree,
    decode,
    needs_gpu,
    plain_with_gaps,
)
from _v2_hybrid import float32_prompts

import ddtree_cpu as cpu

pytestmark = needs_gpu
PROMPTS, TOKENS = 100, 64
ENGINE = {"additional_config": {"gdn_prefill_backend": "triton"}}


@pytest.fixture(scope="module", autouse=True)
def bundled():
    with pytest.MonkeyPatch.context() as patch, float32_prompts():
        patch.setattr(cpu, "PAIR", cpu.ROOT / "models" / "tiny-qwen3_5")
        yield


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return cpu.heldout(PROMPTS)


@pytest.fixture(scope="module")
def plain(prompts) -> tuple[cpu.Run, list]:
    """Plain decoding and its gaps."""
    return plain_with_gaps(prompts, ENGINE, max_tokens=TOKENS)


@pytest.fixture(scope="module")
def chain(prompts) -> cpu.Run:
    """Stock DFlash."""
    return decode(cpu.chain(POSITIONS), prompts, ENGINE, max_tokens=TOKENS)


def test_chain_shaped_tree_equals_stock_dflash(prompts, plain, chain):
    spec = ddtree(POSITIONS, "spine_first")
    run = decode(spec, prompts, ENGINE, max_tokens=TOKENS)
    assert_same_but_for_ties(run, *plain)
    assert_same_but_for_ties(chain, *plain)
    same = [i for i, t in enumerate(run.tokens) if t == chain.tokens[i]]
    assert [run.steps[i] for i in same] == [chain.steps[i] for i in same]


@pytest.mark.parametrize("budget", [7, 31, 63])
def test_greedy_equals_plain(prompts, plain, chain, budget):
    run = decode(ddtree(budget), prompts, ENGINE, max_tokens=TOKENS)
    assert_same_but_for_ties(run, *plain)
    print(f"{run.tokens_per_step:.2f} tokens a step, chain {chain.tokens_per_step:.2f}")
    assert run.tokens_per_step > chain.tokens_per_step
