# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""TREE_ATTN for the V2 model runner.

Rows of at most 1 + N tokens come first in the runner's batch. They are served as
context plus own rows; with FlashAttention 3 the context is its pass, elsewhere, and in
sliding windows, one Triton kernel splits the context. Longer rows are prefills without
a tree; they take FlashAttention's causal pass where there is one. The cache layout is
that of upstream's FlashAttention backend (0.26.0, v1/attention/backends/
flash_attn.py), of which this extends the registry entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.torch_utils import (
    canonicalize_singleton_dim_strides,
    is_quantized_kv_cache,
)
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import get_kv_cache_layout
from vllm.v1.spec_decode.ddtree import tree_state
from vllm.v1.spec_decode.ddtree.attention import store_kv
from vllm.v1.spec_decode.ddtree.kernels.attention import (
    merge_new_rows,
    split_kv_attention,
)

if current_platform.is_cuda():
    from vllm.v1.attention.backends.fa_utils import (
        flash_attn_varlen_func,
        get_flash_attn_version,
        get_scheduler_metadata,
        is_flash_attn_varlen_func_available,
        reshape_and_cache_flash,
    )

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.cache import CacheDType
    from vllm.v1.kv_cache_interface import AttentionSpec

logger = init_logger(__name__)

MODES = ("auto", "flash", "triton")


def attention_mode(vllm_config: VllmConfig) -> str:
    """``ddtree_attention`` of ``additional_config``: auto, flash or triton.

    Raises:
        ValueError: It is none of them.
    """
    extra = vllm_config.additional_config
    mode = extra.get("ddtree_attention", "auto") if isinstance(extra, dict) else "auto"
    if mode not in MODES:
        raise ValueError(
            f"additional_config ddtree_attention={mode!r} is unknown; set it to one "
            f"of {', '.join(MODES)}."
        )
    return mode


def flash_version(head_size: int, dtype: torch.dtype) -> int | None:
    """The FlashAttention that can serve such a layer, or None."""
    if not current_platform.is_cuda() or dtype == torch.float32:
        return None
    if not is_flash_attn_varlen_func_available():
        return None
    return get_flash_attn_version(head_size=head_size)


