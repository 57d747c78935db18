# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Samples and walks trees on the V2 model runner.

Takes the place of upstream's ``RejectionSampler`` (v1/worker/gpu/spec_decode/
rejection_sampler.py): the target's token is sampled at every row with the request's
own parameters, then the walk follows the drafted tree. Upstream's noise is keyed by
(seed, position), and one row per depth is visited, so a request draws the tokens that
it would draw without speculation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from vllm.v1.spec_decode.ddtree.kernels.walk import walk
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.output import SamplerOutput

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.spec_decode.ddtree.tree_state import TreeState
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.sampler import Sampler

# Processing in chunks of rows bounds the float32 copies that top-k and top-p make.
MAX_CHUNK_BYTES = 1 << 30


def decode_token_count(
    scheduler_output: SchedulerOutput, uniform_token_count: int | None
) -> int | None:
    """The uniform token count of a batch of decodes, else None.

    Upstream 0.26 looks at lengths alone, and takes a prefill chunk of exactly
    1 + N tokens for a decode.

    Args:
        scheduler_output: The step.
        uniform_token_count: Tokens of every request, or None where they differ.

    Returns:
        ``uniform_token_count`` if every request has one token beside its drafts.
    """
    if uniform_token_count is None:
        return None
    drafts = scheduler_output.scheduled_spec_decode_tokens
    for req_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
        if num_tokens - len(drafts.get(req_id, ())) != 1:
            return None
    return uniform_token_count


class DDTreeSampler:
    """Callable with the signature of upstream's ``RejectionSampler``."""

    def __init__(self, sampler: Sampler, tree: TreeState) -> None:
        self.sampler = sampler
        self.tree = tree

    def _sample_rows(
        self,
        logits: torch.Tensor,
        rows: slice,
        input_batch: InputBatch,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
    ) -> torch.Tensor:
        idx_mapping = input_batch.expanded_idx_mapping[rows]
        processed = self.sampler.apply_sampling_params(
            logits[rows],
            idx_mapping,
            input_batch.idx_mapping_np,
            pos[rows],
            draft_sampled[rows],
            input_batch.expanded_local_pos[rows],
        )
        states = self.sampler.sampling_states
        return gumbel_sample(
            processed,
            idx_mapping,
            states.temperature.gpu,
            states.seeds.gpu,
            pos[rows],
            apply_temperature=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Sample every row and walk every tree.

        Args:
            logits: [num_logits, V], the target's; overwritten.
            input_batch: The step; positions are the logical ones.
            draft_logits: Unused; no draft probability is needed.

        Returns:
            ``sampled_token_ids`` is [num_reqs, L + 1] int64.
        """
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        draft_sampled = input_batch.input_ids[input_batch.logits_indices]
        pos = input_batch.positions[input_batch.logits_indices]
        num_logits = logits.shape[0]
        chunk = chunk_rows(logits)
        parts = [
            self._sample_rows(
                logits, slice(i, i + chunk), input_batch, draft_sampled, pos
            )
            for i in range(0, num_logits, chunk)
        ]
        node_tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
        sampled, num_sampled = walk(
            node_tokens,
            draft_sampled,
            input_batch.cu_num_logits,
            self.tree,
        )
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=None,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def profile(
        self,
        hidden_states: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Allocate as much as the largest batch of trees will.

        Upstream profiles one row of logits per request; a tree has 1 + N.

        Args:
            hidden_states: Of the profiling run, [T, H].
            compute_logits: The target's.
        """
        tree = self.tree
        rows = min(tree.max_num_reqs * tree.num_rows, hidden_states.shape[0])
        logits = compute_logits(hidden_states[:rows])
        if logits is not None:
            # What top-k and top-p take for one chunk.
            chunk = logits[: chunk_rows(logits)].float()
            chunk = torch.softmax(chunk, dim=-1)
            del chunk


def chunk_rows(logits: torch.Tensor) -> int:
    """Rows whose float32 copy fits ``MAX_CHUNK_BYTES``, at least one."""
    return max(1, MAX_CHUNK_BYTES // (4 * logits.shape[1]))
