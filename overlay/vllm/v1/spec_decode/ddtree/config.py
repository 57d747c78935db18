# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Configuration checks of DDTree, called from thin hooks in upstream's configs.

``normalize`` and ``resolve`` run inside ``SpeculativeConfig.__post_init__``,
``verify`` inside ``VllmConfig.__post_init__``, ``verify_sampling_params`` inside
``SamplingParams.verify`` (it stands in ``params``). All name the field, the value and
the remedy; the server turns the last one into HTTP 400.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from . import config_hybrid, rank_check
from .params import unsupported_param
from .params import verify_sampling_params as verify_sampling_params  # for patch 0004

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

MAX_TREE_BUDGET = 127
TREE_POLICIES = ("best_first", "spine_first")
LOGITS_PROCESSOR_GROUP = "vllm.logits_processors"

# Trees of this many requests fit a FULL CUDA graph by default.
MAX_GRAPH_REQUESTS = 32
_in_drafter_scope = False


@contextmanager
def drafter_scope() -> Iterator[None]:
    """Leave configurations alone that are derived for the drafter.

    Upstream copies the engine's configuration for the drafter's own layers, which
    runs ``verify`` again; those layers want the platform's backend, not TREE_ATTN.
    """
    global _in_drafter_scope
    _in_drafter_scope = True
    try:
        yield
    finally:
        _in_drafter_scope = False


def needs_v2_runner(config: VllmConfig) -> bool:
    """Whether trees want the V2 model runner: everywhere but on a CPU.

    Args:
        config: Engine configuration, not yet checked.

    Returns:
        True on a GPU with a tree budget, whatever upstream's default for the model.
    """
    from vllm.platforms import current_platform

    spec = config.speculative_config
    return spec is not None and spec.use_ddtree() and not current_platform.is_cpu()


def _tree_fields(spec: SpeculativeConfig) -> dict[str, Any]:
    return {
        name: getattr(spec, name)
        for name in ("tree_budget", "tree_policy", "num_draft_positions")
        if getattr(spec, name) is not None
    }


def normalize(spec: SpeculativeConfig) -> None:
    """Turn ``method: ddtree`` into ``dflash`` with a tree budget.

    Idempotent, since upstream builds the config again from its own fields.

    Args:
        spec: Configuration under construction; ``method``, ``tree_policy`` and
            ``num_speculative_tokens`` are rewritten in place.

    Raises:
        ValueError: A tree field is out of range or contradicts another field.
    """
    fields = _tree_fields(spec)
    if spec.method == "ddtree" and spec.tree_budget is None:
        raise ValueError(
            "method='ddtree' requires tree_budget, the number of draft nodes per "
            f"step; set tree_budget to 1..{MAX_TREE_BUDGET}, for example 31."
        )
    if spec.tree_budget is None:
        if fields:
            name, value = next(iter(fields.items()))
            raise ValueError(
                f"{name}={value!r} only applies with a tree_budget; set tree_budget "
                f"(1..{MAX_TREE_BUDGET}) or remove {name}."
            )
        return
    if spec.method is None:
        spec.method = "dflash"
    if spec.method not in ("ddtree", "dflash"):
        raise ValueError(
            f"tree_budget={spec.tree_budget} does not apply to "
            f"method={spec.method!r}; use method='ddtree' with a DFlash drafter."
        )
    if not 1 <= spec.tree_budget <= MAX_TREE_BUDGET:
        raise ValueError(
            f"tree_budget={spec.tree_budget} is out of range; set it to "
            f"1..{MAX_TREE_BUDGET}."
        )
    if spec.model is None:
        raise ValueError(
            f"tree_budget={spec.tree_budget} requires model, the path or name of a "
            "DFlash drafter, which is not set."
        )
    tokens = spec.num_speculative_tokens
    if tokens is not None and tokens != spec.tree_budget:
        raise ValueError(
            f"num_speculative_tokens={tokens} contradicts "
            f"tree_budget={spec.tree_budget}; with a tree the budget is the number "
            "of speculative tokens, so remove num_speculative_tokens."
        )
    pp = getattr(spec.target_parallel_config, "pipeline_parallel_size", 1)
    if pp > 1:
        # Here, because upstream's own check of the drafter comes before `verify`.
        raise ValueError(
            f"pipeline_parallel_size={pp} is not supported with "
            f"tree_budget={spec.tree_budget} yet; set it to 1."
        )
    spec.method = "dflash"
    spec.tree_policy = spec.tree_policy or "best_first"
    spec.num_speculative_tokens = spec.tree_budget

    refused = {
        "draft_sample_method": (spec.draft_sample_method, "greedy"),
        "rejection_sample_method": (spec.rejection_sample_method, "standard"),
        "disable_padded_drafter_batch": (spec.disable_padded_drafter_batch, False),
        "use_local_argmax_reduction": (spec.use_local_argmax_reduction, False),
        "use_heterogeneous_vocab": (spec.use_heterogeneous_vocab, False),
        "num_speculative_tokens_per_batch_size": (
            spec.num_speculative_tokens_per_batch_size,
            None,
        ),
        "synthetic_acceptance_rates": (spec.synthetic_acceptance_rates, None),
        "synthetic_acceptance_length": (spec.synthetic_acceptance_length, None),
    }
    for name, (value, required) in refused.items():
        if value != required:
            raise ValueError(
                f"{name}={value!r} is not supported with "
                f"tree_budget={spec.tree_budget}; set it to {required!r} or remove it."
            )
    if spec.draft_model_config is None:
        _check_drafter(spec)


