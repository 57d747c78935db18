# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Which model classes, recurrent layers and M-RoPE models a tree can serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# Models whose recurrent layers are all of GATED_DELTA_LAYER, and whose classes give
# auxiliary hidden states. The text-only ones of Qwen3.5 are registered since 0.27.
GATED_DELTA_MODELS = frozenset(
    {
        "InternS2PreviewForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3NextForCausalLM",
    }
)
GATED_DELTA_LAYER = "QwenGatedDeltaNetAttention"
# Beyond 0 these bring positions that a text does not have.
MODALITIES = ("image", "video")

# A field of the model's config, and the recurrent layers that it stands for. More
# telling ones first.
_LAYER_FIELDS = (
    ("linear_attn_config", "Kimi delta attention (KDA)"),
    ("linear_num_value_heads", "gated delta layers of another kind"),
    ("attn_type_list", "lightning attention"),
    ("mamba_n_heads", "Mamba-2"),
    ("mamba_num_heads", "Mamba-2"),
    ("mamba_headdim", "Mamba-2"),
    ("mamba_d_state", "Mamba"),
    ("ssm_state_size", "Mamba"),
    ("conv_L_cache", "short convolutions"),
)


def recurrent_layers(text_config: Any) -> str:
    """Name the recurrent layers of a hybrid that is not served.

    Args:
        text_config: The model's Hugging Face text config.

    Returns:
        A name for people, such as ``Mamba-2``.
    """
    for name, kind in _LAYER_FIELDS:
        if getattr(text_config, name, None):
            return kind
    return "recurrent layers of an unknown kind"


def _registered(model: ModelConfig) -> bool:
    from vllm.model_executor.models.registry import ModelRegistry

    return model.architecture in ModelRegistry.models


def serves_gated_delta(model: ModelConfig) -> bool:
    """Whether a model is a hybrid that trees are written for."""
    return model.is_hybrid and model.architecture in GATED_DELTA_MODELS


def _text_only(model: ModelConfig) -> bool:
    limits = model.multimodal_config
    if limits is None or limits.language_model_only:
        return True
    return not any(limits.get_limit_per_prompt(name) for name in MODALITIES)


def unsupported(config: VllmConfig) -> Iterator[tuple[str, Any, str]]:
    """Every (field, value, remedy) that is refused because of the model's layers.

    Args:
        config: Engine configuration.
    """
    model = config.model_config
    served = serves_gated_delta(model)
    if served and not _registered(model):
        # Upstream then takes the class of a like name, and fails when it is built.
        yield (
            "model",
            f"{model.model} ({model.architecture}, a class that this release of vLLM "
            "does not have)",
            "use a newer release, or the checkpoint with its image tower",
        )
        return
    dense = "use a dense full-attention decoder, or plain method='dflash'"
    kinds = [
        (
            model.is_hybrid and not served,
            f"a hybrid with recurrent layers: {recurrent_layers(model.hf_text_config)}",
        ),
        (model.uses_mrope and not served, "one with M-RoPE positions"),
        (model.is_multimodal_model and not served, "multimodal"),
    ]
    for condition, kind in kinds:
        if condition:
            yield "model", f"{model.model} ({kind})", dense
    if not served:
        return
    if model.is_multimodal_model and not _text_only(model):
        yield (
            "limit_mm_per_prompt",
            {
                name: model.multimodal_config.get_limit_per_prompt(name)
                for name in MODALITIES
            },
            "serve text only: set it to " + str(dict.fromkeys(MODALITIES, 0)),
        )
    if config.cache_config.enable_prefix_caching:
        yield (
            "enable_prefix_caching",
            True,
            "a hybrid's state inside a block is not kept along a tree's path: set it "
            "to False",
        )


def verify_target_class(config: VllmConfig) -> None:
    """Refuse a target that gives a DFlash drafter nothing to read.

    For the runner, before any weight is loaded: it imports the model's class, which a
    front end should not. Upstream finds out after both models are loaded.

    Args:
        config: Engine configuration.

    Raises:
        ValueError: Names the model and its class.
    """
    from vllm.model_executor.model_loader.utils import get_model_cls
    from vllm.model_executor.models.interfaces import supports_eagle3

    model = config.model_config
    kind = get_model_cls(model)
    if not supports_eagle3(kind):
        raise ValueError(
            f"model={model.model!r} is not supported with tree_budget="
            f"{config.speculative_config.tree_budget}: its class {kind.__name__} gives "
            "no auxiliary hidden states, which a DFlash drafter reads; serve another "
            "model, or this one without a drafter."
        )


def verify_layers(layers: Mapping[str, Any]) -> None:
    """Refuse a loaded model with a recurrent layer that has no tree path.

    Args:
        layers: Attention and recurrent layers of the model by name.

    Raises:
        ValueError: Names the first such layer and its class.
    """
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    for name, layer in layers.items():
        kind = type(layer).__name__
        if isinstance(layer, MambaBase) and kind != GATED_DELTA_LAYER:
            raise ValueError(
                f"Layer {name!r} is a {kind}, a recurrent layer that tree_budget does "
                "not support; remove tree_budget, or serve another model."
            )
