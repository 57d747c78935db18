# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Plain PyTorch Qwen3.5 target: gated delta layers and some full-attention layers.

Numerically the text part of ``Qwen3_5ForConditionalGeneration`` in vLLM 0.26.0 and
transformers 5; parameter names are those of their files. A gated delta layer (Yang et
al., arXiv 2412.06464) runs a text in chunks whose rows are solved for at once, so that
a training step is a few large matrix products; a single row with a cache takes one
step of the recurrence. The rule is float32 inside, under autocast, too.

Sizes in shapes: ``B`` rows of a batch, ``T`` tokens, ``Hk`` and ``Hv`` key and value
heads of sizes ``Dk`` and ``Dv``, ``N`` chunks of ``C`` tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .model import MLP, Target, apply_rope, attend, initialise, rope_tables
from .presets import Preset

CHUNK = 64
TAPS = 4
ROTARY_SHARE = 0.5
NORM_EPSILON = 1e-6


def normalise(x: Tensor) -> Tensor:
    """Scale the last dimension to length 1; float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)


def join_blocks(a: Tensor) -> Tensor:
    """Invert ``I + a`` by matrix products; ``a`` as for :func:`unit_lower_inverse`.

    Pairs of inverted diagonal blocks are joined into blocks of twice the size. Unlike
    the product of ``I + (-a)^(2^i)`` it stays accurate where keys repeat: there the
    powers grow like binomials and cancel.
    """
    size = a.shape[-1]
    rows = torch.arange(size, device=a.device)
    inverse = torch.eye(size, dtype=a.dtype, device=a.device).expand_as(a)
    block = 1
    while block < size:
        owner = rows // block
        joins = (owner[:, None] % 2 == 1) & (owner[:, None] - 1 == owner)
        step = a * joins
        # The blocks of the first round are ones.
        inverse = inverse - (step if block == 1 else inverse @ step @ inverse)
        block *= 2
    return inverse


class _UnitLowerInverse(torch.autograd.Function):
    """Saves one matrix, since the gradient needs no more than the inverse."""

    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:
        if a.device.type == "cpu":
            one = torch.eye(a.shape[-1], dtype=a.dtype).expand_as(a)
            inverse = torch.linalg.solve_triangular(
                a, one, upper=False, unitriangular=True
            )
        else:
            # Triangular solvers of many small systems leave a GPU idle.
            inverse = join_blocks(a)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            return -(inverse.mT @ grad @ inverse.mT).tril(-1)


def unit_lower_inverse(a: Tensor) -> Tensor:
    """Invert ``I + a``; ``a`` ``[..., C, C]`` strictly lower, C a power of two."""
    return _UnitLowerInverse.apply(a)


def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule over texts, chunk by chunk.

    Within a chunk, with G the sum of g from its first row: ``u = (I + A)^-1 (beta v -
    beta e^G k S)`` where ``A_ij = beta_i e^{G_i - G_j} k_i . k_j`` for j < i, and the
    output is ``e^G q S + (e^{G_i - G_j} q_i . k_j) u``. The next chunk's state is
    linear in this one's: one product a chunk is all that runs in sequence.

    Args:
        q: ``[B, T, Hk, Dk]``, not normalised.
        k: like q. Value head h takes key head ``h // (Hv / Hk)``.
        v: ``[B, T, Hv, Dv]``.
        g: ``[B, T, Hv]`` float32, log decay.
        beta: ``[B, T, Hv]`` float32, write strength.
        state: ``[B, Hv, Dk, Dv]`` float32 before the first row; None is zero.

    Returns:
        Outputs ``[B, T, Hv, Dv]`` and the state after the last row, both float32.
    """
    with torch.autocast(v.device.type, enabled=False):
        length, share = v.shape[1], v.shape[2] // k.shape[2]
        size = min(CHUNK, 1 << (length - 1).bit_length())

        def chunks(x: Tensor) -> Tensor:
            # Rows of zeros at the end change no state. [B, H, N, C, D]
            x = F.pad(x.float(), (0, 0, 0, 0, 0, -length % size))
            return x.unflatten(1, (-1, size)).movedim(3, 1)

        q, k = chunks(normalise(q) * q.shape[-1] ** -0.5), chunks(normalise(k))
        v, beta = chunks(v), chunks(beta[..., None])
        total = chunks(g[..., None]).cumsum(-2)
        within = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
        # The mask comes before the exponential: above the diagonal it can overflow.
        decay = (total - total.mT).masked_fill(~within, float("-inf")).exp()
        reads = decay * (q @ k.mT).repeat_interleave(share, 1)
        system = beta * decay * (k @ k.mT).repeat_interleave(share, 1)
        q, k = (x.repeat_interleave(share, 1) for x in (q, k))
        start = total.exp()
        right = torch.cat((beta * v, beta * start * k), -1)
        solved = unit_lower_inverse(system.tril(-1)) @ right
        u, w = solved.split((v.shape[-1], k.shape[-1]), -1)
        last = total[..., -1:, :]
        keys = ((last - total).exp() * k).mT
        kept = torch.eye(k.shape[-1], device=v.device) * last.exp() - keys @ w
        added = keys @ u
        if state is None:
            state = torch.zeros_like(added[:, :, 0])
        before = []
        for index in range(v.shape[2]):
            before.append(state)
            state = added[:, :, index] + kept[:, :, index] @ state
        states = torch.stack(before, 2)
        out = (start * q) @ states + reads @ (u - w @ states)
        return out.movedim(1, 3).flatten(1, 2)[:, :length], state


