#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Decode held-out text plainly, with stock DFlash and with DDTree, and compare.

Exit codes: 0 every text is the same, 1 some text differs, 2 could not run (usage, vLLM
not patched, no pair).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, NoReturn, TextIO

from rich.console import Console
from rich.table import Table

import ddtree_cpu
from ddtree_cpu import Run
from demo_plot import replacing, write_plot

SCHEMA_VERSION = 1
MAX_BUDGET = 127
# The chain's tree analogue; one spine_first row shows that it never falls below.
SPINE_BUDGET = 31


@dataclass(frozen=True)
class Mode:
    """One way to decode.

    Attributes:
        name: Row label.
        spec: ``speculative_config``, None for plain decoding.
    """

    name: str
    spec: dict[str, Any] | None

    @property
    def family(self) -> str:
        """``plain``, ``chain``, ``best_first`` or ``spine_first``."""
        if self.spec is None:
            return "plain"
        return self.spec.get("tree_policy", "chain")


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt: its set and its text."""

    subset: str
    text: str


class Failure(Exception):
    """A one-line error for the user."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def _count(low: int, high: int) -> Any:
    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r}: want {low}..{high}")
        return int(text)

    return parse


def _budgets(text: str) -> list[int]:
    return [_count(1, MAX_BUDGET)(part.strip()) for part in text.split(",")]


def _output(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: cannot be written there")
    return path


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        description=__doc__.split("\n\n")[0],
        epilog="exit codes: 0 every text is the same, 1 some text differs, 2 could "
        "not run",
    )
    parser.add_argument(
        "--pair", default="tiny-qwen3", help="name under models/, or a folder"
    )
    parser.add_argument(
        "--prompts",
        type=_count(1, 10_000),
        default=24,
        help="prompts in all, spread over the sets (default 24)",
    )
    parser.add_argument(
        "--tokens",
        type=_count(2, 768),
        default=64,
        help="tokens per prompt (default 64)",
    )
    parser.add_argument(
        "--budgets",
        type=_budgets,
        default=[15, 31, 63],
        metavar="N,N,...",
        help="best_first tree budgets, 1..127 (default 15,31,63)",
    )
    parser.add_argument("--json", type=_output, metavar="FILE", help="write the result")
    parser.add_argument(
        "--plot", type=_output, metavar="FILE", help="write a PNG of tokens per step"
    )
    parser.add_argument("--verbose", action="store_true", help="show vLLM's own log")
    return parser.parse_args(argv)


def check_patched() -> None:
    """Raise Failure unless the vLLM of this interpreter is patched."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise Failure("vLLM is not installed for this Python; run `make install`")
    package = Path(list(spec.submodule_search_locations)[0])
    if not (package / "v1/spec_decode/ddtree/config.py").is_file():
        raise Failure(f"the vLLM in {package} is not patched; run `make install`")


def find_pair(name: str) -> Path:
    """Give the folder of a pair; raise Failure where it is incomplete."""
    named = ddtree_cpu.ROOT / "models" / name
    folder = named if named.is_dir() else Path(name)
    for part in ("target/config.json", "drafter/config.json", "heldout.jsonl"):
        if not (folder / part).is_file():
            raise Failure(
                f"--pair {name}: there is no {folder / part}; give the name of a "
                "folder under models/ or a path"
            )
    return folder.resolve()


def pick_prompts(pair: Path, count: int) -> list[Prompt]:
    """Take prompts from all sets in turn, spread evenly over each set."""
    lines = (pair / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    sets: dict[str, list[str]] = {}
    for row in map(json.loads, lines):
        sets.setdefault(row["set"], []).append(row["text"])
    total = sum(map(len, sets.values()))
    if count > total:
        raise Failure(f"--prompts {count}: the pair has {total} held-out prompts")
    shares = dict.fromkeys(sets, 0)
    while sum(shares.values()) < count:
        for name, texts in sets.items():
            if shares[name] < len(texts) and sum(shares.values()) < count:
                shares[name] += 1
    return [
        Prompt(name, texts[i * len(texts) // shares[name]])
        for name, texts in sets.items()
        for i in range(shares[name])
    ]


def chain_length(pair: Path) -> int:
    """The drafter's trained positions: its block size minus 1."""
    config = json.loads((pair / "drafter/config.json").read_text(encoding="utf-8"))
    return int(config["block_size"]) - 1


