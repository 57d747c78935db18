# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Measures exactness and acceptance of the bundled pair on a CPU.

    .venv/bin/python scripts/measure.py --out docs/measurements.json
    .venv/bin/python scripts/measure.py --tp 2 --out docs/measurements-tp2.json
    .venv/bin/python scripts/measure.py --pair models/tiny-qwen3_5 --out FILE
    .venv/bin/python scripts/measure.py --table docs/measurements.json

Greedy float32. Every configuration decodes the same held-out prompts at batch 1 and
at batch 8; its tokens are compared with plain decoding, its tokens per step with the
chain's. A finished configuration is kept in the output file, so that an interrupted
run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import ddtree_cpu as cpu

BUDGETS = (1, 7, 15, 16, 31, 63)
POLICIES = ("best_first", "spine_first")
BATCHES = (1, 8)


def configurations() -> dict[str, dict[str, Any] | None]:
    """Speculative configs by name; plain decoding first, then the chain."""
    found: dict[str, dict[str, Any] | None] = {"plain": None, "chain 15": cpu.chain(15)}
    for policy in POLICIES:
        for budget in BUDGETS:
            found[f"{policy} {budget}"] = cpu.ddtree(budget, policy)
    return found


def write(path: Path, data: dict[str, Any]) -> None:
    """Replace ``path`` in one move."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(
        json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8"
    )
    temporary.replace(path)


def measure(
    path: Path,
    tp: int,
    count: int,
    tokens: int,
    batches: list[int],
    only: list[str] | None,
) -> dict[str, Any]:
    """Run the configurations, or ``only`` some, that ``path`` does not hold yet."""
    key = {"tensor_parallel_size": tp, "prompts": count, "tokens": tokens}
    if cpu.PAIR.name != "tiny-qwen3":
        key["pair"] = cpu.PAIR.name
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if any(data.get(name, value) != value for name, value in key.items()):
        raise SystemExit(f"--out={path}: holds other settings; name a new file")
    data.update(key)
    runs = data.setdefault("runs", {})
    prompts = cpu.heldout(count)
    for name, spec in configurations().items():
        if only and name not in ("plain", *only):
            continue
        found = runs.setdefault(name, {})
        missing = [batch for batch in batches if str(batch) not in found]
        if not missing:
            continue
        with cpu.engine(spec, tensor_parallel_size=tp) as llm:
            for batch in missing:
                run = cpu.decode(llm, prompts, concurrency=batch, max_tokens=tokens)
                plain = runs.get("plain", {}).get(str(batch), {}).get("tokens")
                same = [a == b for a, b in zip(run.tokens, plain or run.tokens)]  # noqa: B905
                found[str(batch)] = {
                    "same": sum(same),
                    "tokens_per_step": run.tokens_per_step,
                    "steps": run.steps if spec else None,
                    "seconds": round(run.seconds, 1),
                    **({} if spec else {"tokens": run.tokens}),
                }
                print(
                    f"tp {tp}, {name}, batch {batch}: {sum(same)}/{len(same)} same, "
                    f"{run.tokens_per_step:.3f} tokens a step, {run.seconds:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
                write(path, data)
    return data


def table(data: dict[str, Any]) -> str:
    """Markdown: one row per configuration, ratios paired by prompt if the chain ran."""
    runs, count = data["runs"], data["prompts"]
    chain = runs.get("chain 15", {}).get("8")

    def same(name: str, batch: str) -> str:
        found = runs[name].get(batch)
        return f"{found['same']}/{count}" if found else "not run"

    lines = ["| configuration | same, batch 1 | same, batch 8 | tokens a step |"]
    rule = "|---|---|---|---|"
    if chain:
        lines[0] += " over the chain | over the chain by prompt: 10 %, median, 90 % |"
        rule += "---|---|"
    lines.append(rule)
    for name in runs:
        if name == "plain" or "8" not in runs[name]:
            continue
        found = runs[name]["8"]
        row = f"| {name} | {same(name, '1')} | {same(name, '8')} "
        row += f"| {found['tokens_per_step']:.2f} |"
        if chain:
            ratios = [
                (sum(tree) / len(tree)) / (sum(line) / len(line))
                for tree, line in zip(found["steps"], chain["steps"], strict=True)
            ]
            deciles = statistics.quantiles(ratios, n=10)
            mean = found["tokens_per_step"] / chain["tokens_per_step"]
            row += f" {mean:.3f} |"
            row += f" {deciles[0]:.2f}, {deciles[4]:.2f}, {deciles[8]:.2f} |"
        lines.append(row)
    return "\n".join(lines)


def table_by_set(data: dict[str, Any]) -> str:
    """Markdown: tokens per step of each set of prompts, batch 8."""
    sets = [row["set"] for row in cpu.heldout_rows(data["prompts"])]
    names = sorted(set(sets))
    lines = [
        "| configuration | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for name, found in data["runs"].items():
        if name == "plain" or "8" not in found:
            continue
        cells = []
        for wanted in names:
            steps = [
                n
                for which, request in zip(sets, found["8"]["steps"], strict=True)
                if which == wanted
                for n in request
            ]
            cells.append(f"{sum(steps) / len(steps):.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="result file, also for resuming")
    parser.add_argument("--table", type=Path, help="print a result file as Markdown")
    parser.add_argument(
        "--pair",
        type=Path,
        default=cpu.PAIR,
        help="folder with target and drafter (default: the bundled dense pair)",
    )
    parser.add_argument("--tp", type=int, default=1, choices=(1, 2))
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=list(configurations()),
        help="configurations to run, as 'best_first 31'; plain always runs",
    )
    args = parser.parse_args()
    if (args.out is None) == (args.table is None):
        parser.error("give one of --out and --table")
    if not (args.pair / "target" / "config.json").is_file():
        parser.error(f"--pair={args.pair}: has no target/config.json; name a pair")
    cpu.use(args.pair)
    if args.table:
        if not args.table.is_file():
            parser.error(f"--table={args.table}: no such file; make it with --out")
        data = json.loads(args.table.read_text(encoding="utf-8"))
        print(table(data), table_by_set(data), sep="\n\n")
    else:
        print(
            table(
                measure(
                    args.out,
                    args.tp,
                    args.prompts,
                    args.tokens,
                    args.batches,
                    args.only,
                )
            )
        )


if __name__ == "__main__":
    main()
