# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The V2 model runner: on a GPU where there is one, else in Triton's interpreter.

The interpreter has to be on before vllm is imported; see tests/kernels/conftest.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
sys.path.append(str(ROOT / "tests" / "e2e"))  # for the hybrid pair

ON_GPU = torch.cuda.is_available()
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
if ON_GPU:
    # Upstream's attention, which plain decoding takes, leaves the precision of float32
    # products to Triton's default, TF32; the tree's is exact.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
else:
    import triton_interpreter

    if os.environ.get("TRITON_INTERPRET") != "1":
        triton_interpreter.force()

import ddtree_cpu as cpu  # noqa: E402

if not ON_GPU:
    # Its kernel calls a tensor method on what the interpreter holds as a plain int.
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False


@pytest.fixture(scope="session")
def on_gpu() -> bool:
    """Whether the runner's kernels are compiled, not interpreted."""
    return ON_GPU


@pytest.fixture(scope="session")
def plain() -> Callable[..., cpu.Run]:
    """Plain decoding on the V2 runner, remembered for the session."""
    runs: dict[str, cpu.Run] = {}

    def run(prompts: list, engine: dict | None = None, **params) -> cpu.Run:
        key = repr((prompts, engine, sorted(params.items())))
        if key not in runs:
            with cpu.engine(None, **(engine or {})) as llm:
                runs[key] = cpu.decode(llm, prompts, **params)
        return runs[key]

    return run