def make_modes(pair: Path, budgets: Sequence[int]) -> list[Mode]:
    """Plain decoding first: the others are compared with it."""
    length = chain_length(pair)
    modes = [
        Mode("plain", None),
        Mode(f"DFlash chain {length}", ddtree_cpu.chain(length)),
    ]
    trees = [(n, "best_first") for n in dict.fromkeys(budgets)]
    trees.append((SPINE_BUDGET, "spine_first"))
    for budget, policy in trees:
        label = f"DDTree {budget}" + (" spine" if policy == "spine_first" else "")
        modes.append(Mode(label, ddtree_cpu.ddtree(budget, policy)))
    return modes


def differences(plain: Run, run: Run) -> list[tuple[int, int]]:
    """Compare token ids with plain decoding.

    Returns:
        (prompt index, first differing token index) of each text that differs.
    """
    found = []
    for index, (want, got) in enumerate(zip(plain.tokens, run.tokens, strict=True)):
        if want != got or plain.texts[index] != run.texts[index]:
            length = min(len(want), len(got))
            at = next((i for i in range(length) if want[i] != got[i]), length)
            found.append((index, at))
    return found


def accepted_by_depth(run: Run) -> list[float]:
    """Share of steps that accepted at least d draft tokens, for d = 1, 2, ..."""
    steps = [size for request in run.steps for size in request]
    deepest = max(steps, default=1)
    return [sum(s > d for s in steps) / len(steps) for d in range(1, deepest)]


def _pooled(runs: Sequence[Sequence[int]]) -> float:
    """Tokens per step over all steps of some requests; 1 where there is none."""
    sizes = [size for steps in runs for size in steps]
    return fmean(sizes) if sizes else 1.0


def _percentiles(values: Sequence[float]) -> list[float]:
    """The 10th, 50th and 90th percentile."""
    if len(values) == 1:
        return [values[0]] * 3
    cuts = quantiles(values, n=10, method="inclusive")
    return [cuts[0], cuts[4], cuts[8]]


def summary(mode: Mode, run: Run, plain: Run, prompts: Sequence[Prompt]) -> dict:
    """Figures of one mode, as they go into the JSON file."""
    each = [_pooled([sizes]) for sizes in run.steps]
    by_set: dict[str, list[list[int]]] = {}
    for prompt, sizes in zip(prompts, run.steps, strict=True):
        by_set.setdefault(prompt.subset, []).append(sizes)
    differing = differences(plain, run)
    tokens = sum(map(len, run.tokens))
    return {
        "name": mode.name,
        "family": mode.family,
        "budget": mode.spec and mode.spec.get("tree_budget"),
        "same_text": len(prompts) - len(differing),
        "differing": [{"prompt": i, "first_token": at} for i, at in differing],
        "tokens": tokens,
        "tokens_per_step": {
            "mean": _pooled(run.steps),
            "percentiles_10_50_90": _percentiles(each),
            "by_set": {name: _pooled(runs) for name, runs in by_set.items()},
            "by_prompt": each,
        },
        "accepted_by_depth": accepted_by_depth(run),
        "seconds": run.seconds,
        "tokens_per_second": tokens / run.seconds,
    }


@contextlib.contextmanager
def quiet(log: TextIO | None) -> Iterator[None]:
    """Send what vLLM and its C++ parts print to a log file, or leave it alone."""
    if log is None:
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, fd)
            os.close(copy)


def decode_all(
    modes: Sequence[Mode], prompts: Sequence[Prompt], tokens: int, progress: Console
) -> list[Run]:
    """Run every mode on an engine of its own, one after the other."""
    runs = []
    texts = [prompt.text for prompt in prompts]
    for number, mode in enumerate(modes, 1):
        progress.print(f"\\[{number}/{len(modes)}] {mode.name} ...", end=" ")
        with ddtree_cpu.engine(mode.spec) as llm:
            # The first steps of an engine are slow; another prompt, for the cache.
            ddtree_cpu.decode(llm, ["\n"], max_tokens=16)
            runs.append(ddtree_cpu.decode(llm, texts, max_tokens=tokens))
        progress.print(f"{runs[-1].seconds:.1f} s")
    return runs


