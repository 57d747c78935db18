# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Tables of bench.py, which print a line for each row and return the rows.

And those of check_tp.py, in Markdown.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any


def spread(samples: list[float]) -> str:
    return (
        f"{statistics.median(samples):.3f} ({min(samples):.3f} to {max(samples):.3f})"
    )


def report_step(results: list[dict], args: argparse.Namespace) -> list[dict]:
    """Ratios tree over chain of equal rows, by batch."""
    table = []
    for rows in args.rows:
        for batch in args.batches:
            times = {}
            for kind in ("chain", "tree"):
                times[kind] = [
                    ms
                    for r in results
                    if r["arm"] == f"{kind} of {rows} rows" and r["batch"] == batch
                    for ms in r["ms_per_step"]
                ]
            ratio = statistics.median(times["tree"]) / statistics.median(times["chain"])
            table.append({"rows": rows, "batch": batch, "ratio": round(ratio, 4)})
            print(
                f"{rows:3} rows, batch {batch:2}: chain {spread(times['chain'])} ms, "
                f"tree {spread(times['tree'])} ms, ratio {ratio:.3f}"
            )
    return table


def report_speed(results: list[dict], args: argparse.Namespace) -> list[dict]:
    """Tokens per second over the chain's best length, by batch."""
    table = []
    for batch in args.batches:
        here = [r for r in results if r["batch"] == batch]
        merged: dict[str, dict] = {}
        for r in here:
            arm = merged.setdefault(r["arm"], {**r, "tokens_per_second": []})
            arm["tokens_per_second"] += r["tokens_per_second"]
        speeds = {
            name: statistics.median(arm["tokens_per_second"])
            for name, arm in merged.items()
        }
        chains = [name for name in speeds if name.startswith("chain")]
        best = max(chains, key=speeds.get) if chains else "plain"
        for name, arm in merged.items():
            steps = arm["tokens_per_step"]
            row = {
                "batch": batch,
                "arm": name,
                "tokens_per_second": round(speeds[name], 1),
                "low": round(min(arm["tokens_per_second"]), 1),
                "high": round(max(arm["tokens_per_second"]), 1),
                "tokens_per_step": round(steps, 3),
                "ms_per_step": round(1000 * batch * steps / speeds[name], 3),
                "over_best_chain": round(speeds[name] / speeds[best], 3),
                "best_chain": best,
                "accepted_by_depth": arm["accepted_by_depth"],
            }
            table.append(row)
            print(
                f"batch {batch:2} {name:10} {row['tokens_per_second']:9.1f} tokens/s "
                f"({row['low']:.1f} to {row['high']:.1f}), {steps:.3f} tokens a step, "
                f"{row['ms_per_step']:.3f} ms a step, {row['over_best_chain']:.3f} "
                f"of {best}"
            )
    return table


def report_exact(results: list[dict], args: argparse.Namespace) -> list[dict]:
    """Where each arm leaves plain decoding, and how close the best two were there."""
    table = []
    for batch in args.batches:
        here = {r["arm"]: r for r in results if r["batch"] == batch}
        plain = here["plain"]
        for name, arm in here.items():
            if name == "plain":
                continue
            parted = []
            for i, (got, want) in enumerate(
                zip(arm["tokens"], plain["tokens"], strict=True)
            ):
                if got != want:
                    at = next(
                        k
                        for k, (a, b) in enumerate(zip(got, want, strict=True))
                        if a != b
                    )
                    gap = plain["gaps"][i][at]
                    parted.append({"prompt": i, "token": at, "gap": gap})
            largest = max((p["gap"] for p in parted), default=0.0)
            count = len(plain["tokens"])
            row = {"batch": batch, "arm": name, "same": count - len(parted)}
            row |= {"prompts": count, "largest_gap": largest, "parted": parted}
            table.append(row)
            print(
                f"batch {batch:2} {name:10} {row['same']}/{count} as plain, largest "
                f"gap where they part: {largest}"
            )
    return table


def plot(table: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for batch in sorted({row["batch"] for row in table}):
        rows = [r for r in table if r["batch"] == batch and r["arm"].startswith("tree")]
        budgets = [int(r["arm"].split()[1]) for r in rows]
        ratios = [r["over_best_chain"] for r in rows]
        axes.plot(budgets, ratios, marker="o", label=f"batch {batch}")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tree budget N")
    axes.set_ylabel("tokens per second over the best chain")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def tp_markdown(document: dict[str, Any]) -> str:
    """Tables of what check_tp.py found."""
    size = document["tensor_parallel_size"]

    def same(row: dict, key: str) -> str:
        found = row.get(key)
        return f"{found['same']}/{found['requests']}" if found else "not run"

    def table(*rows: list) -> list[str]:
        head, *rest = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
        return ["", head, "|---" * len(rows[0]) + "|", *rest]

    lines = [f"Tensor parallel {size}, {document['device']}."]
    if document["exact"]:
        head = ["pair", "batch", "steps compared", "as TP 1", "as plain", "right"]
        rows = [
            [r["pair"], r["batch"], r["steps_compared"], same(r, "tree_at_1")]
            + [same(r, "plain"), "yes" if r["ok"] else "no"]
            for r in document["exact"]
        ]
        lines += table(head, *rows)
    if document["hang"]:
        head = ["pair", "case", "seconds", "preemptions", "aborted", "as plain"]
        rows = [
            [r["pair"], r["case"], r.get("seconds", "no end")]
            + [r.get("preemptions", ""), r.get("aborted", "")]
            + [f"{r['same']}/{r['requests']}" if "same" in r else "", r["ok"]]
            for r in document["hang"]
        ]
        rows = [[*row[:-1], "yes" if row[-1] else "no"] for row in rows]
        lines += table([*head, "right"], *rows)
    if document["step"]:
        head = ["TP", "rows", "batch", "chain, ms a step", "tree, ms a step"]
        rows = [
            [r["tp"], r["rows"], r["batch"]]
            + [spread(r[kind]) if r[kind] else "failed" for kind in ("chain", "tree")]
            + [r.get("ratio", "")]
            for r in document["step"]
        ]
        lines += table([*head, "tree over chain"], *rows)
    for kind in ("failures", "errors"):
        lines += ["", f"{kind.capitalize()}:", ""] if document[kind] else []
        lines += [f"- {line}" for line in document[kind]]
    return "\n".join(lines) + "\n"