class TreeAttentionBackend(AttentionBackend):
    """Registry entry of TREE_ATTN."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "float16",
        "bfloat16",
    ]

    @staticmethod
    def get_name() -> str:
        return "TREE_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= 256

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

    @staticmethod
    def get_kv_cache_stride_order(
        include_num_layers_dimension: bool = False,
    ) -> tuple[int, ...]:
        if get_kv_cache_layout() == "HND":
            return (1, 2, 0, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)

    @classmethod
    def get_required_kv_cache_layout(cls) -> str | None:
        # On a CPU, in the interpreter, the drafter's layers are CPU_ATTN's.
        return "HND" if current_platform.is_cpu() else None

    @staticmethod
    def use_cascade_attention(*args, **kwargs) -> bool:
        return False


@dataclass
class TreeAttentionMetadata:
    """Batch metadata, built once a step and shared by all layers of the group.

    Attributes:
        num_actual_tokens: T, without padding.
        num_short: Requests of at most 1 + N rows, the first of the batch.
        short_tokens: Their rows.
        short_query_len: Rows of the longest of them.
        num_reqs: All requests.
        max_query_len: Rows of the longest of all.
        max_seq_len: Upper bound of the lengths.
        query_start_loc: [num_reqs + 1] int32.
        seq_lens: [num_reqs] int32.
        context_lens: [num_short] int32, slots before the first row.
        block_table: [num_reqs, max_blocks] int32.
        scheduler_metadata: FlashAttention 3's plan of the context pass, or None.
        max_num_splits: FlashAttention's bound, 0 for its own choice.
        long_query_start_loc: [num_reqs - num_short + 1] int32, from 0.
    """

    num_actual_tokens: int
    num_short: int
    short_tokens: int
    short_query_len: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    scheduler_metadata: torch.Tensor | None
    max_num_splits: int
    long_query_start_loc: torch.Tensor | None


class TreeAttentionMetadataBuilder(AttentionMetadataBuilder[TreeAttentionMetadata]):
    """Splits the batch on the host by lengths that the host knows."""

    # A mixed batch needs the host's split, which a graph cannot express.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        self.impl: TreeAttentionImpl = layers[layer_names[0]].impl
        self.max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.context_lens = torch.zeros(
            self.max_num_reqs, dtype=torch.int32, device=device
        )
        self.plan: torch.Tensor | None = None
        self.max_num_splits = 0
        self.max_graph_tokens = 0
        compilation = vllm_config.compilation_config
        if compilation.cudagraph_mode.has_full_cudagraphs():
            self.max_graph_tokens = compilation.max_cudagraph_capture_size or 0
            attention = vllm_config.attention_config
            if self.impl.fa_version == 3:  # FlashAttention 2 refuses a number
                self.max_num_splits = attention.flash_attn_max_num_splits_for_cuda_graph
        if self.impl.context_by_flash and self.impl.fa_version == 3:
            # As FlashAttentionMetadataBuilder: one counter, then four per request,
            # for a multiple of four requests.
            padded = -(-self.max_num_reqs // 4) * 4
            self.plan = torch.zeros(1 + 4 * padded, dtype=torch.int32, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TreeAttentionMetadata:
        cad = common_attn_metadata
        num_reqs = cad.num_reqs
        tree = tree_state.current()
        assert tree is not None
        starts = cad.query_start_loc_cpu[: num_reqs + 1].numpy()
        num_short, short_query_len = num_reqs, cad.max_query_len
        if cad.max_query_len > tree.num_rows:
            # The runner sorts full trees first, then by length.
            lengths = starts[1:] - starts[:-1]
            num_short = int((lengths <= tree.num_rows).sum())
            short_query_len = int(lengths[:num_short].max()) if num_short else 0
        short_tokens = int(starts[num_short])

        starts_gpu = cad.query_start_loc[: num_reqs + 1]
        context_lens = self.context_lens[:num_reqs]
        torch.sub(starts_gpu[:-1], starts_gpu[1:], out=context_lens)
        context_lens += cad.seq_lens[:num_reqs]

        max_num_splits = 0
        if cad.num_actual_tokens <= self.max_graph_tokens:
            max_num_splits = self.max_num_splits
        scheduler_metadata = None
        if self.plan is not None and num_short:
            plan = get_scheduler_metadata(
                batch_size=num_short,
                max_seqlen_q=short_query_len,
                max_seqlen_k=cad.max_seq_len,
                num_heads_q=self.impl.num_heads,
                num_heads_kv=self.impl.num_kv_heads,
                headdim=self.impl.head_size,
                cache_seqlens=context_lens[:num_short],
                qkv_dtype=self.kv_cache_spec.dtype,
                cu_seqlens_q=starts_gpu[: num_short + 1],
                page_size=self.kv_cache_spec.block_size,
                causal=False,
                window_size=(-1, -1),
                num_splits=max_num_splits,
            )
            size = plan.shape[0]
            self.plan[:size] = plan
            self.plan[size:] = 0
            scheduler_metadata = self.plan[:size]
        long_starts = None
        if num_short < num_reqs:
            long_starts = starts_gpu[num_short:] - starts_gpu[num_short]
        return TreeAttentionMetadata(
            num_actual_tokens=cad.num_actual_tokens,
            num_short=num_short,
            short_tokens=short_tokens,
            short_query_len=short_query_len,
            num_reqs=num_reqs,
            max_query_len=cad.max_query_len,
            max_seq_len=cad.max_seq_len,
            query_start_loc=starts_gpu,
            seq_lens=cad.seq_lens[:num_reqs],
            context_lens=context_lens[:num_short],
            block_table=cad.block_table_tensor,
            scheduler_metadata=scheduler_metadata,
            max_num_splits=max_num_splits,
            long_query_start_loc=long_starts,
        )


class TreeAttentionImpl(AttentionImpl[TreeAttentionMetadata]):
    """One layer's attention."""

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
            "logits_soft_cap": logits_soft_cap,
            "sinks": sinks,
            # Own rows are read from key and value, which a sharing layer lacks.
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "attn_type": None if attn_type == AttentionType.DECODER else attn_type,
            "kv_cache_dtype": (
                kv_cache_dtype if is_quantized_kv_cache(kv_cache_dtype) else None
            ),
        }
        for name, value in refused.items():
            if value is not None:
                raise ValueError(
                    f"An attention layer with {name}={value!r} is not supported by "
                    "TREE_ATTN yet; remove tree_budget, or the backend."
                )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

        from vllm.config import get_current_vllm_config

        config = get_current_vllm_config()
        mode = attention_mode(config)
        dtype = config.model_config.dtype
        self.fa_version = None if mode == "triton" else flash_version(head_size, dtype)
        if mode == "flash" and self.fa_version is None:
            raise ValueError(
                "additional_config ddtree_attention='flash' cannot be served: "
                f"FlashAttention has no kernel for head_size={head_size} in {dtype} "
                "here; remove it."
            )
        # FlashAttention 2 does not split the context when a request has several
        # rows, and no version has a window per row.
        self.context_by_flash = sliding_window is None and (
            mode == "flash" or self.fa_version in (3, 4)
        )
        logger.info_once(
            "TREE_ATTN: context of %s layers by %s, prefills by %s",
            "sliding-window" if sliding_window else "full-attention",
            f"FlashAttention {self.fa_version}"
            if self.context_by_flash
            else "the Triton split-KV kernel",
            f"FlashAttention {self.fa_version}" if self.fa_version else "Triton",
        )

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write ``key`` and ``value`` [T, num_kv_heads, head_size] to their slots."""
        if kv_cache.device.type == "cpu":
            store_kv(kv_cache, key, value, slot_mapping)
            return
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        reshape_and_cache_flash(
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            self.kv_cache_dtype,
            layer._k_scale,
            layer._v_scale,
        )

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
        if attn_metadata is None:  # profiling
            return output.fill_(0)
        meta = attn_metadata
        tree = tree_state.current()
        assert tree is not None
        num_tokens = meta.num_actual_tokens
        query = query[:num_tokens]
        out = output.view(-1, self.num_heads, self.head_size)[:num_tokens]
        prefill_by_triton = self.fa_version is None
        if not self.context_by_flash:
            reqs = meta.num_reqs if prefill_by_triton else meta.num_short
            if reqs:
                all_rows = reqs == meta.num_reqs
                split_kv_attention(
                    query,
                    key,
                    value,
                    kv_cache,
                    out,
                    meta.query_start_loc,
                    meta.seq_lens,
                    meta.block_table,
                    tree,
                    reqs,
                    meta.max_query_len if all_rows else meta.short_query_len,
                    num_tokens if all_rows else meta.short_tokens,
                    self.scale,
                    self.window,
                )
            if reqs == meta.num_reqs:
                return output

        key_cache, value_cache = (
            canonicalize_singleton_dim_strides(part)
            for part in kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        )
        num_short = meta.num_short
        if self.context_by_flash and num_short:
            context_out, context_lse = flash_attn_varlen_func(
                q=query[: meta.short_tokens],
                k=key_cache,
                v=value_cache,
                cu_seqlens_q=meta.query_start_loc[: num_short + 1],
                max_seqlen_q=meta.short_query_len,
                seqused_k=meta.context_lens,
                max_seqlen_k=meta.max_seq_len,
                softmax_scale=self.scale,
                causal=False,
                block_table=meta.block_table[:num_short],
                return_softmax_lse=True,
                scheduler_metadata=meta.scheduler_metadata,
                fa_version=self.fa_version,
                num_splits=meta.max_num_splits,
            )
            merge_new_rows(
                query,
                key,
                value,
                kv_cache,
                out,
                context_out,
                context_lse,
                meta.query_start_loc,
                meta.seq_lens,
                meta.block_table,
                tree,
                num_short,
                meta.short_query_len,
                self.scale,
            )
        if num_short < meta.num_reqs:
            flash_attn_varlen_func(
                q=query[meta.short_tokens :],
                k=key_cache,
                v=value_cache,
                out=out[meta.short_tokens :],
                cu_seqlens_q=meta.long_query_start_loc,
                max_seqlen_q=meta.max_query_len,
                seqused_k=meta.seq_lens[num_short:],
                max_seqlen_k=meta.max_seq_len,
                softmax_scale=self.scale,
                causal=True,
                window_size=[-1, -1] if self.window is None else [self.window - 1, 0],
                block_table=meta.block_table[num_short : meta.num_reqs],
                fa_version=self.fa_version,
            )
        return output
