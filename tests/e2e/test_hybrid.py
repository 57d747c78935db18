# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Hybrid targets (Qwen3.5) on a CPU in float32: trees give plain decoding's tokens.

The pair has random weights; ``_hybrid.Oracle`` steers the drafts.
"""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import _hybrid
import pytest
import torch
from _hybrid import POSITIONS, Oracle

import ddtree_cpu as cpu

SEED = int(os.environ.get("DDTREE_TEST_SEED", "20261201"))
LENGTHS = (1, 2, 3, 5, 17, 33, 60, 130)
# A batch that mixes prompt chunks with trees.
CHUNKS = {"max_num_batched_tokens": 48}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    return _hybrid.write_pair(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def hybrid(pair):
    """Opens an engine on the pair: ``budget`` of a tree, ``chain`` or neither."""
    target, drafter = map(str, pair)

    @contextlib.contextmanager
    def engine(budget: int | None = None, chain: bool = False, **args):
        spec = None
        if budget:
            spec = {"method": "ddtree", "model": drafter, "tree_budget": budget}
        elif chain:
            spec = {
                "method": "dflash",
                "model": drafter,
                "num_speculative_tokens": POSITIONS,
            }
        settings = {"enable_prefix_caching": False, **_hybrid.TEXT_ONLY, **args}
        with cpu.engine(spec, model=target, **settings) as llm:
            yield llm

    return engine


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    return [
        [10 + index] + [rng.randrange(10, 512) for _ in range(size - 1)]
        for index, size in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def reference(hybrid, texts) -> cpu.Run:
    with hybrid() as llm:
        return cpu.decode(llm, texts)


@pytest.fixture
def oracle(monkeypatch, texts, reference) -> Oracle:
    found = Oracle(texts, reference.tokens, SEED)
    found.install(monkeypatch)
    return found


def wrong(run: cpu.Run, reference: cpu.Run) -> list[int]:
    """Requests whose tokens differ."""
    pairs = zip(run.tokens, reference.tokens, strict=True)
    return [index for index, (got, want) in enumerate(pairs) if got != want]


def test_plain_equals_transformers(pair, texts, reference):
    """The float32 path is the yardstick of all others, so it has one, too."""
    from transformers import Qwen3_5ForConditionalGeneration

    model = Qwen3_5ForConditionalGeneration.from_pretrained(
        str(pair[0]), dtype=torch.float32
    )
    for prompt, want in zip(texts, reference.tokens, strict=True):
        got = model.generate(
            input_ids=torch.tensor([prompt]),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
        )
        assert got[0, len(prompt) :].tolist() == want[:24]


def test_chain_equals_plain(hybrid, texts, reference, oracle):
    """Upstream's chain, which keeps a state per draft, on the float32 path."""
    # Upstream takes the drafter's rows off the budget; 48 are left.
    with hybrid(chain=True, max_num_batched_tokens=104) as llm:
        oracle.runner = _hybrid.runner_of(llm)
        run = cpu.decode(llm, texts)
    assert wrong(run, reference) == []
    assert run.tokens_per_step > 1.3


@pytest.mark.parametrize("budget", [7, 16, 31])
def test_tree_equals_plain(hybrid, texts, reference, oracle, budget):
    with hybrid(budget) as llm:
        run = cpu.decode(llm, texts)
    assert wrong(run, reference) == []
    assert run.tokens_per_step > 1.5
    accepted = {size for steps in run.steps for size in steps}
    assert accepted >= {1, 2, 3, 4}


def test_batch_of_1_equals_plain(hybrid, texts, reference, oracle):
    with hybrid(16, max_num_seqs=1) as llm:
        run = cpu.decode(llm, texts[2:6])
    assert run.tokens == reference.tokens[2:6]
    assert run.tokens_per_step > 1.5


def test_prompt_chunks_beside_trees(hybrid, texts, reference, oracle):
    """Requests arrive three at a time, so prompts run beside the others' trees."""
    with hybrid(16, **CHUNKS) as llm:
        run = cpu.decode(llm, texts, concurrency=3)
    assert wrong(run, reference) == []
    assert run.tokens_per_step > 1.5


