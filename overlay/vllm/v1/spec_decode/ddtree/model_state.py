# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Hooks of the V2 model runner around a step with trees.

A mixin over upstream's model states (v1/worker/gpu/model_states): the step's trees are
put into batch order before the forward pass, with the positions corrected in place, and
the K/V rows of the accepted nodes are moved after sampling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.spec_decode.ddtree import gdn_v2, tree_state
from vllm.v1.spec_decode.ddtree.gpu_sampler import DDTreeSampler
from vllm.v1.spec_decode.ddtree.kernels.gdn_commit import GDNCommitter
from vllm.v1.spec_decode.ddtree.kernels.kv_compact import KVCompactor
from vllm.v1.spec_decode.ddtree.kernels.step import prepare_step, shift_positions
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
    from vllm.v1.worker.gpu.model_states.interface import ModelState
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState


class DDTreeModelStateMixin:
    """Adds trees to a model state. Put it before the class that it extends."""

    def __init__(self, vllm_config: VllmConfig, *args: Any) -> None:
        super().__init__(vllm_config, *args)
        tree = tree_state.current()
        assert tree is not None, "the speculator creates the buffers first"
        self.tree = tree
        self._compactor: KVCompactor | None = None
        # The step between preprocess_state and postprocess_state.
        self._step: tuple[InputBatch, tuple[torch.Tensor, ...]] | None = None

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Forget what the slot's last request drafted."""
        super().add_request(req_index, new_req_data)
        self.tree.reset(req_index)

    def custom_sampler(self, sampler: Sampler) -> tuple[Sampler, DDTreeSampler]:
        """Walk trees in place of upstream's rejection sampling."""
        return sampler, DDTreeSampler(sampler, self.tree)

    def preprocess_state(
        self,
        input_batch: InputBatch,
        block_tables: tuple[torch.Tensor, ...],
        kv_cache_config: KVCacheConfig,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        """Put the trees into batch order and correct the positions.

        Runs after the slot mapping, which wants linear positions, and before the
        forward pass, which wants start + depth.
        """
        super().preprocess_state(
            input_batch, block_tables, kv_cache_config, num_computed_tokens
        )
        if self._compactor is None:
            self._compactor = self._make_compactor(kv_cache_config)
        prepare_step(
            self.tree,
            input_batch.idx_mapping,
            input_batch.query_start_loc,
            input_batch.cu_num_logits,
            input_batch.positions,
            input_batch.num_reqs,
            input_batch.num_reqs_after_padding,
        )
        self._step = input_batch, block_tables

    def prepare_inputs(
        self, input_batch: InputBatch, req_states: RequestState
    ) -> dict[str, Any]:
        """Correct multi-dimensional RoPE positions as well."""
        inputs = super().prepare_inputs(input_batch, req_states)
        positions = inputs.get("positions")
        if positions is not None:
            shift_positions(
                positions,
                self.tree,
                input_batch.query_start_loc,
                input_batch.num_reqs,
            )
        return inputs

    def postprocess_state(
        self,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> None:
        """Move the K/V rows of the accepted nodes to their places."""
        super().postprocess_state(idx_mapping, num_sampled, num_computed_tokens)
        if self._step is None:
            return
        input_batch, block_tables = self._step
        self._step = None
        if input_batch.num_draft_tokens > 0:
            self._commit(input_batch, block_tables)

    def _commit(
        self, input_batch: InputBatch, block_tables: tuple[torch.Tensor, ...]
    ) -> None:
        assert self._compactor is not None
        self._compactor.compact(
            block_tables,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            self.tree.b_path,
            self.tree.b_num_sampled,
            input_batch.num_reqs,
        )

    def _make_compactor(self, kv_cache_config: KVCacheConfig) -> KVCompactor:
        """Tables of the target's caches; the drafter's are rewritten from context."""
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        groups: list[list[torch.Tensor]] = []
        for group in kv_cache_config.kv_cache_groups:
            caches = [
                layers[name].kv_cache
                for name in group.layer_names
                if name in layers
                and name not in self.tree.draft_layers
                and layers[name].kv_sharing_target_layer_name is None
            ]
            groups.append(caches)
        return KVCompactor(groups, self.tree.num_positions, self.device)


class DDTreeModelState(DDTreeModelStateMixin, DefaultModelState):
    """Trees over attention-only targets."""


class DDTreeHybridModelState(DDTreeModelStateMixin, MambaHybridModelState):
    """Trees over targets with gated delta layers."""

    def __init__(self, vllm_config: VllmConfig, *args: Any) -> None:
        super().__init__(vllm_config, *args)
        self._gdn_layers: dict[str, Any] = get_layers_from_vllm_config(
            vllm_config, MambaBase
        )
        assert self.tree.gdn_scratch.keys() == self._gdn_layers.keys(), (
            "the speculator allocates what the layers keep"
        )
        self._committer: GDNCommitter | None = None
        self._new_block_ids: list[tuple[list[int], ...]] = []

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Have the states of a new or resumed request start at zero."""
        super().add_request(req_index, new_req_data)
        if new_req_data.num_computed_tokens == 0:
            self._new_block_ids.append(new_req_data.block_ids)

    def preprocess_state(
        self,
        input_batch: InputBatch,
        block_tables: tuple[torch.Tensor, ...],
        kv_cache_config: KVCacheConfig,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        """Also zero the states of new requests, before the forward pass."""
        super().preprocess_state(
            input_batch, block_tables, kv_cache_config, num_computed_tokens
        )
        if self._committer is None:
            self._committer = gdn_v2.make_committer(
                self._gdn_layers,
                self.tree.gdn_scratch,
                kv_cache_config,
                self.tree.num_positions,
            )
        for block_ids in self._new_block_ids:
            first = [ids[0] if ids else 0 for ids in block_ids]
            indices = torch.tensor(first, dtype=torch.int32)
            self._committer.reset(async_tensor_h2d(indices, device=self.device))
        self._new_block_ids.clear()

    def _commit(
        self, input_batch: InputBatch, block_tables: tuple[torch.Tensor, ...]
    ) -> None:
        super()._commit(input_batch, block_tables)
        assert self._committer is not None
        self._committer.commit(
            block_tables,
            self.tree.b_path,
            self.tree.b_num_sampled,
            input_batch.query_start_loc,
            input_batch.cu_num_logits,
            input_batch.num_reqs,
        )


def init_ddtree_model_state(
    vllm_config: VllmConfig,
    model: torch.nn.Module,
    encoder_cache: EncoderCache | None,
    device: torch.device,
) -> ModelState:
    """The model state of a target with trees.

    Args:
        vllm_config: Engine configuration, checked by ``config.verify``.
        model: The target.
        encoder_cache: Of multimodal targets.
        device: The runner's device.

    Returns:
        The model state.

    Raises:
        ValueError: The model brings a state of its own, which no tree path knows.
    """
    if hasattr(model, "get_model_state_cls"):
        raise ValueError(
            f"model={vllm_config.model_config.model!r} has a model state of its own, "
            "which tree_budget does not support; remove tree_budget."
        )
    hybrid = vllm_config.model_config.is_hybrid
    kind = DDTreeHybridModelState if hybrid else DDTreeModelState
    return kind(vllm_config, model, encoder_cache, device)
