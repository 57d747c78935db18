# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""What a serving engine does around a step, with trees under way."""

from __future__ import annotations

import pytest
from conftest import assert_same

import ddtree_cpu as cpu

TREE = cpu.ddtree(31)
SMALL = {"block_size": 16, "max_model_len": 400, "num_gpu_blocks_override": 30}


def counter(llm, name: str) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == name)


@pytest.fixture(scope="module")
def lengths(prompts) -> list[list[int]]:
    """Token prompts of many lengths, one token to several blocks."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(cpu.PAIR / "target"))
    ids = tokenizer("".join(cpu.heldout(24)))["input_ids"]
    sizes = [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200]
    return [ids[7 * i : 7 * i + size] for i, size in enumerate(sizes)]


def test_mixed_prompt_lengths(lengths, plain):
    with cpu.engine(TREE) as llm:
        run = cpu.decode(llm, lengths)
    assert_same(run, plain(lengths))


def test_chunked_prefill_beside_tree_decode(lengths, plain):
    """40 tokens a step: prefill chunks share steps with whole and cut trees."""
    with cpu.engine(TREE, max_num_batched_tokens=40) as llm:
        run = cpu.decode(llm, lengths)
    assert_same(run, plain(lengths))


def test_prompt_chunks_as_long_as_a_tree(lengths, plain):
    """A prefill of exactly Q tokens must not meet a stale tree."""
    rows = 32
    prompts = [(lengths[-1] + lengths[-2])[i : i + rows] for i in range(12)]
    want = plain(prompts)
    with cpu.engine(TREE) as llm:
        for _ in range(2):
            assert_same(cpu.decode(llm, prompts), want)


def test_preemption_in_a_tiny_pool(lengths, plain):
    with cpu.engine(TREE, **SMALL) as llm:
        run = cpu.decode(llm, lengths, max_tokens=96)
        assert counter(llm, "vllm:num_preemptions") > 0
    assert_same(run, plain(lengths, max_tokens=96))


def test_prefix_cache_cold_equals_warm(lengths, plain):
    with cpu.engine(TREE, block_size=16, enable_prefix_caching=True) as llm:
        cold = cpu.decode(llm, lengths)
        hits = counter(llm, "vllm:prefix_cache_hits")
        warm = cpu.decode(llm, lengths)
        assert counter(llm, "vllm:prefix_cache_hits") > hits
        # Prompts that continue cached outputs: blocks that trees have written.
        longer = [p + t for p, t in zip(lengths, cold.tokens, strict=True)]
        continued = cpu.decode(llm, longer)
    assert_same(cold, plain(lengths))
    assert_same(warm, plain(lengths))
    assert_same(continued, plain(longer))


def test_context_kv_of_cached_blocks_keeps_acceptance(lengths):
    """The drafter's own cache entries of shared blocks must be as good as fresh."""
    with cpu.engine(TREE, block_size=16, enable_prefix_caching=True) as llm:
        cold = cpu.decode(llm, lengths)
        warm = cpu.decode(llm, lengths)
    assert warm.tokens_per_step == pytest.approx(cold.tokens_per_step, rel=0.02)


def test_max_tokens_inside_an_accepted_path(prompts, plain):
    whole = plain(prompts)
    with cpu.engine(TREE) as llm:
        for limit in (1, 2, 3, 5, 11):
            run = cpu.decode(llm, prompts, max_tokens=limit)
            assert run.tokens == [tokens[:limit] for tokens in whole.tokens]
            assert set(run.finish) == {"length"}


