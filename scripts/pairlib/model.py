# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Plain PyTorch Qwen3 target and DFlash drafter, numerically those of vLLM 0.26.0.

Parameter names are those of the files that vLLM loads. The drafter's semantics follow
``vllm/model_executor/models/qwen3_dflash.py``: keys and values of the context come from
``hidden_norm(fc(features))`` at the context positions, and the block's own rows
(bonus token, then mask tokens) attend to the context and to all rows of the block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .presets import Preset


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, ...]:
    """Cosines and sines ``[..., head_dim / 2]`` float32 of integer positions."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions.float().unsqueeze(-1) / theta**exponents
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
    """Rotate ``x`` ``[B, H, T, D]``, halves layout; tables ``[B or 1, T, D / 2]``."""
    cos, sin = (t.unsqueeze(1).to(x.dtype) for t in tables)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention.

    Args:
        q: ``[B, H, T, D]``.
        k: ``[B, Hkv, S, D]``.
        v: like k; its type is that of the products.
        mask: true where a query row sees a key; None means causal.

    Returns:
        ``[B, T, H * D]``.
    """
    q, k = q.to(v.dtype), k.to(v.dtype)
    groups = q.shape[1] // k.shape[1]
    if q.shape[2] == 1:
        # One row sees every key, so the heads of a group can be the query rows.
        q = q.unflatten(1, (-1, groups)).flatten(2, 3)
        return F.scaled_dot_product_attention(q, k, v).flatten(1)[:, None]
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None
    )
    return out.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Grouped-query attention with per-head RMS norms on queries and keys."""

    def __init__(self, p: Preset):
        super().__init__()
        self.p = p
        q_size, kv_size = p.num_heads * p.head_dim, p.num_kv_heads * p.head_dim
        self.q_proj = nn.Linear(p.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(p.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(p.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, p.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(p.head_dim, eps=p.rms_norm_eps)
        self.k_norm = nn.RMSNorm(p.head_dim, eps=p.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.p.head_dim)).transpose(1, 2)

    def keys_values(self, x: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Rotated keys and values ``[B, Hkv, T, D]`` of states ``[B, T, hidden]``."""
        k = self.k_norm(self._heads(self.k_proj(x)))
        return apply_rope(k, tables), self._heads(self.v_proj(x))

    def forward(
        self,
        x: Tensor,
        tables: tuple[Tensor, ...],
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """Attend from ``x`` ``[B, T, hidden]`` to ``k``, ``v``; None means causal."""
        q = apply_rope(self.q_norm(self._heads(self.q_proj(x))), tables)
        return self.o_proj(attend(q, k, v, mask))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, p: Preset):
        super().__init__()
        self.gate_proj = nn.Linear(p.hidden_size, p.intermediate_size, bias=False)
        self.up_proj = nn.Linear(p.hidden_size, p.intermediate_size, bias=False)
        self.down_proj = nn.Linear(p.intermediate_size, p.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm block."""

    def __init__(self, p: Preset):
        super().__init__()
        self.self_attn = Attention(p)
        self.mlp = MLP(p)
        self.input_layernorm = nn.RMSNorm(p.hidden_size, eps=p.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(p.hidden_size, eps=p.rms_norm_eps)


def initialise(module: nn.Module, layers: int) -> None:
    """Draw all matrices anew; those that write to the residual stream are smaller."""
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2:
            scale = 0.02
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                scale /= (2 * layers) ** 0.5
            nn.init.normal_(parameter, std=scale)


class Target(nn.Module):
    """Qwen3ForCausalLM with tied embeddings."""

    def __init__(self, p: Preset):
        super().__init__()
        self.p = p
        self.embed_tokens = nn.Embedding(p.vocab_size, p.hidden_size)
        self.layers = nn.ModuleList(Layer(p) for _ in range(p.target_layers))
        self.norm = nn.RMSNorm(p.hidden_size, eps=p.rms_norm_eps)
        initialise(self, p.target_layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits of normed states; the drafter uses them as well."""
        return F.linear(hidden, self.embed_tokens.weight)

    def new_cache(self, batch: int, capacity: int) -> list[Tensor]:
        """Make an empty cache for ``forward``, on the device of the weights.

        Args:
            batch: rows.
            capacity: positions.

        Returns:
            Per layer a zero ``[2, B, Hkv, capacity, D]`` of the weights' type.
        """
        p, weight = self.p, self.embed_tokens.weight
        shape = 2, batch, p.num_kv_heads, capacity, p.head_dim
        return [weight.new_zeros(shape) for _ in self.layers]

    def forward(
        self, ids: Tensor, cache: list[Tensor] | None = None, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Run token ids ``[B, T]`` at positions ``start`` onwards.

        Args:
            ids: int64 token ids.
            cache: of ``new_cache``, written in place.
            start: position of the first id; rows before it come from the cache.

        Returns:
            Normed hidden states ``[B, T, hidden]`` and the drafter's features
            ``[B, T, len(target_layer_ids) * hidden]``: the residual stream after each
            of those layers, before the final norm.
        """
        p, length = self.p, ids.shape[1]
        positions = torch.arange(start, start + length, device=ids.device)
        tables = rope_tables(positions[None], p.head_dim, p.rope_theta)
        mask = None
        if cache is not None:
            mask = torch.arange(start + length, device=ids.device) <= positions[:, None]
        x, features = self.embed_tokens(ids), []
        for index, layer in enumerate(self.layers):
            normed = layer.input_layernorm(x)
            k, v = layer.self_attn.keys_values(normed, tables)
            if cache is not None:
                cache[index][0, :, :, start : start + length] = k
                cache[index][1, :, :, start : start + length] = v
                k, v = cache[index][:, :, :, : start + length]
            x = x + layer.self_attn(normed, tables, k, v, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if index in p.target_layer_ids:
                features.append(x)
        return self.norm(x), torch.cat(features, dim=-1)


class Drafter(nn.Module):
    """DFlashDraftModel without embedding and output head: both are the target's.

    All layers share one key norm weight (the file repeats it): the CPU kernels of vLLM
    0.26.0 give the context keys of every layer the first layer's weight, and a drafter
    with a weight for each layer loses a quarter of its tokens a step there.
    """

    def __init__(self, p: Preset):
        super().__init__()
        self.p = p
        width = len(p.target_layer_ids) * p.hidden_size
        self.fc = nn.Linear(width, p.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(p.hidden_size, eps=p.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(p) for _ in range(p.drafter_layers))
        for layer in self.layers[1:]:
            layer.self_attn.k_norm = self.layers[0].self_attn.k_norm
        self.norm = nn.RMSNorm(p.hidden_size, eps=p.rms_norm_eps)
        initialise(self, p.drafter_layers)

    def forward(self, embeds: Tensor, starts: Tensor, features: Tensor) -> Tensor:
        """Draft blocks at many anchors of each sequence at once.

        Args:
            embeds: ``[B, A, block, hidden]``: bonus token, then mask tokens.
            starts: ``[B, A]`` int64, the bonus token's position; the block sees the
                context rows before it.
            features: ``[B, T, width]`` of the target, at positions 0 onwards.

        Returns:
            Normed states ``[B, A, block - 1, hidden]``; entry i predicts the token at
            position ``starts + 1 + i``.
        """
        p = self.p
        batch, anchors, block, _ = embeds.shape
        length, device = features.shape[1], features.device
        context = self.hidden_norm(self.fc(features))
        context_positions = torch.arange(length, device=device)
        context_tables = rope_tables(context_positions[None], p.head_dim, p.rope_theta)
        positions = starts[..., None] + torch.arange(block, device=device)
        tables = rope_tables(positions.flatten(1), p.head_dim, p.rope_theta)
        sees_context = context_positions < starts[..., None]
        sees_context = sees_context.repeat_interleave(block, dim=1)
        owner = torch.arange(anchors, device=device).repeat_interleave(block)
        same = (owner[:, None] == owner).expand(batch, -1, -1)
        mask = torch.cat((sees_context, same), dim=-1)[:, None]
        x = embeds.flatten(1, 2)
        for layer in self.layers:
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            context_kv = attention.keys_values(context, context_tables)
            own_kv = attention.keys_values(normed, tables)
            k, v = (
                torch.cat((c.to(o.dtype), o), dim=2)
                for c, o in zip(context_kv, own_kv, strict=True)
            )
            x = x + attention(normed, tables, k, v, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x).unflatten(1, (anchors, block))[:, :, 1:]


def block_embeddings(target: Target, bonus: Tensor, mask_id: int) -> Tensor:
    """Embed blocks: bonus ids ``[B, A]`` then ``block_size - 1`` mask tokens."""
    ids = bonus.new_full((*bonus.shape, target.p.block_size), mask_id)
    ids[..., 0] = bonus
    return target.embed_tokens(ids)


def round_to_bfloat16(module: nn.Module) -> None:
    """Round float32 weights to what a bfloat16 file keeps."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16().float())


def parameters_of(module: nn.Module) -> int:
    """Number of weights."""
    return sum(parameter.numel() for parameter in module.parameters())


def share_key_norms(p: Preset, state: dict[str, Tensor], features: Tensor) -> None:
    """Rewrite a drafter with a key norm weight for each layer to use one for all.

    The ratio of old to new weight moves into ``k_proj``; that changes the norm's
    denominator, which the mean over ``features`` puts back through ``q_norm``. What is
    left is small, and further training removes it.

    Args:
        p: sizes.
        state: float32 weights by name, changed in place.
        features: ``[..., width]`` target features of some text.
    """
    layers = [f"layers.{i}.self_attn." for i in range(p.drafter_layers)]
    norms = torch.stack([state[name + "k_norm.weight"] for name in layers])
    if (norms == norms[0]).all():
        return
    shared = norms.log().mean(0).exp()
    context = F.rms_norm(
        features @ state["fc.weight"].T,
        (p.hidden_size,),
        state["hidden_norm.weight"],
        p.rms_norm_eps,
    )
    for name, own in zip(layers, norms, strict=True):
        ratio = own / shared
        keys = (context @ state[name + "k_proj.weight"].T).unflatten(
            -1, (-1, p.head_dim)
        )
        before, after = (k.pow(2).mean(-1).sqrt() for k in (keys, keys * ratio))
        rows = ratio.repeat(p.num_kv_heads)[:, None]
        state[name + "k_proj.weight"] = state[name + "k_proj.weight"] * rows
        scale = (after / before).mean()
        state[name + "q_norm.weight"] = state[name + "q_norm.weight"] * scale
        state[name + "k_norm.weight"] = shared