def step_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> Tensor:
    """Run one row of the gated delta rule; moves ``state`` on in place.

    Args:
        q: ``[B, Hk, Dk]``, not normalised.
        k: like q.
        v: ``[B, Hv, Dv]``.
        g: ``[B, Hv]`` float32, log decay.
        beta: ``[B, Hv]`` float32, write strength.
        state: ``[B, Hv, Dk, Dv]`` float32.

    Returns:
        ``[B, Hv, Dv]`` float32.
    """
    share = v.shape[1] // k.shape[1]
    q = normalise(q).repeat_interleave(share, 1) * q.shape[-1] ** -0.5
    k = normalise(k).repeat_interleave(share, 1)
    decay = g.exp()[..., None]
    # The state is most of the traffic, so it is read once for both products.
    read_k, read_q = (decay[..., None] * (torch.stack((k, q), 2) @ state)).unbind(2)
    write = beta[..., None] * (v.float() - read_k)
    state.mul_(decay[..., None]).addcmul_(k[..., None], write[..., None, :])
    return read_q + (k * q).sum(-1, keepdim=True) * write


class Norm(nn.Module):
    """RMS norm whose file keeps the weight less one."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        weight = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


class GatedDelta(nn.Module):
    """Qwen3.5's linear attention."""

    def __init__(self, p: Preset):
        super().__init__()
        self.p = p
        keys = p.linear_key_heads * p.linear_key_dim
        values = p.linear_value_heads * p.linear_value_dim
        self.sizes = keys, keys, values
        channels = sum(self.sizes)
        self.in_proj_qkv = nn.Linear(p.hidden_size, channels, bias=False)
        self.in_proj_z = nn.Linear(p.hidden_size, values, bias=False)
        self.in_proj_b = nn.Linear(p.hidden_size, p.linear_value_heads, bias=False)
        self.in_proj_a = nn.Linear(p.hidden_size, p.linear_value_heads, bias=False)
        # Only holds the weight [channels, 1, TAPS].
        self.conv1d = nn.Conv1d(channels, channels, TAPS, groups=channels, bias=False)
        # As Mamba starts: steps of 0.001 to 0.1, so heads that forget within some
        # tens of tokens and heads that keep a thousand.
        low, high = torch.tensor([1e-3, 1e-1]).log()
        dt = (low + torch.rand(p.linear_value_heads) * (high - low)).exp()
        self.dt_bias = nn.Parameter(dt + (-torch.expm1(-dt)).log())
        self.A_log = nn.Parameter(torch.empty_like(dt).uniform_(1, 16).log())
        self.norm = nn.RMSNorm(p.linear_value_dim, eps=p.rms_norm_eps)
        self.out_proj = nn.Linear(values, p.hidden_size, bias=False)

    def _convolve(self, x: Tensor, history: Tensor | None) -> Tensor:
        """Causal convolution and SiLU of ``[B, T, channels]``; float32.

        ``history`` ``[B, TAPS - 1, channels]`` has the rows before, and gets the last.
        """
        length = x.shape[1]
        if history is None:
            rows = F.pad(x, (0, 0, TAPS - 1, 0))
        else:
            rows = torch.cat((history.to(x.dtype), x), 1)
            history.copy_(rows[:, -(TAPS - 1) :])
        taps = self.conv1d.weight[:, 0].float().unbind(-1)
        # Four products of whole tensors: convolutions by channel are slow on a GPU.
        return F.silu(
            sum(rows[:, i : i + length].float() * tap for i, tap in enumerate(taps))
        )

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor] | None) -> Tensor:
        """Mix ``x`` ``[B, T, hidden]``; ``cache`` is history and state, in place."""
        p = self.p
        history, state = (None, None) if cache is None else cache
        mixed = self._convolve(self.in_proj_qkv(x), history)
        q, k, v = mixed.split(self.sizes, -1)
        q, k = (t.unflatten(-1, (p.linear_key_heads, -1)) for t in (q, k))
        v = v.unflatten(-1, (p.linear_value_heads, -1))
        z = self.in_proj_z(x).unflatten(-1, (p.linear_value_heads, -1))
        beta = self.in_proj_b(x).float().sigmoid()
        steps = F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        g = -self.A_log.float().exp() * steps
        if state is not None and x.shape[1] == 1:
            rows = (t[:, 0] for t in (q, k, v, g, beta))
            out = step_delta_rule(*rows, state)[:, None]
        else:
            out, after = chunk_delta_rule(q, k, v, g, beta, state)
            if state is not None:
                state.copy_(after)
        weight = self.norm.weight.float()
        out = F.rms_norm(out, weight.shape, weight, p.rms_norm_eps) * F.silu(z.float())
        return self.out_proj(out.to(z.dtype).flatten(2))


