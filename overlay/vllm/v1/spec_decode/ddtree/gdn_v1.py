# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Gated delta layers on a CPU, for the V1 runner: plain PyTorch.

Upstream's CPU kernels take bfloat16 alone and keep a state per draft. This is the path
for float32, with or without speculation, and for trees in any dtype.

Rows outside a tree move their request's state at once. A tree leaves the state alone:
its layer inputs wait in ``TreeMask.layer_inputs`` until the walk, and ``commit`` then
replays the accepted rows with the arithmetic of plain decoding. So a request has one
state, in one slot, whatever its tree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .gdn import (
    Gates,
    GDNTrees,
    chain_delta_rule,
    commit_history,
    gates,
    split_heads,
    tree_conv,
    tree_delta_rule,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention,
    )
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata


@dataclass(slots=True)
class LayerInputs:
    """Inputs of some rows of a layer, all in the layer's dtype.

    Attributes:
        mixed_qkv: [T, C], before the convolution.
        a, b: [T, Hv], of the decay and of the write strength.
    """

    mixed_qkv: Tensor
    a: Tensor
    b: Tensor

    def take(self, rows: slice | Tensor) -> LayerInputs:
        """The inputs of a slice or of [n] integer row indices."""
        return LayerInputs(self.mixed_qkv[rows], self.a[rows], self.b[rows])


@dataclass(slots=True)
class PendingTree:
    """A tree's inputs between the forward and the walk.

    Attributes:
        slot: State slot of the request.
        inputs: Of the root and the nodes, [1 + n] rows.
    """

    slot: int
    inputs: LayerInputs


def handles(layer: QwenGatedDeltaNetAttention, dtype: torch.dtype) -> bool:
    """Whether a layer runs here instead of in upstream's CPU kernels.

    Args:
        layer: The layer.
        dtype: Of its inputs.

    Returns:
        True for trees, and for a dtype that those kernels do not take.
    """
    spec = layer.speculative_config
    tree = spec is not None and spec.use_ddtree()
    return tree or dtype != torch.bfloat16


