# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Tree state of the V1 runner: everything between two drafts of a request.

One step calls, in this order: ``prepare_inputs`` (depth positions, ancestor masks),
the target forward, ``sample`` (node sampling, walk, KV compaction),
``drafter_context`` and ``store`` (by the proposer). CPU path: the host reads trees
freely here, which the GPU path must not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.ddtree import gdn_v1
from vllm.v1.spec_decode.ddtree.attention import TreeMask
from vllm.v1.spec_decode.ddtree.kv_compact import compact_kv
from vllm.v1.spec_decode.ddtree.node_sampling import DepthNoise, sample_rows
from vllm.v1.spec_decode.ddtree.sampler import walk
from vllm.v1.spec_decode.ddtree.tree import TreeBatch, ancestor_mask
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = init_logger(__name__)


@dataclass(slots=True)
class _Drafted:
    """A request's last tree: tokens [n], parents and depths [1 + n]."""

    tokens: list[int]
    parents: torch.Tensor
    depths: torch.Tensor


@dataclass(slots=True)
class _Step:
    """The trees under verification.

    Attributes:
        tree: Trees in batch order, Q rows as wide as the widest.
        first_row: [B] int64, batch row of each request's root.
        positions: [T] int64, slot positions of all rows before depth correction.
        path: [B, L + 1] int32 once sampled.
        num_sampled: [B] int32 once sampled.
    """

    tree: TreeBatch
    first_row: torch.Tensor
    positions: torch.Tensor
    path: torch.Tensor | None = None
    num_sampled: torch.Tensor | None = None


