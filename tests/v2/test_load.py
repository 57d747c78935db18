# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Requests that come, go and are aborted at random on a GPU, in a pool that preempts.

``DDTREE_LOAD_SECONDS`` sets the time (30 by default).
"""

from __future__ import annotations

import os
import random
import time

from _v2 import TIE, check_tree, ddtree, needs_gpu, plain_with_gaps, settings

import ddtree_cpu as cpu

SECONDS = float(os.environ.get("DDTREE_LOAD_SECONDS", "30"))
SEED = int(os.environ.get("DDTREE_TEST_SEED", "20261201"))
LONGEST = 96
ENGINE = {
    "block_size": 16,
    "max_model_len": 320,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 600,
    "enable_prefix_caching": True,
}
SAMPLED = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 5},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.7, "seed": 9},
    {"temperature": 0.0, "ignore_eos": False, "stop_token_ids": [40, 41, 42]},
]


@needs_gpu
def test_random_load():
    from transformers import AutoTokenizer

    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    print(f"seed {SEED}, {SECONDS} s")
    rng = random.Random(SEED)
    tokenizer = AutoTokenizer.from_pretrained(str(cpu.PAIR / "target"))
    ids = tokenizer("".join(cpu.heldout(100)))["input_ids"]
    prompts = []
    for _ in range(200):
        begin, size = rng.randrange(len(ids) - 220), rng.choice([1, 5, 24, 40, 90, 200])
        prompts.append(ids[begin : begin + size])
    want, gaps = plain_with_gaps(prompts, ENGINE, max_tokens=LONGEST)

    spec = ddtree(23)
    small = ENGINE | {"num_gpu_blocks_override": 121}
    with cpu.engine(spec, **settings(**small)) as llm:
        check_tree(llm, spec)
        engine = llm.llm_engine
        core = engine.engine_core.engine_core
        blocks = core.scheduler.kv_cache_manager.block_pool
        free = blocks.get_num_free_blocks()
        got: dict[int, list[int]] = {}
        plans: dict[int, tuple[int, int, bool]] = {}
        aborted = greedy = ties = completed = 0
        end = time.monotonic() + SECONDS
        arriving = 0
        while time.monotonic() < end or engine.has_unfinished_requests():
            open_ = time.monotonic() < end
            if open_ and len(plans) < 40 and rng.random() < 0.5:
                for _ in range(rng.randrange(1, 5)):
                    index = rng.randrange(len(prompts))
                    limit = rng.choice([1, 2, 7, 24, 48, LONGEST])
                    exact = rng.random() < 0.7
                    params = {"temperature": 0.0, "ignore_eos": True}
                    if not exact:
                        params |= rng.choice(SAMPLED)
                    engine.add_request(
                        str(arriving),
                        {"prompt_token_ids": prompts[index]},
                        SamplingParams(
                            max_tokens=limit,
                            output_kind=RequestOutputKind.DELTA,
                            **params,
                        ),
                    )
                    got[arriving] = []
                    plans[arriving] = (index, limit, exact)
                    arriving += 1
            if plans and rng.random() < 0.02:
                victim = rng.choice(sorted(plans))
                engine.abort_request([str(victim)])
                del plans[victim], got[victim]
                aborted += 1
            for output in engine.step():
                request = int(output.request_id)
                if request not in plans:
                    continue
                got[request].extend(output.outputs[0].token_ids)
                if not output.finished:
                    continue
                index, limit, exact = plans.pop(request)
                tokens = got.pop(request)
                completed += 1
                assert 0 < len(tokens) <= limit
                if not exact:
                    continue
                greedy += 1
                right = want.tokens[index][:limit]
                assert len(tokens) == limit
                if tokens != right:
                    at = next(i for i in range(limit) if tokens[i] != right[i])
                    assert gaps[index][at] < TIE, (request, index, at)
                    ties += 1
        metrics = {m.name: m for m in llm.get_metrics()}
        preempted = metrics["vllm:num_preemptions"].value
        hits = metrics["vllm:prefix_cache_hits"].value
        cpu.decode(llm, [prompts[0]], max_tokens=2)
        cpu.decode(llm, [prompts[0]], max_tokens=2)
        assert blocks.get_num_free_blocks() == free, "KV blocks leaked"
    print(
        f"{completed} complete, {greedy} of them compared, {ties} parted at a tie, "
        f"{aborted} aborted, {preempted} preemptions, {hits} cached tokens"
    )
    assert greedy > SECONDS
    assert ties <= max(2, greedy // 100)
    assert aborted > 0
    assert preempted > 0
    assert hits > 0
