# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The whole check of tensor parallelism, in one call on a machine with N GPUs.

    python scripts/check_tp.py --out FILE.json [--markdown FILE.md]
        [--tensor-parallel-size 2] [--only exact,hang,step] [--pair FOLDER ...]

``exact`` decodes held-out prompts with trees at TP N, while all ranks compare their
trees and walks, until ``--steps`` steps were compared. Its texts have to be those of
trees and of plain decoding at TP 1. Where they part, the two tokens have to be closer
than rounding: log probabilities within 1e-4 in float32, 0.25 in bfloat16.
``hang`` has requests that run up to the model's length, aborts in flight, and
preemption in a small pool; after each of these a request alone has to be answered, and
all texts have to be right. An engine that says nothing for ``--timeout`` seconds is
killed with all its workers.
``step`` times trees beside chains of equal rows, at real shapes without weights, at
TP 1 and TP N; its figures fail nothing. On a CPU it takes a bundled pair.

On GPUs every rank has to run the V2 model runner and DDTreeSpeculator, with CUDA
graphs, asynchronous scheduling, and NCCL_NVLS_ENABLE=0. With vLLM's build for CPUs it
is a rehearsal: V1 runner, gloo, float32.

The file has all figures; until the end they are in FILE.json.part. What the engines
print is in FILE.json.log. Exit codes: 0 all is well; 1 a check failed; 2 an argument is
wrong or an engine failed. After the last two the figures are written all the same,
unless an argument is wrong.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import bench
from benchlib.process import BenchError, exit_on_sigterm
from benchlib.report import tp_markdown
from benchlib.shapes import HYBRIDS, SHAPES
from benchlib.tp_checks import PairCheck, Session, run_step

