# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Gated delta layers over a tree, in plain PyTorch.

A gated delta layer (Yang et al., arXiv 2412.06464; Qwen3.5's linear attention) keeps
one state per request. No node of a tree gets a state of its own: the chunked form of
the delta rule, with the ancestor mask in the place of the causal one, gives every
node's output from the state at the root's parent, and the state moves on along the
accepted path once that is known. Storage and gates are those of upstream 0.26.0
(model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py, third_party/
flash_linear_attention/ops/fused_sigmoid_gating.py, mamba/ops/causal_conv1d.py).

One request at a time; shapes are without a batch dimension. Words: ``T`` rows, ``C``
channels before the heads are split, ``W`` taps of the convolution, ``Hk`` and ``Hv``
key and value heads, ``Dk`` and ``Dv`` their sizes. ``parents`` [T] has a row's parent,
-1 on the root; parents come first. A chain is ``parents = arange(T) - 1``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .tree import ancestor_mask

NORM_EPSILON = 1e-6


@dataclass(slots=True)
class GDNTrees:
    """Requests of a step on the V2 model runner, for its gated delta layers.

    Attributes:
        num_reqs: Rows of the tensors below, padding included.
        query_start_loc: [num_reqs + 1] int32.
        state_indices: [num_reqs] int32 of any stride, the slot of each state.
        rest: [n] int64, tokens of the requests that upstream's kernels serve, or None.
    """

    num_reqs: int
    query_start_loc: Tensor
    state_indices: Tensor
    rest: Tensor | None


class Gates(NamedTuple):
    """Log decay and write strength, both [T, Hv] float32."""

    g: Tensor
    beta: Tensor


def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> Gates:
    """Compute a layer's gates.

    Args:
        a, b: [T, Hv], of the input projection.
        a_log, dt_bias: [Hv], parameters.

    Returns:
        ``g = -exp(a_log) softplus(a + dt_bias)``, never positive, and
        ``beta = sigmoid(b)``.
    """
    step = F.softplus(a.float() + dt_bias.float())
    return Gates(-a_log.float().exp() * step, b.float().sigmoid())


def window_rows(parents: Tensor, width: int) -> Tensor:
    """Rows that a row's convolution reads, oldest first.

    Args:
        parents: [T] integer.
        width: W.

    Returns:
        [T, W] int64. The last column is the row itself, the one before its parent. What
        lies before the root is negative: -1 is the history's newest row.
    """
    rows = torch.arange(len(parents), device=parents.device)
    columns = [rows]
    hop = rows
    for _ in range(width - 1):
        up = parents.long()[hop.clamp(min=0)]
        hop = torch.where(hop >= 0, up, hop - 1)
        columns.append(hop)
    return torch.stack(columns[::-1], dim=1)


def tree_conv(
    x: Tensor,
    history: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parents: Tensor,
    activation: str | None = "silu",
) -> Tensor:
    """Causal depthwise convolution where the past of a row is its ancestors.

    Args:
        x: [T, C], rows before the convolution.
        history: [W - 1, C], the rows before the root, oldest first.
        weight: [C, W]; the last tap is the row itself.
        bias: [C] or None.
        parents: [T] integer.
        activation: ``silu`` (or ``swish``), or None.

    Returns:
        [T, C] float32.

    Raises:
        ValueError: Another activation.
    """
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation={activation!r} is unknown; want silu or None")
    width = weight.shape[1]
    rows = window_rows(parents, width)
    both = torch.cat([history.float(), x.float()])
    # Row -1 is the history's last, and both[W - 2]; row 0 is both[W - 1].
    taken = both[rows + width - 1]
    out = torch.einsum("twc,cw->tc", taken, weight.float())
    if bias is not None:
        out = out + bias.float()
    return F.silu(out) if activation else out


def normalise(x: Tensor) -> Tensor:
    """Scale the last dimension to length 1, as upstream's kernels do; float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)


def split_heads(
    mixed: Tensor, key_heads: int, value_heads: int, key_size: int, value_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split [T, 2 Hk Dk + Hv Dv] into q, k [T, Hk, Dk] and v [T, Hv, Dv]."""
    keys = key_heads * key_size
    q, k, v = mixed.split([keys, keys, value_heads * value_size], dim=-1)
    return (
        q.unflatten(-1, (key_heads, key_size)),
        k.unflatten(-1, (key_heads, key_size)),
        v.unflatten(-1, (value_heads, value_size)),
    )


def tree_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Gates,
    state: Tensor,
    parents: Tensor,
) -> Tensor:
    """Outputs of all rows of a tree from the state before its root.

    With G_i the sum of g from the root to row i, and anc(i) its ancestors without it:
    ``u_i = beta_i (v_i - e^{G_i} S k_i - sum_{anc(i)} e^{G_i - G_j} (k_j . k_i) u_j)``
    and ``o_i = e^{G_i} S q_i + sum_{anc(i) or i} e^{G_i - G_j} (k_j . q_i) u_j``, with
    q scaled by ``Dk ** -0.5``. The sum over ancestors makes a unit lower triangular
    system, since parents come first.

    Args:
        q, k: [T, Hk, Dk], not normalised.
        v: [T, Hv, Dv]. Value head h takes key head ``h // (Hv / Hk)``.
        gate: Of the rows.
        state: [Hv, Dv, Dk], upstream's order.
        parents: [T] integer.

    Returns:
        [T, Hv, Dv] float32.
    """
    num_rows, num_heads = v.shape[:2]
    share = num_heads // k.shape[1]
    # [Hv, T, D]
    q = normalise(q).repeat_interleave(share, 1).transpose(0, 1) * q.shape[-1] ** -0.5
    k = normalise(k).repeat_interleave(share, 1).transpose(0, 1)
    v = v.float().transpose(0, 1)
    state = state.float()
    last = torch.tensor([num_rows - 1], device=parents.device)
    seen = ancestor_mask(parents[None], last)[0]  # with the row itself
    total = torch.einsum("ij,jh->hi", seen.float(), gate.g)
    # The mask comes before the exponential: beside the path the sign is any.
    decay = total[:, :, None] - total[:, None, :]
    decay = decay.masked_fill(~seen, float("-inf")).exp()
    strict = seen & ~torch.eye(num_rows, dtype=torch.bool, device=seen.device)
    beta = gate.beta.T[..., None]
    start = total.exp()[..., None]
    system = beta * decay * (k @ k.mT) * strict
    right = beta * (v - start * (k @ state.mT))
    u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = start * (q @ state.mT) + (decay * (q @ k.mT)) @ u
    return out.transpose(0, 1)


