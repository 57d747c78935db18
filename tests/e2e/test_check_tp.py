# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""scripts/check_tp.py: what it refuses, what it calls a failure, and a rehearsal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

import check_tp
import ddtree_cpu as cpu
from benchlib import tp_checks
from benchlib.process import BenchError, Child, Hang
from benchlib.tp_compare import (
    fact_failures,
    gap_of,
    partings,
    rank_failures,
    request_failures,
)

PAIR = str(cpu.DENSE_PAIR)


def call(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["check_tp.py", *arguments])
    try:
        return check_tp.main()
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--steps", "many"], "--steps: 'many': give a number, 1 or more"),
        (["--budget", "128"], "--budget: '128': give a number, 1 to 127"),
        (["--batches", "1,1"], "--batches: '1,1': name each number once"),
        (["--only", "exact,speed"], "--only: 'speed': name some of exact, hang, step"),
        (["--shape", "9b"], "--shape: invalid choice: '9b' (choose from"),
        (["--pair", "/none"], "--pair /none: has no target/config.json; give a"),
        (["--out", "/none/x"], "--out /none/x: no file can be written there; name"),
        (["--gpu-memory-utilization", "2"], "--gpu-memory-utilization 2.0: give a"),
        (
            ["--tensor-parallel-size", "4", "--pair", PAIR],
            "--tensor-parallel-size 4: does not divide num_attention_heads 6",
        ),
        (
            ["--tensor-parallel-size", "4096", "--only", "step"],
            "--tensor-parallel-size 4096: needs as many cores, ",
        ),
        (
            ["--tensor-parallel-size", "1", "--shape", "8b"],
            "--shape 8b: on a CPU no drafter runs without weights; take tiny",
        ),
        (
            ["--tensor-parallel-size", "1", "--rows", "16,32"],
            "--rows 32: the drafter of --shape tiny has 16; take no more",
        ),
    ],
)
def test_bad_arguments(monkeypatch, capsys, tmp_path, arguments, said):
    out = tmp_path / "out.json"
    assert call(monkeypatch, "--out", str(out), *arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("check_tp.py: ")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_pair_without_prompts(monkeypatch, capsys, tmp_path):
    for part in ("target", "drafter"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text("{}", encoding="utf-8")
    for text in ("", "[1]\n", '{"text": "a"}\nb\n'):
        (tmp_path / "heldout.jsonl").write_text(text, encoding="utf-8")
        out = str(tmp_path / "out.json")
        assert call(monkeypatch, "--out", out, "--pair", str(tmp_path)) == 2
        assert "heldout.jsonl is no list of objects" in capsys.readouterr().err


def test_fewer_gpus_than_asked():
    assert check_tp.find_device(2, True, 2, 1)
    assert not check_tp.find_device(2, False, 0, 2)
    with pytest.raises(BenchError, match="size 2: needs as many GPUs, 1 can be used"):
        check_tp.find_device(2, True, 1, 64)
    with pytest.raises(BenchError, match="GPUs, 0 can be"):  # no silent rehearsal
        check_tp.find_device(1, True, 0, 64)


def test_partings():
    texts = [[1, 2, 3], [1, 2, 3], [1, 2]]
    found = partings(texts, [[1, 2, 3], [1, 5, 3], [1, 2, 3]])
    assert [(p.request, p.position, p.tokens) for p in found] == [
        (1, 1, (2, 5)),
        (2, 2, (None, 3)),
    ]
    assert found[0].prefix == [1]
    best = [[5, -0.5], [2, -0.7], [9, -3.0]]
    assert gap_of((2, 5), best) == 0.2
    assert gap_of((2, 9), best) == 2.5  # neither is the best
    assert gap_of((2, 8), best) is None


def test_facts_of_ranks():
    right = {
        "runner": "V2",
        "speculator": "DDTreeSpeculator",
        "graphs": "FULL_DECODE_ONLY",
        "captured": 3,
        "async": True,
        "nvls": "0",
    }
    ranks = [{**right, "rank": rank} for rank in range(2)]
    assert fact_failures(ranks, 2, tree=True, graphs=True) == []
    assert fact_failures(ranks[:1], 2, True, True) == ["1 ranks in place of 2"]
    for key, value in [
        ("runner", "V1"),
        ("speculator", "DFlashSpeculator"),
        ("graphs", "NONE"),
        ("captured", 0),
        ("async", False),
        ("nvls", None),
    ]:
        (line,) = fact_failures([ranks[0], {**ranks[1], key: value}], 2, True, True)
        assert line.startswith("rank 1: ") and str(value) in line


def test_ranks_and_lengths():
    right = [{"ranks": 2, "steps": 30}] * 2
    assert rank_failures(right, 2, 30) == []
    assert rank_failures(right, 2, 31)
    assert rank_failures([{"ranks": 1, "steps": 30}] * 2, 2, 30)
    requests = [
        {"tokens": [1], "expected": None},
        {"tokens": [1], "expected": 1},
        {"tokens": [1], "expected": 2},
    ]
    lines = request_failures("length", requests)
    assert lines == ["length: request 2 has 1 tokens, not 2"]


class Forged:
    """Answers in the place of an engine; ``wrong`` changes trees at one position.

    Tokens are all 7. The best two are 7 and ``wrong`` in plain text.
    """

    wrong = 7
    gap = 1.0
    engines: list[dict] = []

    def __init__(self, job, *options) -> None:
        self.plain = "speculative_config" not in job["engine"]
        self.engines.append(job["engine"])

    def wait(self) -> list[dict]:
        return [{"facts": []}]

    def text(self, count: int) -> list[int]:
        return [7 if self.plain or i != 1 else self.wrong for i in range(count)]

    def ask(self, **job) -> list[dict]:
        if job["mode"] == "ranks":
            ranks = [{"ranks": 1, "steps": job["steps"]}]
            text = self.text(job["tokens"])
            return [{"prompts": [[1, 2]], "tokens": [text], "ranks": ranks}]
        found = []
        for _, counts in job["groups"]:
            rows = [[7, -0.1], [self.wrong, -0.1 - self.gap]]
            found.append(
                {
                    "tokens": [self.text(count) for count in counts],
                    "best": [[rows] * count for count in counts],
                }
            )
        return found

    def close(self) -> None:
        pass


@pytest.mark.parametrize("gap, code", [(1.0, 1), (0.001, 1), (0.00001, 0)])
def test_forged_difference(monkeypatch, capsys, tmp_path, gap, code):
    monkeypatch.setattr(tp_checks, "Child", Forged)
    monkeypatch.setattr(Forged, "wrong", 9)
    monkeypatch.setattr(Forged, "gap", gap)
    out, tables = tmp_path / "out.json", tmp_path / "out.md"
    arguments = ["--out", str(out), "--markdown", str(tables), "--pair", PAIR]
    arguments += ["--tensor-parallel-size", "1", "--only", "exact"]
    assert call(monkeypatch, *arguments, "--batches", "1", "--steps", "3") == code
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["ok"] == (code == 0)
    (row,) = found["exact"]
    (parted,) = row["plain"]["parted"]
    assert parted["position"] == 1 and parted["tokens"] == [9, 7]
    assert parted["gap"] == pytest.approx(gap)
    assert "| 0/1 |" in tables.read_text(encoding="utf-8")
    said = capsys.readouterr().err
    assert ("output token 1: 9 where the other has 7" in said) == (code == 1)
    assert not out.with_name("out.json.part").exists()


def test_parted_after_leaving_plain():
    """The gap is then asked for, after the text that both have."""
    asked = []

    class Engine:
        def ask(self, mode, groups, best):
            asked.append(groups)
            return [{"tokens": [[4]], "best": [[[[4, -1.0], [5, -1.00001]]]]}]

    plain = tp_checks.Plain(Engine(), tie=1e-4)
    reference = ([[1, 1, 1]], [[[[1, -0.1]]] * 3])
    texts = [[[2, 4, 6]], [[2, 5, 6]]]
    row, lines = plain.compare("x", [[8, 9]], *texts, reference)
    assert asked == [[[[[8, 9, 2]], [1]]]]
    assert row["parted"][0]["gap"] == pytest.approx(1e-5)
    assert lines == []


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"


def test_silent_child_is_killed_with_its_own():
    code = (
        "import subprocess, sys, time\n"
        "other = subprocess.Popen(['sleep', '600'])\n"
        "print('RESULT {\"pid\": %d}' % other.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    child = Child({"arm": "case x"}, silence=2, command=[sys.executable, "-c", code])
    try:
        results = child.results()
        pid = next(results)["pid"]
        assert alive(pid)
        with pytest.raises(Hang, match="'case x' said nothing for 2 s"):
            next(results)
        for _ in range(50):
            if not alive(pid):
                break
            time.sleep(0.1)
        assert not alive(pid)
    finally:
        child.close()


@pytest.mark.parametrize(
    "only", ["exact", pytest.param("exact,hang", marks=pytest.mark.full)]
)
def test_rehearsal(tmp_path, only):
    out = tmp_path / "out.json"
    arguments = ["--out", out, "--only", only, "--pair", PAIR, "--timeout", "120"]
    arguments += ["--tensor-parallel-size", "1", "--batches", "2"]
    done = subprocess.run(
        [sys.executable, cpu.ROOT / "scripts" / "check_tp.py", *arguments]
        + ["--steps", "12", "--tokens", "24"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["ok"] and found["rehearsal"]
    (row,) = found["exact"]
    assert row["steps_compared"] >= 12
    assert row["plain"]["same"] == row["plain"]["requests"] >= 2
    cases = {case["case"]: case for case in found["hang"]}
    assert len(cases) == (3 if "hang" in only else 0)
    for case in cases.values():
        assert case["ok"]
    if cases:
        assert cases["abort"]["aborted"] == 6
        assert cases["preemption"]["preemptions"] > 0


CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.full
@pytest.mark.skipif(len(CORES) < 2, reason="each rank wants a core of its own")
def test_a_rank_that_stops_is_a_hang(monkeypatch, tmp_path):
    """The case is named, its processes end, and the other cases run."""
    ask, stopped = Child.ask, []

    def stop_rank(child, **job):
        if job.get("case") == "length":
            stopped.extend(psutil.Process(child.process.pid).children(recursive=True))
            workers = [p for p in stopped if "resource_tracker" not in p.cmdline()[-1]]
            workers[-1].suspend()
            child.silence = 8
        return ask(child, **job)

    monkeypatch.setattr(Child, "ask", stop_rank)
    args = check_tp.parse(["--out", "x", "--only", "hang", "--timeout", "120"])
    args.dtype, args.cudagraph, args.max_model_len = "float32", "eager", 256
    base = check_tp.bench.base_engine(args, [1])
    del base["gpu_memory_utilization"]
    with open(tmp_path / "log", "w", encoding="utf-8") as log:
        environment = check_tp.environment_of(False, CORES)
        session = tp_checks.Session(args, False, environment, log, lambda: None)
        tp_checks.PairCheck(session, cpu.DENSE_PAIR, base, 256).run()
    assert stopped and not any(alive(process.pid) for process in stopped)
    (failure,) = session.failures
    assert "case length' said nothing for 8 s" in failure
    assert not session.errors
    found = {case["case"]: case["ok"] for case in session.hang}
    assert found == {"length": False, "abort": True, "preemption": True}
