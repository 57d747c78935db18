# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Engines on the V2 runner for the tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ddtree_cpu as cpu

ON_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(
    not ON_GPU,
    reason="takes minutes where every kernel is interpreted; runs on a GPU",
)
# Fewer where every kernel is interpreted.
POSITIONS = 15 if ON_GPU else 5
# Best two log-probabilities of float32 that are closer than this are a tie: kernels of
# other batch shapes sum in another order.
TIE = 1e-4


def ddtree(budget: int, policy: str = "best_first", **more: Any) -> dict[str, Any]:
    return cpu.ddtree(budget, policy, num_draft_positions=POSITIONS, **more)


def settings(**more: Any) -> dict[str, Any]:
    """Engine arguments; small ones where every kernel is interpreted."""
    base = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "max_model_len": 512}
    if ON_GPU:
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        base |= {
            "enforce_eager": False,
            "gpu_memory_utilization": 0.2,
            "kv_cache_memory_bytes": 2 << 30,
            "compilation_config": graphs,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 2048,
        }
    return base | more


def runner(llm: Any) -> Any:
    """The model runner; no test here may pass because V1 ran in silence."""
    found = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    assert any(
        base.__module__ == "vllm.v1.worker.gpu.model_runner"
        for base in type(found).__mro__
    ), type(found)
    return found


def check_tree(llm: Any, spec: dict[str, Any] | None) -> Any:
    """The runner, with its tree parts where ``spec`` asks for them."""
    found = runner(llm)
    if spec is not None and spec["method"] == "ddtree":
        assert type(found.speculator).__name__ == "DDTreeSpeculator"
        assert type(found.rejection_sampler).__name__ == "DDTreeSampler"
    return found


def decode(spec, prompts, engine=None, concurrency=None, **params) -> cpu.Run:
    with cpu.engine(spec, **settings(**(engine or {}))) as llm:
        check_tree(llm, spec)
        return cpu.decode(llm, prompts, concurrency, **params)


def plain_with_gaps(prompts, engine=None, **params) -> tuple[cpu.Run, list]:
    """Plain greedy decoding, and the gap of the best two at each of its tokens."""
    from vllm import SamplingParams

    with cpu.engine(None, **settings(**(engine or {}))) as llm:
        runner(llm)
        run = cpu.decode(llm, prompts, **params)
        sampling = {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True, **params}
        data = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]
        outputs = llm.generate(
            data, SamplingParams(logprobs=2, **sampling), use_tqdm=False
        )
    gaps = []
    for output in outputs:
        best = [
            sorted((e.logprob for e in at.values()), reverse=True)
            for at in output.outputs[0].logprobs
        ]
        gaps.append([b[0] - b[1] for b in best])
    return run, gaps


def edited_pair(folder: Path, target: dict, drafter: dict) -> Path:
    """The bundled pair with other settings in its two ``config.json``.

    Returns:
        Folder with ``target`` and ``drafter``; the weights are links.
    """
    for part, changes in (("target", target), ("drafter", drafter)):
        (folder / part).mkdir()
        for file in (cpu.PAIR / part).iterdir():
            if file.name != "config.json":
                (folder / part / file.name).symlink_to(file)
        text = (cpu.PAIR / part / "config.json").read_text(encoding="utf-8")
        config = json.loads(text) | changes
        (folder / part / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def assert_same_but_for_ties(run: cpu.Run, want: cpu.Run, gaps: list) -> None:
    """Same tokens up to a tie, of which there may be one in a hundred requests.

    Args:
        run: What is tested.
        want: Plain decoding.
        gaps: Per request and token of ``want``, the best log-probability less the
            second.
    """
    parted = []
    for index, (got, right) in enumerate(zip(run.tokens, want.tokens, strict=True)):
        if got == right:
            continue
        assert len(got) == len(right), f"request {index}"
        at = next(i for i, (a, b) in enumerate(zip(got, right, strict=True)) if a != b)
        parted.append((index, at, gaps[index][at]))
    print(f"{len(parted)} of {len(run.tokens)} part from plain decoding: {parted}")
    assert all(gap < TIE for _, _, gap in parted), parted
    assert len(parted) <= max(1, len(run.tokens) // 100), parted