def chain_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, gate: Gates, state: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Run rows one after the other, as the layer is defined.

    Args:
        q, k: [T, Hk, Dk], not normalised.
        v: [T, Hv, Dv].
        gate: Of the rows.
        state: [Hv, Dv, Dk].

    Returns:
        Outputs [T, Hv, Dv] float32, and the state after each row, float32.
    """
    share = v.shape[1] // k.shape[1]
    q = normalise(q).repeat_interleave(share, 1) * q.shape[-1] ** -0.5
    k = normalise(k).repeat_interleave(share, 1)
    v = v.float()
    decay = gate.g.exp()[:, :, None, None]
    beta = gate.beta[..., None]
    state = state.float()
    out = torch.empty(v.shape)
    states = []
    for row in range(len(v)):
        state = state * decay[row]
        key = k[row][:, None, :]
        write = beta[row] * (v[row] - (state * key).sum(-1))
        state = state + write[..., None] * key
        out[row] = (state * q[row][:, None, :]).sum(-1)
        states.append(state)
    return out, states


def commit_path(
    k: Tensor,
    v: Tensor,
    gate: Gates,
    state: Tensor,
    path: Tensor,
) -> Tensor:
    """Move the state along the accepted rows, one by one as without speculation.

    Args:
        k: [T, Hk, Dk], not normalised.
        v: [T, Hv, Dv].
        gate: Of the rows.
        state: [Hv, Dv, Dk].
        path: [n] integer, accepted rows, root first.

    Returns:
        [Hv, Dv, Dk] float32, the state after the path's last row.
    """
    path = path.long()
    rows = Gates(gate.g[path], gate.beta[path])
    return chain_delta_rule(k[path], k[path], v[path], rows, state)[1][-1]


def commit_history(x: Tensor, history: Tensor, path: Tensor) -> Tensor:
    """Give the convolution's history after the accepted rows.

    Args:
        x: [T, C], rows before the convolution.
        history: [W - 1, C], oldest first.
        path: [n] integer, accepted rows, root first.

    Returns:
        [W - 1, C] of the history's dtype, oldest first.
    """
    return torch.cat([history, x[path.long()].to(history.dtype)])[-len(history) :]
