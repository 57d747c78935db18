# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""One engine in a process of its own: ``python -m benchlib.child JSON``.

Reads a line of JSON with changes to the job for every measurement, and prints lines
``RESULT {...}``, then ``DONE``; before the first it prints ``DONE`` when the engine is
ready. An engine that fails says ``FAILED "reason"`` instead. Times are wall-clock
seconds of whole ``generate`` calls.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchlib.channel import emit, open_channel, say
from benchlib.tp_child import run_decode, run_hang, run_ranks

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for worker_facts
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Not every machine lends NVLink multicast to a container; NCCL does without.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


def worker_facts(worker: Any) -> dict[str, Any]:
    """What a rank runs: runner, speculator, graphs, blocks of the KV cache."""
    import torch

    worker = getattr(worker, "worker", worker)
    runner, config = worker.model_runner, worker.vllm_config
    kinds = [f"{base.__module__}.{base.__name__}" for base in type(runner).__mro__]
    v2 = "vllm.v1.worker.gpu.model_runner.GPUModelRunner" in kinds
    manager = getattr(runner, "cudagraph_manager", None)
    asked = config.compilation_config.cudagraph_mode
    specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
    return {
        "rank": worker.rank,
        "runner": "V2" if v2 else "V1",
        "speculator": type(getattr(runner, "speculator", None)).__name__,
        "gpu": torch.cuda.is_available(),
        "graphs": getattr(manager, "cudagraph_mode", asked).name,
        "captured": len(getattr(manager, "graphs", ())),
        "async": bool(config.scheduler_config.async_scheduling),
        "nvls": os.environ.get("NCCL_NVLS_ENABLE"),
        # Of one request as long as it may get, for pools that are too small.
        "request_blocks": sum(
            -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)
            for spec in specs
        ),
    }


