# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Gated delta layers on the V2 model runner: metadata, forward pass, commit.

In a step with drafts every request whose tokens all have logits is *deferred*: the
tree kernels give its outputs and leave its state alone, and after the walk one launch
replays the accepted rows in all layers. That holds with and without a tree, since a
request without one still has drafts that are not accepted. Prompts, which have fewer
rows of logits than tokens, go through upstream's kernels as a batch of their own, and
so does a step without drafts. A request keeps one state, in one slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from vllm.config import get_layers_from_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.spec_decode.ddtree import config_hybrid, tree_state
from vllm.v1.spec_decode.ddtree.gdn import GDNTrees
from vllm.v1.spec_decode.ddtree.kernels.gdn import tree_delta_rule
from vllm.v1.spec_decode.ddtree.kernels.gdn_commit import GDNCommitter, GDNLayer
from vllm.v1.spec_decode.ddtree.kernels.gdn_conv import GDNScratch, tree_conv

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention,
    )
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.spec_decode.ddtree.tree_state import TreeState

logger = init_logger(__name__)


class TreeGDNAttentionBackend(GDNAttentionBackend):
    """Upstream's, with the builder below."""

    @staticmethod
    def get_builder_cls() -> type[TreeGDNMetadataBuilder]:
        return TreeGDNMetadataBuilder


class TreeGDNMetadataBuilder(GDNAttentionMetadataBuilder):
    """Tells deferred requests from the others, which upstream's builder sees alone."""

    def build(  # type: ignore[override]
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> GDNAttentionMetadata:
        """Metadata of a step.

        Args:
            common_prefix_len: Unused.
            common_attn_metadata: Of the whole batch.
            num_accepted_tokens: Unused; every state is up to date.
            num_decode_draft_tokens_cpu: [num_reqs] int32, drafts of a decode, -1 for
                all other requests.
            fast_build: Unused.
        """
        m = common_attn_metadata
        drafts = num_decode_draft_tokens_cpu
        if drafts is None or not bool((drafts > 0).any()):
            return super().build(common_prefix_len, m)
        lengths = m.query_start_loc_cpu.diff()[: m.num_reqs]
        rest = (drafts < 0) & (lengths > 1)
        if not bool(rest.any()):
            return _deferred(m)
        rows = rest.nonzero()[:, 0]
        tokens = torch.cat(
            [
                torch.arange(start, start + length)
                for start, length in zip(
                    m.query_start_loc_cpu[rows].tolist(),
                    lengths[rows].tolist(),
                    strict=True,
                )
            ]
        )
        metadata = super().build(common_prefix_len, _select(m, rows, lengths[rows]))
        metadata.tree = _trees(m, async_tensor_h2d(tokens, device=m.seq_lens.device))
        return metadata

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> GDNAttentionMetadata:
        """A captured batch is one of decodes with drafts."""
        return _deferred(common_attn_metadata)


def _trees(m: CommonAttentionMetadata, rest: torch.Tensor | None) -> GDNTrees:
    # Views of the runner's buffers, whose addresses a captured graph holds.
    return GDNTrees(m.num_reqs, m.query_start_loc, m.block_table_tensor[:, 0], rest)


def _deferred(m: CommonAttentionMetadata) -> GDNAttentionMetadata:
    return GDNAttentionMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decodes=0,
        num_decode_tokens=0,
        num_spec_decodes=m.num_reqs,
        num_spec_decode_tokens=m.num_actual_tokens,
        num_actual_tokens=m.num_actual_tokens,
        tree=_trees(m, None),
    )


