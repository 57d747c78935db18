# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""In-process vLLM engines on a CPU for the demo, the measurements and the tests.

Import this before vllm: it sets the environment that vLLM reads at import.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DENSE_PAIR = ROOT / "models" / "tiny-qwen3"
PAIR = Path(os.environ.get("DDTREE_PAIR", DENSE_PAIR))

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TQDM_DISABLE": "1",
}
_open = False
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)


def use(pair: Path) -> None:
    """Take another pair than ``tiny-qwen3`` from now on."""
    global PAIR
    PAIR = pair


def model_arguments(pair: Path | None = None) -> dict[str, Any]:
    """What an engine needs to know of a pair's target, by default of ``PAIR``'s."""
    target = (pair or PAIR) / "target"
    found: dict[str, Any] = {"model": str(target)}
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] == "qwen3_5":
        # Its class reads images, too, and a hybrid's states are not cached.
        found["limit_mm_per_prompt"] = {"image": 0, "video": 0}
        found["enable_prefix_caching"] = False
    return found


def ddtree(budget: int, policy: str = "best_first", **extra: Any) -> dict[str, Any]:
    """Speculative config of a tree with the bundled drafter."""
    return {
        "method": "ddtree",
        "model": str(PAIR / "drafter"),
        "tree_budget": budget,
        "tree_policy": policy,
        **extra,
    }


def chain(positions: int = 15) -> dict[str, Any]:
    """Speculative config of stock DFlash with the bundled drafter."""
    return {
        "method": "dflash",
        "model": str(PAIR / "drafter"),
        "num_speculative_tokens": positions,
    }


def heldout_rows(limit: int | None = None) -> list[dict[str, Any]]:
    """Held-out prompts as ``text`` and ``set``, in file order.

    With a limit they are spread evenly over the file, so over all sets.
    """
    lines = (PAIR / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    count = len(lines) if limit is None else min(limit, len(lines))
    return [json.loads(lines[i * len(lines) // count]) for i in range(count)]


def heldout(limit: int | None = None) -> list[str]:
    """Texts of ``heldout_rows``."""
    return [row["text"] for row in heldout_rows(limit)]


@contextlib.contextmanager
def engine(speculative_config: dict[str, Any] | None = None, **args: Any) -> Iterator:
    """An in-process ``LLM`` on the bundled target, shut down at the end.

    Args:
        speculative_config: None decodes plainly.
        **args: Override the defaults below.

    Yields:
        The ``vllm.LLM``.

    Raises:
        RuntimeError: Another engine is open; the end of one would take down the
            distributed state of both.
    """
    global _open
    if _open:
        raise RuntimeError("one engine at a time")
    from vllm import LLM

    settings: dict[str, Any] = {
        **model_arguments(),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "seed": 0,
        "disable_log_stats": False,
        "speculative_config": speculative_config,
    }
    settings.update(args)
    llm = LLM(**settings)
    _open = True
    try:
        yield llm
    finally:
        _open = False
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        from vllm.platforms import current_platform

        # The graphs of this engine are gone, and with them the pool's memory.
        type(current_platform)._global_graph_pool = None


@dataclass
class Run:
    """What a batch of requests gave.

    Attributes:
        tokens: Output token ids by request.
        texts: Output text by request.
        steps: Tokens of each target step by request, prefill's token left out.
        seconds: Wall time.
    """

    tokens: list[list[int]]
    texts: list[str]
    steps: list[list[int]]
    seconds: float = 0.0
    finish: list[str | None] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        """Mean over all steps of all requests."""
        steps = [n for request in self.steps for n in request]
        return sum(steps) / max(1, len(steps))

    def per_request(self) -> list[float]:
        """Tokens per step of each request that had a step."""
        return [sum(s) / len(s) for s in self.steps if s]


def decode(
    llm: Any,
    prompts: Sequence[str | list[int]],
    concurrency: int | None = None,
    **params: Any,
) -> Run:
    """Decode all prompts and record every step's size.

    Args:
        llm: An engine from ``engine``.
        prompts: Texts or token id lists.
        concurrency: Requests in the engine at a time; all by default.
        **params: ``SamplingParams``; greedy, 64 tokens and ignore_eos by default.

    Returns:
        The run, in the order of the prompts.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    settings = {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True, **params}
    settings["output_kind"] = RequestOutputKind.DELTA
    count = len(prompts)
    run = Run(
        [[] for _ in range(count)],
        [""] * count,
        [[] for _ in range(count)],
        finish=[None] * count,
    )
    core = llm.llm_engine
    begin = time.perf_counter()
    waiting = list(enumerate(prompts))[::-1]
    live = 0
    while waiting or live:
        while waiting and live < (concurrency or count):
            index, prompt = waiting.pop()
            data = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
            core.add_request(str(index), data, SamplingParams(**settings))
            live += 1
        for output in core.step():
            index, part = int(output.request_id), output.outputs[0]
            if part.token_ids and run.tokens[index]:
                run.steps[index].append(len(part.token_ids))
            run.tokens[index].extend(part.token_ids)
            run.texts[index] += part.text
            run.finish[index] = part.finish_reason or run.finish[index]
            live -= output.finished
    run.seconds = time.perf_counter() - begin
    return run
