# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Kernel tests: on a GPU where there is one, else in Triton's interpreter.

The interpreter has to be switched on before vllm is imported, which other tests of one
pytest run may have done, with Triton off. So on a CPU this folder is a run of its own:
`make test` calls it so.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

if not torch.cuda.is_available():
    import triton_interpreter

    if os.environ.get("TRITON_INTERPRET") != "1":
        triton_interpreter.force()


def pytest_configure() -> None:
    """These kernels live in the patched vLLM; without it the tests must not pass."""
    if importlib.util.find_spec("vllm.v1.spec_decode.ddtree.kernels") is None:
        pytest.exit("the installed vllm is not patched; run `make install`", 2)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def on_gpu() -> bool:
    """Whether the kernels are compiled, not interpreted."""
    return torch.cuda.is_available()
