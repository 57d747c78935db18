# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""States of gated delta layers over many steps, against one row after another."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from _gdn import Layer, forward, make_batch, make_layer, random_tree

from vllm.v1.spec_decode.ddtree.kernels.gdn_commit import GDNCommitter, GDNLayer

SEED = int(os.environ.get("DDTREE_TEST_SEED", "0"))
ON_GPU = torch.cuda.is_available()
STEPS = 200 if ON_GPU else 6
DIMS = [(1, 2, 16, 16), *([(2, 6, 128, 128)] if ON_GPU else [])]


def sequential(layer: Layer, x, a, b, state, history):
    """Row by row in float64.

    Args:
        layer: Has the parameters.
        x, a, b: Rows of a path, [n, C], [n, Hv], [n, Hv].
        state: [Hv, Dv, Dk].
        history: [W - 1, C].

    Returns:
        Output of the last row [Hv, Dv], and state and history after it.
    """
    heads, value_heads, dk, dv = layer.dims
    weight, bias, a_log, dt_bias = (
        part.double().cpu()
        for part in (layer.weight, layer.bias, layer.a_log, layer.dt_bias)
    )
    for row, gate, strength in zip(x, a, b, strict=True):
        window = torch.cat([history, row[None]])
        mixed = F.silu((window.T * weight).sum(1) + bias)
        q, k, v = mixed.split([heads * dk, heads * dk, value_heads * dv])
        q, k = (
            (part / torch.sqrt(part.square().sum(1, keepdim=True) + 1e-6))
            .repeat_interleave(value_heads // heads, 0)
            for part in (q.view(heads, dk), k.view(heads, dk))
        )  # fmt: skip
        decay = torch.exp(-a_log.exp() * F.softplus(gate + dt_bias))
        state = state * decay[:, None, None]
        error = v.view(value_heads, dv) - (state @ k[..., None])[..., 0]
        write = torch.sigmoid(strength)[:, None] * error
        state = state + write[..., None] * k[:, None]
        out = (state @ q[..., None])[..., 0] * dk**-0.5
        history = window[1:]
    return out, state, history


@pytest.mark.parametrize("dims", DIMS)
def test_no_drift(device, dims):
    """Random trees and acceptances; a step starts from what the last one kept."""
    print(f"seed {SEED}")
    gen = torch.Generator().manual_seed(SEED)
    budget, positions, blocks = 15, 7, [2, 1]
    layer = make_layer(gen, dims, 1, 3, torch.float32, device)
    layer.conv_state.zero_()
    layer.ssm_state.zero_()
    exact = [
        (layer.ssm_state[0].double().cpu(), layer.conv_state[0].T.double().cpu())
        for _ in blocks
    ]
    reset = layer.ssm_state[0].clone()
    worst = 0.0
    for _ in range(STEPS):
        sizes = torch.randint(1, budget + 1, (2,), generator=gen).tolist()
        parents = [random_tree(gen, size, positions) for size in sizes]
        lengths = [size + 1 for size in sizes]
        batch = make_batch(device, budget, positions, parents, lengths, blocks)
        step = make_layer(gen, dims, sum(lengths), 1, torch.float32, device)
        layer.x, layer.a, layer.b = step.x, step.a, step.b
        _, out, scratch = forward(layer, batch)
        path = torch.zeros(2, positions + 1, dtype=torch.int32)
        counts = torch.zeros(2, dtype=torch.int32)
        for r, (mine, first) in enumerate(
            zip(parents, batch.starts.tolist(), strict=False)
        ):
            rows = [int(torch.randint(0, len(mine), (), generator=gen))]
            while mine[rows[-1]] >= 0:
                rows.append(mine[rows[-1]])
            rows.reverse()
            path[r, : len(rows)] = torch.tensor(rows)
            counts[r] = len(rows)
            taken = [first + row for row in rows]
            want, *exact[r] = sequential(
                layer,
                *(t[taken].double().cpu() for t in (layer.x, layer.a, layer.b)),
                *exact[r],
            )
            apart = (out[taken[-1]].double().cpu() - want).abs().max()
            worst = max(worst, float(apart))
        kept = GDNLayer(scratch, layer.conv_state, layer.ssm_state, 0)
        GDNCommitter([kept], dims[0], positions).commit(
            [batch.indices],
            path.to(device),
            counts.to(device),
            batch.starts,
            batch.starts,
            2,
        )
        for block, (state, history) in zip(blocks, exact, strict=True):
            apart = (layer.ssm_state[block].double().cpu() - state).abs().max()
            worst = max(worst, float(apart))
            assert torch.equal(layer.conv_state[block].T.double().cpu(), history)
    print(f"{dims}, {STEPS} steps: at most {worst:.2e} from float64")
    assert worst < 1e-3
    assert torch.equal(layer.ssm_state[0], reset)