class Engine:
    """The ``LLM`` of one arm and its counters.

    Args:
        job: ``engine`` has the arguments of ``LLM``. With ``own_process`` the engine
            core has one, as in a server, where its steps overlap with the handling of
            outputs; without it can be profiled.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        own = "1" if job.get("own_process") else "0"
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", own)

        from vllm import LLM

        self.llm = LLM(**job["engine"])
        spec = job["engine"].get("speculative_config") or {}
        self.facts = self.llm.collective_rpc(worker_facts)
        for rank in self.facts:
            runner, speculator = rank["runner"], rank["speculator"]
            tree = runner == "V2" and speculator == "DDTreeSpeculator"
            if spec.get("method") == "ddtree" and rank["gpu"] and not tree:
                raise SystemExit(f"the tree runs on {runner}, {speculator}")
            self.runner = runner

    def sync(self) -> None:
        """Wait for the GPU, if this process uses one."""
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def counters(self) -> dict[str, Any]:
        """Drafts (a step of one request) and accepted tokens, also by depth."""
        found: dict[str, Any] = {"drafts": 0, "accepted": 0, "by_depth": []}
        for metric in self.llm.get_metrics():
            if metric.name == "vllm:spec_decode_num_drafts":
                found["drafts"] += metric.value
            elif metric.name == "vllm:spec_decode_num_accepted_tokens":
                found["accepted"] += metric.value
            elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
                found["by_depth"] = list(metric.values)
        return found

    def generate(self, prompts: list, tokens: int, **params: Any):
        from vllm import SamplingParams

        settings = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
        self.sync()
        begin = time.perf_counter()
        outputs = self.llm.generate(
            prompts, SamplingParams(**{**settings, **params}), use_tqdm=False
        )
        self.sync()
        return time.perf_counter() - begin, outputs


def run_step(engine: Engine, job: dict[str, Any]) -> None:
    """Milliseconds a step, whatever is accepted: decode time over counted steps."""
    tokens, context = job["tokens"], job["context"]
    speculative = job["engine"].get("speculative_config") is not None
    for batch in job["batches"]:
        prompts = [
            {"prompt_token_ids": [(7 * i + j) % 30000 + 10 for i in range(context)]}
            for j in range(batch)
        ]
        engine.generate(prompts, tokens, detokenize=False)
        prefill = sorted(
            engine.generate(prompts, 1, detokenize=False)[0] for _ in range(5)
        )[2]
        samples = []
        for _ in range(job["repeats"]):
            before = engine.counters()["drafts"]
            seconds, _ = engine.generate(prompts, tokens, detokenize=False)
            drafts = engine.counters()["drafts"] - before
            steps = drafts / batch if speculative else tokens - 1
            samples.append(1000 * (seconds - prefill) / max(steps, 1))
        emit(batch=batch, runner=engine.runner, ms_per_step=samples, prefill_s=prefill)


def run_speed(engine: Engine, job: dict[str, Any]) -> None:
    """Tokens per second over real prompts, a group of ``batch`` at a time."""
    prompts, tokens = job["prompts"], job["tokens"]
    params = {"temperature": job["temperature"]}
    if job["temperature"] > 0:
        params["seed"] = 1
    for batch in job["batches"]:
        count = max(batch, min(len(prompts), job["max_prompts"]) // batch * batch)
        chosen = [prompts[i % len(prompts)] for i in range(count)]
        groups = [chosen[i : i + batch] for i in range(0, count, batch)]
        engine.generate(groups[0], tokens, **params)
        samples, before = [], engine.counters()
        for _ in range(job["repeats"]):
            seconds = sum(engine.generate(g, tokens, **params)[0] for g in groups)
            samples.append(count * tokens / seconds)
        after = engine.counters()
        drafts = after["drafts"] - before["drafts"]
        accepted = after["accepted"] - before["accepted"]
        old = before["by_depth"] or [0] * len(after["by_depth"])
        by_depth = [
            round((a - b) / max(drafts, 1), 4)
            for a, b in zip(after["by_depth"], old, strict=True)
        ]
        emit(
            batch=batch,
            runner=engine.runner,
            tokens_per_second=samples,
            tokens_per_step=1 + accepted / drafts if drafts else 1.0,
            accepted_by_depth=by_depth,
        )


def run_exact(engine: Engine, job: dict[str, Any]) -> None:
    """Tokens of every prompt; of plain decoding also the gap of the best two."""
    params: dict[str, Any] = {}
    plain = job["engine"].get("speculative_config") is None
    if plain:
        params["logprobs"] = 2
    for batch in job["batches"]:
        tokens, gaps = [], []
        for i in range(0, len(job["prompts"]), batch):
            group = job["prompts"][i : i + batch]
            for output in engine.generate(group, job["tokens"], **params)[1]:
                part = output.outputs[0]
                tokens.append(list(part.token_ids))
                if plain:
                    best = [
                        sorted((e.logprob for e in at.values()), reverse=True)[:2]
                        for at in part.logprobs
                    ]
                    gaps.append([round(b[0] - b[1], 5) for b in best])
        emit(batch=batch, runner=engine.runner, tokens=tokens, gaps=gaps)


def run_profile(engine: Engine, job: dict[str, Any]) -> None:
    """What the GPU does in a step, see ``profile.summarise``."""
    from benchlib.profile import record

    tokens, context = job["tokens"], job["context"]
    for batch in job["batches"]:
        prompts = [
            {"prompt_token_ids": [(7 * i + j) % 30000 + 10 for i in range(context)]}
            for j in range(batch)
        ]
        engine.generate(prompts, tokens, detokenize=False)
        found = record(engine, prompts, tokens, batch)
        emit(batch=batch, runner=engine.runner, **found)


MODES = {
    "step": run_step,
    "speed": run_speed,
    "exact": run_exact,
    "profile": run_profile,
    "ranks": run_ranks,
    "decode": run_decode,
    "hang": run_hang,
}


def main() -> None:
    open_channel()
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        engine = Engine(job)
        emit(facts=engine.facts)
        say("DONE")
        for line in sys.stdin:
            turn = {**job, **json.loads(line)}
            MODES[turn["mode"]](engine, turn)
            say("DONE")
    except BaseException as error:
        traceback.print_exc()
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        say("FAILED", reason)
        # Its workers gone, an engine can wait for ever for its sockets to close.
        os._exit(1)
    if job["engine"].get("tensor_parallel_size", 1) > 1:
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
