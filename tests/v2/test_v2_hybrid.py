# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Hybrid targets (Qwen3.5) on the V2 runner, in float32.

The pair has random weights; ``_v2_hybrid.Oracle`` steers the drafts. In the interpreter
a few requests, on a GPU many, there with CUDA graphs and upstream's kernels for plain
decoding. Upstream's kernels for prompts refuse float32; PyTorch takes their place.
"""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import _hybrid
import pytest
from _v2 import (
    assert_same_but_for_ties,
    check_tree,
    needs_gpu,
    plain_with_gaps,
    runner,
    settings,
)
from _v2_hybrid import Oracle, float32_prompts

import ddtree_cpu as cpu

SEED = int(os.environ.get("DDTREE_TEST_SEED", "20261201"))
# One token, fewer than the convolution's window, Q of budget 7, and longer.
LENGTHS = (1, 2, 8, 17)
# Not 1: upstream takes such a prompt for a decode, which reads the slot's old state.
LENGTHS_ON_GPU = (2, 2, 3, 5, 8, 16, 17, 32, 33, 64, 65, 127, 130, 200, 260, 300)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    return _hybrid.write_pair(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def arguments(pair) -> dict:
    """Of every engine here."""
    gpu = {"additional_config": {"gdn_prefill_backend": "triton"}}
    return {
        "model": str(pair[0]),
        "enable_prefix_caching": False,
        **_hybrid.TEXT_ONLY,
        **(gpu if "compilation_config" in settings() else {}),
    }


@pytest.fixture(scope="module", autouse=True)
def prompts_in_float32():
    with float32_prompts():
        yield


@pytest.fixture(scope="module")
def engine(pair, arguments):
    """Opens an engine on the pair: ``budget`` of a tree, or plain."""

    @contextlib.contextmanager
    def opened(budget: int | None, **args):
        spec = None
        if budget:
            spec = {"method": "ddtree", "model": str(pair[1]), "tree_budget": budget}
        with cpu.engine(spec, **settings(**arguments, **args)) as llm:
            check_tree(llm, spec)
            if budget:
                state = type(runner(llm).model_state).__name__
                assert state == "DDTreeHybridModelState"
            yield llm

    return opened


@pytest.fixture(scope="module")
def texts(on_gpu) -> list[list[int]]:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    return [
        [10 + index] + [rng.randrange(10, 512) for _ in range(size - 1)]
        for index, size in enumerate(LENGTHS_ON_GPU if on_gpu else LENGTHS)
    ]


@pytest.fixture(scope="module")
def count(on_gpu) -> int:
    """Tokens a request."""
    return 64 if on_gpu else 10


@pytest.fixture(scope="module")
def plain(texts, count, arguments) -> tuple[cpu.Run, list]:
    """Plain decoding and its gaps."""
    return plain_with_gaps(texts, arguments, max_tokens=count)


@pytest.fixture
def oracle(monkeypatch, texts, plain) -> Oracle:
    found = Oracle(texts, plain[0].tokens, SEED)
    found.install(monkeypatch)
    return found


@pytest.fixture
def tree_launches(monkeypatch) -> list[int]:
    """Requests of every launch of the tree kernel; a captured graph counts once."""
    from vllm.v1.spec_decode.ddtree import gdn_v2

    launches: list[int] = []
    right = gdn_v2.tree_delta_rule

    def count(*args, **kwargs):
        launches.append(args[9])
        return right(*args, **kwargs)

    monkeypatch.setattr(gdn_v2, "tree_delta_rule", count)
    return launches


BUDGETS = [7, *(pytest.param(n, marks=needs_gpu) for n in (15, 31, 63, 127))]


@pytest.mark.parametrize("budget", BUDGETS)
def test_tree_equals_plain(engine, texts, count, plain, oracle, tree_launches, budget):
    """Requests come two or more at a time, so that prompts run beside trees."""
    with engine(budget, max_num_batched_tokens=128) as llm:
        oracle.bind(llm)
        # One state a request: no slots for drafts.
        specs = runner(llm).kv_cache_config.kv_cache_groups
        slots = [getattr(g.kv_cache_spec, "num_speculative_blocks", 0) for g in specs]
        assert slots == [0] * len(specs)
        run = cpu.decode(llm, texts, max(2, len(texts) // 4), max_tokens=count)
    assert_same_but_for_ties(run, *plain)
    assert run.tokens_per_step > 1.5
    assert tree_launches


@needs_gpu
def test_eager_and_batch_of_1(engine, texts, count, plain, oracle):
    with engine(31, max_num_seqs=1, enforce_eager=True, compilation_config={}) as llm:
        oracle.bind(llm)
        run = cpu.decode(llm, texts[3:9], max_tokens=count)
    assert_same_but_for_ties(run, _part(plain[0], slice(3, 9)), plain[1][3:9])


@needs_gpu
def test_preemption(engine, texts, count, plain, oracle):
    """A pool too small for all: resumed requests compute their states anew."""
    with engine(31, num_gpu_blocks_override=24, max_model_len=512) as llm:
        oracle.bind(llm)
        run = cpu.decode(llm, texts, max_tokens=count)
        metrics = {m.name: m for m in llm.get_metrics()}
        assert metrics["vllm:num_preemptions"].value > 0
    assert_same_but_for_ties(run, *plain)


def one_token_between_others(engine, texts) -> list[list[int]]:
    """Tokens of a prompt of one token, three times.

    Between them come enough others to go through all blocks, which are taken by turns.
    """
    one, others = [40], texts[8:]
    with engine(31, max_num_seqs=1, num_gpu_blocks_override=24) as llm:
        order = [one, *others, one, *others, one]
        run = cpu.decode(llm, order, concurrency=1, max_tokens=8)
    return run.tokens[:: len(others) + 1]


@needs_gpu
def test_a_slot_with_a_past(engine, texts):
    """A prompt of one token looks like a decode and must not take the slot's state."""
    first, *others = one_token_between_others(engine, texts)
    assert others == [first, first]


@needs_gpu
def test_without_a_reset_it_differs(engine, texts, monkeypatch):
    from vllm.v1.spec_decode.ddtree.kernels.gdn_commit import GDNCommitter

    monkeypatch.setattr(GDNCommitter, "reset", lambda *args: None)
    first, *others = one_token_between_others(engine, texts)
    assert others != [first, first]


@needs_gpu
def test_without_a_commit_it_differs(engine, texts, count, plain, oracle, monkeypatch):
    """Else the tests above could not fail."""
    from vllm.v1.spec_decode.ddtree.kernels.gdn_commit import GDNCommitter

    monkeypatch.setattr(GDNCommitter, "commit", lambda *args: None)
    with engine(31) as llm:
        oracle.bind(llm)
        run = cpu.decode(llm, texts, max_tokens=count)
    assert run.tokens != plain[0].tokens


def _part(run: cpu.Run, which: slice) -> cpu.Run:
    return cpu.Run(run.tokens[which], run.texts[which], run.steps[which])
