# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Shared state of the end-to-end tests: engines on the bundled pair, on a CPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import ddtree_cpu as cpu  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def patched_vllm() -> None:
    """These tests are about the patched vLLM; without it they must not pass."""
    if importlib.util.find_spec("vllm") is None:
        pytest.fail("vllm is not installed in this environment; run `make setup`")
    if importlib.util.find_spec("vllm.v1.spec_decode.ddtree") is None:
        pytest.fail("the installed vllm is not patched; run `make install`")


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Held-out prompts of every set."""
    return cpu.heldout(24)


@pytest.fixture(scope="session")
def plain() -> Callable[..., cpu.Run]:
    """Plain decoding, remembered for the session.

    Call with the prompts, and sampling parameters or engine arguments (``engine=``).
    """
    runs: dict[str, cpu.Run] = {}

    def run(prompts: list, engine: dict | None = None, **params) -> cpu.Run:
        key = repr((prompts, engine, sorted(params.items())))
        if key not in runs:
            with cpu.engine(None, **(engine or {})) as llm:
                runs[key] = cpu.decode(llm, prompts, **params)
        return runs[key]

    return run


def assert_same(run: cpu.Run, reference: cpu.Run) -> None:
    """Same tokens, text and finish reason for every request, or say where not."""
    for index, (got, want) in enumerate(zip(run.tokens, reference.tokens, strict=True)):
        if got != want:
            at = next(
                (i for i, (a, b) in enumerate(zip(got, want)) if a != b),  # noqa: B905
                min(len(got), len(want)),
            )
            pytest.fail(
                f"request {index} differs from plain decoding at output token {at}: "
                f"got {got[at : at + 4]}, want {want[at : at + 4]} "
                f"(lengths {len(got)} and {len(want)})"
            )
    assert run.texts == reference.texts
    assert run.finish == reference.finish