def test_stop_strings_and_tokens_inside_an_accepted_path(prompts, plain):
    whole = plain(prompts)
    token = whole.tokens[0][9]
    text = whole.texts[1][12:15]
    cases = [
        {"stop_token_ids": [token]},
        {"stop": [text]},
        {"stop": [text], "include_stop_str_in_output": True},
    ]
    want = [plain(prompts, **case) for case in cases]
    with cpu.engine(TREE) as llm:
        got = [cpu.decode(llm, prompts, **case) for case in cases]
    for case, run, reference in zip(cases, got, want, strict=True):
        if "stop" in case:
            # As with upstream's chain, ids go to the end of the step; the text stops.
            assert (run.texts, run.finish) == (reference.texts, reference.finish)
            for ids, expected in zip(run.tokens, reference.tokens, strict=True):
                assert ids[: len(expected)] == expected
        else:
            assert_same(run, reference)
        assert "stop" in run.finish, case


@pytest.mark.parametrize("budget", [7, 63])
def test_max_model_len_to_the_last_token(lengths, plain, budget):
    limit = {"max_model_len": 160}
    prompts = [p for p in lengths if len(p) < 150]
    want = plain(prompts, engine=limit, max_tokens=400)
    with cpu.engine(cpu.ddtree(budget), **limit) as llm:
        run = cpu.decode(llm, prompts, max_tokens=400)
    assert_same(run, want)
    assert all(len(p) + len(t) == 160 for p, t in zip(prompts, run.tokens, strict=True))


def test_one_request_at_the_limit_leaves_others_their_trees(lengths):
    """Upstream's chain drops the whole batch's drafts; a tree only its own."""
    short, long = lengths[8], (lengths[-1] + lengths[-2])[:150]
    limit = {"max_model_len": 160, "max_num_seqs": 8}
    with cpu.engine(TREE, **limit) as llm:
        alone = cpu.decode(llm, [short], max_tokens=60)
        beside = cpu.decode(llm, [short] + [long] * 3, max_tokens=60)
    assert beside.tokens[0] == alone.tokens[0]
    assert beside.steps[0] == alone.steps[0]


def test_drafter_shorter_than_the_target(lengths, plain):
    """Past the drafter's own length requests decode on without drafts."""
    spec = cpu.ddtree(31, max_model_len=96)
    with cpu.engine(spec) as llm:
        run = cpu.decode(llm, lengths)
    assert_same(run, plain(lengths))
    # The 200-token prompt starts past the drafter's length.
    assert set(run.steps[-1]) == {1}
    assert max(run.steps[0]) > 1


def test_parallel_sampling(prompts):
    from vllm import SamplingParams

    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=24)
    with cpu.engine(None, max_num_seqs=4) as llm:
        want = [
            o.token_ids
            for o in llm.generate(prompts[:1], params, use_tqdm=False)[0].outputs
        ]
    with cpu.engine(TREE, max_num_seqs=4) as llm:
        got = [
            o.token_ids
            for o in llm.generate(prompts[:1], params, use_tqdm=False)[0].outputs
        ]
    assert len(set(map(tuple, got))) > 1
    assert got == want


def test_bfloat16_differs_from_stock_dflash_at_ties_only(prompts):
    """A first difference must be where the target's two best logits nearly tie."""
    from vllm import SamplingParams

    with cpu.engine(cpu.chain(15), dtype="bfloat16") as llm:
        want = cpu.decode(llm, prompts)
        ids = [llm.get_tokenizer()(p)["input_ids"] for p in prompts]
    with cpu.engine(TREE, dtype="bfloat16") as llm:
        run = cpu.decode(llm, prompts)
    contexts = []
    for prompt, got, expected in zip(ids, run.tokens, want.tokens, strict=True):
        if got != expected:
            at = next(i for i, token in enumerate(got) if token != expected[i])
            contexts.append({"prompt_token_ids": prompt + got[:at]})
    print(f"{len(contexts)} of {len(prompts)} texts differ")
    assert len(contexts) < len(prompts)
    if contexts:
        with cpu.engine(None, dtype="bfloat16") as llm:
            params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2)
            for output in llm.generate(contexts, params, use_tqdm=False):
                best, second = sorted(
                    (p.logprob for p in output.outputs[0].logprobs[0].values()),
                    reverse=True,
                )[:2]
                # bfloat16 keeps 8 bits: logits near 10 are 1/16 apart.
                assert best - second <= 0.13
