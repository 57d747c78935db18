# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The bundled hybrid pair on a CPU: trees against plain decoding, mostly in float32."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from _decode import run_jobs

import ddtree_cpu as cpu

PAIR = cpu.ROOT / "models" / "tiny-qwen3_5"
ARGUMENTS = cpu.model_arguments(PAIR)
TREE = {"method": "ddtree", "model": str(PAIR / "drafter"), "tree_budget": 31}
GREEDY = {"max_tokens": 24}
SEEDED = {"max_tokens": 8, "temperature": 1.0, "seed": 5}
CORES = sorted(os.sched_getaffinity(0))


def decode(
    spec: dict | None, prompts: list[str], dtype: str = "float32"
) -> list[cpu.Run]:
    with cpu.engine(spec, dtype=dtype, **ARGUMENTS) as llm:
        return [cpu.decode(llm, prompts, **params) for params in (GREEDY, SEEDED)]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    before = cpu.PAIR
    cpu.use(PAIR)
    try:
        return cpu.heldout(8)
    finally:
        cpu.use(before)


@pytest.fixture(scope="module")
def plain(texts) -> list[cpu.Run]:
    return decode(None, texts)


@pytest.fixture(scope="module")
def tree(texts) -> list[cpu.Run]:
    return decode(TREE, texts)


def test_tree_equals_plain(plain, tree):
    """Greedy, and at T = 1, where noise is keyed by seed and position."""
    for run, reference in zip(tree, plain, strict=True):
        assert run.tokens == reference.tokens
    assert tree[0].tokens_per_step > 2.5
    assert tree[1].tokens_per_step > 1.2


def test_tree_in_bfloat16(texts):
    """Upstream's kernels, with packed weights where a CPU has AMX, against the tree's.

    They round differently, so a near-tie may go the other way. A wrong state or weight
    would spoil all texts.
    """
    plain, tree = (decode(spec, texts, "bfloat16")[0] for spec in (None, TREE))
    same = sum(a == b for a, b in zip(tree.tokens, plain.tokens, strict=True))
    assert same >= len(texts) - 3
    assert tree.tokens_per_step > 2.5


@pytest.mark.skipif(len(CORES) < 2, reason="each rank wants a core of its own")
def test_two_ranks_equal_one(tmp_path, texts, plain, tree):
    """Heads of the gated delta layers are shared out, and so are their states."""
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    site = Path(importlib.util.find_spec("vllm").origin).parents[1]
    found = run_jobs(
        tmp_path,
        texts,
        [
            {
                "speculative": TREE,
                "engine": {**ARGUMENTS, **ranks},
                "params": [GREEDY, SEEDED],
            }
        ],
        {
            "PYTHONPATH": str(site),
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[1]}",
        },
    )
    for run, alone, reference in zip(found["runs"][0], tree, plain, strict=True):
        assert run.tokens == reference.tokens
        assert run.steps == alone.steps
