# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Reading a recording of a step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from benchlib.profile import group_of, summarise


def kernel(name: str, begin: float, duration: float) -> dict:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": duration}


def test_shares_and_gaps():
    events = [
        kernel("nvjet_sm90_tst", 100, 40),
        kernel("_attention_kernel", 120, 30),  # beside the first
        kernel("_walk_kernel", 160, 20),
        kernel("what", 183, 17),
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize"},
        {"ph": "M", "name": "process_name"},
    ]
    found = summarise(events, steps=2)
    assert found["ms_per_step"] == pytest.approx(0.05)
    assert found["busy"] == pytest.approx(0.87)
    assert found["idle_ms_per_step"] == pytest.approx(0.0065)
    assert found["gaps_per_step"] == 0.5  # 10 us; the one of 3 us is none
    assert found["largest_gap_us"] == 10
    assert found["syncs_per_step"] == 0.5
    assert found["ms_by_group"]["matrix products"] == 0.02
    assert found["ms_by_group"]["tree attention"] == 0.015
    assert found["largest_kernels"] == [["what", 0.0085]]


def test_no_kernel():
    with pytest.raises(ValueError, match="no kernel"):
        summarise([{"ph": "X", "cat": "cpu_op", "name": "x", "ts": 0, "dur": 1}], 1)


@pytest.mark.parametrize(
    "name, group",
    [
        ("void flash::FlashAttnFwdSm90<...>", "FlashAttention"),
        ("_grow_kernel", "tree build"),
        ("_compact_kernel", "compaction"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("triton_poi_fused_add_0", "other"),
    ],
)
def test_groups(name, group):
    assert group_of(name) == group
