# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Compare tree and chain on a GPU, in one run.

    python scripts/bench.py step  --out FILE [--shape 8b] [--rows 16,32,64]
    python scripts/bench.py speed --out FILE --pair FOLDER [--budgets 7,15,31,63,127]
    python scripts/bench.py exact --out FILE --pair FOLDER [--budgets 15,31]

``step`` takes configurations at real shapes without weights and reports milliseconds
a step: a tree of Q rows beside a chain of Q rows. ``speed`` takes a trained pair and
reports tokens per second beside the chain's best length. ``exact`` compares greedy
texts and shows the gap between the best two tokens where they part.

Every engine runs in a process of its own; arms take turns, ``--rounds`` times. With
``--together`` all engines are started at once and stay, so that a turn costs no start
and the arms of a round stand beside each other in time; all have to fit into memory.
The result file is removed before the run; until its end, what the finished arms gave is
in a file with the suffix ``.part``. Exit code 0, or 2 if an argument is wrong or an
engine fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchlib.process import BenchError, Child, exit_on_sigterm, run_child
from benchlib.report import plot, report_exact, report_speed, report_step
from benchlib.shapes import HYBRID_ENGINE, HYBRIDS, SHAPES, is_hybrid, write_shape

GRAPHS = {
    "full": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "compiled": {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"},
    "piecewise": {"mode": 3, "cudagraph_mode": "PIECEWISE"},
    "eager": None,
}


def numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of numbers, such as 7,15,31"
        ) from None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=["step", "speed", "exact"])
    parser.add_argument("--out", type=Path, required=True, help="result, JSON")
    parser.add_argument("--plot", type=Path, help="picture of a speed run")
    parser.add_argument("--pair", type=Path, help="folder with target/ and drafter/")
    parser.add_argument("--shape", choices=sorted({**SHAPES, **HYBRIDS}), default="8b")
    parser.add_argument("--rows", type=numbers, default=[16, 32, 64])
    parser.add_argument("--budgets", type=numbers, default=[7, 15, 31, 63, 127])
    parser.add_argument("--chains", type=numbers, default=[3, 7, 15])
    parser.add_argument("--policy", default="best_first")
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--context", type=int, default=512, help="prompt of a step run")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=32, help="of a pair's heldout")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=2, help="turns of every arm")
    parser.add_argument("--repeats", type=int, default=5, help="measurements a turn")
    parser.add_argument("--cudagraph", choices=list(GRAPHS), default="full")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.5)
    parser.add_argument(
        "--capture-tokens",
        type=int,
        help="rows of the largest captured graph, both arms (default: vLLM's choice)",
    )
    parser.add_argument(
        "--capture-batches",
        action="store_true",
        help="capture each arm's graphs for the sizes of --batches and below",
    )
    parser.add_argument("--no-async", action="store_true")
    parser.add_argument(
        "--together",
        type=float,
        metavar="GIB",
        help="start all engines at once, each with a KV cache of GIB",
    )
    parser.add_argument("--attention", choices=["auto", "flash", "triton"])
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    return parser.parse_args()


def base_engine(args: argparse.Namespace, batches: list[int]) -> dict[str, Any]:
    engine: dict[str, Any] = {
        "dtype": args.dtype,
        "max_model_len": args.max_model_len,
        "max_num_seqs": max(8, *batches),
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
    }
    if args.tensor_parallel_size > 1:
        engine["tensor_parallel_size"] = args.tensor_parallel_size
    graphs = GRAPHS[args.cudagraph]
    if graphs is None:
        engine["enforce_eager"] = True
    else:
        most = {"max_cudagraph_capture_size": args.capture_tokens}
        engine["compilation_config"] = graphs | (most if args.capture_tokens else {})
    if args.together:
        engine["kv_cache_memory_bytes"] = int(args.together * 2**30)
        engine["gpu_memory_utilization"] = 0.01  # asked for at the start, not kept to
    if args.no_async:
        engine["async_scheduling"] = False
    if args.attention:
        engine["additional_config"] = {"ddtree_attention": args.attention}
    return engine


def run_together(jobs: list[dict[str, Any]], rounds: int, keep) -> None:
    """Start all engines, then measure ``rounds`` times each batch of each arm.

    Args:
        jobs: One for each arm.
        rounds: Turns of every arm.
        keep: Called with the arm, the round and a result.
    """
    children: list[Child] = []
    try:
        children += [Child(job) for job in jobs]
        for child in children:
            child.wait()
        for turn in range(rounds):
            for batch in jobs[0]["batches"]:
                for child in children:
                    for result in child.ask(batches=[batch]):
                        keep(child.arm, turn, result)
    finally:
        for child in children:
            child.end()
        for child in children:
            child.close()


def captured(arm: dict[str, Any], batches: list[int]) -> list[int]:
    """Tokens of whole batches of an arm's target and drafter.

    Also of smaller batches, since requests do not end in the same step.
    """
    spec = arm.get("speculative_config", {})
    rows = 1 + spec.get("tree_budget", spec.get("num_speculative_tokens", 0))
    kinds = {rows}
    if spec:
        config = json.loads((Path(spec["model"]) / "config.json").read_text())
        kinds.add(min(rows, config["block_size"]))
    counts = {n for k in range(10) for n in (2**k, 3 * 2**k) if n <= max(batches)}
    return sorted({n * kind for n in counts | set(batches) for kind in kinds})


