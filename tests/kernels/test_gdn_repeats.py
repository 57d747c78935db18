# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Gated delta kernels give the same bits every time: a race would show.

``DDTREE_REPEAT_SECONDS`` sets the time for a case on a GPU (8 by default).
"""

from __future__ import annotations

import os
import time

import pytest
import torch
from _gdn import close, forward, make_batch, make_layer, random_tree, reference

ON_GPU = torch.cuda.is_available()
SECONDS = float(os.environ.get("DDTREE_REPEAT_SECONDS", "8" if ON_GPU else "0"))
SEED = int(os.environ.get("DDTREE_TEST_SEED", "0"))
CASES = [
    # dims (Hk, Hv, Dk, Dv), budget, positions, nodes (None: no tree), dtype
    ((1, 2, 16, 16), 70, 15, [70, 3], torch.float32),
]
if ON_GPU:
    CASES += [
        ((2, 4, 128, 128), 127, 31, [127, 100, 127], torch.float32),
        ((2, 4, 128, 128), 127, 31, [127, 100, 127], torch.bfloat16),
        ((16, 48, 128, 128), 63, 15, [63] * 8, torch.float32),
        ((16, 48, 128, 128), 63, 15, [63] * 8, torch.bfloat16),
        ((1, 2, 256, 256), 63, 15, [63, 10], torch.float32),
    ]


@pytest.mark.parametrize("dims, budget, positions, nodes, dtype", CASES)
def test_repeats_are_equal(device, dims, budget, positions, nodes, dtype):
    print(f"seed {SEED}, {SECONDS} s")
    end = time.monotonic() + SECONDS
    inputs = repeats = 0
    while not inputs or time.monotonic() < end:
        gen = torch.Generator().manual_seed(SEED + inputs)
        inputs += 1
        parents = [random_tree(gen, n, positions) for n in nodes]
        lengths = [n + 1 for n in nodes]
        blocks = (torch.randperm(len(nodes), generator=gen) + 1).tolist()
        batch = make_batch(device, budget, positions, parents, lengths, blocks)
        layer = make_layer(
            gen, dims, sum(lengths), len(nodes) + 1, dtype, device, inputs % 2 == 0
        )
        mixed, out, _ = forward(layer, batch)
        for r in range(len(nodes)):
            first, last = batch.starts[r : r + 2].tolist()
            want = reference(layer, batch, r)
            close(mixed[first:last], want[0], dtype)
            close(out[first:last], want[1], dtype)
        until = time.monotonic() + min(2, SECONDS)
        while repeats < 2 or time.monotonic() < until:
            # What the next buffers are made of.
            junk = [
                torch.full((1 << n,), float("nan"), device=device) for n in (12, 18)
            ]
            del junk
            again = forward(layer, batch)[:2]
            repeats += 1
            assert torch.equal(again[0], mixed), f"{repeats} repeats"
            assert torch.equal(again[1], out), f"{repeats} repeats"
    print(f"{inputs} inputs, {repeats} repeats")
