# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Debugging aid: do all tensor-parallel ranks walk and build the same trees?

``additional_config={"ddtree_check_ranks": true}`` switches it on. After each drafter
pass, outside of captured graphs, a step's integers are gathered over the TP group on
the host and compared on every rank. That costs a synchronisation a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTION = "ddtree_check_ranks"
_current: RankChecker | None = None


def enabled(config: VllmConfig) -> bool:
    """``ddtree_check_ranks`` of ``additional_config``, off by default.

    Args:
        config: Engine configuration.

    Raises:
        ValueError: The value is no boolean.
    """
    extra = config.additional_config
    value = extra.get(OPTION, False) if isinstance(extra, dict) else False
    if not isinstance(value, bool):
        raise ValueError(
            f"additional_config {OPTION}={value!r} is no boolean; set it to true or "
            "false, or remove it."
        )
    return value


def first_difference(gathered: torch.Tensor) -> tuple[int, int, int] | None:
    """Where a rank first differs from rank 0.

    Args:
        gathered: [ranks, B, C], integers.

    Returns:
        Rank, row and column; None where all ranks agree.
    """
    found = (gathered != gathered[:1]).nonzero()
    if len(found) == 0:
        return None
    rank, row, column = found[0].tolist()
    return rank, row, column


class RankChecker:
    """Compares steps and counts them.

    Attributes:
        steps: Steps compared so far.
    """

    def __init__(self) -> None:
        from vllm.distributed import get_tp_group

        self.group = get_tp_group()
        self.steps = 0

    @property
    def num_ranks(self) -> int:
        """Ranks of the group; with one there is nothing to compare."""
        return self.group.world_size

    def check(self, req_ids: Sequence[str], parts: dict[str, torch.Tensor]) -> None:
        """Compare one step.

        Args:
            req_ids: Of the batch's B rows, for the message.
            parts: Integers by name, [B] or [B, *], the same shapes on all ranks.

        Raises:
            RuntimeError: A rank differs. All ranks raise.
        """
        wide = {n: p.reshape(len(req_ids), -1).long() for n, p in parts.items()}
        # On the host: no collective of the device's then mixes with the model's own.
        own = torch.cat(list(wide.values()), dim=1).cpu().contiguous()
        ranks = [own]
        if self.num_ranks > 1:
            ranks = [torch.empty_like(own) for _ in range(self.num_ranks)]
            torch.distributed.all_gather(ranks, own, group=self.group.cpu_group)
        where = first_difference(torch.stack(ranks))
        if where is None:
            self.steps += 1
            return
        rank, row, column = where
        names = [n for n, part in wide.items() for _ in range(part.shape[1])]
        raise RuntimeError(
            f"{OPTION}: step {self.steps}, request row {row} ({req_ids[row]}): rank "
            f"{rank} has {names[column]} {ranks[rank][row, column].item()} where rank "
            f"0 has {ranks[0][row, column].item()}. The ranks have parted; report "
            "this as a bug."
        )


def create(config: VllmConfig) -> RankChecker | None:
    """The checker of this process's engine, or None where it is off."""
    global _current
    _current = RankChecker() if enabled(config) else None
    return _current


def steps_compared(worker: Any = None) -> dict[str, int]:
    """For ``LLM.collective_rpc``: ``ranks`` and ``steps`` of this process.

    Args:
        worker: Unused.
    """
    if _current is None:
        return {"ranks": 0, "steps": 0}
    return {"ranks": _current.num_ranks, "steps": _current.steps}