def _check_drafter(spec: SpeculativeConfig) -> None:
    """Refuse a model that is no DFlash drafter, before upstream renames it to one."""
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    config = None
    with suppress(ValueError):  # no path and no repository name: upstream says so
        config = get_hf_file_to_dict("config.json", spec.model, spec.revision or "main")
    architectures = (config or {}).get("architectures")
    if architectures and not any("DFlash" in name for name in architectures):
        raise ValueError(
            f"model={spec.model!r} has architectures {architectures}, which is no "
            "DFlash drafter; tree_budget needs one (DFlashDraftModel)."
        )


def _block_size(hf_config: Any) -> int | None:
    """The drafter's trained block size, wherever its checkpoint keeps it."""
    nested = getattr(hf_config, "dflash_config", None) or {}
    for value in (
        getattr(hf_config, "block_size", None),
        nested.get("block_size"),
        getattr(getattr(hf_config, "model", None), "block_size", None),
    ):
        if value is not None:
            return int(value)
    return None


def resolve(spec: SpeculativeConfig) -> None:
    """Set ``num_draft_positions`` (L) from the loaded drafter config.

    Args:
        spec: Normalised configuration whose ``draft_model_config`` is loaded.

    Raises:
        ValueError: The drafter has no block size, or was not trained for as many
            positions as asked for.
    """
    if spec.tree_budget is None or spec.draft_model_config is None:
        return
    block_size = _block_size(spec.draft_model_config.hf_config)
    asked = spec.num_draft_positions
    if block_size is None:
        if asked is None:
            raise ValueError(
                f"The drafter config of model={spec.model!r} has no block_size; set "
                "num_draft_positions to the positions it was trained for."
            )
        block_size = asked + 1
    if block_size < 2:
        raise ValueError(
            f"block_size={block_size} of drafter model={spec.model!r} leaves no "
            "draft position; a DFlash drafter has a block_size of at least 2."
        )
    if asked is not None and not 1 <= asked <= block_size - 1:
        raise ValueError(
            f"num_draft_positions={asked} is out of range: the drafter was trained "
            f"for block_size={block_size}; set it to 1..{block_size - 1}."
        )
    spec.num_draft_positions = asked if asked is not None else block_size - 1


def _sliding_window(hf_config: Any) -> bool:
    layer_types = getattr(hf_config, "layer_types", None) or []
    if layer_types:
        return any("sliding" in str(kind) for kind in layer_types)
    if getattr(hf_config, "use_sliding_window", None) is False:
        return False
    return bool(getattr(hf_config, "sliding_window", None))


def _set_capture_sizes(config: VllmConfig) -> None:
    """Choose CUDA graph sizes that are whole trees, unless the user chose.

    Upstream's default stops at 512 tokens, which is 8 requests of 64 rows. Piecewise
    graphs keep upstream's small sizes; above them only multiples of Q = 1 + N count.
    """
    compilation = config.compilation_config
    if (
        compilation.cudagraph_capture_sizes is not None
        or compilation.max_cudagraph_capture_size is not None
    ):
        return
    rows = config.speculative_config.tree_budget + 1
    scheduler = config.scheduler_config
    most = min(scheduler.max_num_seqs, MAX_GRAPH_REQUESTS)
    requests = {1, 2, 3, *range(4, min(most, 16) + 1, 2), *range(16, most + 1, 4), most}
    small = min(512, 2 * rows * scheduler.max_num_seqs)
    sizes = {1, 2, 4, *range(8, min(small, 255) + 1, 8), *range(256, small + 1, 16)}
    sizes |= {n * rows for n in requests if n <= most}
    limit = scheduler.max_num_batched_tokens
    compilation.cudagraph_capture_sizes = sorted(n for n in sizes if n <= limit)


