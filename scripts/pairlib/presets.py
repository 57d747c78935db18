# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Sizes and schedules of a target and drafter pair."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Preset:
    """Everything that decides what a training run produces.

    Lengths are in tokens, sizes in units of a weight dimension, rates are AdamW peak
    learning rates. ``size_limit`` is bytes for the whole output folder, 0 for none.
    """

    name: str
    # Shapes. The drafter shares hidden size, heads and MLP width with the target.
    vocab_size: int = 512
    hidden_size: int = 192
    intermediate_size: int = 448
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    target_layers: int = 3
    drafter_layers: int = 4
    target_layer_ids: tuple[int, ...] = (0, 1, 2)
    block_size: int = 16
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_positions: int = 2048
    # Gated delta layers (Qwen3.5) but for every n-th; no key heads: a dense Qwen3.
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    full_attention_interval: int = 4
    # Target training.
    target_steps: int = 1200
    target_batch: int = 64
    target_length: int = 512
    target_lr: float = 3e-3
    # Text that the target writes for the drafter.
    gen_sequences: int = 98304
    gen_batch: int = 8192
    gen_length: int = 288
    # Drafter training.
    drafter_steps: int = 8000
    drafter_batch: int = 192
    drafter_anchors: int = 16
    drafter_lr: float = 2e-3
    joint_weight: float = 1.0
    loss_decay: float = 7.0
    # Held-out text.
    heldout_prompts: int = 480
    eval_tokens: int = 64
    size_limit: int = 6_000_000

    @property
    def draft_length(self) -> int:
        """L: draft positions a step, the block size less the bonus token."""
        return self.block_size - 1

    def check(self) -> None:
        """Refuse sizes that vLLM or the training cannot use.

        Raises:
            ValueError: one line that names the field, its value and the remedy.
        """
        for field, step, why in (
            ("vocab_size", 64, "vLLM pads the vocabulary to 64"),
            ("intermediate_size", 2, "two tensor-parallel ranks share it"),
            ("num_kv_heads", 2, "two tensor-parallel ranks share them"),
        ):
            value = getattr(self, field)
            if value < step or value % step:
                raise ValueError(
                    f"{field} is {value}: use a multiple of {step} ({why})"
                )
        if not 320 <= self.vocab_size <= 32704:
            raise ValueError(
                f"vocab_size is {self.vocab_size}: use 320 to 32704 "
                "(256 bytes, special tokens and some merges)"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}: use a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.linear_key_heads:
            self._check_hybrid()
        bad = [i for i in self.target_layer_ids if not 0 <= i < self.target_layers]
        if bad or not self.target_layer_ids:
            raise ValueError(
                f"target_layer_ids is {self.target_layer_ids}: name layers from 0 to "
                f"{self.target_layers - 1}"
            )
        if self.gen_length < 2 * self.block_size + 8:
            raise ValueError(
                f"gen_length is {self.gen_length}: use at least "
                f"{2 * self.block_size + 8} for blocks of {self.block_size}"
            )
        for field in (
            "target_steps",
            "target_batch",
            "gen_sequences",
            "gen_batch",
            "drafter_steps",
            "drafter_batch",
            "drafter_anchors",
            "heldout_prompts",
            "eval_tokens",
        ):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}: use 1 or more")

    def _check_hybrid(self) -> None:
        """Refuse gated delta sizes; raises ValueError as ``check`` does."""
        for field, step, why in (
            ("linear_key_heads", 2, "two tensor-parallel ranks share them"),
            ("linear_value_heads", self.linear_key_heads, "key heads are shared"),
            ("linear_key_dim", 16, "kernels work on tiles of 16"),
            ("linear_value_dim", 16, "kernels work on tiles of 16"),
            ("head_dim", 16, "RoPE turns half of it, in three planes"),
        ):
            value = getattr(self, field)
            if value < step or value % step:
                raise ValueError(
                    f"{field} is {value}: use a multiple of {step} ({why})"
                )
        if not 2 <= self.full_attention_interval <= self.target_layers:
            raise ValueError(
                f"full_attention_interval is {self.full_attention_interval}: use 2 to "
                f"target_layers ({self.target_layers}), for layers of both kinds"
            )


_TINY = Preset(name="tiny-qwen3")

PRESETS: dict[str, Preset] = {
    "tiny": _TINY,
    # For tests: everything runs, nothing is learned.
    "smoke": replace(
        _TINY,
        name="smoke",
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        head_dim=16,
        target_layers=2,
        drafter_layers=1,
        target_layer_ids=(0, 1),
        target_steps=3,
        target_batch=2,
        target_length=64,
        gen_sequences=8,
        gen_batch=4,
        gen_length=64,
        drafter_steps=3,
        drafter_batch=2,
        drafter_anchors=2,
        heldout_prompts=12,
        eval_tokens=16,
    ),
    # For speed figures on a GPU: the target alone has more than 100 M parameters.
    "100m": replace(
        _TINY,
        name="qwen3-100m",
        hidden_size=768,
        intermediate_size=2048,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        target_layers=16,
        drafter_layers=3,
        target_layer_ids=(1, 5, 8, 11, 14),
        target_steps=1500,
        target_lr=8e-4,
        gen_sequences=40960,
        gen_batch=4096,
        drafter_steps=20000,
        drafter_batch=64,
        drafter_anchors=32,
        drafter_lr=1e-3,
        size_limit=0,
    ),
}

# Hybrid twins: as large as the dense pair, trained in the same way.
PRESETS |= {
    "tiny-hybrid": replace(
        _TINY,
        name="tiny-qwen3_5",
        target_layers=4,
        drafter_layers=3,
        target_layer_ids=(0, 2, 3),
        linear_key_heads=2,
        linear_value_heads=4,
        linear_key_dim=32,
        linear_value_dim=32,
    ),
    "smoke-hybrid": replace(
        PRESETS["smoke"],
        name="smoke-hybrid",
        head_dim=32,
        target_layers=4,
        target_layer_ids=(0, 2, 3),
        linear_key_heads=2,
        linear_value_heads=4,
        linear_key_dim=32,
        linear_value_dim=32,
    ),
    "hybrid-100m": replace(
        PRESETS["100m"],
        name="qwen3_5-100m",
        linear_key_heads=4,
        linear_value_heads=8,
        linear_key_dim=128,
        linear_value_dim=128,
    ),
}
