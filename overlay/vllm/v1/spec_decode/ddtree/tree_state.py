# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Persistent buffers of the trees on the V2 model runner.

All are allocated once, because captured CUDA graphs hold their addresses. Words:
``R`` request slots (``max_num_seqs``), ``N`` tree budget, ``Q = 1 + N`` rows,
``L`` draft positions, ``W = ceil(Q / 32)`` mask words.

Three sets, because the order of the requests changes from step to step:

* slot order: the tree of each request as it was drafted;
* batch order: what this step verifies, and the path that it accepted;
* drafted: what the drafter's graph has just built, in batch order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .tree import WORD_BITS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from .kernels.gdn_conv import GDNScratch

_current: TreeState | None = None


class TreeState:
    """The buffers. Conventions of padding are those of ``tree.TreeBatch``.

    Attributes:
        parents, depths: Slot order, [R, Q] int32.
        num_nodes: Slot order, [R] int32; 0 means no tree.
        b_parents, b_depths: Batch order, [R, Q] int32.
        b_num_nodes: Batch order, [R] int32; 0 means plain causal. Padded rows of a
            captured graph have 0; rows beyond those keep old values.
        b_mask: Batch order, [R, Q, W] int32, layout of ``tree.ancestor_bitmask``.
        b_path: Batch order, [R, L + 1] int32, accepted rows, root first, then -1.
        b_num_sampled: Batch order, [R] int32, valid entries of ``b_path``: 1, the
            root, for a walked request without a tree; 0 where nothing was walked.
        d_tokens: Drafted, [R, N] int64.
        d_parents, d_depths: Drafted, [R, Q] int32.
        d_num_nodes: Drafted, [R] int32.
        draft_layers: Names of the drafter's attention layers.
        gdn_scratch: What gated delta layers keep for the commit, by layer.
    """

    def __init__(
        self,
        max_num_reqs: int,
        budget: int,
        num_positions: int,
        device: torch.device,
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.budget = budget
        self.num_positions = num_positions
        self.device = device
        self.num_rows = budget + 1
        rows = (max_num_reqs, self.num_rows)

        def ints(*shape: int, fill: int = 0, dtype=torch.int32) -> torch.Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        self.parents = ints(*rows, fill=-1)
        self.depths = ints(*rows)
        self.num_nodes = ints(max_num_reqs)
        self.b_parents = ints(*rows, fill=-1)
        self.b_depths = ints(*rows)
        self.b_num_nodes = ints(max_num_reqs)
        self.b_mask = ints(*rows, -(-self.num_rows // WORD_BITS))
        self.b_path = ints(max_num_reqs, num_positions + 1, fill=-1)
        self.b_num_sampled = ints(max_num_reqs)
        self.d_tokens = ints(max_num_reqs, budget, dtype=torch.int64)
        self.d_parents = ints(*rows, fill=-1)
        self.d_depths = ints(*rows)
        self.d_num_nodes = ints(max_num_reqs)
        self.draft_layers: frozenset[str] = frozenset()
        self.gdn_scratch: dict[str, GDNScratch] = {}

    @property
    def num_bytes(self) -> int:
        """Size of all buffers."""
        buffers = (v for v in vars(self).values() if isinstance(v, torch.Tensor))
        return sum(b.numel() * b.element_size() for b in buffers)

    def reset(self, slot: int) -> None:
        """Forget the tree of a slot that a new or resumed request takes."""
        self.num_nodes[slot].fill_(0)


def create(vllm_config: VllmConfig, device: torch.device) -> TreeState:
    """Allocate the buffers of this process's engine.

    A worker process runs one model runner, so the newest is the current one.

    Args:
        vllm_config: Engine configuration with a resolved tree budget.
        device: The runner's device.

    Returns:
        The buffers, which ``current`` returns from now on.
    """
    global _current
    spec = vllm_config.speculative_config
    assert spec is not None and spec.num_draft_positions is not None
    _current = TreeState(
        vllm_config.scheduler_config.max_num_seqs,
        spec.tree_budget,
        spec.num_draft_positions,
        device,
    )
    return _current


def current() -> TreeState | None:
    """The buffers of this process's engine, or None without a tree."""
    return _current