def _unsupported(config: VllmConfig) -> list[tuple[str, Any, str]]:
    """Every (field, value, remedy) of ``config`` that a tree cannot serve."""
    from vllm.sampling_params import SamplingParams
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    model = config.model_config
    parallel = config.parallel_config
    spec = config.speculative_config
    # Without Triton upstream's choice of V2, as for mixed drafters, is of no avail.
    v2 = config.use_v2_model_runner and HAS_TRITON
    found: list[tuple[str, Any, str]] = []

    def refuse(condition: Any, field: str, value: Any, remedy: str) -> None:
        if condition:
            found.append((field, value, remedy))

    pp = parallel.pipeline_parallel_size
    refuse(pp > 1, "pipeline_parallel_size", pp, "set it to 1")
    dp = parallel.data_parallel_size
    refuse(dp > 1, "data_parallel_size", dp, "set it to 1")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        refuse(size > 1, name, size, "set it to 1")
    refuse(parallel.enable_dbo, "enable_dbo", True, "switch dual batch overlap off")
    ubatch = parallel.ubatch_size
    refuse(ubatch > 1, "ubatch_size", ubatch, "set it to 0")
    refuse(config.lora_config, "enable_lora", True, "serve without LoRA")
    refuse(
        config.kv_transfer_config,
        "kv_transfer_config",
        getattr(config.kv_transfer_config, "kv_connector", None),
        "serve without a KV connector",
    )
    offloading = config.cache_config.kv_offloading_size
    refuse(offloading, "kv_offloading_size", offloading, "serve without KV offloading")
    refuse(
        config.ec_transfer_config,
        "ec_transfer_config",
        "set",
        "serve without an encoder-cache connector",
    )
    cache_dtype = config.cache_config.cache_dtype
    refuse(
        cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")),
        "kv_cache_dtype",
        cache_dtype,
        "set it to 'auto'",
    )
    block_size = config.cache_config.block_size
    refuse(
        config.cache_config.user_specified_block_size and block_size % 16,
        "block_size",
        block_size,
        "set it to a multiple of 16",
    )
    refuse(
        config.cache_config.kv_sharing_fast_prefill,
        "kv_sharing_fast_prefill",
        True,
        "switch it off",
    )
    refuse(
        model.runner_type != "generate",
        "runner",
        model.runner_type,
        "serve a model that generates text",
    )
    text = model.hf_text_config
    kinds = (
        (model.is_attention_free, "free of attention"),
        (model.is_encoder_decoder, "an encoder-decoder"),
        (model.use_mla, "one with multi-head latent attention"),
        (model.uses_xdrope_dim > 0, "one with XD-RoPE positions"),
        (model.is_diffusion, "a diffusion model"),
        (
            _sliding_window(text) and not v2,
            "one with sliding-window layers, on the V1 runner",
        ),
        (
            getattr(text, "attn_logit_softcapping", None),
            "one with attention soft-capping",
        ),
        (getattr(text, "alibi", None), "one with ALiBi"),
    )
    for condition, kind in kinds:
        refuse(
            condition,
            "model",
            f"{model.model} ({kind})",
            "use a dense full-attention decoder, or plain method='dflash'",
        )
    found.extend(config_hybrid.unsupported(config))
    refuse(
        model.enable_prompt_embeds, "enable_prompt_embeds", True, "send token prompts"
    )
    refuse(
        model.logits_processors,
        "logits_processors",
        model.logits_processors,
        "serve without custom logits processors",
    )
    refuse(
        model.use_fp64_gumbel,
        "use_fp64_gumbel",
        True,
        "the tree sampler draws float32 noise: switch it off",
    )
    plugins = [point.name for point in entry_points(group=LOGITS_PROCESSOR_GROUP)]
    refuse(
        plugins,
        "logits_processors",
        f"{', '.join(plugins)} (installed as a plugin)",
        "uninstall the package that brings it",
    )
    default = unsupported_param(
        SamplingParams.from_optional(**model.get_diff_sampling_param())
    )
    refuse(
        default,
        f"generation_config {default and default[0]}",
        default and default[1],
        "it would apply to every request: set generation_config to 'vllm', or this "
        "field in override_generation_config to its neutral value",
    )
    refuse(
        getattr(model, "enable_return_routed_experts", False),
        "enable_return_routed_experts",
        True,
        "switch it off",
    )
    if spec.draft_model_config is not None:
        refuse(
            spec.kv_cache_dtype not in (None, "auto", cache_dtype),
            "speculative_config.kv_cache_dtype",
            spec.kv_cache_dtype,
            "remove it, so that the drafter uses the target's",
        )
        drafter_backend = spec.attention_backend
        refuse(
            not v2 and drafter_backend not in (None, AttentionBackendEnum.TREE_ATTN),
            "speculative_config.attention_backend",
            getattr(drafter_backend, "name", None),
            "remove it, so that the platform's own is used",
        )
        refuse(
            v2 and drafter_backend == AttentionBackendEnum.TREE_ATTN,
            "speculative_config.attention_backend",
            "TREE_ATTN",
            "remove it: the drafter's attention is no tree attention",
        )
        refuse(
            not v2 and _sliding_window(spec.draft_model_config.hf_config),
            "speculative_config.model",
            f"{spec.model} (a drafter with sliding-window layers)",
            "use a full-attention DFlash drafter on the V1 runner",
        )
        draft_tp = spec.draft_tensor_parallel_size
        refuse(
            draft_tp not in (None, parallel.tensor_parallel_size),
            "draft_tensor_parallel_size",
            draft_tp,
            f"set it to {parallel.tensor_parallel_size}, as the target's",
        )
    return found


