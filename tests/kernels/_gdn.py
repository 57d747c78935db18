# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Layers, batches of trees and the reference for the tests of gated delta kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm.v1.spec_decode.ddtree import gdn
from vllm.v1.spec_decode.ddtree.kernels import gdn as kernels
from vllm.v1.spec_decode.ddtree.kernels import gdn_conv
from vllm.v1.spec_decode.ddtree.tree import ancestor_bitmask
from vllm.v1.spec_decode.ddtree.tree_state import TreeState

WIDTH = 4


@dataclass
class Layer:
    """Parameters, states and inputs of one layer; states have blocks."""

    dims: tuple[int, int, int, int]
    weight: torch.Tensor
    bias: torch.Tensor | None
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    conv_state: torch.Tensor  # [blocks, C, W - 1]
    ssm_state: torch.Tensor  # [blocks, Hv, Dv, Dk]
    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor

    @property
    def channels(self) -> int:
        return self.weight.shape[0]


def make_layer(gen, dims, tokens, blocks, dtype, device, bias=True, slots_last=True):
    heads, value_heads, dk, dv = dims
    channels = 2 * heads * dk + value_heads * dv

    def rand(*shape, kind=dtype, factor=1.0):
        made = torch.randn(*shape, generator=gen) * factor
        return made.to(kind).to(device)

    conv = rand(blocks, channels, WIDTH - 1)
    if not slots_last:  # upstream's other layout: channels are contiguous
        conv = conv.transpose(1, 2).contiguous().transpose(1, 2)
    # As in Qwen3.5: q, k, v are a view of a wider projection.
    wide = rand(tokens, channels + 24)
    return Layer(
        dims,
        rand(channels, WIDTH, factor=0.5),
        rand(channels, factor=0.1) if bias else None,
        rand(value_heads, kind=torch.float32),
        rand(value_heads, kind=torch.float32),
        conv,
        rand(blocks, value_heads, dv, dk, kind=torch.float32),
        wide[:, :channels],
        rand(tokens, value_heads),
        rand(tokens, value_heads),
    )


def random_tree(gen, nodes, deepest):
    parents, depths = [-1], [0]
    for row in range(1, nodes + 1):
        parent = int(torch.randint(0, row, (), generator=gen))
        while depths[parent] >= deepest:
            parent = parents[parent]
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


@dataclass
class Batch:
    """Trees of a batch on the device, and as lists for the reference.

    ``parents[r]`` has the parents of request r's rows, a chain where it has no tree.
    """

    tree: TreeState
    starts: torch.Tensor
    indices: torch.Tensor
    parents: list[list[int]]
    blocks: list[int]


def make_batch(device, budget, positions, parents, lengths, blocks) -> Batch:
    """``parents[r]`` is None where request r has no tree but ``lengths[r]`` rows."""
    tree = TreeState(len(lengths), budget, positions, device)
    known = []
    for r, (mine, length) in enumerate(zip(parents, lengths, strict=True)):
        if mine is None:
            known.append([i - 1 for i in range(length)])
            tree.b_parents[r] = 7  # old values that nobody may read
            tree.b_mask[r] = 0
            continue
        known.append(mine)
        nodes = len(mine) - 1
        row = torch.full((budget + 1,), -1, dtype=torch.int32)
        row[: len(mine)] = torch.tensor(mine, dtype=torch.int32)
        count = torch.tensor([nodes], dtype=torch.int32)
        tree.b_parents[r] = row.to(device)
        tree.b_num_nodes[r] = nodes
        tree.b_mask[r] = ancestor_bitmask(row[None], count)[0].to(device)
    starts = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    table = torch.zeros(len(lengths), 5, dtype=torch.int32, device=device)
    table[:, 0] = torch.tensor(blocks)
    return Batch(tree, starts, table, known, blocks)


def forward(layer: Layer, batch: Batch):
    """Both kernels; returns mixed, outputs and the scratch."""
    heads, value_heads, dk, dv = layer.dims
    tree, reqs = batch.tree, len(batch.blocks)
    scratch = gdn_conv.GDNScratch(
        reqs, len(layer.x), layer.channels, value_heads, WIDTH, layer.x.dtype,
        layer.x.device,
    )  # fmt: skip
    gdn_conv.tree_conv(
        layer.x, layer.conv_state, batch.indices[:, 0], layer.weight, layer.bias,
        batch.starts, tree, reqs, scratch,
    )  # fmt: skip
    out = torch.zeros(len(layer.x), value_heads, dv, dtype=layer.x.dtype).to(layer.x)
    kernels.tree_delta_rule(
        layer.a, layer.b, layer.a_log, layer.dt_bias, layer.ssm_state,
        batch.indices[:, 0], batch.starts, tree, reqs, heads, out, scratch,
    )  # fmt: skip
    return scratch.mixed, out, scratch


def reference(layer: Layer, batch: Batch, r: int):
    """Mixed, outputs, k, v, gates of request r."""
    first, last = batch.starts[r : r + 2].tolist()
    parents = torch.tensor(batch.parents[r])
    block = batch.blocks[r]
    cpu = [t.cpu() for t in (layer.x[first:last], layer.conv_state[block].T)]
    bias = None if layer.bias is None else layer.bias.cpu()
    mixed = gdn.tree_conv(*cpu, layer.weight.cpu(), bias, parents)
    mixed = mixed.to(layer.x.dtype)
    q, k, v = gdn.split_heads(mixed, *layer.dims)
    gate = gdn.gates(
        layer.a[first:last].cpu(),
        layer.b[first:last].cpu(),
        layer.a_log.cpu(),
        layer.dt_bias.cpu(),
    )
    state = layer.ssm_state[block].cpu()
    out = gdn.tree_delta_rule(q, k, v, gate, state, parents)
    return mixed, out, k, v, gate


def close(got, want, dtype, scale=1.0):
    tolerance = scale * (1e-4 if dtype == torch.float32 else 3e-2)
    torch.testing.assert_close(
        got.float().cpu(), want.float(), rtol=tolerance, atol=tolerance
    )
