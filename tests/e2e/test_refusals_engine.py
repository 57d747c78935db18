# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""What a tree cannot serve of an engine or a target is refused at start-up.

Each message has field, value and remedy. Configurations are built as an engine builds
them; an engine starts where the runner is the first to know.
"""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint

import pytest
from _refusals import TARGET, build, refusal, spec, variant

import ddtree_cpu as cpu

ENGINE = {
    "pipeline": (
        {"pipeline_parallel_size": 2},
        ["pipeline_parallel_size=2", "set it to 1"],
    ),
    "data parallel": (
        {"data_parallel_size": 2},
        ["data_parallel_size=2", "set it to 1"],
    ),
    "prefill context parallel": (
        {"prefill_context_parallel_size": 2},
        ["prefill_context_parallel_size=2", "set it to 1"],
    ),
    "overlap": ({"enable_dbo": True}, ["enable_dbo=True", "switch"]),
    "micro-batches": ({"ubatch_size": 2}, ["ubatch_size=2", "set it to 0"]),
    "LoRA": ({"enable_lora": True}, ["enable_lora=True", "serve without LoRA"]),
    "KV offloading": (
        {"kv_offloading_size": 1.0},
        ["kv_offloading_size=1.0", "serve without KV offloading"],
    ),
    "fp8 KV cache": (
        {"kv_cache_dtype": "fp8"},
        ["kv_cache_dtype='fp8'", "set it to 'auto'"],
    ),
    "other KV dtype": (
        {"kv_cache_dtype": "bfloat16"},
        ["kv_cache_dtype='bfloat16'", "set it to 'auto'"],
    ),
    "fast prefill": (
        {"kv_sharing_fast_prefill": True},
        ["kv_sharing_fast_prefill=True", "switch it off"],
    ),
    "logits processors": (
        {"logits_processors": ["module:Class"]},
        ["logits_processors=['module:Class']", "serve without"],
    ),
    "prompt embeddings": (
        {"enable_prompt_embeds": True},
        ["enable_prompt_embeds=True", "send token prompts"],
    ),
    "routed experts": (
        {"enable_return_routed_experts": True},
        ["enable_return_routed_experts=True", "switch it off"],
    ),
    "pooling": ({"runner": "pooling"}, ["runner='pooling'", "generates text"]),
    "default penalty": (
        {"override_generation_config": {"repetition_penalty": 1.2}},
        ["repetition_penalty=1.2", "generation_config", "'vllm'"],
    ),
    "small batch": (
        {"max_num_batched_tokens": 31, "enable_chunked_prefill": True},
        ["max_num_batched_tokens=31", "1 + tree_budget = 32", "raise it"],
    ),
    "small schedule": (
        {"max_num_scheduled_tokens": 31},
        ["max_num_scheduled_tokens=31", "1 + tree_budget = 32", "raise it"],
    ),
    "prefill threshold": (
        {"long_prefill_token_threshold": 31},
        ["long_prefill_token_threshold=31", "1 + tree_budget = 32", "raise it"],
    ),
    "blocks of 8": ({"block_size": 8}, ["block_size=8", "multiple of 16"]),
    "CPU attention": (
        {"attention_backend": "CPU_ATTN"},
        ["attention_backend=CPU_ATTN", "TREE_ATTN", "remove it"],
    ),
    "flash attention": (
        {"attention_backend": "FLASH_ATTN"},
        ["attention_backend=FLASH_ATTN", "TREE_ATTN", "remove it"],
    ),
}


@pytest.mark.parametrize("case", ENGINE)
def test_engine_config(case):
    fields, words = ENGINE[case]
    message = refusal(**fields)
    for word in words:
        assert word in message, message


def test_kv_connector():
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    message = refusal(kv_transfer_config=transfer)
    assert "kv_transfer_config='ExampleConnector'" in message
    assert "serve without a KV connector" in message


def test_encoder_cache_connector():
    from vllm.config import ECTransferConfig

    transfer = ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_both")
    message = refusal(ec_transfer_config=transfer)
    assert "ec_transfer_config" in message and "serve without" in message


def test_decode_context_parallel(tmp_path):
    target = variant(tmp_path, TARGET, num_key_value_heads=1)
    message = refusal(
        model=target, tensor_parallel_size=2, decode_context_parallel_size=2
    )
    assert "decode_context_parallel_size=2" in message and "set it to 1" in message


def test_drafter_on_fewer_ranks_than_the_target():
    message = refusal(spec(draft_tensor_parallel_size=1), tensor_parallel_size=2)
    assert "draft_tensor_parallel_size=1" in message and "set it to 2" in message
    build(spec(draft_tensor_parallel_size=2), tensor_parallel_size=2)


def test_installed_logits_processor_plugin(monkeypatch):
    """Upstream loads these without being asked, so their mere presence counts."""
    from vllm.v1.spec_decode.ddtree import config

    point = EntryPoint("banned_words", "package.module:Class", "")

    def installed(group: str) -> list[EntryPoint]:
        return [point] if group == "vllm.logits_processors" else []

    monkeypatch.setattr(config, "entry_points", installed)
    message = refusal()
    for word in ("logits_processors", "banned_words", "uninstall"):
        assert word in message


def test_default_penalty_of_the_checkpoint(tmp_path):
    """Qwen2.5 ships one: every request without its own value would carry it."""
    target = variant(tmp_path, TARGET)
    defaults = {"repetition_penalty": 1.05, "temperature": 0.6, "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults), "utf-8")
    message = refusal(model=target)
    for word in ("repetition_penalty=1.05", "set generation_config to 'vllm'"):
        assert word in message
    build(model=target, generation_config="vllm")
    build(model=target, override_generation_config={"repetition_penalty": 1.0})


QWEN3_WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 64,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}


def test_sliding_window_target(tmp_path):
    target = variant(tmp_path, TARGET, **QWEN3_WINDOWS)
    message = refusal(model=target)
    for word in (f"model='{target}", "sliding-window", "plain method='dflash'"):
        assert word in message


KINDS = {
    "is_hybrid": "hybrid",
    "is_attention_free": "free of attention",
    "is_encoder_decoder": "encoder-decoder",
    "use_mla": "latent attention",
    "uses_mrope": "M-RoPE",
    "is_multimodal_model": "multimodal",
    "is_diffusion": "diffusion",
}


@pytest.mark.parametrize("kind", KINDS)
def test_kind_of_target(kind, monkeypatch):
    """Real architectures of each kind would take a model inspection of a minute."""
    from vllm.config import ModelConfig
    from vllm.v1.spec_decode.ddtree import config as ddtree_config

    config = build()
    monkeypatch.setattr(ModelConfig, kind, property(lambda self: True))
    with pytest.raises(ValueError) as error:
        ddtree_config.verify(config)
    for word in (f"model='{TARGET}", KINDS[kind], "use a dense full-attention decoder"):
        assert word in str(error.value)


TEXT_CONFIG = {
    "soft-capping": {"attn_logit_softcapping": 30.0},
    "ALiBi": {"alibi": True},
    "M-RoPE": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
        }
    },
}


@pytest.mark.parametrize("kind", TEXT_CONFIG)
def test_text_config_of_target(kind, tmp_path):
    target = variant(tmp_path, TARGET, **TEXT_CONFIG[kind])
    message = refusal(model=target)
    for word in (f"model='{target}", kind, "use a dense full-attention decoder"):
        assert word in message


@pytest.mark.full
def test_hybrid_architecture(tmp_path):
    config = {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "max_position_embeddings": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    message = refusal(model=str(tmp_path))
    assert f"model='{tmp_path}" in message and "hybrid" in message


def test_target_class_without_auxiliary_hidden_states(tmp_path, monkeypatch):
    """An engine in earnest: the class is seen before the weights, of which are none."""
    from vllm.model_executor.models.gpt2 import GPT2LMHeadModel
    from vllm.model_executor.models.registry import ModelRegistry, _RegisteredModel

    name = "GPT2LMHeadModel"
    # An imported class is not inspected in a process of its own, which takes long.
    known = _RegisteredModel.from_model_cls(GPT2LMHeadModel)
    monkeypatch.setitem(ModelRegistry.models, name, known)
    config = {
        "architectures": [name],
        "model_type": "gpt2",
        "vocab_size": 512,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    settings = {"model": str(tmp_path), "skip_tokenizer_init": True}
    with pytest.raises(ValueError) as error, cpu.engine(spec(), **settings):
        pass
    message = str(error.value)
    for word in (f"model='{tmp_path}", "tree_budget=31", name, "serve another model"):
        assert word in message
    assert "\n" not in message


def test_v2_model_runner(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    message = refusal()
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in message and "unset it" in message


def test_other_platform(monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    message = refusal()
    for word in ("tree_budget=31", "CUDA devices and CPUs", "remove tree_budget"):
        assert word in message


def test_v1_runner_on_a_gpu(monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    message = refusal()
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in message and "unset it" in message