def step_arms(args: argparse.Namespace, folder: Path) -> dict[str, dict]:
    arms: dict[str, dict] = {}
    for rows in args.rows:
        target, drafter = write_shape(args.shape, folder, 16)
        _, wide = write_shape(args.shape, folder, rows)
        arms[f"chain of {rows} rows"] = {
            "model": str(target),
            "speculative_config": {
                "method": "dflash",
                "model": str(wide),
                "num_speculative_tokens": rows - 1,
            },
        }
        arms[f"tree of {rows} rows"] = {
            "model": str(target),
            "speculative_config": {
                "method": "ddtree",
                "model": str(drafter),
                "tree_budget": rows - 1,
            },
        }
    extra = {"load_format": "dummy", "skip_tokenizer_init": True}
    if args.shape in HYBRIDS:
        extra |= HYBRID_ENGINE
    return {name: {**arm, **extra} for name, arm in arms.items()}


def pair_arms(args: argparse.Namespace) -> dict[str, dict]:
    if args.pair is None or not (args.pair / "target" / "config.json").is_file():
        raise BenchError(
            f"--pair {args.pair} has no target/config.json; give a folder made by "
            "scripts/train_pair.py"
        )
    target, drafter = str(args.pair / "target"), str(args.pair / "drafter")
    arms: dict[str, dict] = {"plain": {"model": target}}
    for length in args.chains:
        arms[f"chain {length}"] = {
            "model": target,
            "speculative_config": {
                "method": "dflash",
                "model": drafter,
                "num_speculative_tokens": length,
            },
        }
    for budget in args.budgets:
        arms[f"tree {budget}"] = {
            "model": target,
            "speculative_config": {
                "method": "ddtree",
                "model": drafter,
                "tree_budget": budget,
                "tree_policy": args.policy,
            },
        }
    if is_hybrid(args.pair / "target"):
        arms = {name: {**arm, **HYBRID_ENGINE} for name, arm in arms.items()}
    return arms


def save(args: argparse.Namespace, table: list[dict], results: list[dict]) -> Path:
    """Write the document beside ``--out``, from where it is moved when complete."""
    try:
        import torch

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    except ImportError:
        device = "unknown"
    arguments = {key: str(value) for key, value in vars(args).items()}
    document = {"device": device, "arguments": arguments}
    document |= {"table": table, "results": results}
    partial = args.out.with_suffix(".part")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return partial


def run(args: argparse.Namespace) -> None:
    if args.tensor_parallel_size < 1:
        raise BenchError(
            f"--tensor-parallel-size {args.tensor_parallel_size}: give 1 or more"
        )
    args.out.unlink(missing_ok=True)
    job: dict[str, Any] = {
        "mode": args.mode,
        "batches": args.batches,
        "tokens": args.tokens,
        "repeats": args.repeats,
        "context": args.context,
        "temperature": args.temperature,
        "max_prompts": args.prompts,
        "own_process": args.mode == "speed",
    }
    with tempfile.TemporaryDirectory() as scratch:
        if args.mode == "step":
            arms = step_arms(args, Path(scratch))
        else:
            arms = pair_arms(args)
            heldout = args.pair / "heldout.jsonl"
            lines = heldout.read_text(encoding="utf-8").splitlines()
            count = min(args.prompts, len(lines))
            picked = [lines[i * len(lines) // count] for i in range(count)]
            job["prompts"] = [json.loads(line)["text"] for line in picked]
        rounds = 1 if args.mode == "exact" else args.rounds
        results: list[dict] = []

        def keep(arm: str, turn: int, result: dict) -> None:
            results.append({"arm": arm, "round": turn, **result})
            save(args, [], results)  # kept if a later arm fails

        base = base_engine(args, args.batches)
        if args.capture_batches and "compilation_config" in base:
            for arm in arms.values():
                sizes = {"cudagraph_capture_sizes": captured(arm, args.batches)}
                arm["compilation_config"] = base["compilation_config"] | sizes
        jobs = [
            {**job, "arm": name, "engine": {**base, **arm}}
            for name, arm in arms.items()
        ]
        if args.together:
            run_together(jobs, rounds, keep)
        else:
            for turn in range(rounds):
                for each in jobs:
                    print(f"round {turn + 1}: {each['arm']}", file=sys.stderr)
                    for result in run_child(each):
                        keep(each["arm"], turn, result)
    reports = {"step": report_step, "speed": report_speed, "exact": report_exact}
    table = reports[args.mode](results, args)
    save(args, table, [] if args.mode == "exact" else results).replace(args.out)
    if args.plot and args.mode == "speed":
        plot(table, args.plot)


def main() -> int:
    args = parse()
    exit_on_sigterm()
    try:
        run(args)
    except BenchError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
