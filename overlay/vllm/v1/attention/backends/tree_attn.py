# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Attention backend TREE_ATTN: causal attention with per-request ancestor masks.

Upstream had a backend of this name for EAGLE's static trees until 0.20.2 (removed
in PR 42121). This one is dynamic. With Triton it serves the V2 runner, without it the
V1 runner on a CPU.
"""

from vllm.triton_utils import HAS_TRITON

if HAS_TRITON:
    from vllm.v1.attention.backends.tree_attn_gpu import TreeAttentionBackend
else:
    from vllm.v1.attention.backends.tree_attn_cpu import TreeAttentionBackend

__all__ = ["TreeAttentionBackend"]
