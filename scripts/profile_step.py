# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""What the GPU does in a decode step: chain and tree of equal rows side by side.

    python scripts/profile_step.py --out FILE [--shape 8b] [--rows 16,64]

Per arm: milliseconds a step by groups of kernels, the share of time in which the GPU
works, gaps between kernels, and synchronising calls of the host. Steps are recorded
with torch's profiler, which itself slows the host; so gaps are upper bounds.

Exit code 0, or 2 if an argument is wrong or an engine fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import bench
from benchlib.process import BenchError, exit_on_sigterm, run_child
from benchlib.shapes import HYBRIDS, SHAPES


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="result, JSON")
    parser.add_argument("--shape", choices=sorted({**SHAPES, **HYBRIDS}), default="8b")
    parser.add_argument("--rows", type=bench.numbers, default=[16, 64])
    parser.add_argument("--batches", type=bench.numbers, default=[1, 8])
    parser.add_argument("--context", type=int, default=512, help="prompt length")
    parser.add_argument("--tokens", type=int, default=48, help="recorded, a request")
    parser.add_argument("--cudagraph", choices=list(bench.GRAPHS), default="full")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.5)
    parser.add_argument("--arms", default="chain,tree", help="chain, tree or both")
    parser.set_defaults(
        dtype="bfloat16",
        no_async=False,
        attention=None,
        capture_tokens=None,
        together=None,
        tensor_parallel_size=1,
    )
    return parser.parse_args()


def report(result: dict) -> None:
    groups = ", ".join(f"{k} {v:.3f}" for k, v in result["ms_by_group"].items() if v)
    print(
        f"{result['arm']}, batch {result['batch']}: {result['ms_per_step']:.3f} ms a "
        f"step, GPU busy {100 * result['busy']:.1f} %, largest gap "
        f"{result['largest_gap_us']:.0f} us, syncs a step "
        f"{result['syncs_per_step']:.2f}\n    {groups}"
    )


def main() -> int:
    args = parse()
    exit_on_sigterm()
    args.out.unlink(missing_ok=True)
    job = {
        "mode": "profile",
        "batches": args.batches,
        "context": args.context,
        "tokens": args.tokens,
    }
    results = []
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for name, arm in bench.step_arms(args, Path(scratch)).items():
                if name.split()[0] not in args.arms.split(","):
                    continue
                engine = {**bench.base_engine(args, args.batches), **arm}
                for result in run_child({**job, "arm": name, "engine": engine}):
                    results.append({"arm": name, **result})
                    report(results[-1])
    except BenchError as error:
        print(f"profile_step.py: {error}", file=sys.stderr)
        return 2
    arguments = {key: str(value) for key, value in vars(args).items()}
    document = {"arguments": arguments, "results": results}
    partial = args.out.with_suffix(".part")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.replace(args.out)
    busy = [r["busy"] for r in results]
    if busy:
        print(f"GPU busy, median of all: {100 * statistics.median(busy):.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
