# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""300 requests that come and go at random, some aborted, in a pool that preempts."""

from __future__ import annotations

import gc
import os
import random

import psutil

import ddtree_cpu as cpu

REQUESTS = 300
SEED = int(os.environ.get("DDTREE_TEST_SEED", "20261201"))


def test_random_load(plain):
    from transformers import AutoTokenizer

    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    print(f"seed {SEED}")
    rng = random.Random(SEED)
    tokenizer = AutoTokenizer.from_pretrained(str(cpu.PAIR / "target"))
    ids = tokenizer("".join(cpu.heldout(100)))["input_ids"]
    prompts, limits = [], []
    for _ in range(REQUESTS):
        begin, size = rng.randrange(len(ids) - 200), rng.choice([1, 5, 17, 40, 90, 160])
        prompts.append(ids[begin : begin + size])
        limits.append(rng.choice([1, 2, 7, 24, 48, 96]))
    want = plain(prompts, max_tokens=96).tokens

    small = {
        "block_size": 16,
        "max_model_len": 320,
        "num_gpu_blocks_override": 41,
        "max_num_batched_tokens": 300,
    }
    with cpu.engine(cpu.ddtree(31), **small) as llm:
        engine = llm.llm_engine
        core = engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        blocks = core.scheduler.kv_cache_manager.block_pool
        free = blocks.get_num_free_blocks()
        got: dict[int, list[int]] = {}
        done: set[int] = set()
        aborted: set[int] = set()
        memory = []
        arriving = 0
        while arriving < REQUESTS or engine.has_unfinished_requests():
            if arriving < REQUESTS and rng.random() < 0.45:
                for _ in range(min(rng.randrange(1, 4), REQUESTS - arriving)):
                    params = SamplingParams(
                        temperature=0.0,
                        max_tokens=limits[arriving],
                        ignore_eos=True,
                        output_kind=RequestOutputKind.DELTA,
                    )
                    prompt = {"prompt_token_ids": prompts[arriving]}
                    engine.add_request(str(arriving), prompt, params)
                    got[arriving] = []
                    arriving += 1
            live = sorted(set(got) - done - aborted)
            if live and rng.random() < 0.04:
                victim = rng.choice(live)
                engine.abort_request([str(victim)])
                aborted.add(victim)
            for output in engine.step():
                index = int(output.request_id)
                got[index].extend(output.outputs[0].token_ids)
                if output.finished:
                    done.add(index)
            if arriving in (100, 200, 300):
                memory.append(psutil.Process().memory_info().rss)
        preempted = sum(
            m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"
        )
        gc.collect()
        end = psutil.Process().memory_info().rss
        # One more step hears of the last finished requests.
        cpu.decode(llm, [prompts[0]], max_tokens=2)
        cpu.decode(llm, [prompts[0]], max_tokens=2)
        assert len(runner.ddtree.drafted) <= 1
        assert blocks.get_num_free_blocks() == free, "KV blocks leaked"
    complete = done - aborted
    print(f"{len(complete)} complete, {len(aborted)} aborted, {preempted} preemptions")
    assert len(complete) > 0.8 * REQUESTS
    assert len(aborted) >= 10
    assert preempted > 0
    for index in complete:
        assert got[index] == want[index][: limits[index]], f"request {index}"
    assert end - memory[0] < 64 * 2**20, "memory grew"


def test_idle_engine_keeps_no_trees(prompts):
    """One request after another, the engine idle in between, as behind a server."""
    with cpu.engine(cpu.ddtree(31)) as llm:
        core = llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        for prompt in prompts[:6]:
            cpu.decode(llm, [prompt], max_tokens=8)
            while core.scheduler.has_requests():
                llm.llm_engine.step()
        assert not runner.requests
        assert len(runner.ddtree.drafted) <= 1