class GatedAttention(nn.Module):
    """Attention with an output gate, and RoPE on a part of each head."""

    def __init__(self, p: Preset):
        super().__init__()
        self.p = p
        q_size, kv_size = p.num_heads * p.head_dim, p.num_kv_heads * p.head_dim
        # Per head the query, then the gate.
        self.q_proj = nn.Linear(p.hidden_size, 2 * q_size, bias=False)
        self.k_proj = nn.Linear(p.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(p.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, p.hidden_size, bias=False)
        self.q_norm = Norm(p.head_dim, p.rms_norm_eps)
        self.k_norm = Norm(p.head_dim, p.rms_norm_eps)

    def _rotate(self, x: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        rotary = rotary_size(self.p)
        turned = apply_rope(x[..., :rotary], tables)
        return torch.cat((turned, x[..., rotary:]), -1)

    def forward(
        self,
        x: Tensor,
        tables: tuple[Tensor, ...],
        cache: Tensor | None,
        start: int,
        mask: Tensor | None,
    ) -> Tensor:
        """Mix ``x`` ``[B, T, hidden]`` at positions ``start`` onwards.

        ``cache`` is a ``[2, B, Hkv, capacity, D]`` buffer, written in place; the mask
        ``[T, start + T]`` goes with it, None means causal.
        """
        end, size = start + x.shape[1], self.p.head_dim
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * size)).chunk(2, -1)
        k, v = (
            proj(x).unflatten(-1, (-1, size)).transpose(1, 2)
            for proj in (self.k_proj, self.v_proj)
        )
        q = self._rotate(self.q_norm(q.transpose(1, 2)), tables)
        k = self._rotate(self.k_norm(k), tables)
        if cache is not None:
            cache[0, :, :, start:end] = k
            cache[1, :, :, start:end] = v
            k, v = cache[:, :, :, :end]
        out = attend(q, k, v, mask)
        return self.o_proj(out * gate.flatten(2).sigmoid())


class HybridLayer(nn.Module):
    """One pre-norm block; either kind of token mixing."""

    def __init__(self, p: Preset, full_attention: bool):
        super().__init__()
        if full_attention:
            self.self_attn = GatedAttention(p)
        else:
            self.linear_attn = GatedDelta(p)
        self.full_attention = full_attention
        self.mlp = MLP(p)
        self.input_layernorm = Norm(p.hidden_size, p.rms_norm_eps)
        self.post_attention_layernorm = Norm(p.hidden_size, p.rms_norm_eps)


