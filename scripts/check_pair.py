#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Compare a pair in vLLM (method dflash, CPU or GPU) with the simulation of its card.

Runs held-out prompts greedily in float32. The text must be the simulation's, and so
must the number of decode steps and of accepted tokens at every draft position. Exit
codes: 0 equal, 1 different, 2 could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

# One thread and one process: quick to start, and the counters are at hand.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch

from pairlib import export
from pairlib.corpus import MASK
from pairlib.presets import PRESETS
from pairlib.simulate import chain_acceptance


def run_vllm(pair: Path, prompts: list[list[int]], tokens: int, hybrid: bool) -> dict:
    """Decode with vLLM's own DFlash; return texts (token ids) and counters."""
    from vllm import LLM, SamplingParams

    config = json.loads((pair / "drafter" / "config.json").read_text())
    # Hybrid targets are of a multimodal class, and have no weights for images.
    text_only = {
        "enable_prefix_caching": False,
        "limit_mm_per_prompt": {"image": 0, "video": 0},
    }
    llm = LLM(
        **(text_only if hybrid else {}),
        model=str(pair / "target"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        disable_log_stats=False,
        speculative_config={
            "method": "dflash",
            "model": str(pair / "drafter"),
            "num_speculative_tokens": config["block_size"] - 1,
        },
    )
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        use_tqdm=False,
    )
    counters = {metric.name: metric for metric in llm.get_metrics()}
    prefix = "vllm:spec_decode_num_"
    return {
        "text": [list(output.outputs[0].token_ids) for output in outputs],
        "steps": counters[prefix + "drafts"].value,
        "accepted": counters[prefix + "accepted_tokens"].value,
        "by_depth": counters[prefix + "accepted_tokens_per_pos"].values,
    }


def main() -> int:
    """Run both and compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("pair", type=Path, nargs="?", default=Path("models/tiny-qwen3"))
    parser.add_argument("--prompts", type=int, default=40, help="held-out prompts")
    parser.add_argument("--tokens", type=int, default=64, help="tokens for each")
    args = parser.parse_args()
    if args.prompts < 1 or args.tokens < 2:
        parser.error("--prompts must be 1 or more and --tokens 2 or more")
    rows_path = args.pair / "heldout.jsonl"
    if not rows_path.exists():
        print(
            f"check_pair.py: error: {rows_path} is missing: name a pair's folder",
            file=sys.stderr,
        )
        return 2
    rows = [json.loads(line) for line in rows_path.read_text().splitlines()]
    rows = rows[:: max(1, len(rows) // args.prompts)][: args.prompts]
    preset = export.preset_of(args.pair, PRESETS["tiny"])
    target, drafter, tokenizer = export.load_pair(args.pair, preset)
    prompts = [tokenizer.encode(row["text"]).ids for row in rows]
    simulated = chain_acceptance(
        target,
        drafter,
        prompts,
        args.tokens,
        tokenizer.token_to_id(MASK),
        temperature=0,
        seed=0,
        device=torch.device("cpu"),
        rows=16,
    )
    steps = sum(simulated.steps)
    expected = {
        "text": simulated.text,
        "steps": steps,
        "accepted": sum(simulated.tokens) - steps,
        "by_depth": [round(share * steps) for share in simulated.by_depth],
    }
    seen = run_vllm(args.pair, prompts, args.tokens, preset.linear_key_heads > 0)
    different = [key for key in expected if expected[key] != seen[key]]
    same = sum(a == b for a, b in zip(expected["text"], seen["text"], strict=True))
    print(f"texts equal: {same} of {len(prompts)}")
    for key in ("steps", "accepted", "by_depth"):
        print(f"{key}: simulation {expected[key]}, vLLM {seen[key]}")
    rate = 1 + seen["accepted"] / seen["steps"]
    print(f"tokens a step in vLLM: {rate:.4f}")
    print(f"different: {', '.join(different)}" if different else "all equal")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