def _select(
    m: CommonAttentionMetadata, rows: torch.Tensor, lengths: torch.Tensor
) -> CommonAttentionMetadata:
    """Some requests as a batch of their own; rows and lengths are on the host."""
    starts = torch.zeros(len(rows) + 1, dtype=m.query_start_loc_cpu.dtype)
    torch.cumsum(lengths, dim=0, out=starts[1:])
    on_device = async_tensor_h2d(rows, device=m.seq_lens.device)

    def host(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[rows]

    return m.replace(
        query_start_loc=async_tensor_h2d(starts, device=m.seq_lens.device),
        query_start_loc_cpu=starts,
        seq_lens=m.seq_lens[on_device],
        num_reqs=len(rows),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(lengths.max()),
        block_table_tensor=m.block_table_tensor[on_device],
        is_prefilling=host(m.is_prefilling),
        seq_lens_cpu_upper_bound=host(m.seq_lens_cpu_upper_bound),
        _seq_lens_cpu=None,
        _num_computed_tokens_cpu=None,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


def _conv_state(layer: QwenGatedDeltaNetAttention) -> torch.Tensor:
    """[blocks, C, W - 1], whatever upstream's layout."""
    state = layer.kv_cache[0]
    return state if is_conv_state_dim_first() else state.transpose(-1, -2)


def _conv_weight(layer: QwenGatedDeltaNetAttention) -> torch.Tensor:
    """[C, W]"""
    weight = layer.conv1d.weight
    return weight.view(weight.size(0), weight.size(-1))


def forward_core(
    layer: QwenGatedDeltaNetAttention,
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
) -> None:
    """In place of the layer's ``_forward_core``, with its arguments."""
    # Views of one projection in Qwen3-Next, whose heads are not adjacent where there
    # are as many of keys as of values. Neither kernels here nor upstream's expect that.
    b, a = b.contiguous(), a.contiguous()
    metadata = get_forward_context().attn_metadata
    own: Any = metadata[layer.prefix] if isinstance(metadata, dict) else None
    if own is None or own.tree is None:
        layer._forward_core(mixed_qkv, b, a, core_attn_out)
        return
    forward(layer, own.tree, mixed_qkv, b, a, core_attn_out, layer._forward_core)


def forward(
    layer: QwenGatedDeltaNetAttention,
    trees: GDNTrees,
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    output: torch.Tensor,
    plain: Callable[..., None],
) -> None:
    """Run one layer over deferred requests, then over the rest of the batch.

    Args:
        layer: The layer. Only the rest of the batch changes its caches.
        trees: Of the batch.
        mixed_qkv: [T, C], before the convolution; last dimension contiguous.
        b, a: [T, Hv].
        output: [T, Hv, Dv], written in place.
        plain: Upstream's path with the same five tensors, for requests of its own.
    """
    tree = tree_state.current()
    assert tree is not None
    scratch = tree.gdn_scratch[layer.prefix]
    tree_conv(
        mixed_qkv,
        _conv_state(layer),
        trees.state_indices,
        _conv_weight(layer),
        layer.conv1d.bias,
        trees.query_start_loc,
        tree,
        trees.num_reqs,
        scratch,
        silu=layer.activation is not None,
    )
    tree_delta_rule(
        a,
        b,
        layer.A_log,
        layer.dt_bias,
        layer.kv_cache[1],
        trees.state_indices,
        trees.query_start_loc,
        tree,
        trees.num_reqs,
        layer.num_k_heads // layer.tp_size,
        output,
        scratch,
    )
    if trees.rest is None:
        return
    rows = trees.rest
    others = output.new_zeros(len(rows), *output.shape[1:])
    plain(
        mixed_qkv.index_select(0, rows),
        b.index_select(0, rows),
        a.index_select(0, rows),
        others,
    )
    output.index_copy_(0, rows, others)


def make_scratch(
    layers: Iterable[QwenGatedDeltaNetAttention],
    max_num_reqs: int,
    max_num_tokens: int,
    device: torch.device,
) -> dict[str, GDNScratch]:
    """Allocate what the layers keep between forward pass and commit.

    Args:
        layers: Of the model.
        max_num_reqs: R, most requests of a batch.
        max_num_tokens: Most tokens of the requests that can be deferred. They come
            first in a batch: upstream sorts by length, trees of full size before all.
        device: The model's.

    Returns:
        Scratch by the layer's name.
    """
    return {
        layer.prefix: GDNScratch(
            max_num_reqs,
            max_num_tokens,
            layer.conv_dim // layer.tp_size,
            layer.num_v_heads // layer.tp_size,
            layer.conv_kernel_size,
            layer.model_config.dtype,
            device,
        )
        for layer in layers
    }


def allocate_scratch(
    vllm_config: VllmConfig, tree: TreeState, device: torch.device
) -> None:
    """Put the target's scratch into ``tree.gdn_scratch``; none for a dense target.

    For the speculator, while it loads the drafter: upstream counts what is allocated
    until then as the models', and then only what a profiling run adds. Memory that is
    allocated in between goes to the KV cache once more.

    Args:
        vllm_config: Engine configuration; the target is loaded.
        tree: The buffers.
        device: The runner's device.

    Raises:
        ValueError: A recurrent layer of another kind.
    """
    layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, MambaBase)
    config_hybrid.verify_layers(layers)
    if not layers:
        return
    scheduler = vllm_config.scheduler_config
    most = scheduler.max_num_seqs * tree.num_rows
    tree.gdn_scratch = make_scratch(
        layers.values(),
        scheduler.max_num_seqs,
        min(most, scheduler.max_num_batched_tokens),
        device,
    )
    logger.info(
        "Gated delta layers keep %.2f GiB of layer inputs for trees of %d rows in "
        "up to %d requests; max_num_seqs bounds it.",
        sum(s.num_bytes for s in tree.gdn_scratch.values()) / (1 << 30),
        tree.num_rows,
        scheduler.max_num_seqs,
    )


def make_committer(
    layers: dict[str, QwenGatedDeltaNetAttention],
    scratch: dict[str, GDNScratch],
    kv_cache_config: KVCacheConfig,
    num_positions: int,
) -> GDNCommitter:
    """The committer over all layers, once their caches are there.

    Args:
        layers: By name, at least one.
        scratch: Of ``make_scratch``.
        kv_cache_config: Says which group a layer's states are in.
        num_positions: L.

    Raises:
        ValueError: The layers differ in shape or dtype.
    """
    groups = {
        name: group
        for group, spec in enumerate(kv_cache_config.kv_cache_groups)
        for name in spec.layer_names
    }
    first = next(iter(layers.values()))
    return GDNCommitter(
        [
            GDNLayer(
                scratch[name],
                _conv_state(layer),
                layer.kv_cache[1],
                groups[name],
            )
            for name, layer in layers.items()
        ],
        first.num_k_heads // first.tp_size,
        num_positions,
    )
