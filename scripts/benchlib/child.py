# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""One engine in a process of its own: ``python -m benchlib.child JSON``.

Prints lines ``RESULT {...}``. Times are wall-clock seconds of whole ``generate`` calls
between device synchronisations.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def emit(**result: Any) -> None:
    print("RESULT " + json.dumps(result), flush=True)


class Engine:
    """The ``LLM`` of one arm and its counters."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch

        from vllm import LLM

        self.torch = torch
        self.llm = LLM(**job["engine"])
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        kinds = [f"{base.__module__}.{base.__name__}" for base in type(runner).__mro__]
        self.runner = (
            "V2" if "vllm.v1.worker.gpu.model_runner.GPUModelRunner" in kinds else "V1"
        )
        spec = job["engine"].get("speculative_config") or {}
        if spec.get("method") == "ddtree" and torch.cuda.is_available():
            speculator = type(runner.speculator).__name__
            if self.runner != "V2" or speculator != "DDTreeSpeculator":
                raise SystemExit(f"the tree runs on {self.runner}, {speculator}")

    def sync(self) -> None:
        if self.torch.cuda.is_available():
            self.torch.cuda.synchronize()

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
}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    engine = Engine(job)
    MODES[job["mode"]](engine, job)


if __name__ == "__main__":
    main()
