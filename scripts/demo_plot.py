# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The demo's picture: tokens per target step by mode."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a file beside ``path`` that replaces it once it is written."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_plot(path: Path, results: Sequence[dict], count: int, tokens: int) -> None:
    """Draw tokens per step by mode, each prompt a dot, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    colours = {
        "plain": "#9aa0a6",
        "chain": "#5f7fa6",
        "best_first": "#c2571a",
        "spine_first": "#e0a03c",
    }
    figure, axes = plt.subplots(figsize=(8, 0.62 * len(results) + 1.7))
    for row, result in enumerate(results):
        steps = result["tokens_per_step"]
        colour = colours[result["family"]]
        axes.barh(row, steps["mean"], height=0.62, color=colour)
        each = steps["by_prompt"]
        if len(set(each)) > 1:
            low, middle, high = steps["percentiles_10_50_90"]
            axes.errorbar(
                middle,
                row,
                xerr=[[middle - low], [high - middle]],
                color="#333333",
                elinewidth=1,
                capsize=3,
            )
            # A fixed fan, so that equal values stay visible without random jitter.
            offsets = [row + 0.22 * ((i * 0.618) % 1 - 0.5) for i in range(len(each))]
            axes.scatter(each, offsets, s=9, color="#222222", alpha=0.35, linewidths=0)
        axes.annotate(
            f"{steps['mean']:.2f}",
            (1, row),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontweight="bold",
        )
    axes.set_yticks(range(len(results)), [r["name"] for r in results])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("tokens per target step")
    axes.set_title(
        f"Greedy decoding of {count} held-out prompts, {tokens} tokens each",
        loc="left",
        fontsize=11,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.text(
        0.99,
        0.01,
        "bar: all tokens over all steps; line: 10th to 90th percentile of the prompts; "
        "dot: one prompt",
        ha="right",
        fontsize=8,
        color="#666666",
    )
    figure.tight_layout(rect=(0, 0.035, 1, 1))
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
    plt.close(figure)