ROOT = Path(__file__).resolve().parent.parent
PAIRS = [ROOT / "models" / name for name in ("tiny-qwen3", "tiny-qwen3_5")]
CHECKS = ("exact", "hang", "step")
STEP_TOKENS = 64
TINY = "tiny"  # shape: a bundled pair, weights and all
TINY_ROWS = 16


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def whole(least: int, most: int | None = None):
    """Type of an argument that is a whole number from ``least`` to ``most``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least or (most is not None and value > most):
            upto = "or more" if most is None else f"to {most}"
            raise argparse.ArgumentTypeError(f"{text!r}: give a number, {least} {upto}")
        return value

    return read


def wholes(least: int, most: int):
    """Type of an argument that is a list of such numbers."""

    def read(text: str) -> list[int]:
        values = [whole(least, most)(part) for part in text.split(",")]
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text!r}: name each number once")
        return values

    return read


def checks(text: str) -> list[str]:
    for part in text.split(","):
        if part not in CHECKS:
            raise argparse.ArgumentTypeError(
                f"{part!r}: name some of {', '.join(CHECKS)}, with commas between them"
            )
    return [each for each in CHECKS if each in text.split(",")]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="check_tp.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="result, JSON")
    add("--markdown", type=Path, help="tables of the result")
    add("--tensor-parallel-size", type=whole(1), default=2, metavar="N")
    add("--only", type=checks, default=list(CHECKS), help="exact,hang,step")
    add("--pair", type=Path, nargs="+", default=PAIRS, metavar="FOLDER")
    add("--steps", type=whole(1), default=2000, help="compared by the ranks, a batch")
    add("--tokens", type=whole(2, 768), default=256, help="of each text")
    add("--batches", type=wholes(1, 64), default=[1, 8])
    add("--budget", type=whole(1, 127), default=31, help="of the pairs' trees")
    shapes = sorted({**SHAPES, **HYBRIDS, TINY: None})
    add("--shape", choices=shapes, help="of step; default: 27b-16l, tiny on a CPU")
    add("--rows", type=wholes(2, 128), default=[16, 32, 64], help="of step")
    add("--repeats", type=whole(1), default=5, help="of step")
    add("--timeout", type=whole(1), default=600, help="seconds of silence")
    graphs = list(bench.GRAPHS)
    add("--cudagraph", choices=graphs, default="full", help="eager on a CPU")
    add("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on GPUs")
    add("--gpu-memory-utilization", type=float, default=0.85)
    parser.set_defaults(
        capture_tokens=None, together=None, no_async=False, attention=None
    )
    return parser.parse_args(arguments)


def check_files(args: argparse.Namespace) -> None:
    """Raise BenchError on a file that cannot be written or a pair that is none."""
    for field in ("out", "markdown"):
        path: Path | None = getattr(args, field)
        if path is not None and (
            path.is_dir() or not os.access(path.absolute().parent, os.W_OK)
        ):
            raise BenchError(
                f"--{field} {path}: no file can be written there; name one in a "
                "folder that exists"
            )
    if args.markdown and args.markdown.absolute() == args.out.absolute():
        raise BenchError(f"--markdown {args.markdown}: is --out, too; name another")
    if not 0 < args.gpu_memory_utilization <= 1:
        raise BenchError(
            f"--gpu-memory-utilization {args.gpu_memory_utilization}: give a share of "
            "the memory, over 0 and up to 1"
        )
    for pair in args.pair if {"exact", "hang"} & set(args.only) else ():
        for name in ("target/config.json", "drafter/config.json", "heldout.jsonl"):
            if not (pair / name).is_file():
                raise BenchError(
                    f"--pair {pair}: has no {name}; give a folder made by "
                    "scripts/train_pair.py"
                )
        try:
            lines = (pair / "heldout.jsonl").read_text("utf-8").splitlines()
            texts = [json.loads(line)["text"] for line in lines]
        except (ValueError, KeyError, TypeError):
            texts = []
        if not texts:
            raise BenchError(
                f"--pair {pair}: heldout.jsonl is no list of objects with a text, one "
                "a line; make it again with scripts/train_pair.py"
            )
        for part in ("target", "drafter"):
            check_heads(args, pair / part / "config.json")


def check_heads(args: argparse.Namespace, path: Path) -> None:
    """Raise BenchError if a model's heads cannot be spread over the ranks."""
    size = args.tensor_parallel_size
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BenchError(f"--pair: {path} is no JSON ({error}); mend it") from None
    config = config.get("text_config", config)
    for key in ("num_attention_heads", "linear_num_key_heads"):
        heads = config.get(key)
        if heads and heads % size:
            raise BenchError(
                f"--tensor-parallel-size {size}: does not divide {key} {heads} of "
                f"{path}; take a size that does, or another --pair"
            )


def check_shape(args: argparse.Namespace, gpu: bool) -> None:
    """Set the default shape; raise BenchError on one that cannot run here."""
    args.shape = args.shape or ("27b-16l" if gpu else TINY)
    if "step" not in args.only:
        return
    if not gpu and args.shape != TINY:
        # Upstream's drafter reads a weight that loading on a CPU has packed away.
        raise BenchError(
            f"--shape {args.shape}: on a CPU no drafter runs without weights; take "
            f"{TINY}"
        )
    if args.shape == TINY and max(args.rows) > TINY_ROWS:
        raise BenchError(
            f"--rows {max(args.rows)}: the drafter of --shape {TINY} has {TINY_ROWS}; "
            "take no more"
        )


def step_arms(args: argparse.Namespace, folder: Path) -> dict[str, dict]:
    """``bench.step_arms``, which knows no ``tiny``."""
    if args.shape != TINY:
        return bench.step_arms(args, folder)
    lengths = [rows - 1 for rows in args.rows]
    arms = bench.pair_arms(
        argparse.Namespace(
            pair=PAIRS[0], chains=lengths, budgets=lengths, policy="best_first"
        )
    )
    return {
        f"{kind} of {n + 1} rows": arms[f"{kind} {n}"]
        for n in lengths
        for kind in ("chain", "tree")
    }


