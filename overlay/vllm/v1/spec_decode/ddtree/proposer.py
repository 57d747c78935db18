# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""DFlash proposer of the V1 runner that returns trees instead of chains."""

from __future__ import annotations

import torch

from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.ddtree import config_hybrid, rank_check
from vllm.v1.spec_decode.ddtree.build import build_tree
from vllm.v1.spec_decode.ddtree.tree import TreeBatch
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID


class DDTreeProposer(DFlashProposer):
    """One DFlash pass over L positions, then a tree of at most N nodes per request.

    The base class works with L draft positions throughout; only the last step and
    the drafter's context rows differ.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner) -> None:
        config_hybrid.verify_target_class(vllm_config)
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        spec = self.speculative_config
        self.num_draft_positions: int = spec.num_draft_positions
        self.tree_budget: int = spec.tree_budget
        self.tree_policy: str = spec.tree_policy
        if self.input_ids.shape[0] < self.max_query_tokens:
            # 1 + L queries per request, which upstream takes off the token budget.
            self.input_ids = self.input_ids.new_zeros(self.max_query_tokens)
        self.rank_checker = rank_check.create(vllm_config)
        self._logits: torch.Tensor | None = None
        self._num_positions: torch.Tensor | None = None

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the drafter, if the target's layers are all ones with a tree path."""
        context = self.vllm_config.compilation_config.static_forward_context
        config_hybrid.verify_layers(context)
        super().load_model(target_model)

    def _create_draft_vllm_config(self) -> VllmConfig:
        # Rebuilding the config selects TREE_ATTN again; the drafter has no tree.
        base = super()._create_draft_vllm_config()
        base.attention_config.backend = self.speculative_config.attention_backend
        return base

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._logits = self.model.compute_logits(hidden_states)
        return self._logits[:, 0], None

    def set_inputs_first_pass(
        self, target_token_ids, next_token_ids, target_positions, *args, **kwargs
    ) -> tuple[int, torch.Tensor, CommonAttentionMetadata]:
        """Upstream's inputs, kept inside the drafter's length request by request.

        Near the end of a request some of its L positions do not exist. Their slots
        are dropped and they are left out of the tree; other requests are unaffected.
        """
        num_tokens, indices, cad = super().set_inputs_first_pass(
            target_token_ids, next_token_ids, target_positions, *args, **kwargs
        )
        limit = self.runner.effective_drafter_max_model_len
        positions = self.positions[:num_tokens]
        slots = self._slot_mapping_buffer[:num_tokens]
        slots.masked_fill_(positions >= limit, PADDING_SLOT_ID)
        bonus = positions.view(-1, 1 + self.num_draft_positions)[:, 0]
        self._num_positions = (limit - 1 - bonus).clamp(0, self.num_draft_positions)
        positions.clamp_(max=limit - 1)
        context = self._context_positions_buffer[: self._dflash_num_context]
        self._context_slot_mapping_buffer[: self._dflash_num_context].masked_fill_(
            context >= limit, PADDING_SLOT_ID
        )
        context.clamp_(max=limit - 1)
        cad.seq_lens = cad.seq_lens.clamp(max=limit)
        cad.max_seq_len = min(cad.max_seq_len, limit)
        return num_tokens, indices, cad

    @torch.inference_mode()
    def propose(  # type: ignore[override]
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        **kwargs,
    ) -> list[list[int]]:
        """Draft one tree per request.

        Args:
            num_speculative_tokens: N; the tree budget is fixed, so unused.
            target_token_ids: [T] int, rows of the target's batch.
            target_positions: [T] int64, rotary positions of those rows.
            target_hidden_states: [T, n_aux * hidden], auxiliary hidden states.
            **kwargs: As upstream's ``propose``.

        Returns:
            The tokens of each request's tree in node order, B lists of at most N.
        """
        trees = self.runner.ddtree
        context = trees.drafter_context()
        if context is not None:
            target_positions, rows = context
            target_hidden_states = target_hidden_states[rows]
        super().propose(
            self.num_draft_positions,
            target_token_ids,
            target_positions,
            target_hidden_states,
            **kwargs,
        )
        tree = self.build_trees(self._logits, self._num_positions)
        self._logits = None
        if self.rank_checker is not None:
            self._check_ranks(tree, kwargs["next_token_ids"])
        return trees.store(tree)

    def _check_ranks(self, tree: TreeBatch, last_sampled: torch.Tensor) -> None:
        """Compare the step's walk and the new trees with the other ranks'."""
        assert self.rank_checker is not None
        parts = {
            "last sampled token": last_sampled,
            "num_nodes": tree.num_nodes,
            "token": tree.tokens,
            "parent": tree.parents,
        }
        step = self.runner.ddtree.step
        if step is not None:
            parts |= {"walked rows": step.num_sampled, "path": step.path}
        self.rank_checker.check(self.runner.input_batch.req_ids, parts)

    def build_trees(
        self, logits: torch.Tensor, num_positions: torch.Tensor
    ) -> TreeBatch:
        """Build trees from drafter logits [B * L, V] and usable positions [B]."""
        return build_tree(
            logits.view(-1, self.num_draft_positions, logits.shape[-1]),
            self.tree_budget,
            self.tree_policy,
            num_positions,
        )
