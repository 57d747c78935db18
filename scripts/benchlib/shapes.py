# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Configurations without weights, at real shapes, for timing a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Name -> target and drafter. Both are Qwen3; the drafter reads five target layers.
SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 32768,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
    },
}
DRAFTER_LAYERS = 5


def write_shape(name: str, folder: Path, block_size: int) -> tuple[Path, Path]:
    """Write the two configurations.

    Args:
        name: Key of ``SHAPES``.
        folder: Where to; existing files are replaced.
        block_size: The drafter's, L + 1.

    Returns:
        Folders of the target and of the drafter.
    """
    shape = SHAPES[name]
    layers = shape["num_hidden_layers"]
    common = {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "max_position_embeddings": 40960,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        **shape,
    }
    target = {"architectures": ["Qwen3ForCausalLM"], **common}
    taps = [round(1 + i * (layers - 4) / 4) for i in range(5)]
    drafter = {
        **common,
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": DRAFTER_LAYERS,
        "num_target_layers": layers,
        "block_size": block_size,
        "layer_types": ["full_attention"] * DRAFTER_LAYERS,
        "dflash_config": {
            "mask_token_id": shape["vocab_size"] - 1,
            "target_layer_ids": taps,
            "block_size": block_size,
        },
    }
    out = folder / f"{name}-target", folder / f"{name}-drafter-{block_size}"
    for path, config in zip(out, (target, drafter), strict=True):
        path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(config, indent=1) + "\n"
        (path / "config.json").write_text(text, encoding="utf-8")
    return out
