# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The V2 runner end to end with the bundled pair, in float32.

In the interpreter a few requests, on a GPU many, there with CUDA graphs.
"""

from __future__ import annotations

import pytest
from _v2 import (
    POSITIONS,
    assert_same_but_for_ties,
    ddtree,
    decode,
    needs_gpu,
    plain_with_gaps,
    runner,
    settings,
)

import ddtree_cpu as cpu


@pytest.fixture(scope="module")
def sizes(on_gpu) -> tuple[int, int]:
    """Prompts and tokens."""
    return (200, 64) if on_gpu else (3, 16)


@pytest.fixture(scope="module")
def prompts(sizes) -> list[str]:
    return cpu.heldout(sizes[0])


@pytest.fixture(scope="module")
def plain(prompts, sizes) -> tuple[cpu.Run, list]:
    """Plain decoding and its gaps."""
    return plain_with_gaps(prompts, max_tokens=sizes[1])


@pytest.fixture(scope="module")
def want(plain) -> cpu.Run:
    """Plain decoding."""
    return plain[0]


@pytest.fixture(scope="module")
def chain(prompts, sizes) -> cpu.Run:
    """Stock DFlash."""
    return decode(cpu.chain(POSITIONS), prompts, max_tokens=sizes[1])


def test_chain_shaped_tree_equals_stock_dflash(prompts, sizes, plain, want, chain):
    """The first acceptance test: parent = i - 1, N = L, step for step."""
    spec = ddtree(POSITIONS, "spine_first")
    run = decode(spec, prompts, max_tokens=sizes[1])
    assert_same_but_for_ties(run, want, plain[1])
    assert_same_but_for_ties(chain, want, plain[1])
    same = [i for i, t in enumerate(run.tokens) if t == chain.tokens[i]]
    assert [run.steps[i] for i in same] == [chain.steps[i] for i in same]


@pytest.mark.parametrize("budget", [7, pytest.param(31, marks=needs_gpu)])
def test_greedy_equals_plain(prompts, sizes, plain, want, chain, budget):
    run = decode(ddtree(budget), prompts, max_tokens=sizes[1])
    assert_same_but_for_ties(run, want, plain[1])
    if budget > POSITIONS:
        assert run.tokens_per_step > chain.tokens_per_step


def test_prompts_of_exactly_q_tokens():
    """Such a prefill looks like a batch of trees (0.26 goes by length)."""
    budget = 7
    ids = [list(range(20 + i, 20 + i + budget + 1)) for i in range(3)]
    want = decode(None, ids, max_tokens=10)
    run = decode(ddtree(budget), ids, concurrency=2, max_tokens=10)
    assert run.tokens == want.tokens


@needs_gpu
def test_seeded_sampling_equals_plain(prompts):
    """Noise is keyed by seed and position, so even T = 1 gives plain's tokens."""
    params = {"temperature": 1.0, "seed": 11, "top_p": 0.9, "max_tokens": 12}
    some = prompts[:3]
    want = decode(None, some, **params)
    run = decode(ddtree(15), some, **params)
    assert run.tokens == want.tokens
    assert len({tuple(t) for t in run.tokens}) == len(some)


@needs_gpu
def test_preemption_and_prefix_cache():
    """A pool too small for the batch, and prompts that come twice."""
    small = {
        "block_size": 16,
        "num_gpu_blocks_override": 17,
        "max_model_len": 160,
        "enable_prefix_caching": True,
    }
    some = [list(range(30 + i, 62 + i)) for i in range(3)] * 2
    want = decode(None, some, {"block_size": 16}, max_tokens=32)
    with cpu.engine(ddtree(15), **settings(**small)) as llm:
        runner(llm)
        run = cpu.decode(llm, some, max_tokens=32)
        core = llm.llm_engine.engine_core.engine_core
        metrics = {m.name: m for m in llm.get_metrics()}
        assert metrics["vllm:num_preemptions"].value > 0
        assert core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 16
    assert run.tokens == want.tokens


@needs_gpu
def test_up_to_max_model_len():
    engine = {"max_model_len": 64}
    some = [list(range(40, 60)), list(range(50, 97))]
    want = decode(None, some, engine, max_tokens=64)
    run = decode(ddtree(31), some, engine, max_tokens=64)
    assert run.tokens == want.tokens
    assert run.finish == want.finish == ["length", "length"]


@needs_gpu
def test_without_compaction_it_differs(monkeypatch, prompts, sizes, want):
    """Else the tests above could not fail."""
    from vllm.v1.spec_decode.ddtree.kernels.kv_compact import KVCompactor

    monkeypatch.setattr(KVCompactor, "compact", lambda *args, **kwargs: None)
    run = decode(ddtree(31), prompts, max_tokens=sizes[1])
    assert run.tokens != want.tokens


@needs_gpu
def test_without_trees_in_the_step_it_differs(monkeypatch, prompts, sizes, want):
    """Causal masks and linear positions, but the walk believes in the tree."""
    from vllm.v1.spec_decode.ddtree import model_state

    real = model_state.prepare_step

    def causal(tree, *args, **kwargs):
        real(tree, *args, **kwargs)
        rows = tree.num_rows
        lower = [(1 << (i + 1)) - 1 for i in range(rows)]
        for row, bits in enumerate(lower):
            for word in range(tree.b_mask.shape[2]):
                part = bits >> (32 * word) & 0xFFFFFFFF
                tree.b_mask[:, row, word] = part - (part >> 31 << 32)

    monkeypatch.setattr(model_state, "prepare_step", causal)
    run = decode(ddtree(31), prompts, max_tokens=sizes[1])
    assert run.tokens != want.tokens
