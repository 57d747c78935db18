# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Two tensor-parallel ranks over gloo give the text and the trees of one rank."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from _decode import run_jobs
from conftest import assert_same

import ddtree_cpu as cpu

CORES = sorted(os.sched_getaffinity(0))
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
GREEDY = {"max_tokens": 48}
SEEDED = {"max_tokens": 48, "temperature": 1.0, "seed": 5}


@pytest.mark.skipif(len(CORES) < 2, reason="each rank wants a core of its own")
@pytest.mark.parametrize(
    "policy", ["best_first", pytest.param("spine_first", marks=pytest.mark.full)]
)
def test_two_ranks_equal_one(tmp_path, prompts, plain, policy):
    tree = cpu.ddtree(31, policy)
    plain_runs = [plain(prompts, **params) for params in (GREEDY, SEEDED)]
    with cpu.engine(tree) as llm:
        one_rank = [cpu.decode(llm, prompts, **params) for params in (GREEDY, SEEDED)]
    site = Path(importlib.util.find_spec("vllm").origin).parents[1]
    found = run_jobs(
        tmp_path,
        prompts,
        [{"speculative": tree, "engine": TWO_RANKS, "params": [GREEDY, SEEDED]}],
        {
            "PYTHONPATH": str(site),
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[1]}",
        },
    )
    assert found["patched"]
    for run, alone, reference in zip(
        found["runs"][0], one_rank, plain_runs, strict=True
    ):
        assert_same(run, reference)
        # Different trees on the ranks would still give some text; acceptance tells.
        assert run.steps == alone.steps
        assert run.tokens_per_step > 1.5