def test_preemption(hybrid, texts, reference, oracle):
    """A pool too small for all: preempted requests start over, states included."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted = []
    right = Scheduler._preempt_request

    def count(self, request, *args, **kwargs):
        preempted.append(request.request_id)
        return right(self, request, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_preempt_request", count)
        with hybrid(16, num_gpu_blocks_override=14, max_model_len=256) as llm:
            run = cpu.decode(llm, texts)
    assert wrong(run, reference) == []
    assert preempted


def test_random_load_leaves_nothing(hybrid, texts, reference, oracle):
    """Requests of all lengths come, end and are aborted; state slots are reused."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    rng = random.Random(SEED)
    print(f"seed {SEED}")
    got: dict[str, list[int]] = {}
    aborted: set[str] = set()
    with hybrid(16, max_num_seqs=4, **CHUNKS) as llm:
        core = llm.llm_engine
        scheduler = core.engine_core.engine_core.scheduler
        blocks = scheduler.kv_cache_manager.block_pool
        free = blocks.get_num_free_blocks()
        while len(got) < 40 or core.has_unfinished_requests():
            if len(got) < 40 and rng.random() < 0.5:
                name = f"{len(got)}/{rng.randrange(len(texts))}"
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=rng.choice([1, 2, 9, 30]),
                    ignore_eos=True,
                    output_kind=RequestOutputKind.DELTA,
                )
                prompt = {"prompt_token_ids": texts[int(name.split("/")[1])]}
                core.add_request(name, prompt, params)
                got[name] = []
            if got and rng.random() < 0.1:
                aborted.add(name := rng.choice(sorted(got)))
                core.abort_request([name])
            for output in core.step():
                got[output.request_id] += output.outputs[0].token_ids
        assert blocks.get_num_free_blocks() == free
    for name, tokens in got.items():
        want = reference.tokens[int(name.split("/")[1])]
        assert tokens == want[: len(tokens)], name
        assert tokens or name in aborted, name


@pytest.mark.parametrize("budget", [None, 16])
def test_prompt_of_one_token_in_a_used_slot(hybrid, texts, reference, budget):
    """Alone in its batch it looks like a decode, and must not take the slot's state."""
    assert len(texts[0]) == 1
    with hybrid(budget, max_num_seqs=1) as llm:
        run = cpu.decode(llm, [texts[3], texts[0]], max_tokens=8)
    assert run.tokens == [reference.tokens[3][:8], reference.tokens[0][:8]]


def test_one_state_per_request(hybrid):
    """No state and no longer history for the drafts."""
    from vllm.v1.kv_cache_interface import MambaSpec

    with hybrid(31) as llm:
        groups = _hybrid.runner_of(llm).kv_cache_config.kv_cache_groups
    found = [g.kv_cache_spec for g in groups if isinstance(g.kv_cache_spec, MambaSpec)]
    assert found
    for spec in found:
        assert spec.num_speculative_blocks == 0
        assert spec.shapes[0][0] == _hybrid.TAPS - 1
        assert len(spec.shapes) == 2


def mutated(hybrid, texts, reference) -> int:
    with hybrid(16) as llm:
        run = cpu.decode(llm, texts, max_tokens=32)
    pairs = zip(run.tokens, reference.tokens, strict=True)
    return sum(got != want[:32] for got, want in pairs)


def test_without_commit(monkeypatch, hybrid, texts, reference, oracle):
    from vllm.v1.spec_decode.ddtree.v1_runner import DDTreeRunner

    monkeypatch.setattr(DDTreeRunner, "_commit_states", lambda self, step: None)
    assert mutated(hybrid, texts, reference) > len(texts) // 2


@pytest.mark.parametrize("part", ["tree_conv", "tree_delta_rule"])
def test_without_ancestors(monkeypatch, hybrid, texts, reference, oracle, part):
    """A node that takes the row before it, not its parent, for its past."""
    from vllm.v1.spec_decode.ddtree import gdn_v1

    right = getattr(gdn_v1, part)
    at = {"tree_conv": 4, "tree_delta_rule": 5}[part]

    def chain(*args):
        rows = torch.arange(len(args[0]))
        return right(*args[:at], rows - 1, *args[at + 1 :])

    monkeypatch.setattr(gdn_v1, part, chain)
    assert mutated(hybrid, texts, reference) > len(texts) // 2


def test_without_all_planes_of_positions(monkeypatch, hybrid, texts, reference, oracle):
    """M-RoPE has three planes, and the plain positions are not what it reads."""
    from vllm.v1.spec_decode.ddtree.v1_runner import DDTreeRunner

    right = DDTreeRunner._write_depth_positions

    def first_plane_only(self, step):
        planes = self.runner.mrope_positions.gpu[1:]
        before = planes.clone()
        right(self, step)
        planes.copy_(before)

    monkeypatch.setattr(DDTreeRunner, "_write_depth_positions", first_plane_only)
    assert mutated(hybrid, texts, reference) > 0


def test_prefix_caching_is_refused(hybrid):
    with (
        pytest.raises(ValueError, match="enable_prefix_caching=True"),
        hybrid(16, enable_prefix_caching=True),
    ):
        pass


def test_images_are_refused(hybrid):
    with (
        pytest.raises(ValueError, match="limit_mm_per_prompt=.*serve text only"),
        hybrid(16, limit_mm_per_prompt={"image": 1, "video": 0}),
    ):
        pass


def test_other_recurrent_layers_are_refused():
    """By the class of the layer, should a model's name say nothing of it."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.v1.spec_decode.ddtree.config_hybrid import verify_layers

    layer = MambaMixer2.__new__(MambaMixer2)
    with pytest.raises(ValueError, match=r"'model\.layers\.0' is a MambaMixer2"):
        verify_layers({"model.layers.0": layer})
