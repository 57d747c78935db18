#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""What must hold of the vLLM in the image, without a GPU: ``postcheck.py PAIR``.

It imports, knows the backend TREE_ATTN, takes a tree_budget and refuses a wrong one.
Exit code 0, or 1 with a line that says what does not hold.
"""

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def speculative_config(pair, **more):
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig

    target = ModelConfig(model=f"{pair}/target", dtype="bfloat16")
    return SpeculativeConfig(
        method="ddtree",
        model=f"{pair}/drafter",
        target_model_config=target,
        target_parallel_config=ParallelConfig(),
        **more,
    )


def main():
    pair = sys.argv[1]
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = AttentionBackendEnum["TREE_ATTN"]
    spec = speculative_config(pair, tree_budget=31)
    if spec.tree_budget != 31 or spec.num_speculative_tokens != 31:
        return f"tree_budget=31 became {spec.num_speculative_tokens} draft tokens"
    try:
        speculative_config(pair, tree_budget=0)
    except ValueError as error:
        if "tree_budget" not in str(error):
            return f"tree_budget=0 is refused without naming it: {error}"
    else:
        return "tree_budget=0 was accepted"
    import vllm

    print(f"vLLM {vllm.__version__} takes a tree_budget; {backend.name} is there")
    return None


if __name__ == "__main__":
    wrong = main()
    if wrong:
        print(f"postcheck.py: {wrong}", file=sys.stderr)
    sys.exit(1 if wrong else 0)
