# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Two tensor-parallel ranks of the V2 runner give one rank's text and trees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ddtree_cpu as cpu
from benchlib.tp_compare import fact_failures

CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(len(CORES) < 2, reason="each rank wants a core of its own")
@pytest.mark.parametrize(
    "pair", ["tiny-qwen3", pytest.param("tiny-qwen3_5", marks=pytest.mark.full)]
)
def test_two_ranks_equal_one(tmp_path, on_gpu, pair):
    if on_gpu:
        pytest.skip("scripts for GPUs check two of them; this one is for gloo")
    folder = cpu.ROOT / "models" / pair
    speculative = {
        "method": "ddtree",
        "model": str(folder / "drafter"),
        "tree_budget": 7,
        "num_draft_positions": 5,
    }
    engine = {
        **cpu.model_arguments(folder),
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
    }
    lines = (folder / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["text"][:60] for line in (lines[0], lines[-1])]
    params = {"max_tokens": 8}
    with cpu.engine(speculative, **engine) as llm:
        alone = cpu.decode(llm, prompts, **params)
    engine |= {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "additional_config": {"ddtree_check_ranks": True},
    }
    job, result = tmp_path / "job.json", tmp_path / "result.json"
    job.write_text(
        json.dumps(
            {
                "speculative": speculative,
                "engine": engine,
                "prompts": prompts,
                "params": params,
            }
        ),
        encoding="utf-8",
    )
    binding = {"VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[1]}"}
    script = Path(__file__).with_name("_tp2.py")
    done = subprocess.run(
        [sys.executable, str(script), str(job), str(result)],
        env={**os.environ, **binding},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    found = json.loads(result.read_text(encoding="utf-8"))
    # What scripts/check_tp.py asks of ranks on GPUs, but for the graphs.
    facts = [{**rank, "async": True} for rank in found["facts"]]  # not on a CPU
    assert fact_failures(facts, 2, tree=True, graphs=False) == []
    assert [rank["gpu"] for rank in found["facts"]] == [False] * 2
    assert all(rank["request_blocks"] > 0 for rank in found["facts"])
    assert found["tokens"] == alone.tokens
    assert found["steps"] == alone.steps
    steps = max(len(request) for request in alone.steps)
    for rank in found["compared"]:
        assert rank["ranks"] == 2
        assert rank["steps"] > steps
    # With one rank's trees spoilt the check says which step, row and rank.
    assert "ddtree_check_ranks: step" in found["error"] + done.stdout
    assert "request row 0" in found["error"] + done.stdout
    assert "rank 1 has token" in found["error"] + done.stdout
