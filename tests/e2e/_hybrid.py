# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""A hybrid pair with random weights, and drafts that a test can steer.

Random weights say nothing about acceptance, so ``Oracle`` puts the tokens of a plain
run into the drafter's logits, with noise: trees of every shape, accepted to every
depth.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

import ddtree_cpu as cpu

VOCAB, HIDDEN, LAYERS, POSITIONS = 512, 64, 4, 7
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
KEY_HEADS, VALUE_HEADS, LINEAR_DIM, TAPS = 2, 4, 32, 4
TEXT_ONLY = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
EXPERTS = 6
EXPERT_FIELDS = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": HIDDEN,
    "shared_expert_intermediate_size": HIDDEN,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float | None = None) -> torch.Tensor:
        scale = shape[-1] ** -0.5 if scale is None else scale
        return torch.randn(*shape, generator=generator) * scale

    keys, values = KEY_HEADS * LINEAR_DIM, VALUE_HEADS * LINEAR_DIM
    base = "model.language_model."
    found = {
        base + "embed_tokens.weight": random(VOCAB, HIDDEN, scale=1.0),
        base + "norm.weight": random(HIDDEN, scale=0.1),
        "lm_head.weight": random(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        name = f"{base}layers.{layer}."
        found |= {
            name + "input_layernorm.weight": random(HIDDEN, scale=0.1),
            name + "post_attention_layernorm.weight": random(HIDDEN, scale=0.1),
            name + "mlp.gate_proj.weight": random(2 * HIDDEN, HIDDEN),
            name + "mlp.up_proj.weight": random(2 * HIDDEN, HIDDEN),
            name + "mlp.down_proj.weight": random(HIDDEN, 2 * HIDDEN),
        }
        if layer == LAYERS - 1:
            name += "self_attn."
            found |= {
                name + "q_proj.weight": random(2 * HEADS * HEAD_DIM, HIDDEN, scale=0.5),
                name + "k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN, scale=0.5),
                name + "v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
                name + "o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM, scale=0.3),
                name + "q_norm.weight": random(HEAD_DIM, scale=0.1),
                name + "k_norm.weight": random(HEAD_DIM, scale=0.1),
            }
        else:
            name += "linear_attn."
            found |= {
                name + "in_proj_qkv.weight": random(2 * keys + values, HIDDEN),
                name + "in_proj_z.weight": random(values, HIDDEN),
                name + "in_proj_b.weight": random(VALUE_HEADS, HIDDEN),
                name + "in_proj_a.weight": random(VALUE_HEADS, HIDDEN),
                name + "out_proj.weight": random(HIDDEN, values, scale=0.3),
                name + "conv1d.weight": random(2 * keys + values, 1, TAPS, scale=0.5),
                name + "A_log": random(VALUE_HEADS, scale=0.5) - 2.0,
                name + "dt_bias": random(VALUE_HEADS, scale=0.5),
                name + "norm.weight": 1 + random(LINEAR_DIM, scale=0.1),
            }
    return found


def _target_config() -> dict:
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "linear_conv_kernel_dim": TAPS,
        "linear_key_head_dim": LINEAR_DIM,
        "linear_value_head_dim": LINEAR_DIM,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "layer_types": ["linear_attention"] * (LAYERS - 1) + ["full_attention"],
        "full_attention_interval": LAYERS,
        "attn_output_gate": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "partial_rotary_factor": 0.5,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            **ROPE,
            "partial_rotary_factor": 0.5,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
        "eos_token_id": 0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    vision = {
        "model_type": "qwen3_5",
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
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
        "torch_dtype": "float32",
        "image_token_id": 9,
        "video_token_id": 8,
        "vision_start_token_id": 7,
        "vision_end_token_id": 6,
    }


def _drafter_config() -> dict:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rope_parameters": ROPE,
        "attention_bias": False,
        "layer_types": ["full_attention"],
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "block_size": POSITIONS + 1,
        "num_target_layers": LAYERS,
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, LAYERS - 2]},
    }


