# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Request parameters that a tree serves, and the refusal of all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

# Sampling parameters that the tree path serves. A field of SamplingParams that is
# in neither table is refused when set, so that a new upstream field cannot be
# ignored in silence.
SUPPORTED_SAMPLING_FIELDS = frozenset(
    {
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "max_tokens",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "stream_interval",  # from 0.27 on
        "skip_clone",
        "output_text_buffer_length",
        # Derived from the ones above by SamplingParams itself.
        "_eos_token_id",
        "_all_stop_token_ids",
        "_bad_words_token_ids",
        # Only says how logprobs are laid out; they are refused themselves.
        "flat_logprobs",
        "skip_reading_prefix_cache",
    }
)


def unsupported_param(params: SamplingParams) -> tuple[str, Any] | None:
    """Find the first parameter that the tree sampler cannot serve.

    Args:
        params: The request's parameters.

    Returns:
        Its name and value, or None.
    """
    from vllm.sampling_params import SamplingParams

    default = SamplingParams()
    for name in SamplingParams.__struct_fields__:
        if name in SUPPORTED_SAMPLING_FIELDS:
            continue
        value = getattr(params, name)
        if value == getattr(default, name) or value in (None, [], {}):
            continue
        return name, value
    return None


def verify_sampling_params(params: SamplingParams) -> None:
    """Refuse a request that the tree sampler cannot serve exactly.

    Args:
        params: The request's parameters after upstream's own checks.

    Raises:
        VLLMValidationError: Names the parameter, its value and the remedy. From 0.27 on
            a server answers 400 to this class alone; in 0.26 it is a ValueError.
    """
    from vllm.exceptions import VLLMValidationError

    found = unsupported_param(params)
    if found is not None:
        name, value = found
        hint = " (beam search asks for them, too)" if name == "logprobs" else ""
        raise VLLMValidationError(
            f"{name}={value!r} is not supported with tree speculative decoding "
            f"(tree_budget) yet{hint}; remove it from the request, or serve without "
            "tree_budget."
        )
