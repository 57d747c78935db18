# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""scripts/demo.py: what it shows, and how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import ddtree_cpu as cpu
import demo

SCRIPT = cpu.ROOT / "scripts" / "demo.py"


def run_demo(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *args],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "100", **environment},
    )


def test_small_demo(tmp_path):
    figures, picture = tmp_path / "demo.json", tmp_path / "demo.png"
    done = run_demo(
        *("--prompts", "6", "--tokens", "24", "--budgets", "7"),
        *("--json", str(figures), "--plot", str(picture)),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert found["schema_version"] == 1
    modes = {mode["name"]: mode for mode in found["modes"]}
    assert list(modes) == ["plain", "DFlash chain 15", "DDTree 7", "DDTree 31 spine"]
    for mode in modes.values():
        assert mode["same_text"] == 6
        assert mode["differing"] == []
        assert mode["tokens"] == 6 * 24
        assert mode["name"] in done.stdout
    means = {name: mode["tokens_per_step"]["mean"] for name, mode in modes.items()}
    assert means["plain"] == 1
    assert means["DFlash chain 15"] > 1.5
    assert means["DDTree 31 spine"] >= means["DFlash chain 15"]
    assert done.stdout.count("6/6") == 4
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    # vLLM's own log stays out of both streams.
    assert "INFO" not in done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--budgets", "128"], "--budgets: '128': want 1..127"),
        (["--budgets", "7,x"], "--budgets: 'x'"),
        (["--prompts", "0"], "--prompts: '0'"),
        (["--prompts", "9999"], "--prompts 9999"),
        (["--tokens", "1"], "--tokens: '1'"),
        (["--plot", "/nowhere/demo.png"], "--plot: '/nowhere/demo.png'"),
        (["--json", "/"], "--json: '/'"),
        (["--pair", "no-such-pair"], "--pair no-such-pair"),
        (["--unknown"], "--unknown"),
    ],
)
def test_bad_arguments_are_one_line(args, named):
    done = run_demo(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert named in done.stderr
    assert done.stderr.count("\n") == 1


def test_unpatched_vllm_is_named(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise SystemExit('imported')\n")
    done = run_demo(PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "is not patched; run `make install`" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_differing_text_is_reported(monkeypatch, capsys):
    def fake(modes, prompts, tokens, progress):
        same = cpu.Run([[1, 2, 3]] * 3, ["abc"] * 3, [[1, 1]] * 3, 1.0)
        other = cpu.Run(
            [[1, 2, 3], [1, 9, 3], [1, 2]], ["abc"] * 3, [[2], [2], [1]], 1.0
        )
        return [same] * (len(modes) - 1) + [other]

    monkeypatch.setattr(demo, "decode_all", fake)
    monkeypatch.setattr(cpu, "PAIR", cpu.PAIR)
    assert demo.main(["--prompts", "3"]) == 1
    shown = capsys.readouterr()
    assert "1/3" in shown.out
    assert shown.err.count("error: ") == 2
    assert "DDTree 31 spine: prompt 1 differs from plain decoding at token 1" in (
        shown.err
    )
    assert "prompt 2 differs from plain decoding at token 2" in shown.err


def test_prompts_come_from_every_set():
    prompts = demo.pick_prompts(cpu.PAIR, 24)
    lines = (cpu.PAIR / "heldout.jsonl").read_text().splitlines()
    sets = {json.loads(line)["set"] for line in lines}
    counts = {name: sum(p.subset == name for p in prompts) for name in sets}
    assert len(sets) > 1
    assert sum(counts.values()) == 24
    assert max(counts.values()) - min(counts.values()) <= 1
    assert len({prompt.text for prompt in prompts}) == 24
