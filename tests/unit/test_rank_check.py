# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Comparison of the ranks' trees, and the option that switches it on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm.v1.spec_decode.ddtree import rank_check


def test_first_difference():
    same = torch.arange(6).reshape(1, 2, 3).repeat(3, 1, 1)
    assert rank_check.first_difference(same) is None
    same[2, 1, 0] += 1
    assert rank_check.first_difference(same) == (2, 1, 0)


def test_option():
    def enabled(**extra) -> bool:
        return rank_check.enabled(SimpleNamespace(additional_config=extra))

    assert not enabled()
    assert not enabled(ddtree_check_ranks=False)
    assert enabled(ddtree_check_ranks=True)
    with pytest.raises(ValueError, match="ddtree_check_ranks='on' is no boolean; set"):
        enabled(ddtree_check_ranks="on")
