# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Samples the target's token at every row of every tree, V1 runner.

The order of operations is upstream's ``Sampler.sample`` with per-request parameters
repeated for the request's rows. Noise is keyed by depth: rows of one depth share it,
and since the walk visits one row per depth, each emitted token has fresh noise. A
seeded request draws one noise vector per emitted token from its own generator, as
plain decoding does, so the same seed gives the same text.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import (
    apply_top_k_top_p,
    sample_with_exponential_noise,
)
from vllm.v1.sample.sampler import _SAMPLING_EPS, Sampler


class DepthNoise:
    """Exponential noise per request and depth, and the generators behind it.

    Args:
        num_depths: Depths each request needs, root included; [B] integers. 0 for a
            request whose sample is discarded: its generator is not touched.
        vocab_size: Width of the logits.
        generators: Seeded requests' generators by batch row.
        device: Where the noise lives.
    """

    def __init__(
        self,
        num_depths: list[int],
        vocab_size: int,
        generators: dict[int, torch.Generator],
        device: torch.device,
    ) -> None:
        shape = (len(num_depths), max([1, *num_depths]), vocab_size)
        self.noise = torch.empty(shape, dtype=torch.float32, device=device)
        if len(generators) < len(num_depths):
            self.noise.exponential_()
        self._states: dict[int, list[Tensor]] = {}
        self._generators = generators
        for row, generator in generators.items():
            if num_depths[row] == 0:
                self.noise[row].fill_(1.0)
                continue
            states = []
            for depth in range(num_depths[row]):
                self.noise[row, depth].exponential_(generator=generator)
                states.append(generator.get_state())
            self._states[row] = states

    def commit(self, num_sampled: list[int]) -> None:
        """Leave each generator as if only the emitted tokens had been drawn.

        Args:
            num_sampled: Emitted tokens per request, [B] integers, 1 or more where
                the request was sampled.
        """
        for row, states in self._states.items():
            self._generators[row].set_state(states[num_sampled[row] - 1])


def sample_rows(
    logits: Tensor,
    request: Tensor,
    depth: Tensor,
    metadata: SamplingMetadata,
    noise: DepthNoise | None,
) -> Tensor:
    """Sample one token per row with its request's parameters.

    Args:
        logits: [R, V] float, target logits of all rows; overwritten.
        request: [R] int64, batch row of each logits row.
        depth: [R] int64, depth of each row in its tree.
        metadata: Per-request sampling metadata of the batch.
        noise: Noise by request and depth; None where all requests are greedy.

    Returns:
        [R] int64 token ids.
    """
    logits = logits.to(torch.float32)
    greedy = None if metadata.all_random else Sampler.greedy_sample(logits)
    if metadata.all_greedy or noise is None:
        assert greedy is not None
        return greedy
    temperature = metadata.temperature[request]
    logits = Sampler.apply_temperature(logits, temperature, metadata.all_random)
    for processor in metadata.logitsprocs.argmax_invariant:
        assert isinstance(processor, MinPLogitsProcessor), type(processor)
        if processor.min_p_count:
            expanded = copy.copy(processor)
            expanded.min_p = processor.min_p[request]
            logits = expanded.apply(logits)
    logits = apply_top_k_top_p(
        logits,
        None if metadata.top_k is None else metadata.top_k[request],
        None if metadata.top_p is None else metadata.top_p[request],
    )
    probs = logits.softmax(dim=-1, dtype=torch.float32)
    random = sample_with_exponential_noise(probs, noise.noise[request, depth])
    if greedy is None:
        return random
    return torch.where(temperature < _SAMPLING_EPS, greedy, random)