class HybridTarget(nn.Module):
    """Text part of Qwen3_5ForConditionalGeneration with tied embeddings.

    Its interface is that of :class:`pairlib.model.Target`.
    """

    def __init__(self, p: Preset):
        super().__init__()
        self.p = p
        self.embed_tokens = nn.Embedding(p.vocab_size, p.hidden_size)
        self.layers = nn.ModuleList(
            HybridLayer(p, kind == "full_attention") for kind in layer_types(p)
        )
        self.norm = Norm(p.hidden_size, p.rms_norm_eps)
        initialise(self, p.target_layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits of normed states; the drafter uses them as well."""
        return F.linear(hidden, self.embed_tokens.weight)

    def new_cache(self, batch: int, capacity: int) -> list:
        """Make an empty cache for ``forward``, on the device of the weights.

        Args:
            batch: rows.
            capacity: positions.

        Returns:
            Per layer a zero ``[2, B, Hkv, capacity, D]`` of the weights' type, or the
            rows before the convolution ``[B, TAPS - 1, channels]`` of that type and
            the state ``[B, Hv, Dk, Dv]`` float32.
        """
        p, weight = self.p, self.embed_tokens.weight
        shape = 2, batch, p.num_kv_heads, capacity, p.head_dim
        state = batch, p.linear_value_heads, p.linear_key_dim, p.linear_value_dim
        return [
            weight.new_zeros(shape)
            if layer.full_attention
            else (
                weight.new_zeros(batch, TAPS - 1, sum(layer.linear_attn.sizes)),
                weight.new_zeros(state, dtype=torch.float32),
            )
            for layer in self.layers
        ]

    def forward(
        self, ids: Tensor, cache: list | None = None, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Run token ids ``[B, T]`` at positions ``start`` onwards.

        Args:
            ids: int64 token ids.
            cache: of ``new_cache``, written in place, so without gradients.
            start: position of the first id; what came before it is in the cache.

        Returns:
            Normed hidden states ``[B, T, hidden]`` and the drafter's features
            ``[B, T, len(target_layer_ids) * hidden]``: the residual stream after each
            of those layers, before the final norm.
        """
        p, length = self.p, ids.shape[1]
        positions = torch.arange(start, start + length, device=ids.device)
        # Text has the same position in all planes of M-RoPE, which so is plain RoPE.
        tables = rope_tables(positions[None], rotary_size(p), p.rope_theta)
        mask = None
        if cache is not None:
            mask = torch.arange(start + length, device=ids.device) <= positions[:, None]
        x, features = self.embed_tokens(ids), []
        for index, layer in enumerate(self.layers):
            normed = layer.input_layernorm(x)
            own = None if cache is None else cache[index]
            if layer.full_attention:
                x = x + layer.self_attn(normed, tables, own, start, mask)
            else:
                x = x + layer.linear_attn(normed, own)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if index in p.target_layer_ids:
                features.append(x)
        return self.norm(x), torch.cat(features, dim=-1)


def layer_types(p: Preset) -> list[str]:
    """Kind of each target layer, by the names of config.json."""
    every = p.full_attention_interval
    return [
        "linear_attention" if (index + 1) % every else "full_attention"
        for index in range(p.target_layers)
    ]


def rotary_size(p: Preset) -> int:
    """How many of a head's dimensions RoPE turns."""
    return int(p.head_dim * ROTARY_SHARE)


def make_target(p: Preset) -> Target | HybridTarget:
    """Make the target that a preset describes, with new weights."""
    return HybridTarget(p) if p.linear_key_heads else Target(p)


def text_config(p: Preset, base: dict) -> dict:
    """Turn a dense target's config into a hybrid's ``text_config``.

    Args:
        p: sizes.
        base: config.json of a dense Qwen3 of these sizes.

    Returns:
        The config of model type ``qwen3_5_text``.
    """
    plane = rotary_size(p) // 2 // 3
    rope = {
        **base["rope_parameters"],
        "partial_rotary_factor": ROTARY_SHARE,
        "mrope_interleaved": True,
        "mrope_section": [rotary_size(p) // 2 - 2 * plane, plane, plane],
    }
    dense_only = ("rope_theta", "use_sliding_window", "sliding_window")
    return {
        **{key: value for key, value in base.items() if key not in dense_only},
        "model_type": "qwen3_5_text",
        "layer_types": layer_types(p),
        "full_attention_interval": p.full_attention_interval,
        "linear_num_key_heads": p.linear_key_heads,
        "linear_num_value_heads": p.linear_value_heads,
        "linear_key_head_dim": p.linear_key_dim,
        "linear_value_head_dim": p.linear_value_dim,
        "linear_conv_kernel_dim": TAPS,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "partial_rotary_factor": ROTARY_SHARE,
        "rope_parameters": rope,
    }


def target_config(p: Preset, base: dict) -> dict:
    """Give ``config.json`` of a hybrid target.

    Args:
        p: sizes.
        base: config.json of a dense Qwen3 of these sizes.

    Returns:
        The config of ``Qwen3_5ForConditionalGeneration``. Its vision part has no
        weights: both loaders want the config, and text never runs it.
    """
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text_config(p, base),
        "vision_config": {
            "model_type": "qwen3_5",
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": p.hidden_size,
            "num_position_embeddings": 64,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
            "deepstack_visual_indexes": [],
        },
        **{
            key: base[key]
            for key in ("tie_word_embeddings", "eos_token_id", "torch_dtype")
        },
        # No token of the text may mark an image, so these are beyond the vocabulary.
        "image_token_id": p.vocab_size,
        "video_token_id": p.vocab_size + 1,
        "vision_start_token_id": p.vocab_size + 2,
        "vision_end_token_id": p.vocab_size + 3,
    }