class DDTreeRunner:
    """Trees of all live requests, keyed by request id, and the step's batch."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self.runner = runner
        spec = runner.speculative_config
        assert spec is not None and spec.num_draft_positions is not None
        self.num_draft_positions: int = spec.num_draft_positions
        self.drafted: dict[str, _Drafted] = {}
        self.step: _Step | None = None
        self.tree_mask: TreeMask | None = None
        self._target_caches: list[tuple[int, list[torch.Tensor]]] | None = None
        logger.info_once(
            "DDTree is on: tree_budget=%d, tree_policy=%s, %d draft positions, "
            "attention backend %s, model runner V1.",
            spec.tree_budget,
            spec.tree_policy,
            self.num_draft_positions,
            runner.vllm_config.attention_config.backend.name,
        )

    # Before the forward.

    def prepare_inputs(
        self,
        scheduler_output: SchedulerOutput,
        spec_decode_metadata: SpecDecodeMetadata | None,
    ) -> None:
        """Set up the batch's trees and rewrite rotary positions to start + depth.

        Runs after slot mapping, which needs the linear positions.

        Args:
            scheduler_output: The step's schedule.
            spec_decode_metadata: Upstream's, with the scheduled drafts per request.
        """
        self.step = self.tree_mask = None
        if spec_decode_metadata is None:
            return
        runner = self.runner
        num_nodes = spec_decode_metadata.num_draft_tokens
        width = max(num_nodes)
        tree = TreeBatch.empty(len(num_nodes), width)
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        for row, nodes in enumerate(num_nodes):
            if nodes:
                req_id = runner.input_batch.req_ids[row]
                self._fill(tree, row, scheduled[req_id], self.drafted.get(req_id))
        ends = runner.query_start_loc.np[1 : len(num_nodes) + 1].astype(np.int64)
        first_row = torch.from_numpy(ends) - tree.num_nodes - 1
        total = int(ends[-1])
        self.step = _Step(tree, first_row, runner.positions[:total].clone())
        self._write_depth_positions(self.step)
        self.tree_mask = TreeMask(self._ancestor_mask(tree), num_nodes, tree.parents)

    @staticmethod
    def _fill(
        tree: TreeBatch, row: int, tokens: list[int], drafted: _Drafted | None
    ) -> None:
        """Put a request's scheduled drafts, a prefix of its tree, into the batch."""
        n = len(tokens)
        tree.tokens[row, :n] = torch.tensor(tokens)
        tree.num_nodes[row] = n
        rows = slice(0, n + 1)
        if drafted is not None and drafted.tokens[:n] == tokens:
            tree.parents[row, rows] = drafted.parents[rows]
            tree.depths[row, rows] = drafted.depths[rows]
        else:
            # Not ours: any list of drafts is a valid chain, and always lossless. The
            # scheduler itself pads with -1, which no target token equals.
            if max(tokens) >= 0:
                logger.warning_once(
                    "DDTree: scheduled drafts are not the tree drafted last; "
                    "verifying them as a chain."
                )
            chain = torch.arange(n + 1, dtype=torch.int32)
            tree.parents[row, rows] = chain - 1
            tree.depths[row, rows] = chain

    @staticmethod
    def _ancestor_mask(tree: TreeBatch) -> torch.Tensor:
        return ancestor_mask(tree.parents, tree.num_nodes)

    def _write_depth_positions(self, step: _Step) -> None:
        """In place, because captured graphs and later readers share the buffer."""
        request, node = step.tree.valid.nonzero(as_tuple=True)
        rows = step.first_row[request] + node
        offset = step.tree.depths[request, node] - node
        self.runner.positions[rows] += offset
        if self.runner.uses_mrope:  # all planes; the ones that the model reads
            self.runner.mrope_positions.gpu[:, rows] += offset

    # After the forward.

    def sample(
        self,
        logits: torch.Tensor,
        spec_decode_metadata: SpecDecodeMetadata,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Sample every row, walk the trees and compact the accepted KV rows.

        Args:
            logits: [R, V], one row per root and node of the batch, request by
                request.
            spec_decode_metadata: Upstream's, for this batch.
            sampling_metadata: Per-request parameters.

        Returns:
            ``sampled_token_ids`` [B, L + 1] int32: accepted tokens, bonus, then -1.
        """
        step = self.step
        assert step is not None
        tree = step.tree
        request, node = tree.valid.nonzero(as_tuple=True)
        depth = tree.depths[request, node].long()
        noise = None
        if not sampling_metadata.all_greedy:
            discarded = self.runner.discard_request_mask.np
            deepest = tree.depths.amax(1).tolist()
            noise = DepthNoise(
                [0 if discarded[row] else 1 + d for row, d in enumerate(deepest)],
                logits.shape[-1],
                sampling_metadata.generators,
                logits.device,
            )
        tokens = sample_rows(logits, request, depth, sampling_metadata, noise)
        node_tokens = torch.zeros(tree.parents.shape, dtype=torch.int64)
        node_tokens[request, node] = tokens
        sampled, step.num_sampled, step.path = walk(
            tree, node_tokens, self.num_draft_positions
        )
        if noise is not None:
            noise.commit(step.num_sampled.tolist())
        self._compact(step)
        self._commit_states(step)
        return SamplerOutput(
            sampled_token_ids=sampled.to(torch.int32), logprobs_tensors=None
        )

    def _moves(self, step: _Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Batch rows that move: from ``root + path[d]`` to ``root + d``, [M] each."""
        depth = torch.arange(step.path.shape[1])
        moved = (step.path >= 0) & (step.path != depth)
        request, to = moved.nonzero(as_tuple=True)
        first = step.first_row[request]
        return first + step.path[request, to], first + to

    def _compact(self, step: _Step) -> None:
        """Move accepted K/V rows of all target layers to where a chain has them."""
        source, target = self._moves(step)
        if source.numel() == 0:
            return
        if self._target_caches is None:
            self._target_caches = self._find_target_caches()
        for group, caches in self._target_caches:
            slots = self.runner.input_batch.block_table[group].slot_mapping.gpu
            for cache in caches:
                compact_kv(
                    cache,
                    slots[source],
                    slots[target],
                    block_size=cache.shape[2],
                    block_dim=0,
                    slot_dim=2,
                )

    def _commit_states(self, step: _Step) -> None:
        """Move the state of every recurrent layer along the accepted paths."""
        assert self.tree_mask is not None
        layers = self.runner.compilation_config.static_forward_context
        num_rows = step.num_sampled.tolist()
        for name, pending in self.tree_mask.layer_inputs.items():
            gdn_v1.commit(layers[name], pending, step.path, num_rows)

    def _find_target_caches(self) -> list[tuple[int, list[torch.Tensor]]]:
        """K/V tensors of the target's layers by KV cache group, drafter left out."""
        runner = self.runner
        layers = runner.compilation_config.static_forward_context
        drafter = runner.drafter._draft_attn_layer_names
        return [
            (
                index,
                [
                    layers[name].kv_cache
                    for name in group.layer_names
                    if name not in drafter
                ],
            )
            for index, group in enumerate(runner.kv_cache_config.kv_cache_groups)
            if not isinstance(group.kv_cache_spec, MambaSpec)
        ]

    # Between verification and the next draft.

    def drafter_context(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Rows that the drafter takes its context from, along the accepted paths.

        Returns:
            Slot positions [T] int64 and source rows [T] int64: row ``root + d`` reads
            the hidden state of ``root + path[d]``, every other row its own. None
            after a step without trees.
        """
        step = self.step
        if step is None:
            return None
        rows = torch.arange(step.positions.shape[0])
        source, target = self._moves(step)
        rows[target] = source
        return step.positions, rows

    def store(self, tree: TreeBatch) -> list[list[int]]:
        """Keep the new trees by request id.

        Args:
            tree: Trees in batch order.

        Returns:
            Each request's tokens in node order, for the scheduler.
        """
        self.step = self.tree_mask = None
        # Pruned here, since a step that only reports finished requests prepares none.
        live = self.runner.requests
        self.drafted = {k: tree for k, tree in self.drafted.items() if k in live}
        drafts = []
        for row, req_id in enumerate(self.runner.input_batch.req_ids):
            n = int(tree.num_nodes[row])
            tokens = tree.tokens[row, :n].tolist()
            self.drafted[req_id] = _Drafted(
                tokens, tree.parents[row, : n + 1], tree.depths[row, : n + 1]
            )
            drafts.append(tokens)
        return drafts
