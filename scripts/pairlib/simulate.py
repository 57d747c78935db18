# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Generation with the target, and what a DFlash chain would accept of it.

A chain only ever accepts the tokens that the target emits anyway, so acceptance is
measured on a finished continuation: draft at every position at once, then walk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .hybrid import HybridTarget
from .model import Drafter, Target, block_embeddings


@torch.no_grad()
def generate(
    target: Target | HybridTarget,
    prompts: Tensor,
    lengths: Tensor,
    sample_until: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Continue a batch of prompts; every row advances through the same positions.

    Args:
        target: the model; its cache has the type of its weights.
        prompts: ``[B, T]`` int64; row b is ``lengths[b]`` prompt ids, then anything.
        lengths: ``[B]`` int64, each at least 1.
        sample_until: ``[B]`` int64; positions before it are sampled at temperature 1,
            later ones are greedy.
        generator: source of the samples, on the device of ``prompts``.

    Returns:
        ``[B, T]`` int64: prompts and their continuations.
    """
    batch, total = prompts.shape
    out = prompts.clone()
    cache = target.new_cache(batch, total)
    shortest = int(lengths.min())
    hidden, _ = target(out[:, :shortest], cache)
    for position in range(shortest, total):
        logits = target.logits(hidden[:, -1]).float()
        noise = torch.empty_like(logits).exponential_(generator=generator)
        sampled = (logits.softmax(-1) / noise).argmax(-1)
        token = torch.where(position < sample_until, sampled, logits.argmax(-1))
        out[:, position] = torch.where(position < lengths, out[:, position], token)
        if position + 1 < total:
            hidden, _ = target(out[:, position : position + 1], cache, position)
    return out


@dataclass
class Acceptance:
    """Per prompt: decode steps, tokens they emitted, text, and whether it loops.

    ``text`` holds the continuations as token ids. ``by_depth[d]`` is the share of steps
    that accepted at least d + 1 draft tokens.
    """

    steps: list[int]
    tokens: list[int]
    loops: list[bool]
    text: list[list[int]]
    by_depth: list[float]

    def tokens_per_step(self, rows: list[int] | None = None) -> float | None:
        """Mean over all steps of the chosen prompts, bonus included; None for none."""
        rows = list(range(len(self.steps))) if rows is None else rows
        steps = sum(self.steps[i] for i in rows)
        return round(sum(self.tokens[i] for i in rows) / steps, 4) if steps else None

    def per_prompt(self) -> list[float]:
        """Tokens a step of each prompt, ascending."""
        return sorted(t / s for t, s in zip(self.tokens, self.steps, strict=True))


def _loops(tail: list[int]) -> bool:
    """Whether the last half of a continuation repeats with a period of at most 16."""
    half = tail[len(tail) // 2 :]
    return any(
        half[period:] == half[:-period] for period in range(1, min(17, len(half) // 2))
    )


@torch.no_grad()
def chain_acceptance(
    target: Target | HybridTarget,
    drafter: Drafter,
    prompts: list[list[int]],
    tokens: int,
    mask_id: int,
    temperature: int,
    seed: int,
    device: torch.device,
    rows: int = 32,
) -> Acceptance:
    """Measure a DFlash chain of ``block_size - 1`` drafts on continuations.

    Args:
        target: the verifier, float32.
        drafter: float32.
        prompts: token ids.
        tokens: continuation length; the first token comes from the prefill, and the
            last step counts in full, as vLLM's counters have it.
        mask_id: the drafter's mask token.
        temperature: 0 for greedy, 1 for plain sampling.
        seed: of the samples.
        device: where both models are.
        rows: prompts drafted at once; bounds memory.

    Returns:
        Counts for each prompt.
    """
    p = drafter.p
    lengths = torch.tensor([len(ids) for ids in prompts], device=device)
    total = int(lengths.max()) + tokens + p.block_size
    padded = torch.zeros(len(prompts), total, dtype=torch.long, device=device)
    for row, ids in enumerate(prompts):
        padded[row, : len(ids)] = torch.tensor(ids, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    until = torch.full_like(lengths, total if temperature else 0)
    text = generate(target, padded, lengths, until, generator)
    result = Acceptance([], [], [], [], [])
    depths = torch.zeros(p.draft_length)
    for first in range(0, len(prompts), rows):
        ids, begin = text[first : first + rows], lengths[first : first + rows]
        starts = begin[:, None] + torch.arange(tokens, device=device)
        _, features = target(ids)
        embeds = block_embeddings(target, ids.gather(1, starts), mask_id)
        hidden = drafter(embeds, starts, features)
        drafts = target.logits(hidden).argmax(-1)
        offsets = torch.arange(1, p.block_size, device=device)
        wanted = (starts[..., None] + offsets).flatten(1)
        hits = drafts == ids.gather(1, wanted).unflatten(1, (tokens, -1))
        accepted = hits.cumprod(-1).sum(-1).cpu()
        for row in range(len(ids)):
            done, steps, emitted = 1, 0, 0
            while done < tokens:
                count = int(accepted[row, done - 1])
                depths[:count] += 1
                steps, emitted, done = steps + 1, emitted + count + 1, done + count + 1
            result.steps.append(steps)
            result.tokens.append(emitted)
            continuation = ids[row, begin[row] : begin[row] + tokens].tolist()
            result.text.append(continuation)
            result.loops.append(_loops(continuation))
    result.by_depth = (depths / max(1, sum(result.steps))).tolist()
    return result


def summarise(result: Acceptance, rows: list[dict]) -> dict:
    """Figures for the card: overall, by prompt set, spread, and without loops."""
    per_prompt = result.per_prompt()
    quantile = [per_prompt[int(q * (len(per_prompt) - 1))] for q in (0.1, 0.5, 0.9)]
    sets = sorted({row["set"] for row in rows})
    plain = [i for i, loop in enumerate(result.loops) if not loop]
    return {
        "tokens_per_step": result.tokens_per_step(),
        "steps": sum(result.steps),
        "tokens": sum(result.tokens),
        "by_set": {
            name: result.tokens_per_step(
                [i for i, row in enumerate(rows) if row["set"] == name]
            )
            for name in sets
        },
        "per_prompt_p10_p50_p90": [round(q, 3) for q in quantile],
        "looping_prompts": sum(result.loops),
        "tokens_per_step_without_looping_prompts": result.tokens_per_step(plain),
        "accepted_at_least": [round(x, 4) for x in result.by_depth],
    }