class _Layer:
    """A layer's parameters and caches in the shapes of ``gdn``."""

    def __init__(self, layer: QwenGatedDeltaNetAttention) -> None:
        from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import (
            _conv_buffer_view,
            _unpacked_conv_weight,
        )

        self.weight = _unpacked_conv_weight(layer)
        self.bias = layer.conv1d.bias
        self.activation = layer.activation
        self.a_log, self.dt_bias = layer.A_log, layer.dt_bias
        self.heads = (
            layer.num_k_heads // layer.tp_size,
            layer.num_v_heads // layer.tp_size,
            layer.head_k_dim,
            layer.head_v_dim,
        )
        self.histories = _conv_buffer_view(layer).transpose(1, 2)  # [slots, rows, C]
        self.states = layer.kv_cache[1]  # [slots, Hv, Dv, Dk]
        self.window = self.weight.shape[1] - 1

    def gates(self, inputs: LayerInputs) -> Gates:
        return gates(inputs.a, inputs.b, self.a_log, self.dt_bias)

    def convolve(
        self, inputs: LayerInputs, history: Tensor, parents: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the rows; rounded to the model's dtype, as upstream does."""
        mixed = inputs.mixed_qkv
        out = tree_conv(
            mixed, history, self.weight, self.bias, parents, self.activation
        )
        return split_heads(out.to(mixed.dtype), *self.heads)

    def advance(self, slot: int, inputs: LayerInputs) -> Tensor:
        """Run a chain of rows from a slot's state, and leave the state after them."""
        history = self.histories[slot, : self.window].clone()
        rows = torch.arange(len(inputs.mixed_qkv))
        qkv = self.convolve(inputs, history, rows - 1)
        out, states = chain_delta_rule(*qkv, self.gates(inputs), self.states[slot])
        self.states[slot] = states[-1].to(self.states.dtype)
        self.histories[slot, : self.window] = commit_history(
            inputs.mixed_qkv, history, rows
        )
        return out

    def verify(self, slot: int, inputs: LayerInputs, parents: Tensor) -> Tensor:
        """Outputs of a tree from a slot's state, which stays as it is."""
        history = self.histories[slot, : self.window]
        qkv = self.convolve(inputs, history, parents)
        return tree_delta_rule(*qkv, self.gates(inputs), self.states[slot], parents)

    def verify_chain(
        self, slots: list[int], num_accepted: int, inputs: LayerInputs
    ) -> Tensor:
        """Upstream's chain: a state per row, and the history as long as the drafts.

        The last step's accepted rows say where state and history stand.
        """
        buffer = self.histories[slots[0]]
        offset = num_accepted - 1
        rows = torch.arange(len(inputs.mixed_qkv))
        history = buffer[offset : offset + self.window].clone()
        qkv = self.convolve(inputs, history, rows - 1)
        state = self.states[slots[offset]]
        out, states = chain_delta_rule(*qkv, self.gates(inputs), state)
        for slot, after in zip(slots, states, strict=False):
            self.states[slot] = after.to(self.states.dtype)
        kept = len(buffer) - len(rows)
        buffer.copy_(
            torch.cat([buffer[offset + 1 : offset + 1 + kept], inputs.mixed_qkv])
        )
        return out


def forward(
    layer: QwenGatedDeltaNetAttention,
    metadata: GDNAttentionMetadata,
    mixed_qkv: Tensor,
    b: Tensor,
    a: Tensor,
    output: Tensor,
) -> None:
    """Run one layer over a batch of plain rows, trees and upstream's chains.

    Args:
        layer: The layer, whose caches are updated in place.
        metadata: Of the batch; ``tree`` has its trees, where there are any.
        mixed_qkv: [T, C], before the convolution.
        b, a: [T, Hv].
        output: [T, Hv, Dv], written in place.
    """
    if isinstance(metadata.tree, GDNTrees):
        # The V2 runner without a GPU, as the tests run it.
        from . import gdn_v2

        rest = replace(metadata, tree=None)
        gdn_v2.forward(
            layer, metadata.tree, mixed_qkv, b, a, output, partial(forward, layer, rest)
        )
        return
    view = _Layer(layer)
    inputs = LayerInputs(mixed_qkv, a, b)
    if metadata.spec_sequence_masks is not None:
        _forward_chains(view, metadata, inputs, output)
    if metadata.non_spec_query_start_loc is None:
        return
    starts = metadata.non_spec_query_start_loc.tolist()
    slots = metadata.non_spec_state_indices_tensor.tolist()
    known = metadata.has_initial_state
    tree = metadata.tree
    pending: dict[int, PendingTree] = {}
    for row, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        if end == start:  # padding
            continue
        rows: slice | Tensor = slice(start, end)
        if metadata.non_spec_token_indx is not None:
            rows = metadata.non_spec_token_indx[start:end].long()
        slot = slots[row]
        if known is not None and not known[row]:
            view.states[slot] = 0
            view.histories[slot] = 0
        nodes = tree.num_nodes[row] if tree and row < len(tree.num_nodes) else 0
        if not nodes:
            output[rows] = view.advance(slot, inputs.take(rows)).to(output.dtype)
            continue
        root = end - nodes - 1
        if root > start:
            before = slice(start, root)
            output[before] = view.advance(slot, inputs.take(before)).to(output.dtype)
        rows = slice(root, end)
        own = inputs.take(rows)
        assert tree.parents is not None
        parents = tree.parents[row, : nodes + 1]
        output[rows] = view.verify(slot, own, parents).to(output.dtype)
        pending[row] = PendingTree(slot, own)
    if tree is not None:
        tree.layer_inputs[layer.prefix] = pending


def _forward_chains(
    view: _Layer, metadata: GDNAttentionMetadata, inputs: LayerInputs, output: Tensor
) -> None:
    starts = metadata.spec_query_start_loc.tolist()
    slots = metadata.spec_state_indices_tensor.tolist()
    accepted = metadata.num_accepted_tokens.tolist()
    for row in range(metadata.num_spec_decodes):
        rows = metadata.spec_token_indx[starts[row] : starts[row + 1]].long()
        out = view.verify_chain(slots[row], accepted[row], inputs.take(rows))
        output[rows] = out.to(output.dtype)


def commit(
    layer: QwenGatedDeltaNetAttention,
    pending: dict[int, PendingTree],
    path: Tensor,
    num_sampled: list[int],
) -> None:
    """Move the states of a layer along the accepted paths.

    Args:
        layer: The layer, whose caches are updated in place.
        pending: What ``forward`` left, by batch row.
        path: [B, L + 1] integer, accepted tree rows, root first.
        num_sampled: Rows of each path, B integers.
    """
    view = _Layer(layer)
    for row, tree in pending.items():
        accepted = path[row, : num_sampled[row]].long()
        view.advance(tree.slot, tree.inputs.take(accepted))