def _drafter_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    name = "layers.0."
    return {
        "fc.weight": random(HIDDEN, 2 * HIDDEN),
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        name + "input_layernorm.weight": torch.ones(HIDDEN),
        name + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        name + "mlp.gate_proj.weight": random(2 * HIDDEN, HIDDEN),
        name + "mlp.up_proj.weight": random(2 * HIDDEN, HIDDEN),
        name + "mlp.down_proj.weight": random(HIDDEN, 2 * HIDDEN),
        name + "self_attn.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN),
        name + "self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        name + "self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        name + "self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
        name + "self_attn.q_norm.weight": torch.ones(HEAD_DIM),
        name + "self_attn.k_norm.weight": torch.ones(HEAD_DIM),
    }


def _add_experts(weights: dict[str, torch.Tensor], fused: bool, seed: int) -> None:
    """Put experts and a shared one in the place of every layer's MLP.

    Args:
        weights: Changed in place.
        fused: One tensor for all experts, as checkpoints of Qwen3.5 have it.
        seed: Of the weights.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    for name in [name for name in weights if name.endswith("mlp.gate_proj.weight")]:
        mlp = name.removesuffix("gate_proj.weight")
        for part in ("gate_proj", "up_proj", "down_proj"):
            del weights[f"{mlp}{part}.weight"]
        weights[mlp + "gate.weight"] = random(EXPERTS, HIDDEN)
        weights[mlp + "shared_expert_gate.weight"] = random(1, HIDDEN)
        shared = mlp + "shared_expert."
        weights[shared + "gate_proj.weight"] = random(HIDDEN, HIDDEN)
        weights[shared + "up_proj.weight"] = random(HIDDEN, HIDDEN)
        weights[shared + "down_proj.weight"] = random(HIDDEN, HIDDEN)
        gate_up = random(EXPERTS, 2 * HIDDEN, HIDDEN)
        down = random(EXPERTS, HIDDEN, HIDDEN)
        if fused:
            weights[mlp + "experts.gate_up_proj"] = gate_up
            weights[mlp + "experts.down_proj"] = down
            continue
        for expert in range(EXPERTS):
            gate, up = gate_up[expert].chunk(2)
            name = f"{mlp}experts.{expert}."
            weights[name + "gate_proj.weight"] = gate.clone()
            weights[name + "up_proj.weight"] = up.clone()
            weights[name + "down_proj.weight"] = down[expert].clone()


def _moe(seed: int) -> tuple[dict, dict[str, torch.Tensor]]:
    config, weights = _target_config(), _weights(seed)
    config["architectures"] = ["Qwen3_5MoeForConditionalGeneration"]
    config["model_type"] = "qwen3_5_moe"
    config["text_config"] |= {"model_type": "qwen3_5_moe_text", **EXPERT_FIELDS}
    config["vision_config"]["model_type"] = "qwen3_5_moe"
    _add_experts(weights, True, seed)
    return config, weights


def _flat_weights(seed: int) -> dict[str, torch.Tensor]:
    return {
        name.replace("model.language_model.", "model."): value
        for name, value in _weights(seed).items()
    }


def _next(seed: int) -> tuple[dict, dict[str, torch.Tensor]]:
    """Qwen3-Next: flat config, plain RoPE, projections of q, k, v, z in one tensor.

    Rows of that tensor are grouped by key head; random ones need no reordering.
    """
    text = _target_config()["text_config"]
    config = {
        **text,
        **EXPERT_FIELDS,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
    }
    weights = _flat_weights(seed)
    for name in [name for name in weights if name.endswith("in_proj_qkv.weight")]:
        layer = name.removesuffix("qkv.weight")
        for joint, parts in (("qkvz", ("qkv", "z")), ("ba", ("b", "a"))):
            found = [weights.pop(f"{layer}{part}.weight") for part in parts]
            weights[f"{layer}{joint}.weight"] = torch.cat(found)
    _add_experts(weights, False, seed)
    return config, weights


def _text(seed: int) -> tuple[dict, dict[str, torch.Tensor]]:
    """Qwen3.5 without an image tower: upstream drops the M-RoPE of its config."""
    config = {
        **_target_config()["text_config"],
        "architectures": ["Qwen3_5ForCausalLM"],
    }
    return config, _flat_weights(seed)


def _intern(seed: int) -> tuple[dict, dict[str, torch.Tensor]]:
    config, weights = _moe(seed)
    config["architectures"] = ["InternS2PreviewForConditionalGeneration"]
    return config, weights


TARGETS = {
    "qwen3_5": lambda seed: (_target_config(), _weights(seed)),
    "qwen3_5_moe": _moe,
    "qwen3_5_text": _text,
    "qwen3_next": _next,
    "interns2_preview": _intern,
}


def write_pair(folder: Path, seed: int = 0, kind: str = "qwen3_5") -> tuple[Path, Path]:
    """Write target and drafter.

    Args:
        folder: Existing folder.
        seed: Of the weights.
        kind: Of ``TARGETS``.

    Returns:
        Paths of target and drafter.
    """
    target, drafter = folder / "target", folder / "drafter"
    for path, config, weights in (
        (target, *TARGETS[kind](seed)),
        (drafter, _drafter_config(), _drafter_weights(seed)),
    ):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(weights, path / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(cpu.PAIR / "target" / name, target)
    return target, drafter


def runner_of(llm):
    """The model runner of an in-process engine."""
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


class Oracle:
    """Drafter logits that know a plain run's tokens, more or less.

    Args:
        prompts: Token ids of each prompt; no two may start with the same token.
        outputs: Tokens of the plain run.
        seed: Of the noise.
        boost: What the right token's logit is raised by, over noise of deviation 1.
    """

    def __init__(
        self,
        prompts: list[list[int]],
        outputs: list[list[int]],
        seed: int,
        boost: float = 4.0,
    ) -> None:
        self.known = {
            prompt[0]: prompt + output
            for prompt, output in zip(prompts, outputs, strict=True)
        }
        assert len(self.known) == len(prompts)
        self.generator = torch.Generator().manual_seed(seed)
        self.boost = boost
        self.runner = None  # for upstream's proposer, which does not know its own

    def logits(self, proposer, shape: torch.Size) -> torch.Tensor:
        """Logits [B * L, V] for the batch that a proposer drafts for."""
        wide = proposer.num_speculative_tokens  # L
        runner = getattr(proposer, "runner", self.runner)
        logits = torch.randn(shape, generator=self.generator)
        bonus = proposer.positions[: shape[0] // wide * (1 + wide)]
        for row, start in enumerate(bonus.view(-1, 1 + wide)[:, 0].tolist()):
            request = runner.requests[runner.input_batch.req_ids[row]]
            text = self.known[request.prompt_token_ids[0]]
            for depth, token in enumerate(text[start + 1 : start + 1 + wide]):
                logits[row * wide + depth, token] += self.boost
        return logits

    def install(self, monkeypatch) -> None:
        """Patch the proposers of trees and of upstream's chains."""
        from vllm.v1.spec_decode.ddtree.proposer import DDTreeProposer
        from vllm.v1.spec_decode.dflash import DFlashProposer

        build = DDTreeProposer.build_trees

        def build_trees(proposer, logits, num_positions):
            return build(proposer, self.logits(proposer, logits.shape), num_positions)

        def sample(proposer, hidden_states, sampling_metadata):
            shape = torch.Size((len(hidden_states), VOCAB))
            return self.logits(proposer, shape).argmax(-1), None

        monkeypatch.setattr(DDTreeProposer, "build_trees", build_trees)
        monkeypatch.setattr(DFlashProposer, "_sample_draft_tokens", sample)
