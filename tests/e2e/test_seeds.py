# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Seeded sampling through trees, and stock sampling with the backports."""

from __future__ import annotations

import pytest
from conftest import assert_same

import ddtree_cpu as cpu

PARAMETERS = {
    "temperature": {"temperature": 1.0},
    "top_k": {"temperature": 0.8, "top_k": 20},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_p": {"temperature": 1.2, "min_p": 0.05},
    "all": {"temperature": 1.0, "top_k": 30, "top_p": 0.95, "min_p": 0.02},
}
SEEDS = (0, 12345)
ALONE = {"concurrency": 1, "max_tokens": 32}


@pytest.fixture(scope="module")
def few(prompts) -> list[str]:
    return prompts[::6]


@pytest.fixture(scope="module")
def plain_runs(few) -> dict[tuple[str, int], cpu.Run]:
    with cpu.engine(None) as llm:
        return {
            (case, seed): cpu.decode(llm, few, seed=seed, **ALONE, **params)
            for case, params in PARAMETERS.items()
            for seed in SEEDS
        }


# Engines of their own come first: one at a time can be open.


@pytest.mark.parametrize("speculative", [None, cpu.ddtree(31)], ids=["plain", "tree"])
def test_seed_with_chunked_prefill(few, plain_runs, speculative):
    """Chunks whose sample is thrown away must not move the generator (backport)."""
    with cpu.engine(speculative, max_num_batched_tokens=32) as llm:
        ids = [llm.get_tokenizer()(prompt)["input_ids"] for prompt in few]
        assert max(map(len, ids)) > 64
        for seed in SEEDS:
            run = cpu.decode(llm, few, seed=seed, **ALONE, **PARAMETERS["all"])
            assert_same(run, plain_runs["all", seed])


def test_stock_chain_accepts_when_sampling(few):
    """Without the backport of the expand kernel it accepts next to nothing."""
    with cpu.engine(cpu.chain()) as llm:
        greedy = cpu.decode(llm, few).tokens_per_step
        for params in (
            {"temperature": 0.8},
            {"temperature": 0.8, "top_p": 0.9},
            {"temperature": 0.8, "top_k": 20},
            {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        ):
            sampled = cpu.decode(llm, few * 2, **params).tokens_per_step
            print(f"{params}: {sampled:.2f} tokens a step, greedy {greedy:.2f}")
            assert sampled > 1 + (greedy - 1) / 3


@pytest.fixture(scope="module")
def tree_engine(plain_runs):
    with cpu.engine(cpu.ddtree(31)) as llm:
        yield llm


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_seeded_request_alone_equals_plain_decoding(
    few, plain_runs, tree_engine, case
):
    texts = set()
    for seed in SEEDS:
        run = cpu.decode(tree_engine, few, seed=seed, **ALONE, **PARAMETERS[case])
        assert_same(run, plain_runs[case, seed])
        assert run.tokens_per_step > 1.2
        texts.add(tuple(run.texts))
    assert len(texts) == len(SEEDS)


def decode_mixed(llm, prompts: list[str], seeds: list[int | None]) -> list[list[int]]:
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=1.0, max_tokens=32, seed=seed, ignore_eos=True)
        for seed in seeds
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_seeded_beside_unseeded_requests_is_repeatable(few, tree_engine):
    """From the first token on, which comes from upstream's sampler (backport)."""
    prompts = [few[i % len(few)] for i in range(8)]
    seeds = [3, None, 4, None, 3, None, None, 5]
    first, second = (decode_mixed(tree_engine, prompts, seeds) for _ in range(2))
    for seed, one, other in zip(seeds, first, second, strict=True):
        if seed is not None:
            assert one == other
    # The unseeded ones share a prompt with seeded ones and must not share noise.
    assert any(
        one != other
        for seed, one, other in zip(seeds, first, second, strict=True)
        if seed is None
    )
    assert first[0] == first[4]  # the same prompt and seed, other neighbours


def test_greedy_beside_sampled_requests(few, tree_engine):
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    sampled = SamplingParams(temperature=1.0, max_tokens=32, ignore_eos=True)
    outputs = tree_engine.generate(
        [prompt for prompt in few for _ in range(2)],
        [greedy, sampled] * len(few),
        use_tqdm=False,
    )
    expected = cpu.decode(tree_engine, few, max_tokens=32)
    got = [list(output.outputs[0].token_ids) for output in outputs[::2]]
    assert got == expected.tokens
