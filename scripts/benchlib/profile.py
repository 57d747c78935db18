# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Reads what torch's profiler recorded of decode steps."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

# First match wins; names of kernels as the profiler gives them.
GROUPS = {
    "tree attention": r"^_attention_kernel|^_reduce_kernel",
    "FlashAttention": r"flash|prepare_varlen",
    "tree build": r"_chunk_stats_kernel|_top_k_kernel|_grow_kernel|_store_drafts",
    "tree step": r"_prepare_step_kernel|_shift_positions",
    "walk": r"_walk_kernel",
    "compaction": r"_compact_kernel",
    "drafter inputs": r"_prepare_tree_inputs|_prepare_dflash|dflash_inputs",
    "gated delta, tree": r"^_conv_kernel|^_delta_kernel|^_commit_kernel",
    "gated delta, upstream": r"gated_delta|causal_conv1d|_delta_rule",
    "cache writes": r"reshape_and_cache",
    "sampling": r"gumbel|sample|argmax|_penalt|topk_topp|logit_bias|min_p",
    "matrix products": r"gemm|nvjet|cutlass|xmma|splitK|cublas|gemv",
    "copies": r"^Memcpy|^Memset",
}
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
GAP_US = 5.0


def group_of(name: str) -> str:
    """Key of ``GROUPS``, or ``other``."""
    for group, pattern in GROUPS.items():
        if re.search(pattern, name):
            return group
    return "other"


def summarise(events: list[dict[str, Any]], steps: float) -> dict[str, Any]:
    """Shares and gaps of a recording.

    Args:
        events: ``traceEvents`` of a Chrome trace.
        steps: Decode steps recorded.

    Returns:
        ``ms_per_step`` from the first kernel to the end of the last, ``busy`` (share
        of it with a kernel or copy on the GPU), ``ms_by_group`` a step,
        ``idle_ms_per_step``, ``gaps_per_step`` longer than 5 us, ``largest_gap_us``,
        ``syncs_per_step`` (host calls that wait for the GPU, events included) and
        ``largest_kernels`` of the group ``other``.

    Raises:
        ValueError: Nothing ran on the GPU.
    """
    device = [
        e
        for e in events
        if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    if not device:
        raise ValueError("the recording has no kernel; is there a GPU?")
    device.sort(key=lambda e: e["ts"])
    begin = device[0]["ts"]
    busy, gaps, end = 0.0, [], begin
    by_group = dict.fromkeys([*GROUPS, "other"], 0.0)
    others: dict[str, float] = {}
    for event in device:
        start, stop = event["ts"], event["ts"] + event["dur"]
        if start > end:
            gaps.append(start - end)
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
        group = group_of(event["name"])
        by_group[group] += event["dur"]
        if group == "other":
            others[event["name"]] = others.get(event["name"], 0.0) + event["dur"]
    syncs = sum(1 for e in events if e.get("name") in SYNCS)
    span = end - begin
    largest = sorted(others.items(), key=lambda item: -item[1])[:8]
    return {
        "steps": steps,
        "ms_per_step": span / steps / 1000,
        "busy": busy / span,
        "idle_ms_per_step": (span - busy) / steps / 1000,
        "gaps_per_step": sum(1 for gap in gaps if gap > GAP_US) / steps,
        "largest_gap_us": max(gaps, default=0.0),
        "syncs_per_step": syncs / steps,
        "kernels_per_step": len(device) / steps,
        "ms_by_group": {k: round(v / steps / 1000, 4) for k, v in by_group.items()},
        "largest_kernels": [[n[:80], round(t / steps / 1000, 4)] for n, t in largest],
    }


def record(engine: Any, prompts: list, tokens: int, batch: int) -> dict[str, Any]:
    """Record the decode steps of one batch; prefill and first steps are left out.

    Args:
        engine: ``child.Engine``, warmed up.
        prompts: One for each request of the batch.
        tokens: Decode steps to record at most.
        batch: Requests.
    """
    from torch.profiler import ProfilerActivity, profile

    from vllm import SamplingParams

    core = engine.llm.llm_engine
    params = SamplingParams(
        temperature=0.0, max_tokens=4 * tokens, ignore_eos=True, detokenize=False
    )
    for index, prompt in enumerate(prompts):
        core.add_request(f"p{index}", prompt, params)
    for _ in range(batch + 6):
        core.step()
    engine.sync()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    before = engine.counters()["drafts"]
    with profile(activities=activities) as recorded:
        for _ in range(tokens):
            if not core.has_unfinished_requests():
                break
            core.step()
        engine.sync()
    steps = (engine.counters()["drafts"] - before) / batch
    while core.has_unfinished_requests():
        core.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return summarise(events, steps)
