# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""scripts/measure_gpu.sh without a GPU: what it refuses, and commands that fail."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "measure_gpu.sh"


def call(*arguments: str, python: str = "false") -> subprocess.CompletedProcess:
    return subprocess.run(
        [SCRIPT, *arguments],
        env={**os.environ, "PYTHON": python},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("step",), "give PART FOLDER [SECONDS]"),
        (("stop", "out"), "PART stop: take train, exact, speed or step"),
        (("step", "out", "0"), "SECONDS 0: give a whole number, 1 or more"),
        (("step", "/dev/null/out"), "FOLDER /dev/null/out: cannot be made; name"),
    ],
)
def test_bad_arguments(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    done = call(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"measure_gpu.sh: {said}")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("python, code", [("false", 1), ("true", 0)])
def test_code_of_the_commands(tmp_path, python, code):
    done = call("step", str(tmp_path / "out"), "30", python=python)
    assert done.returncode == code
    told = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    names = ["step-16,64", "gdn", "step-32", "attention", "profile"]
    assert [line.split(":")[0][3:] for line in told] == names
    assert all(f": code {code} after" in line for line in told)
