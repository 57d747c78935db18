# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Configurations without weights, at real shapes, for timing a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Name -> sizes of a Qwen3 target; its drafter has the same and reads five layers.
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

# Name -> layers of a target with the sizes of Qwen3.6-27B, three of four gated delta.
HYBRIDS = {"27b": 64, "27b-16l": 16}
# Of every engine over a hybrid. Without FlashInfer its prefill backend must be named.
HYBRID_ENGINE: dict[str, Any] = {
    "language_model_only": True,
    "additional_config": {"gdn_prefill_backend": "triton"},
}
_HYBRID_TEXT = {
    "model_type": "qwen3_5_text",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248320,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "mamba_ssm_dtype": "float32",
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}
_HYBRID_DRAFTER = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 248320,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    # As the published drafters: all but the last layer slide.
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048,
    "use_sliding_window": True,
    "max_window_layers": DRAFTER_LAYERS,
}
_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "max_position_embeddings": 40960,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _hybrid_target(layers: int) -> dict[str, Any]:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    text = {
        **_COMMON,
        **_HYBRID_TEXT,
        "num_hidden_layers": layers,
        "layer_types": kinds * (layers // 4),
    }
    vision = {  # never built, but the configuration has to have it
        "model_type": "qwen3_5",
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 64,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "deepstack_visual_indexes": [],
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "vision_start_token_id": 7,
        "vision_end_token_id": 6,
        "image_token_id": 9,
        "video_token_id": 8,
    }


def write_shape(name: str, folder: Path, block_size: int) -> tuple[Path, Path]:
    """Write the two configurations.

    Args:
        name: Key of ``SHAPES`` or of ``HYBRIDS``.
        folder: Where to; existing files are replaced.
        block_size: The drafter's, L + 1.

    Returns:
        Folders of the target and of the drafter.
    """
    hybrid = name in HYBRIDS
    layers = HYBRIDS[name] if hybrid else SHAPES[name]["num_hidden_layers"]
    own: dict[str, Any] = _HYBRID_DRAFTER if hybrid else SHAPES[name]
    common = {
        **_COMMON,
        "model_type": "qwen3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "layer_types": ["full_attention"] * DRAFTER_LAYERS,
        **own,
    }
    if hybrid:
        target = _hybrid_target(layers)
    else:
        target = {"architectures": ["Qwen3ForCausalLM"], **common}
        target["layer_types"] = ["full_attention"] * layers
    taps = [round(1 + i * (layers - 4) / 4) for i in range(5)]
    drafter = {
        **common,
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": DRAFTER_LAYERS,
        "num_target_layers": layers,
        "block_size": block_size,
        "dflash_config": {
            "mask_token_id": common["vocab_size"] - 1,
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


def is_hybrid(target: Path) -> bool:
    """Whether a model folder's config.json names gated delta layers."""
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    return "linear_attention" in text.get("layer_types", [])
