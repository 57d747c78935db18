# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Chi-squared tests of token counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

import torch

MIN_EXPECTED = 10  # cells below are pooled into one


def _p_value(statistic: float, degrees: int) -> float:
    """Upper tail of the chi-squared distribution."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def goodness_of_fit(
    draws: Iterable[Hashable], probabilities: Mapping[Hashable, float]
) -> float:
    """p-value of draws against exact probabilities.

    Args:
        draws: Observed outcomes.
        probabilities: Of every outcome; they sum to 1.

    Raises:
        AssertionError: An outcome of probability 0 was drawn.
    """
    observed = Counter(draws)
    total = sum(observed.values())
    assert abs(sum(probabilities.values()) - 1) < 1e-5
    impossible = [o for o in observed if probabilities.get(o, 0) <= 0]
    assert not impossible, f"outcomes of probability 0 were drawn: {impossible[:5]}"
    cells: list[tuple[float, float]] = []
    rest_seen = rest_expected = 0.0
    for outcome, probability in probabilities.items():
        expected = probability * total
        if expected < MIN_EXPECTED:
            rest_seen += observed[outcome]
            rest_expected += expected
        else:
            cells.append((observed[outcome], expected))
    if rest_expected >= MIN_EXPECTED:
        cells.append((rest_seen, rest_expected))
    assert len(cells) > 1, "too few draws for a test"
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    return _p_value(statistic, len(cells) - 1)


def same_distribution(
    first: Iterable[Hashable], second: Iterable[Hashable]
) -> tuple[float, int]:
    """Two-sample test, rare outcomes pooled.

    Args:
        first: Outcomes of one sampler.
        second: Outcomes of the other.

    Returns:
        The p-value and the number of cells.
    """
    a, b = Counter(first), Counter(second)
    share_a = sum(a.values()) / (sum(a.values()) + sum(b.values()))
    cells: list[list[float]] = []
    rest = [0.0, 0.0]
    for outcome in a.keys() | b.keys():
        pair = [a[outcome], b[outcome]]
        if sum(pair) * min(share_a, 1 - share_a) < MIN_EXPECTED:
            rest = [rest[0] + pair[0], rest[1] + pair[1]]
        else:
            cells.append(pair)
    if sum(rest) * min(share_a, 1 - share_a) >= MIN_EXPECTED:
        cells.append(rest)
    assert len(cells) > 1, "too few draws for a test"
    statistic = 0.0
    for seen_a, seen_b in cells:
        total = seen_a + seen_b
        expected = (total * share_a, total * (1 - share_a))
        statistic += (seen_a - expected[0]) ** 2 / expected[0]
        statistic += (seen_b - expected[1]) ** 2 / expected[1]
    return _p_value(statistic, len(cells) - 1), len(cells)
