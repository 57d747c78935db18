# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""What scripts/check_tp.py holds to be equal; no engine is needed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Between two tokens' log probabilities; closer ones are a tie that rounding decides.
TIES = {"float32": 1e-4, "bfloat16": 0.25}


@dataclass
class Parting:
    """Where a text leaves another one.

    Attributes:
        request: Index of the request.
        position: Of the first output token that differs.
        tokens: There, of the text and of its reference; None after its end.
        prefix: Output tokens before, common to both.
        gap: How much less likely than the best token the lesser of the two is; None
            if that is unknown, or if one is not among the best.
    """

    request: int
    position: int
    tokens: tuple[int | None, int | None]
    prefix: list[int] = field(repr=False)
    gap: float | None = None

    def row(self) -> dict[str, Any]:
        return {
            "request": self.request,
            "position": self.position,
            "tokens": self.tokens,
            "gap": self.gap,
        }


def partings(texts: Sequence[list[int]], references: Sequence[list[int]]) -> list:
    """``Parting`` of each text that is not its reference.

    Args:
        texts: Token ids of each request.
        references: As many.

    Raises:
        ValueError: There are more of one than of the other.
    """
    found = []
    for i, (got, want) in enumerate(zip(texts, references, strict=True)):
        if got == want:
            continue
        pairs = enumerate(zip(got, want))  # noqa: B905
        at = next((k for k, (a, b) in pairs if a != b), min(len(got), len(want)))
        tokens = tuple(text[at] if at < len(text) else None for text in (got, want))
        found.append(Parting(i, at, tokens, got[:at]))
    return found


def gap_of(tokens: Sequence[int | None], best: Sequence[Sequence]) -> float | None:
    """``Parting.gap``.

    Args:
        tokens: The two.
        best: Pairs of token id and log probability, the best first.
    """
    known = dict(best)
    if any(token not in known for token in tokens):
        return None
    return round(best[0][1] - min(known[token] for token in tokens), 6)


def known_gap(parting: Parting, plain: list[int], best: list) -> bool:
    """Set the gap from a plain run of the request, if it went through the prefix.

    Args:
        parting: Changed in place.
        plain: The run's tokens.
        best: Its ``best`` at every token.

    Returns:
        Whether the run says what came next; the gap may be unknown all the same.
    """
    at = parting.position
    if plain[:at] != parting.prefix or at >= len(best):
        return False
    parting.gap = gap_of(parting.tokens, best[at])
    return True


def text_failures(name: str, found: Sequence[Parting], tie: float) -> list[str]:
    """A line for each parting that is no tie.

    Args:
        name: What was compared with what.
        found: Partings with their gaps.
        tie: Largest gap that is one.
    """
    lines = []
    for each in found:
        if each.gap is None or each.gap > tie:
            gap = "unknown or large" if each.gap is None else f"{each.gap:g}"
            lines.append(
                f"{name}: request {each.request}, output token {each.position}: "
                f"{each.tokens[0]} where the other has {each.tokens[1]}, gap {gap}, "
                f"a tie has at most {tie:g}"
            )
    return lines


def fact_failures(
    facts: Sequence[dict[str, Any]], size: int, tree: bool, graphs: bool
) -> list[str]:
    """What the ranks of an engine on GPUs do not have on.

    Args:
        facts: ``child.worker_facts`` of each rank.
        size: Ranks that there should be.
        tree: The engine decodes with trees.
        graphs: It should have captured CUDA graphs.
    """
    lines = []
    if len(facts) != size:
        lines.append(f"{len(facts)} ranks in place of {size}")
    for each in facts:
        wanted: dict[str, Any] = {"runner": "V2", "async": True}
        if size > 1:
            wanted["nvls"] = "0"
        if tree:
            wanted["speculator"] = "DDTreeSpeculator"
        for key, value in wanted.items():
            if each[key] != value:
                lines.append(f"rank {each['rank']}: {key} {each[key]}, not {value}")
        # Piecewise graphs are counted elsewhere.
        captured = each["captured"] or "FULL" not in each["graphs"]
        if graphs and (each["graphs"] == "NONE" or not captured):
            lines.append(
                f"rank {each['rank']}: CUDA graphs {each['graphs']}, "
                f"{each['captured']} captured"
            )
    return lines


def rank_failures(ranks: Sequence[dict], size: int, steps: int) -> list[str]:
    """Whether all ranks compared enough steps with all others.

    Args:
        ranks: ``rank_check.steps_compared`` of each rank.
        size: Ranks that there should be.
        steps: The fewest to be compared.
    """
    lines = []
    if len(ranks) != size:
        lines.append(f"{len(ranks)} ranks in place of {size}")
    for i, rank in enumerate(ranks):
        if rank["ranks"] != size or rank["steps"] < steps:
            lines.append(
                f"rank {i} compared {rank['steps']} steps of {rank['ranks']} ranks, "
                f"not {steps} of {size}"
            )
    return lines


def request_failures(case: str, requests: Sequence[dict[str, Any]]) -> list[str]:
    """Requests of a hang case that ended too early or too late."""
    return [
        f"{case}: request {i} has {len(each['tokens'])} tokens, not {each['expected']}"
        for i, each in enumerate(requests)
        if each["expected"] not in (None, len(each["tokens"]))
    ]
