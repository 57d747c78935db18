# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Slow, independent versions of what the unit tests check, and random inputs."""

from __future__ import annotations

import heapq
import os
from dataclasses import dataclass

import torch
from torch import Tensor

NEG_INF = float("-inf")
BASE_SEED = int(os.environ.get("DDTREE_TEST_SEED", "0"))


def generator(case: int) -> torch.Generator:
    """A generator for one case. Prints its seed, which pytest shows on failure."""
    seed = BASE_SEED + case
    print(f"seed {seed} = DDTREE_TEST_SEED ({BASE_SEED}) + {case}")
    return torch.Generator().manual_seed(seed)


def randint(gen: torch.Generator, low: int, high: int) -> int:
    """A random int from low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=gen))


@dataclass
class OracleTree:
    tokens: list[int]
    parents: list[int]  # of nodes 1..n, without the root
    depths: list[int]
    scores: list[float]


def heap_tree(
    logits: Tensor,
    budget: int,
    policy: str = "best_first",
    *,
    low_id_first: bool = True,
    early_first: bool = True,
    sibling_first: bool = True,
) -> OracleTree:
    """The paper's heap, one request, logits [L, V] float32.

    The three switches turn one rule of the order round.
    """
    log_z = torch.logsumexp(logits, dim=-1)
    ranked = []
    for position, row in enumerate(logits):
        values = row.tolist()
        sign = 1 if low_id_first else -1
        order = sorted(range(len(values)), key=lambda t: (-values[t], sign * t))
        log_probs = row - log_z[position]
        ranked.append([(t, log_probs[t]) for t in order if values[t] > NEG_INF])

    heap: list[tuple] = []
    inserted = 0
    tree = OracleTree([], [], [], [])

    def push(parent: int, depth: int, rank: int, base: Tensor) -> tuple | None:
        nonlocal inserted
        if depth > len(ranked) or rank >= len(ranked[depth - 1]):
            return None
        score = base + ranked[depth - 1][rank][1]
        inserted += 1
        age = inserted if early_first else -inserted
        entry = (-float(score), age, parent, depth, rank, base, score)
        heapq.heappush(heap, entry)
        return entry

    newest = push(0, 1, 0, torch.zeros(()))
    on_spine = policy == "spine_first"
    while heap and len(tree.tokens) < budget:
        on_spine = on_spine and newest is not None
        if on_spine:
            entry = newest
            heap.remove(entry)
            heapq.heapify(heap)
        else:
            entry = heapq.heappop(heap)
        _, _, parent, depth, rank, base, score = entry
        tree.tokens.append(ranked[depth - 1][rank][0])
        tree.parents.append(parent)
        tree.depths.append(depth)
        tree.scores.append(float(score))
        row = len(tree.tokens)
        if sibling_first:
            push(parent, depth, rank + 1, base)
            newest = push(row, depth + 1, 0, score)
        else:
            newest = push(row, depth + 1, 0, score)
            push(parent, depth, rank + 1, base)
    return tree


def naive_walk(
    tokens: list[int], parents: list[int], node_tokens: list[int]
) -> tuple[list[int], list[int]]:
    """Walks one tree of valid nodes only. Returns the sampled tokens and the path."""
    path = [0]
    while True:
        wanted = node_tokens[path[-1]]
        for row, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
            if parent == path[-1] and token == wanted:
                path.append(row)
                break
        else:
            return [node_tokens[row] for row in path], path


def naive_ancestors(parents: list[int], row: int) -> set[int]:
    """Row, its parent, and so on up to the root."""
    seen = set()
    while row >= 0:
        seen.add(row)
        row = parents[row]
    return seen


def plain_logits(gen: torch.Generator, batch: int, length: int, vocab: int) -> Tensor:
    """Random logits [batch, length, vocab] without exact ties worth mentioning."""
    return torch.randn(batch, length, vocab, generator=gen) * 3


def tied_logits(gen: torch.Generator, batch: int, length: int, vocab: int) -> Tensor:
    """Logits with many ties in id and in score.

    They take few distinct values and positions repeat. At some positions one token is
    certain: a node there has exactly its parent's score, and so its parent's twin's.
    """
    levels = randint(gen, 1, 5)
    logits = torch.randint(0, levels, (batch, length, vocab), generator=gen) * 0.5
    same = torch.rand(batch, length, generator=gen) < 0.5
    logits[same] = logits[0, 0].clone()
    certain = torch.rand(batch, length, generator=gen) < 0.2
    logits[..., randint(gen, 0, vocab - 1)] += 200.0 * certain
    dead = torch.rand(batch, length, vocab, generator=gen) < 0.1
    return logits.masked_fill(dead, NEG_INF) if randint(gen, 0, 1) else logits


def random_parents(gen: torch.Generator, budget: int) -> list[int]:
    """Parents of rows 0..budget of a random tree; the root has -1."""
    return [-1] + [randint(gen, 0, row - 1) for row in range(1, budget + 1)]
