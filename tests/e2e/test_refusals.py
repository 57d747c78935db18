# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""What a tree cannot serve is refused at start-up, with field, value and remedy.

Configurations are built as an engine builds them, but no engine starts.
"""

from __future__ import annotations

import copy
import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import ddtree_cpu as cpu

DRAFTER = str(cpu.PAIR / "drafter")
TARGET = str(cpu.PAIR / "target")
POSITIONS = 15  # the bundled drafter's block size minus 1


def spec(budget: Any = 31, **fields: Any) -> dict[str, Any]:
    return {"method": "ddtree", "model": DRAFTER, "tree_budget": budget, **fields}


def build(speculative: dict[str, Any] | None = None, **args: Any):
    from vllm.engine.arg_utils import EngineArgs

    settings = {
        "model": TARGET,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "speculative_config": spec() if speculative is None else speculative,
        **args,
    }
    return EngineArgs(**settings).create_engine_config()


def refusal(*args: Any, **kwargs: Any) -> str:
    """The message of the refusal, in one line and without pydantic's frame."""
    with pytest.raises(ValueError) as error:
        build(*args, **kwargs)
    if hasattr(error.value, "errors"):
        found = error.value.errors()
        assert len(found) == 1, found
        place = ".".join(map(str, found[0]["loc"]))
        message = f"{place}: {found[0]['msg']} (got {found[0]['input']!r:.200})"
        message = message if place else found[0]["msg"]
    else:
        message = str(error.value)
    assert "\n" not in message
    return message


def variant(
    tmp_path: Path, source: str, drop: tuple[str, ...] = (), **changes: Any
) -> str:
    """A model directory with a changed config.json and nothing else."""
    config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
    config.update(changes)
    for name in drop:
        config.pop(name, None)
        config.get("dflash_config", {}).pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(tmp_path)


# The speculative config by itself.

CHAIN = {"method": "dflash", "model": DRAFTER, "num_speculative_tokens": 7}
BUDGET_RANGE = ["set it to 1..127"]

SPECULATIVE = {
    "ddtree without budget": (
        {"method": "ddtree", "model": DRAFTER},
        ["method='ddtree'", "tree_budget", "set tree_budget to 1..127"],
    ),
    "budget None": (spec(None), ["method='ddtree'", "set tree_budget to 1..127"]),
    "budget 0": (spec(0), ["tree_budget=0", *BUDGET_RANGE]),
    "budget 128": (spec(128), ["tree_budget=128", *BUDGET_RANGE]),
    "budget -1": (spec(-1), ["tree_budget=-1", *BUDGET_RANGE]),
    "budget text": (spec("x"), ["tree_budget", "valid integer", "'x'"]),
    "budget fraction": (spec(1.5), ["tree_budget", "valid integer", "1.5"]),
    "more than one budget": (
        spec(num_speculative_tokens=7),
        [
            "num_speculative_tokens=7",
            "tree_budget=31",
            "remove num_speculative_tokens",
        ],
    ),
    "unknown policy": (
        spec(tree_policy="widest"),
        ["tree_policy", "'best_first' or 'spine_first'", "'widest'"],
    ),
    "policy without budget": (
        {**CHAIN, "tree_policy": "best_first"},
        ["tree_policy='best_first'", "set tree_budget", "remove tree_policy"],
    ),
    "positions without budget": (
        {**CHAIN, "num_draft_positions": 3},
        ["num_draft_positions=3", "set tree_budget", "remove num_draft_positions"],
    ),
    "no positions": (
        spec(num_draft_positions=0),
        ["num_draft_positions=0", "block_size=16", f"set it to 1..{POSITIONS}"],
    ),
    "a position too many": (
        spec(num_draft_positions=POSITIONS + 1),
        ["num_draft_positions=16", "block_size=16", f"set it to 1..{POSITIONS}"],
    ),
    "no drafter": (
        {"method": "ddtree", "tree_budget": 31},
        ["tree_budget=31", "model", "DFlash drafter"],
    ),
    "another method": (
        spec(method="eagle"),
        ["tree_budget=31", "method='eagle'", "use method='ddtree'"],
    ),
    "ngram": (
        {"method": "ngram", "prompt_lookup_max": 3, "tree_budget": 31},
        ["tree_budget=31", "method='ngram'", "use method='ddtree'"],
    ),
    "target as drafter": (
        spec(model=TARGET),
        [f"model={TARGET!r}", "Qwen3ForCausalLM", "no DFlash drafter"],
    ),
    "sampled drafts": (
        spec(draft_sample_method="probabilistic"),
        ["draft_sample_method='probabilistic'", "set it to 'greedy'"],
    ),
    "block verification": (
        spec(rejection_sample_method="block"),
        ["rejection_sample_method='block'", "set it to 'standard'"],
    ),
    "synthetic acceptance": (
        spec(rejection_sample_method="synthetic", synthetic_acceptance_length=2.0),
        ["rejection_sample_method='synthetic'", "set it to 'standard'"],
    ),
    "synthetic rates": (
        spec(1, synthetic_acceptance_rates=[0.5]),
        ["synthetic_acceptance_rates=[0.5]", "remove it"],
    ),
    "synthetic length": (
        spec(synthetic_acceptance_length=2.0),
        ["synthetic_acceptance_length=2.0", "remove it"],
    ),
    "unpadded drafter batch": (
        spec(disable_padded_drafter_batch=True),
        ["disable_padded_drafter_batch=True", "set it to False"],
    ),
    "local argmax": (
        spec(use_local_argmax_reduction=True),
        ["use_local_argmax_reduction=True", "set it to False"],
    ),
    "other vocabulary": (
        spec(use_heterogeneous_vocab=True),
        ["use_heterogeneous_vocab=True", "set it to False"],
    ),
    "dynamic schedule": (
        spec(num_speculative_tokens_per_batch_size=[(1, 8, 31)]),
        ["num_speculative_tokens_per_batch_size=[(1, 8, 31)]", "remove it"],
    ),
    "drafter's KV dtype": (
        spec(kv_cache_dtype="fp8"),
        ["speculative_config.kv_cache_dtype='fp8'", "remove it"],
    ),
    "drafter's backend": (
        spec(attention_backend="FLASH_ATTN"),
        ["speculative_config.attention_backend='FLASH_ATTN'", "remove it"],
    ),
    "EAGLE's static tree": (
        spec(speculative_token_tree="[(0,)]"),
        ["speculative_token_tree", "Unexpected keyword argument"],
    ),
}


