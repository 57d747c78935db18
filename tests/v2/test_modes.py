# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Graph modes, scheduling, batch sizes, long contexts and sliding windows on a GPU."""

from __future__ import annotations

import pytest
from _v2 import (
    assert_same_but_for_ties,
    check_tree,
    ddtree,
    decode,
    edited_pair,
    needs_gpu,
    plain_with_gaps,
    settings,
)

import ddtree_cpu as cpu

pytestmark = needs_gpu
MODES = {
    "eager": {"enforce_eager": True, "compilation_config": None},
    "piecewise": {"compilation_config": {"mode": 3, "cudagraph_mode": "PIECEWISE"}},
    "full and piecewise": {
        "compilation_config": {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}
    },
    "async off": {"async_scheduling": False},
}
BUDGET = 23


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return cpu.heldout(64)


@pytest.fixture(scope="module")
def plain(prompts) -> tuple[cpu.Run, list]:
    return plain_with_gaps(prompts, max_tokens=48)


@pytest.fixture(scope="module")
def full_graphs(prompts) -> cpu.Run:
    """The default of the tests: full graphs, asynchronous scheduling."""
    with cpu.engine(ddtree(BUDGET), **settings()) as llm:
        check_tree(llm, ddtree(BUDGET))
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        return cpu.decode(llm, prompts, max_tokens=48)


@pytest.mark.parametrize("mode", MODES)
def test_modes_agree(mode, prompts, plain, full_graphs):
    run = decode(ddtree(BUDGET), prompts, MODES[mode], max_tokens=48)
    assert_same_but_for_ties(run, plain[0], plain[1])
    assert_same_but_for_ties(full_graphs, plain[0], plain[1])
    same = [i for i, t in enumerate(run.tokens) if t == full_graphs.tokens[i]]
    if mode != "async off":  # the other batches that it makes part at other ties
        assert [run.steps[i] for i in same] == [full_graphs.steps[i] for i in same]
    assert run.tokens_per_step == pytest.approx(full_graphs.tokens_per_step, rel=0.02)


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_batch_sizes(batch, prompts, plain):
    some = prompts[: max(batch, 12)]
    engine = {"max_num_seqs": 64, "max_num_batched_tokens": 4096}
    run = decode(ddtree(BUDGET), some, engine, concurrency=batch, max_tokens=48)
    want = cpu.Run(plain[0].tokens[: len(some)], [], [])
    assert_same_but_for_ties(run, want, plain[1])


@pytest.mark.parametrize("attention", ["auto", "triton"])
def test_context_of_32k(tmp_path, attention):
    """Far beyond what the pair was trained for; the texts must still be the same."""
    length = {"max_position_embeddings": 40960}
    pair = edited_pair(tmp_path, length, length)
    engine = {
        "model": str(pair / "target"),
        "max_model_len": 33000,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 4,
    }
    ids = [(17 * i * i + 5 * i) % 500 + 3 for i in range(32768)]
    some = [ids, ids[5000:20000], ids[:40]]
    spec = {**ddtree(BUDGET), "model": str(pair / "drafter")}
    want, gaps = plain_with_gaps(some, engine, max_tokens=32)
    more = {"additional_config": {"ddtree_attention": attention}}
    run = decode(spec, some, engine | more, max_tokens=32)
    assert_same_but_for_ties(run, want, gaps)


@pytest.mark.parametrize("window", [16, 100])
def test_sliding_windows(tmp_path, window, prompts):
    """A target with a window, and a drafter with windows and full layers."""
    layers = ["sliding_attention"] * 3 + ["full_attention"]
    sliding = {"use_sliding_window": True, "sliding_window": window}
    every = {"layer_types": ["sliding_attention"] * 3, "max_window_layers": 0}
    pair = edited_pair(tmp_path, sliding | every, sliding | {"layer_types": layers})
    engine = {"model": str(pair / "target")}
    some = [*prompts[:24], list(range(10, 310))]
    spec = {**ddtree(BUDGET), "model": str(pair / "drafter")}
    want, gaps = plain_with_gaps(some, engine, max_tokens=48)
    run = decode(spec, some, engine, max_tokens=48)
    assert_same_but_for_ties(run, want, gaps)
    assert run.tokens_per_step > 1.2


def cached(llm, prompts: list[list[int]], count: int) -> cpu.Run:
    """Decode prompts whose blocks must be in the prefix cache."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    data = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(data, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        # A drafter takes the last block anew.
        assert output.num_cached_tokens >= (len(prompt) - 1) // 16 * 16 - 16
    return cpu.Run([list(o.outputs[0].token_ids) for o in outputs], [], [])


def test_prefix_cache_cold_and_warm():
    """The second time the prompts' blocks, and those of answers, are reused."""
    engine = {"block_size": 16, "enable_prefix_caching": True}
    shared = list(range(30, 190))
    some = [[*shared, 200 + i] for i in range(8)]
    want, gaps = plain_with_gaps(some, {"enable_prefix_caching": False}, max_tokens=48)
    with cpu.engine(ddtree(BUDGET), **settings(**engine)) as llm:
        check_tree(llm, ddtree(BUDGET))
        cold = cpu.decode(llm, some, max_tokens=48)
        warm = cached(llm, some, 48)
        # Goes on from the answers, whose rows were moved by the compaction.
        longer = [p + t for p, t in zip(some, cold.tokens, strict=True)]
        again = cached(llm, longer, 16)
    assert_same_but_for_ties(cold, want, gaps)
    assert_same_but_for_ties(warm, want, gaps)
    further, gaps = plain_with_gaps(longer, max_tokens=16)
    assert_same_but_for_ties(again, further, gaps)