def environment_of(gpu: bool, cores: list[int]):
    """Variables of an engine, by its tensor-parallel size."""

    def variables(size: int) -> dict[str, str]:
        if gpu:
            # Plain decoding on the runner of the trees, and in true float32.
            return {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_F32_DEFAULT": "ieee"}
        bind = "|".join(map(str, cores[:size])) if size > 1 else "nobind"
        return {
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_CPU_OMP_THREADS_BIND": bind,
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
            "OMP_NUM_THREADS": "1",
            # What would be compiled is for sampling, and takes longer than the rest.
            "TORCHDYNAMO_DISABLE": "1",
        }

    return variables


def find_device(size: int, cuda: bool, gpus: int, cores: int) -> bool:
    """Whether the check runs on GPUs, or is rehearsed on a CPU.

    Args:
        size: Ranks.
        cuda: vLLM is a build for GPUs. It does not rehearse: nobody would notice.
        gpus: That it sees.
        cores: Of the CPU that this process may use.

    Raises:
        BenchError: There are fewer than ``size`` of what is needed.
    """
    kind, count = ("GPU", gpus) if cuda else ("core", cores)
    if count < size:
        raise BenchError(
            f"--tensor-parallel-size {size}: needs as many {kind}s, {count} can be "
            "used here; take a larger machine, or a smaller size"
        )
    return cuda


def save(args: argparse.Namespace, session: Session, device: str) -> Path:
    """Write the document beside ``--out``, from where it is moved when complete."""
    arguments = {key: str(value) for key, value in vars(args).items()}
    document = {
        "device": device,
        "vllm": importlib.metadata.version("vllm"),
        "rehearsal": not session.gpu,
        "tensor_parallel_size": session.size,
        "ok": not session.failures and not session.errors,
        "failures": session.failures,
        "errors": session.errors,
        "exact": session.exact,
        "hang": session.hang,
        "step": session.step,
        "engines": session.engines,
        "arguments": arguments,
    }
    partial = args.out.with_name(args.out.name + ".part")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(tp_markdown(document), encoding="utf-8")
    return partial


def run(args: argparse.Namespace) -> Session:
    check_files(args)
    try:
        cuda = "cpu" not in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise BenchError("vllm is not installed; run `make install`") from None
    import torch

    cores = sorted(os.sched_getaffinity(0))
    gpus = torch.cuda.device_count() if cuda else 0
    gpu = find_device(args.tensor_parallel_size, cuda, gpus, len(cores))
    check_shape(args, gpu)
    args.dtype = args.dtype or ("bfloat16" if gpu else "float32")
    device = torch.cuda.get_device_name() if gpu else "cpu"
    if not gpu:
        args.cudagraph = "eager"
        print("check_tp.py: vLLM for CPUs: a rehearsal", file=sys.stderr)

    longest = args.max_model_len = 1024 if gpu else 256
    base: dict[str, Any] = bench.base_engine(args, args.batches)
    base["max_model_len"] = 1024
    if not gpu:
        base["max_num_batched_tokens"] = 2048
        del base["gpu_memory_utilization"]
    args.out.unlink(missing_ok=True)
    with open(f"{args.out}.log", "w", encoding="utf-8") as log:
        session = Session(
            args,
            gpu,
            environment_of(gpu, cores),
            log,
            lambda: save(args, session, device),
        )
        if {"exact", "hang"} & set(args.only):
            for pair in args.pair:
                PairCheck(session, pair, base, longest).run()
        if "step" in args.only:
            job = {
                "batches": args.batches,
                "tokens": min(args.tokens, STEP_TOKENS),
                "context": 512 if gpu else 64,
                "repeats": args.repeats,
            }
            with tempfile.TemporaryDirectory() as scratch:
                arms = step_arms(args, Path(scratch))
                if gpu:  # as bench.py
                    base["max_model_len"] = 4096
                run_step(session, base, arms, job)
    save(args, session, device).replace(args.out)
    return session


def main() -> int:
    args = parse()
    exit_on_sigterm()
    try:
        session = run(args)
    except BenchError as error:
        print(f"check_tp.py: {error}", file=sys.stderr)
        return 2
    for line in session.failures + session.errors:
        print(f"check_tp.py: {line}", file=sys.stderr)
    return 2 if session.errors else 1 if session.failures else 0


if __name__ == "__main__":
    sys.exit(main())