@pytest.mark.parametrize("case", SPECULATIVE)
def test_speculative_config(case):
    fields, words = SPECULATIVE[case]
    message = refusal(fields)
    for word in words:
        assert word in message, message


def test_drafter_without_block_size(tmp_path):
    drafter = variant(tmp_path, DRAFTER, drop=("block_size",))
    message = refusal(spec(model=drafter))
    for word in (f"model={drafter!r}", "no block_size", "set num_draft_positions"):
        assert word in message
    config = build(spec(model=drafter, num_draft_positions=7))
    assert config.speculative_config.num_draft_positions == 7


def test_drafter_of_block_size_1(tmp_path):
    message = refusal(spec(model=variant(tmp_path, DRAFTER, block_size=1)))
    assert "block_size=1" in message and "at least 2" in message


def test_sliding_window_drafter(tmp_path):
    drafter = variant(
        tmp_path,
        DRAFTER,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        use_sliding_window=True,
        sliding_window=64,
    )
    message = refusal(spec(model=drafter))
    for word in ("speculative_config.model", drafter, "sliding-window", "use a full"):
        assert word in message


def test_missing_drafter_is_upstreams_error(tmp_path):
    path = str(tmp_path / "absent")
    with pytest.raises(ValueError, match="Invalid repository ID or local directory"):
        build(spec(model=path))


# The engine config.

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


# What is accepted.


def test_defaults():
    config = build()
    speculative = config.speculative_config
    assert speculative.method == "dflash"
    assert speculative.use_ddtree()
    assert speculative.tree_policy == "best_first"
    assert speculative.num_draft_positions == POSITIONS
    assert speculative.num_speculative_tokens == 31
    assert config.attention_config.backend.name == "TREE_ATTN"


@pytest.mark.parametrize("budget", [1, 127])
def test_budget_limits(budget):
    assert build(spec(budget)).speculative_config.num_speculative_tokens == budget


def test_dflash_with_a_budget_is_ddtree():
    fields = ("method", "tree_budget", "tree_policy", "num_draft_positions")
    ours, theirs, bare = (
        build(value).speculative_config
        for value in (
            spec(),
            spec(method="dflash"),
            {"model": DRAFTER, "tree_budget": 31},
        )
    )
    for name in fields:
        assert getattr(ours, name) == getattr(theirs, name) == getattr(bare, name)
    assert ours.compute_hash() == theirs.compute_hash()


def test_chain_is_untouched():
    config = build(CHAIN)
    assert not config.speculative_config.use_ddtree()
    assert config.speculative_config.num_draft_positions is None
    assert config.attention_config.backend is None
    # What DDTree refuses stays upstream's business without a tree.
    build(CHAIN, kv_cache_dtype="bfloat16", block_size=8)


def test_hash_tells_trees_from_chains():
    tree, wider, chain = (
        build(value).speculative_config.compute_hash()
        for value in (spec(7), spec(31), CHAIN)
    )
    assert len({tree, wider, chain}) == 3


def test_validation_is_idempotent():
    """Upstream builds configs again from their own fields, for the drafter too."""
    from dataclasses import replace

    fields = spec(tree_policy="spine_first", num_draft_positions=7)
    config = build(fields)
    assert fields == spec(tree_policy="spine_first", num_draft_positions=7)
    speculative = config.speculative_config
    again = copy.copy(speculative)
    again.__post_init__()
    drafter = replace(
        config, attention_config=replace(config.attention_config, backend=None)
    )
    for other in (again, drafter.speculative_config):
        for name in (
            "method",
            "tree_budget",
            "tree_policy",
            "num_draft_positions",
            "num_speculative_tokens",
        ):
            assert getattr(other, name) == getattr(speculative, name)
    assert again.num_draft_positions == 7
    assert drafter.attention_config.backend.name == "TREE_ATTN"


def test_explicit_tree_backend():
    assert build(attention_backend="TREE_ATTN").attention_config.backend is not None
    build(spec(attention_backend="TREE_ATTN"))


@pytest.mark.parametrize("asked", [True, False, None])
def test_async_scheduling_is_off_on_a_cpu(asked):
    """Upstream's platform switches it off, asked for or not: nothing to refuse."""
    config = build(async_scheduling=asked)
    assert config.scheduler_config.async_scheduling is False


def test_drafter_shorter_than_the_target():
    config = build(spec(max_model_len=64))
    assert config.speculative_config.draft_model_config.max_model_len == 64
