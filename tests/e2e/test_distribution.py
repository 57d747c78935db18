# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Sampling through trees has the target's distribution, and the tests could tell.

Many copies of one prompt draw three tokens each: the first after the prefill, the
others in tree steps, together or apart. They are compared with plain sampling, and
with the probabilities that the target itself gives.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from _stats import goodness_of_fit, same_distribution

import ddtree_cpu as cpu

DRAWS = int(os.environ.get("DDTREE_TEST_DRAWS", "20000"))
FEWER_DRAWS = 2500
SEED = int(os.environ.get("DDTREE_TEST_SEED", "0"))
PROMPT = 12  # of 24 held-out ones: each token has several likely values
TOP = 8  # tokens per position that get cells of their own
ENGINE = {
    "max_num_seqs": 128,
    "max_num_batched_tokens": 4096,
    "block_size": 16,
    "enable_prefix_caching": True,
    "max_logprobs": -1,
    "seed": SEED,
    "gpu_memory_utilization": 0.3,  # counts where there is a GPU
}
# Three tokens are drawn, so deeper positions would only cost time.
TREE = cpu.ddtree(7, num_draft_positions=3)
FILTERS = {
    "top_k": {"temperature": 1.0, "top_k": 6},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "all": {"temperature": 1.4, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
}


def draw(llm, ids: list[int], count: int, **params) -> cpu.Run:
    """Three tokens of each of ``count`` unseeded requests."""
    settings = {"temperature": 1.0, "max_tokens": 3, "detokenize": False, **params}
    return cpu.decode(llm, [ids] * count, **settings)


def triples(run: cpu.Run) -> list[tuple[int, ...]]:
    return [tuple(tokens) for tokens in run.tokens]


@dataclass
class Plain:
    """What the plain engine gave.

    Attributes:
        ids: The prompt's tokens.
        draws: Sampled triples at temperature 1.
        log_probs: The target's [V] float64 log-probabilities after likely prefixes.
    """

    ids: list[int]
    draws: list[tuple[int, ...]]
    log_probs: dict[tuple[int, ...], torch.Tensor]


@pytest.fixture(scope="module")
def plain_samples(prompts) -> Plain:
    from vllm import SamplingParams

    print(f"engine seed {SEED}")
    with cpu.engine(None, **ENGINE) as llm:
        ids = llm.get_tokenizer()(prompts[PROMPT])["input_ids"]
        log_probs: dict[tuple[int, ...], torch.Tensor] = {}

        def ask(prefixes: list[tuple[int, ...]]) -> None:
            data = [{"prompt_token_ids": [*ids, *prefix]} for prefix in prefixes]
            params = SamplingParams(max_tokens=1, logprobs=-1)
            outputs = llm.generate(data, params, use_tqdm=False)
            for prefix, output in zip(prefixes, outputs, strict=True):
                found = output.outputs[0].logprobs[0]
                values = [found[token].logprob for token in range(len(found))]
                log_probs[prefix] = torch.tensor(values, dtype=torch.float64)

        frontier: list[tuple[int, ...]] = [()]
        for _ in range(3):
            ask(frontier)
            frontier = [
                (*prefix, token)
                for prefix in frontier
                for token in log_probs[prefix].topk(TOP).indices.tolist()
            ]
        return Plain(ids, triples(draw(llm, ids, DRAWS)), log_probs)


@pytest.fixture(scope="module")
def tree_engine(plain_samples):  # after the plain engine: two at a time do not work
    with cpu.engine(TREE, **ENGINE) as llm:
        yield llm


def filtered(log_probs, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """Sampling probabilities written out: temperature, min_p, top_k, then top_p."""
    p = (log_probs / temperature).softmax(0)
    if min_p is not None:
        p = torch.where(p >= min_p * p.max(), p, 0.0)
    values, order = p.sort(descending=True)
    if top_k is not None:
        values[top_k:] = 0
    values /= values.sum()
    if top_p is not None:
        values[values.cumsum(0) - values >= top_p] = 0
    return torch.zeros_like(p).scatter(0, order, values / values.sum())


def exact(log_probs: dict, **params) -> dict[tuple[int, ...], float]:
    """Probabilities of likely triples; all others together are ``()``."""
    found = {}
    for prefix in (prefix for prefix in log_probs if len(prefix) == 2):
        before = float(
            filtered(log_probs[()], **params)[prefix[0]]
            * filtered(log_probs[prefix[:1]], **params)[prefix[1]]
        )
        last = filtered(log_probs[prefix], **params)
        for token in last.topk(TOP).indices.tolist():
            probability = before * float(last[token])
            if probability > 0:
                found[(*prefix, token)] = probability
    rest = 1 - sum(found.values())
    if rest > 1e-9:
        found[()] = rest
    return found


def fit(draws: list[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    return goodness_of_fit(
        [triple if triple in expected else () for triple in draws], expected
    )


def test_plain_sampling_fits_the_targets_probabilities(plain_samples):
    """The reference itself, so that a failure below is the tree's."""
    p = fit(plain_samples.draws, exact(plain_samples.log_probs))
    print(f"p = {p:.4g}")
    assert p > 1e-3


def test_temperature_1_equals_plain_sampling(plain_samples, tree_engine):
    """At least 20,000 draws of each, unless DDTREE_TEST_DRAWS says otherwise."""
    run = draw(tree_engine, plain_samples.ids, DRAWS)
    drawn = triples(run)
    assert len(drawn) == len(plain_samples.draws) == DRAWS
    p, cells = same_distribution(drawn, plain_samples.draws)
    p_exact = fit(drawn, exact(plain_samples.log_probs))
    together = sum(steps == [2] for steps in run.steps) / DRAWS
    print(
        f"two-sample p = {p:.4g} over {cells} cells; against exact probabilities "
        f"p = {p_exact:.4g}; tokens 2 and 3 from one step: {together:.1%}"
    )
    assert cells > 50
    # Both ways to get the third token must be common, or the test says little.
    assert 0.1 < together < 0.9
    assert all(sum(steps) == 2 for steps in run.steps)
    assert p > 1e-3
    assert p_exact > 1e-3


@pytest.mark.parametrize("case", FILTERS)
def test_filters_fit_exact_probabilities(plain_samples, tree_engine, case):
    expected = exact(plain_samples.log_probs, **FILTERS[case])
    run = draw(tree_engine, plain_samples.ids, FEWER_DRAWS, **FILTERS[case])
    p = fit(triples(run), expected)
    print(f"p = {p:.4g} over {len(expected)} outcomes")
    assert p > 1e-3


def test_would_notice_a_walk_that_prefers_the_drafters_token(
    plain_samples, tree_engine, monkeypatch
):
    """Every other request takes the drafter's first token, whatever was sampled.

    Noise shared between depths: see test_node_sampling, on a vocabulary so small that
    it matters.
    """
    from vllm.v1.spec_decode.ddtree import v1_runner

    healthy = v1_runner.walk
    calls = iter(range(10**9))

    def biased(tree, node_tokens, *args):
        rows = torch.arange(tree.batch_size) % 2 == next(calls) % 2
        rows &= tree.num_nodes > 0
        node_tokens[rows, 0] = tree.tokens[rows, 0]
        return healthy(tree, node_tokens, *args)

    monkeypatch.setattr(v1_runner, "walk", biased)
    drawn = triples(draw(tree_engine, plain_samples.ids, FEWER_DRAWS))
    p, _ = same_distribution(drawn, plain_samples.draws)
    print(f"p = {p:.4g}")
    assert p < 1e-6
