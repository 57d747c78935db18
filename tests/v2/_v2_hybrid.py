# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Steered drafts on the V2 runner, for a hybrid pair with random weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from _v2 import ON_GPU


@contextlib.contextmanager
def float32_prompts() -> Iterator[None]:
    """Let prompts be float32 on a GPU, where upstream's chunked kernel is not."""
    if not ON_GPU:
        yield
        return
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        ChunkGatedDeltaRule,
    )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkGatedDeltaRule, "forward_native", recurrent_rule)
        yield


def recurrent_rule(_, q, k, v, g, beta, initial_state, cu_seqlens=None, **unused):
    """Upstream's chunked delta rule, row by row in float32.

    Args:
        q, k: [1, T, Hk, Dk], normalised.
        v: [1, T, Hv, Dv].
        g, beta: [1, T, Hv].
        initial_state: [N, Hv, Dv, Dk].
        cu_seqlens: [N + 1], None for one sequence.

    Returns:
        Outputs [1, T, Hv, Dv] and final states [N, Hv, Dv, Dk].
    """
    share = v.shape[2] // k.shape[2]
    q = q[0].float().repeat_interleave(share, 1) * q.shape[-1] ** -0.5
    k = k[0].float().repeat_interleave(share, 1)
    out, states = torch.empty_like(v), initial_state.float().clone()
    starts = [0, len(q)] if cu_seqlens is None else cu_seqlens.tolist()
    for index, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        state = states[index]
        for row in range(start, end):
            state = state * g[0, row].exp()[:, None, None]
            write = v[0, row] - (state @ k[row][..., None])[..., 0]
            state = state + (beta[0, row][:, None] * write)[..., None] * k[row][:, None]
            out[0, row] = (state @ q[row][..., None])[..., 0]
        states[index] = state
    return out, states


class Oracle:
    """Drafter logits that know a plain run's tokens, more or less.

    Noise and right tokens are put into buffers before each pass, so that captured
    drafter graphs read them, too.

    Args:
        prompts: Token ids of each prompt; no two may start with the same token.
        outputs: Tokens of the plain run.
        seed: Of the noise.
        boost: What the right token's logit is raised by, over noise of deviation 1.
    """

    def __init__(
        self,
        prompts: list[list[int]],
        outputs: list[list[int]],
        seed: int,
        boost: float = 4.0,
    ) -> None:
        self.known = {
            prompt[0]: prompt + output
            for prompt, output in zip(prompts, outputs, strict=True)
        }
        assert len(self.known) == len(prompts)
        self.generator = torch.Generator().manual_seed(seed)
        self.boost = boost
        self.logits: torch.Tensor | None = None
        self.states = None

    def bind(self, llm) -> None:
        """Know where an engine's requests stand."""
        worker = llm.llm_engine.model_executor.driver_worker.worker
        self.states = worker.model_runner.req_states

    def _fill(self, wide: int, input_batch) -> None:
        logits = torch.randn(self.logits.shape, generator=self.generator)
        states = self.states
        slots = input_batch.idx_mapping.tolist()
        for row, slot in enumerate(slots):
            text = self.known.get(int(states.all_token_ids.gpu[slot, 0]))
            start = int(states.num_computed_tokens.gpu[slot])
            for depth, token in enumerate((text or [])[start + 1 : start + 1 + wide]):
                logits[row * wide + depth, token] += self.boost
        self.logits.copy_(logits)

    def install(self, monkeypatch) -> None:
        """Patch the speculator of trees; ``bind`` comes once the engine is there."""
        from vllm.v1.spec_decode.ddtree.kernels.build import TreeBuilder
        from vllm.v1.spec_decode.ddtree.speculator import DDTreeSpeculator

        build, propose = TreeBuilder.build, DDTreeSpeculator.propose

        def steered(builder, logits, *args):
            if self.logits is None:  # for the largest batch of these tests
                self.logits = logits.new_zeros(8 * 15, logits.shape[1])
            return build(builder, self.logits[: len(logits)].to(logits), *args)

        def proposed(speculator, input_batch, *args, **kwargs):
            dummy = kwargs.get("dummy_run")
            if self.states is not None and self.logits is not None and not dummy:
                self._fill(speculator.num_speculative_steps, input_batch)
            return propose(speculator, input_batch, *args, **kwargs)

        monkeypatch.setattr(TreeBuilder, "build", steered)
        monkeypatch.setattr(DDTreeSpeculator, "propose", proposed)