def show_sample(prompt: Prompt, text: str, out: Console) -> None:
    """Print one prompt with the text that followed."""
    tail = prompt.text.splitlines()[-6:]
    out.rule(f"a held-out prompt ({prompt.subset}) and its continuation", style="dim")
    out.print("\n".join(tail), style="dim", end="", markup=False, highlight=False)
    out.print(text, style="bold", markup=False, highlight=False)
    out.rule(style="dim")


def show_table(results: Sequence[dict], count: int, out: Console) -> None:
    """Print the comparison."""
    sets = list(results[0]["tokens_per_step"]["by_set"])
    table = Table(title="tokens per target step")
    table.add_column("mode", no_wrap=True)
    for name in ("same text", "all", "10-90 %", *sets, "tok/s"):
        table.add_column(name, justify="right")
    for result in results:
        steps = result["tokens_per_step"]
        table.add_row(
            result["name"],
            f"{result['same_text']}/{count}",
            f"{steps['mean']:.2f}",
            "{:.1f}-{:.1f}".format(*steps["percentiles_10_50_90"][::2]),
            *(f"{steps['by_set'][name]:.2f}" for name in sets),
            f"{result['tokens_per_second']:.0f}",
        )
    out.print(table)
    out.print(
        "Same text: equal to plain decoding, token for token. All and sets: tokens "
        "over steps. 10-90 %: spread over prompts, percentiles. DDTree N: N nodes, "
        "best_first; spine: spine_first. tok/s is of this CPU, which pays for every "
        "node of a tree: this run shows acceptance, not speed.",
        style="dim",
        highlight=False,
    )


def write_json(path: Path, results: Sequence[dict], args: argparse.Namespace) -> None:
    """Write settings and figures as one JSON document."""
    import torch

    import vllm

    document = {
        "schema_version": SCHEMA_VERSION,
        "pair": args.pair,
        "prompts": args.prompts,
        "tokens": args.tokens,
        "dtype": "float32",
        "sampling": "greedy",
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "modes": list(results),
    }
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _run(args: argparse.Namespace) -> int:
    out = Console()
    check_patched()
    pair = find_pair(args.pair)
    ddtree_cpu.PAIR = pair
    prompts = pick_prompts(pair, args.prompts)
    modes = make_modes(pair, args.budgets)
    with contextlib.ExitStack() as stack:
        log = None
        terminal = stack.enter_context(os.fdopen(os.dup(2), "w"))
        if args.verbose:
            os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
        else:
            log = tempfile.NamedTemporaryFile(  # noqa: SIM115 - kept after a failure
                "w+", prefix="ddtree-demo-", suffix=".log", delete=False
            )
        progress = Console(file=terminal)
        progress.print(
            f"{len(prompts)} held-out prompts, {args.tokens} tokens each, "
            f"{len(modes)} engines (each takes about 10 s to start)"
        )
        try:
            with quiet(log):
                runs = decode_all(modes, prompts, args.tokens, progress)
        except Exception as err:
            if log is None:
                raise
            with log:
                traceback.print_exc(file=log)
            line = str(err).strip().splitlines()
            raise Failure(
                f"vLLM failed: {line[0] if line else type(err).__name__} (its log: "
                f"{log.name})"
            ) from err
        finally:
            progress.print()
        if log is not None:
            log.close()
            Path(log.name).unlink()
    results = [
        summary(mode, run, runs[0], prompts)
        for mode, run in zip(modes, runs, strict=True)
    ]
    show_sample(prompts[0], runs[0].texts[0], out)
    show_table(results, len(prompts), out)
    if args.json:
        write_json(args.json, results, args)
    if args.plot:
        write_plot(args.plot, results, len(prompts), args.tokens)
    bad = [r for r in results if r["differing"]]
    for result in bad:
        for item in result["differing"]:
            print(
                f"error: {result['name']}: prompt {item['prompt']} differs from plain "
                f"decoding at token {item['first_token']}",
                file=sys.stderr,
            )
    return 1 if bad else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    args = _arguments(argv)
    try:
        return _run(args)
    except Failure as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
