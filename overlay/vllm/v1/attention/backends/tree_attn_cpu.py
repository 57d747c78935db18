# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""TREE_ATTN on a CPU, for the V1 runner: plain PyTorch.

The mask of each request comes with the batch, in
``CommonAttentionMetadata.tree_mask``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.spec_decode.ddtree.attention import (
    gather_kv,
    masked_attention,
    request_mask,
    store_kv,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.cache import CacheDType
    from vllm.v1.kv_cache_interface import AttentionSpec


class TreeAttentionBackend(AttentionBackend):
    """Registry entry of TREE_ATTN."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return "TREE_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type[TreeAttentionImpl]:
        return TreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeAttentionMetadataBuilder]:
        return TreeAttentionMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @classmethod
    def get_required_kv_cache_layout(cls) -> str | None:
        # The drafter's CPU_ATTN layers share the block pool and want this layout.
        return "HND"

    @staticmethod
    def use_cascade_attention(*args, **kwargs) -> bool:
        return False


@dataclass(slots=True)
class TreeRequest:
    """One request's share of the batch.

    Attributes:
        start: First query row in the batch.
        end: Past its last query row.
        seq_len: Slots to attend, the queries included.
        block_ids: [ceil(seq_len / block_size)] int32.
        mask: [end - start, seq_len] bool or None for all visible.
    """

    start: int
    end: int
    seq_len: int
    block_ids: torch.Tensor
    mask: torch.Tensor | None


@dataclass
class TreeAttentionMetadata:
    """Batch metadata, built once a step and shared by all layers of the group."""

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    requests: list[TreeRequest]
    causal: bool = True


class TreeAttentionMetadataBuilder(AttentionMetadataBuilder[TreeAttentionMetadata]):
    """Builds masks and block lists on the host, which on a CPU costs no sync."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TreeAttentionMetadata:
        cad = common_attn_metadata
        tree = cad.tree_mask
        block_size = self.kv_cache_spec.block_size
        starts = cad.query_start_loc.tolist()
        requests = []
        for row, seq_len in enumerate(cad.seq_lens.tolist()):
            start, end = starts[row], starts[row + 1]
            if end == start:
                continue
            nodes = 0
            if tree is not None and row < len(tree.num_nodes):
                nodes = tree.num_nodes[row]
            mask = request_mask(
                end - start,
                seq_len,
                causal=bool(cad.causal),
                tree=tree.mask[row, : nodes + 1, : nodes + 1] if nodes else None,
            )
            num_blocks = -(-seq_len // block_size)
            block_ids = cad.block_table_tensor[row, :num_blocks]
            requests.append(TreeRequest(start, end, seq_len, block_ids, mask))
        return TreeAttentionMetadata(
            num_actual_tokens=cad.num_actual_tokens,
            slot_mapping=cad.slot_mapping,
            requests=requests,
            causal=bool(cad.causal),
        )


class TreeAttentionImpl(AttentionImpl[TreeAttentionMetadata]):
    """Paged gather, mask, scaled dot product: one request after the other."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        refused = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "sinks": sinks,
            "attn_type": None if attn_type == AttentionType.DECODER else attn_type,
            "kv_cache_dtype": (
                kv_cache_dtype if is_quantized_kv_cache(kv_cache_dtype) else None
            ),
        }
        for name, value in refused.items():
            if value is not None:
                raise ValueError(
                    f"An attention layer with {name}={value!r} is not supported by "
                    "TREE_ATTN on the CPU yet; remove tree_budget, or the backend."
                )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write ``key`` and ``value`` [T, num_kv_heads, head_size] to their slots."""
        store_kv(kv_cache, key, value, slot_mapping)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TreeAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend and write ``output``, both [T, num_heads, head_size]."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("TREE_ATTN has no fused output quantization")
        if attn_metadata is None:  # warm-up
            return output
        for request in attn_metadata.requests:
            keys, values = gather_kv(kv_cache, request.block_ids, request.seq_len)
            rows = slice(request.start, request.end)
            output[rows] = masked_attention(
                query[rows], keys, values, request.mask, self.scale
            ).view_as(output[rows])
        return output
