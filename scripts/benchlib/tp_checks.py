# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The engines of scripts/check_tp.py, one after the other, and what they give."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from benchlib.process import BenchError, Child, Hang
from benchlib.shapes import HYBRID_ENGINE, is_hybrid
from benchlib.tp_child import CASES
from benchlib.tp_compare import (
    TIES,
    Parting,
    fact_failures,
    gap_of,
    known_gap,
    partings,
    rank_failures,
    request_failures,
    text_failures,
)

PARTED = "ddtree_check_ranks: step"  # of rank_check's error
GROUP = 8  # requests at a time, of a reference run
# Blocks of a pool that has to preempt, over those of one request at its full length.
SMALL_POOL = 1.6


class Session:
    """Starts engines, and keeps what failed.

    Args:
        args: Of check_tp.py.
        gpu: Whether there are GPUs; else a CPU rehearses.
        environment: Variables for the engines, by tensor-parallel size.
        log: For the engines' output.
        keep: Called after every part.

    Attributes:
        failures: Checks that failed, a line each.
        errors: Engines that failed, a line each.
        engines: Facts of every engine that started.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        gpu: bool,
        environment: Callable[[int], dict[str, str]],
        log: IO[str],
        keep: Callable[[], None],
    ) -> None:
        self.args = args
        self.size: int = args.tensor_parallel_size
        self.gpu = gpu
        self.environment = environment
        self.log = log
        self.keep = keep
        self.failures: list[str] = []
        self.errors: list[str] = []
        self.engines: list[dict[str, Any]] = []
        self.exact: list[dict[str, Any]] = []
        self.hang: list[dict[str, Any]] = []
        self.step: list[dict[str, Any]] = []

    def fail(self, name: str, lines: list[str]) -> None:
        self.failures += [f"{name}: {line}" for line in lines]

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Go on with the next part after an engine fails or hangs in this one."""
        begin, where = time.monotonic(), self.log.tell()
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            yield
        except Hang as error:
            self.fail(name, [f"hang: {error}"])
        except BenchError as error:
            parted = self._parted(where)
            if parted:
                self.fail(name, [parted])
            else:
                self.errors.append(f"{name}: {error}; see {self.log.name}")
        self.keep()
        took = time.monotonic() - begin
        print(f"{name}: {took:.0f} s", file=sys.stderr, flush=True)

    def _parted(self, where: int) -> str | None:
        """What the ranks' comparison said since byte ``where`` of the log."""
        with open(self.log.name, "rb") as file:
            file.seek(where)
            text = file.read().decode("utf-8", "replace")
        found = next((line for line in text.splitlines() if PARTED in line), None)
        return found and found[found.index(PARTED) :]

    @contextlib.contextmanager
    def child(
        self, name: str, engine: dict[str, Any], **job: Any
    ) -> Iterator[tuple[Child, list[dict[str, Any]]]]:
        """An engine that has started, and the facts of its ranks."""
        size = engine["tensor_parallel_size"]
        child = Child(
            {"arm": name, "engine": engine, "own_process": self.gpu, **job},
            self.environment(size),
            self.log,
            self.args.timeout,
        )
        try:
            facts = child.wait()[0]["facts"]
            self.engines.append({"arm": name, "ranks": facts})
            if self.gpu:
                spec = engine.get("speculative_config", {})
                graphs = "compilation_config" in engine
                tree = spec.get("method") == "ddtree"
                self.fail(name, fact_failures(facts, size, tree, graphs))
            yield child, facts
        finally:
            child.close()


class Plain:
    """A plain engine at TP 1, by which differences are judged."""

    def __init__(self, child: Child, tie: float) -> None:
        self.child = child
        self.tie = tie

    def decode(self, groups: list) -> tuple[list[list[int]], list[list]]:
        """Texts and their best tokens of all requests of the groups."""
        results = self.child.ask(mode="decode", groups=groups, best=True)
        tokens = [text for result in results for text in result["tokens"]]
        return tokens, [best for result in results for best in result["best"]]

    def compare(
        self,
        name: str,
        prompts: list[list[int]],
        texts: list[list[int]],
        references: list[list[int]],
        plain: tuple[list[list[int]], list[list]],
    ) -> tuple[dict[str, Any], list[str]]:
        """Compare texts, judge where they part.

        Args:
            name: What is compared with what, for the messages.
            prompts: Of R requests.
            texts: Of those.
            references: Of those.
            plain: What ``decode`` gave for those.

        Returns:
            ``requests``, ``same`` and ``parted``; lines on what is no tie.
        """
        found: list[Parting] = partings(texts, references)
        # Both left the plain text before they parted: ask what comes after theirs.
        unknown = [
            each
            for each in found
            if not known_gap(each, plain[0][each.request], plain[1][each.request])
            and None not in each.tokens
        ]
        for begin in range(0, len(unknown), GROUP):
            some = unknown[begin : begin + GROUP]
            contexts = [prompts[each.request] + each.prefix for each in some]
            _, best = self.decode([[contexts, [1] * len(some)]])
            for each, rows in zip(some, best, strict=True):
                each.gap = gap_of(each.tokens, rows[0])
        row = {"requests": len(texts), "same": len(texts) - len(found)}
        row["parted"] = [each.row() for each in found]
        return row, text_failures(name, found, self.tie)