def verify(config: VllmConfig) -> None:
    """Check a whole engine configuration and select the tree attention backend.

    Args:
        config: Engine configuration; ``attention_config.backend`` is set.

    Raises:
        ValueError: A feature that the tree path does not serve is switched on.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    spec = config.speculative_config
    if spec is None or spec.tree_budget is None or config.model_config is None:
        return
    if _in_drafter_scope:
        return
    v2 = config.use_v2_model_runner
    if not v2 and not current_platform.is_cpu():
        raise ValueError(
            f"VLLM_USE_V2_MODEL_RUNNER=0 selects the V1 model runner, which serves "
            f"tree_budget={spec.tree_budget} on a CPU only; unset it, or remove "
            "tree_budget to run the DFlash chain."
        )
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        raise ValueError(
            f"tree_budget={spec.tree_budget} is served on CUDA devices and CPUs, not "
            f"on {current_platform.device_name!r}; remove tree_budget to run the "
            "DFlash chain."
        )
    for field, value, remedy in _unsupported(config):
        raise ValueError(
            f"{field}={value!r} is not supported with tree_budget="
            f"{spec.tree_budget} yet; {remedy}."
        )
    if v2 and not HAS_TRITON:
        raise ValueError(
            "VLLM_USE_V2_MODEL_RUNNER=1 selects a model runner that needs Triton; "
            "unset it to serve a tree_budget on the CPU."
        )
    scheduler = config.scheduler_config
    rows = spec.tree_budget + 1
    if scheduler.max_num_batched_tokens < rows:
        raise ValueError(
            f"max_num_batched_tokens={scheduler.max_num_batched_tokens} is less than "
            f"the 1 + tree_budget = {rows} rows of one request; raise it or lower "
            "tree_budget."
        )
    limit = scheduler.max_num_scheduled_tokens
    if limit is not None and limit < rows:
        raise ValueError(
            f"max_num_scheduled_tokens={limit} is less than the 1 + tree_budget = "
            f"{rows} rows of one request; raise it or lower tree_budget."
        )
    threshold = scheduler.long_prefill_token_threshold
    if 0 < threshold < rows:
        raise ValueError(
            f"long_prefill_token_threshold={threshold} would cut every tree of "
            f"1 + tree_budget = {rows} rows; raise it or set it to 0."
        )
    backend = config.attention_config.backend
    if backend not in (None, AttentionBackendEnum.TREE_ATTN):
        raise ValueError(
            f"attention_backend={backend.name} cannot mask a tree; remove it or set "
            "TREE_ATTN."
        )
    if config.attention_config.backend_per_kind:
        raise ValueError(
            f"backend_per_kind={config.attention_config.backend_per_kind!r} is not "
            "supported with tree_budget; remove it."
        )
    rank_check.enabled(config)
    config.attention_config.backend = AttentionBackendEnum.TREE_ATTN
    if v2:
        _set_capture_sizes(config)
