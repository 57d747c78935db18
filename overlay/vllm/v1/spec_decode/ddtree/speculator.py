# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""DFlash on the V2 model runner with L draft positions and a tree of N nodes.

Extends upstream's ``DFlashSpeculator`` (v1/worker/gpu/spec_decode/dflash/
speculator.py). The tree is built inside the drafter's captured graph. The context that
the drafter gets is gathered along the accepted paths, at most L + 1 rows per tree.
"""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.spec_decode.ddtree import config as ddtree_config
from vllm.v1.spec_decode.ddtree import config_hybrid, gdn_v2, rank_check, tree_state
from vllm.v1.spec_decode.ddtree.kernels.build import TreeBuilder
from vllm.v1.spec_decode.ddtree.kernels.context import prepare_tree_inputs
from vllm.v1.spec_decode.ddtree.kernels.step import store_drafts
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.buffer_utils import async_copy_to_gpu
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch

logger = init_logger(__name__)


class DDTreeSpeculator(DFlashSpeculator):
    """Drafts trees. ``num_speculative_steps`` is L, ``draft_tokens`` is [R, N]."""

    _speculator_name = "DDTree"

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        config_hybrid.verify_target_class(vllm_config)
        super().__init__(vllm_config, device)
        self.tree = tree_state.create(vllm_config, device)
        self.draft_tokens = self.tree.d_tokens
        self.rank_checker = rank_check.create(vllm_config)
        self.context_rows = torch.zeros_like(self.context_positions)
        build = DFlashSpeculator._build_draft_attn_metadata
        self._metadata_parameters = frozenset(signature(build).parameters)
        self.builder = TreeBuilder(
            self.max_num_reqs,
            self.num_speculative_steps,
            self.tree.budget,
            vllm_config.model_config.get_vocab_size(),
            self.speculative_config.tree_policy,
            device,
        )
        logger.info_once(
            "DDTree is on: tree_budget=%d, tree_policy=%s, %d draft positions, "
            "attention backend TREE_ATTN, model runner V2.",
            self.tree.budget,
            self.speculative_config.tree_policy,
            self.num_speculative_steps,
        )

    @property
    def attn_vllm_config(self) -> VllmConfig:
        """The drafter's own attention is no tree attention."""
        with ddtree_config.drafter_scope():
            return super().attn_vllm_config

    def load_draft_model(
        self, target_model: torch.nn.Module, target_attn_layer_names: set[str]
    ) -> torch.nn.Module:
        """Load the drafter with the platform's own attention backend."""
        with ddtree_config.drafter_scope():
            return super().load_draft_model(target_model, target_attn_layer_names)

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the drafter and tell its layers from the target's."""
        gdn_v2.allocate_scratch(self.vllm_config, self.tree, self.device)
        super().load_model(target_model)
        self.tree.draft_layers = frozenset(self.draft_attn_layer_names)

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        """The drafter pass and the build: what the graph captures."""
        hidden_states = self._run_model(
            num_tokens_padded,
            attn_metadata,
            slot_mappings,
            num_tokens_across_dp,
            cudagraph_runtime_mode,
        )
        num_sample = num_reqs * self.num_speculative_steps
        logits = self.model.compute_logits(
            hidden_states[self.sample_indices[:num_sample]]
        )
        tree = self.tree
        self.builder.build(
            logits, tree.d_tokens, tree.d_parents, tree.d_depths, tree.d_num_nodes
        )
        # Rows without a node become input ids of the target, which must exist. They
        # are never accepted: num_nodes says so, not the token.
        tree.d_tokens[:num_reqs].clamp_(min=0)

    def _metadata_arguments(self, input_batch: InputBatch) -> dict[str, Any]:
        """What releases after 0.26 want in addition."""
        if "step" not in self._metadata_parameters:
            return {}
        return {
            "seq_lens_cpu_upper_bound": input_batch.seq_lens_cpu_upper_bound,
            "step": self.num_query_per_req,
        }

    def _context_layout(self, input_batch: InputBatch) -> tuple[torch.Tensor, int, int]:
        """Rows of context per request, known on the host without the path.

        Returns:
            ``ctx_start`` [num_reqs + 1] int32 on the device, the number of rows, and
            the most rows of one request.
        """
        query_lens = input_batch.num_scheduled_tokens
        rows = np.diff(input_batch.cu_num_logits_np)
        is_tree = (rows > 1) & (rows == query_lens)
        counts = np.where(
            is_tree, np.minimum(rows, self.num_speculative_steps + 1), query_lens
        )
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        on_device = async_copy_to_gpu(starts, device=self.device)
        return on_device, int(starts[-1]), int(counts.max())

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        num_tokens_across_dp: torch.Tensor | None = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: tuple[list[torch.Tensor], torch.Tensor] | None = None,
        is_profile: bool = False,
    ) -> torch.Tensor:
        """Draft one tree per request; arguments as upstream's.

        Returns:
            [num_reqs, N] int64, tokens of the nodes; the shapes of the trees stay in
            the buffers.
        """
        if dummy_run and skip_attn_for_dummy_run:
            super().propose(
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                num_sampled,
                num_rejected,
                last_sampled,
                next_prefill_tokens,
                temperature,
                seeds,
                num_tokens_across_dp,
                dummy_run,
                skip_attn_for_dummy_run,
                mm_inputs,
                is_profile,
            )
            return self.draft_tokens[: input_batch.num_reqs]

        num_reqs = input_batch.num_reqs
        num_query_tokens = num_reqs * self.num_query_per_req
        max_seq_len = input_batch.seq_lens_cpu_upper_bound[:num_reqs].max().item()
        self.draft_max_seq_len = min(
            max_seq_len + self.num_query_per_req, self.max_model_len
        )
        self._copy_request_inputs(num_reqs, input_batch.idx_mapping, temperature, seeds)

        context_start, num_context, max_context = self._context_layout(input_batch)
        for i, gid in enumerate(self.draft_kv_cache_group_ids):
            prepare_tree_inputs(
                self.input_buffers,
                self.block_tables.slot_mappings[gid],
                self.context_rows,
                self.context_positions,
                self._context_slot_mappings[i],
                self.sample_indices,
                self.sample_pos,
                self.sample_idx_mapping,
                input_batch,
                context_start,
                max_context,
                self.tree,
                num_sampled,
                num_rejected,
                last_sampled,
                next_prefill_tokens,
                self.block_tables.input_block_tables[gid],
                self.block_tables.kernel_block_sizes[gid],
                self.parallel_drafting_token_id,
                self.num_query_per_req,
                self.num_speculative_steps,
                self.max_num_reqs,
                self.max_num_tokens,
                self.max_model_len,
            )

        rows = self.context_rows[:num_context]
        if aux_hidden_states:
            context = self.model.combine_hidden_states(
                torch.cat([h.index_select(0, rows) for h in aux_hidden_states], dim=-1)
            )
        else:
            context = last_hidden_states.index_select(0, rows)

        context_slots: torch.Tensor | list[torch.Tensor | None] | None = None
        if not dummy_run:  # whose block tables are placeholders
            if self._layer_group_idx is not None:
                context_slots = [
                    self._context_slot_mappings[g][:num_context]
                    for g in self._layer_group_idx
                ]
            else:
                context_slots = self._context_slot_mappings[0][:num_context]
        self.model.precompute_and_store_context_kv(
            context, self.context_positions[:num_context], context_slots
        )

        batch_desc, num_tokens_across_dp = dispatch_cg_and_sync_dp(
            self.query_cudagraph_manager,
            num_reqs,
            num_query_tokens,
            uniform_token_count=self.num_query_per_req,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            need_eager=is_profile,
        )
        num_tokens_padded = batch_desc.num_tokens
        # Also for a captured graph: the builders refresh their own buffers.
        draft_attn_metadata = self._build_draft_attn_metadata(
            num_reqs=num_reqs,
            num_reqs_padded=batch_desc.num_reqs or num_reqs,
            num_tokens_padded=num_tokens_padded,
            causal=self._group_causal,
            **self._metadata_arguments(input_batch),
        )
        self._prepare_eplb_forward(num_query_tokens)
        if batch_desc.cg_mode == CUDAGraphMode.FULL:
            assert self.query_cudagraph_manager is not None
            self.query_cudagraph_manager.run_fullgraph(batch_desc)
        else:
            self._generate_draft(
                num_reqs,
                num_tokens_padded,
                draft_attn_metadata,
                build_slot_mappings_by_layer(
                    self.block_tables.slot_mappings[:, :num_tokens_padded],
                    self.kv_cache_config,
                ),
                num_tokens_across_dp=num_tokens_across_dp,
                cudagraph_runtime_mode=batch_desc.cg_mode,
            )
        store_drafts(self.tree, input_batch.idx_mapping, num_reqs)
        if self.rank_checker is not None and not dummy_run:
            tree = self.tree
            self.rank_checker.check(
                input_batch.req_ids[:num_reqs],
                {
                    "num_sampled": num_sampled[:num_reqs],
                    "last sampled token": last_sampled[input_batch.idx_mapping],
                    "walked rows": tree.b_num_sampled[:num_reqs],
                    "path": tree.b_path[:num_reqs],
                    "num_nodes": tree.d_num_nodes[:num_reqs],
                    "token": tree.d_tokens[:num_reqs],
                    "parent": tree.d_parents[:num_reqs],
                },
            )
        return self.draft_tokens[:num_reqs]
