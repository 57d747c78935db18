# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Rewinding random generators whose sample is thrown away (V1 runner).

A CUDA generator is rewound by its offset. A CPU generator has none, and upstream
0.26.0 raises there for a seeded request whose prompt is prefilled in chunks.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor


def save_states(
    generators: dict[int, torch.Generator], rows: Collection[int]
) -> dict[int, Tensor]:
    """Remember CPU generators whose sample of this step will be thrown away.

    Args:
        generators: Seeded requests' generators by batch row.
        rows: Batch rows that only prefill in this step.

    Returns:
        Generator states by batch row, for ``rewind``.
    """
    return {
        row: generators[row].get_state()
        for row in rows
        if row in generators and generators[row].device.type == "cpu"
    }


def rewind(generator: torch.Generator, state: Tensor | None) -> None:
    """Undo the draw of a discarded sample.

    Args:
        generator: The request's generator.
        state: Its state from ``save_states``, or None for a device generator.
    """
    if state is not None:
        generator.set_state(state)
    else:
        # One Philox draw, upstream's own constant.
        generator.set_offset(generator.get_offset() - 4)