class PairCheck:
    """Checks ``exact`` and ``hang`` of one pair.

    Args:
        session: Where results go.
        pair: Folder with target/, drafter/ and heldout.jsonl.
        base: Arguments of every engine.
        max_model_len: Of the engines of ``hang``.
    """

    def __init__(
        self, session: Session, pair: Path, base: dict[str, Any], max_model_len: int
    ) -> None:
        self.session = session
        self.args = session.args
        self.pair = pair
        self.max_model_len = max_model_len
        self.base = {**base, "model": str(pair / "target")}
        self.base |= HYBRID_ENGINE if is_hybrid(pair / "target") else {"block_size": 16}
        rows = (pair / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
        # Every seventh at first, so that a short run sees all sets.
        order = [row for i in range(7) for row in rows[i::7]]
        self.texts = [json.loads(row)["text"] for row in order]
        self.groups: dict[int, list[dict[str, Any]]] = {}
        self.trees: dict[int, list[list[int]]] = {}
        self.cases: dict[str, dict[str, Any]] = {}

    def name(self, what: str) -> str:
        return f"{self.pair.name}, {what}"

    def tree(self, size: int, check: bool = False, **changes: Any) -> dict[str, Any]:
        """Arguments of an engine with trees."""
        engine = {**self.base, "tensor_parallel_size": size, **changes}
        engine["speculative_config"] = {
            "method": "ddtree",
            "model": str(self.pair / "drafter"),
            "tree_budget": self.args.budget,
        }
        extra = {"ddtree_check_ranks": True} if check else {}
        engine["additional_config"] = {**engine.get("additional_config", {}), **extra}
        return engine

    def run(self) -> None:
        only, size = self.args.only, self.session.size
        if "exact" in only:
            with self.session.part(self.name(f"exact: tree at TP {size}")):
                self.run_ranks()
            if size > 1 and self.groups:
                with self.session.part(self.name("exact: tree at TP 1")):
                    self.run_one()
        if "hang" in only:
            self.run_hang()
        if self.groups or self.cases:
            with self.session.part(self.name("plain at TP 1")):
                self.run_plain()

    def run_ranks(self) -> None:
        """Texts of TP N, as many as the steps to compare take."""
        args, size = self.args, self.session.size
        name = self.name(f"tree at TP {size}, ranks compared")
        with self.session.child(name, self.tree(size, True)) as (child, _):
            for batch in args.batches:
                self.groups[batch] = child.ask(
                    mode="ranks",
                    batch=batch,
                    texts=self.texts,
                    tokens=args.tokens,
                    steps=args.steps,
                )

    def run_one(self) -> None:
        """The same requests with trees at TP 1."""
        name = self.name("tree at TP 1")
        with self.session.child(name, self.tree(1)) as (child, _):
            for batch, results in self.groups.items():
                groups = [
                    [r["prompts"], [self.args.tokens] * len(r["prompts"])]
                    for r in results
                ]
                found = child.ask(mode="decode", groups=groups, best=False)
                self.trees[batch] = [text for r in found for text in r["tokens"]]

    def run_hang(self) -> None:
        """Every case in an engine that did not hang before; preemption has its own."""
        blocks = None
        waiting = list(CASES)
        while waiting:
            small = waiting[0] == "preemption"
            changes: dict[str, Any] = {"max_model_len": self.max_model_len}
            if small:
                if blocks is None:
                    line = "preemption was not run, since no engine started before it"
                    self.session.fail(self.name("hang"), [line])
                    return
                changes["num_gpu_blocks_override"] = int(SMALL_POOL * blocks) + 2
            cases = [case for case in waiting if (case == "preemption") == small]
            blocks = self.hang_cases(cases, waiting, changes) or blocks

    def hang_cases(
        self, cases: list[str], waiting: list[str], changes: dict[str, Any]
    ) -> int | None:
        """Run cases in one engine until one hangs.

        Args:
            cases: Of ``CASES``.
            waiting: What was tried, also in vain, is removed.
            changes: Arguments of the engine.

        Returns:
            Blocks of a request at its full length, None if no engine started.
        """
        size, blocks = self.session.size, None
        engine = self.tree(size, **changes)
        current = cases[0]
        start = ", ".join(cases)
        with self.session.part(self.name(f"hang at TP {size}: {start}")):
            arm = self.name(f"tree at TP {size} for {start}")
            with self.session.child(arm, engine) as (child, facts):
                blocks = max(rank["request_blocks"] for rank in facts)
                for current in cases:
                    child.arm = self.name(f"case {current}")
                    waiting.remove(current)
                    begin = time.monotonic()
                    asked = child.ask(mode="hang", case=current, texts=self.texts)
                    found = asked[0] | {"seconds": time.monotonic() - begin}
                    self.cases[current] = found
        if blocks is None:  # it did not start; another one will not either
            del waiting[:]
        elif current in waiting:
            waiting.remove(current)
        for case in cases:
            if case not in self.cases and case not in waiting:
                self.session.hang.append(
                    {"pair": self.pair.name, "case": case, "ok": False}
                )
        return blocks

    def run_plain(self) -> None:
        """References for both checks, and the comparisons."""
        engine = {**self.base, "tensor_parallel_size": 1}
        with self.session.child(self.name("plain at TP 1"), engine) as (child, _):
            plain = Plain(child, TIES[self.args.dtype])
            for batch in self.groups:
                self.compare_exact(plain, batch)
            for case in self.cases:
                self.compare_hang(plain, case)

    def compare_exact(self, plain: Plain, batch: int) -> None:
        results, size = self.groups[batch], self.session.size
        prompts = [prompt for r in results for prompt in r["prompts"]]
        texts = [text for r in results for text in r["tokens"]]
        count = self.args.tokens
        reference = plain.decode(
            [[r["prompts"], [count] * len(r["prompts"])] for r in results]
        )
        ranks = results[-1]["ranks"]
        row = {
            "pair": self.pair.name,
            "batch": batch,
            "tokens": count,
            "ranks": len(ranks),
            "steps_compared": min(rank["steps"] for rank in ranks),
        }
        lines = rank_failures(ranks, size, self.args.steps)
        compared = [(f"TP {size} and plain", "plain", reference[0])]
        if batch in self.trees:
            name = f"TP {size} and TP 1"
            compared.append((name, "tree_at_1", self.trees[batch]))
        for name, key, other in compared:
            row[key], found = plain.compare(name, prompts, texts, other, reference)
            lines += found
        row["ok"] = not lines and (size == 1 or "tree_at_1" in row)
        self.session.exact.append(row)
        self.session.fail(self.name(f"exact, batch {batch}"), lines)

    def compare_hang(self, plain: Plain, case: str) -> None:
        found = self.cases[case]
        requests = found["requests"]
        prompts = [each["prompt"] for each in requests]
        texts = [each["tokens"] for each in requests]
        counts = [max(1, len(text)) for text in texts]
        tokens, best = plain.decode(
            [
                [prompts[i : i + GROUP], counts[i : i + GROUP]]
                for i in range(0, len(prompts), GROUP)
            ]
        )
        # A request that was aborted at once has no text.
        wanted = [want[: len(text)] for want, text in zip(tokens, texts, strict=True)]
        lines = request_failures(case, requests)
        row, parted = plain.compare(case, prompts, texts, wanted, (tokens, best))
        lines += parted
        if case == "preemption" and not found["preemptions"]:
            lines.append("preemption: no request was preempted, the pool was too large")
        self.session.hang.append(
            {
                "pair": self.pair.name,
                "case": case,
                "ok": not lines,
                "seconds": round(found["seconds"], 1),
                "preemptions": found["preemptions"],
                "aborted": sum(each["expected"] is None for each in requests),
                **row,
            }
        )
        self.session.fail(self.name("hang"), lines)


def run_step(
    session: Session, base: dict[str, Any], arms: dict[str, dict], job: dict[str, Any]
) -> None:
    """Milliseconds a step of chain and tree, at TP 1 and TP N.

    Args:
        session: Where results go.
        base: Arguments of every engine.
        arms: More of them, for ``chain of R rows`` and ``tree of R rows``.
        job: ``batches``, ``tokens``, ``context`` and ``repeats``.
    """
    times: dict[tuple, list[float]] = {}
    sizes = sorted({1, session.size})
    for size in sizes:
        for arm, changes in arms.items():
            name = f"step: {arm} at TP {size}"
            engine = {**base, **changes, "tensor_parallel_size": size}
            with session.part(name), session.child(name, engine, **job) as (child, _):
                for result in child.ask(mode="step"):
                    key = (size, arm, result["batch"])
                    times[key] = result["ms_per_step"]
    for size in sizes:
        for rows in session.args.rows:
            for batch in job["batches"]:
                row: dict[str, Any] = {"tp": size, "rows": rows, "batch": batch}
                for kind in ("chain", "tree"):
                    row[kind] = times.get((size, f"{kind} of {rows} rows", batch))
                if row["chain"] and row["tree"]:
                    ratio = statistics.median(row["tree"])
                    row["ratio"] = round(ratio / statistics.median(row["chain"]), 4)
                session.step.append(row)
