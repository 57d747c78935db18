# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The command line: help, JSON documents, exit codes, the entry point."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from apply_support import REPO, Project

COMMANDS = (
    "fetch", "apply", "status", "verify", "install", "uninstall", "export", "lock",
    "lint", "rebase", "build",
)  # fmt: skip
COMMON = ("schema_version", "command", "ok", "exit_code", "error", "warnings")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(project: Project, capsys, command: str) -> None:
    argv = [command, "--help"] if command else ["--help"]
    with pytest.raises(SystemExit) as ended:
        project.main(*argv)
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "exit codes:" in text
    if command:
        assert "--json" in text
    else:
        assert all(re.search(rf"^    {name}\s", text, re.M) for name in COMMANDS)


@pytest.mark.parametrize(
    ("argv", "keys"),
    [
        (("fetch",), ("source", "path", "present")),
        (("apply",), ("worktree", "applied", "absorbed", "head", "tree", "fresh")),
        (("status",), ("patches", "overlay", "worktree", "applied", "source")),
        (("verify",), ("checks", "not_checked")),
        (("install", "--site", "SITE", "--check"), ("state", "differs", "project")),
        (("install", "--site", "SITE"), ("done", "patched", "added", "metadata")),
        (("uninstall", "--site", "SITE"), ("done", "site")),
        (("export",), ("written", "removed", "patches", "final_tree")),
        (("lock",), ("changed", "final_tree")),
        (("lint",), ("findings",)),
    ],
)
def test_one_json_document_each(
    project: Project, site: Path, as_json, argv: tuple[str, ...], keys: tuple[str, ...]
) -> None:
    argv = tuple(str(site) if a == "SITE" else a for a in argv)
    code, document = as_json(*argv)
    assert code == (3 if "--check" in argv else 0)
    assert set(document) >= {*COMMON, "release", *keys}
    assert list(document)[: len(COMMON)] == list(COMMON)
    assert document["schema_version"] == 1
    assert document["command"] == argv[0]
    assert (document["ok"], document["exit_code"]) == (code == 0, code)
    assert document["error"] is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("rebase", "--onto", "nonsense"), "--onto nonsense"),
        (("build", "--builder", "x"), "--builder x"),
        (("install",), "--python"),
        (("nothing",), "nothing"),
        (("apply", "--what"), "--what"),
        (("rebase",), "--onto"),
        (("apply", "--continue", "--abort"), "--abort"),
    ],
)
def test_errors_are_one_document_and_exit_2(
    project: Project, as_json, argv: tuple[str, ...], words: str
) -> None:
    code, document = as_json(*argv)
    assert code == 2
    assert set(document) == set(COMMON)
    assert words in document["error"]["message"]


def test_no_command(project: Project, capsys) -> None:
    from patchset.cli import main

    assert main([], root=project.root) == 2
    assert "COMMAND" in capsys.readouterr().err


def test_prose_and_json_as_processes(call) -> None:
    done = call("status")
    assert done.returncode == 0
    assert "work tree build/vllm-1.2.0: applied" in done.stdout
    done = call("status", "--json")
    assert json.loads(done.stdout)["applied"] is True
    assert "work tree" in done.stderr
    done = call("apply", "--release", "v0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_starts_in_any_folder(project: Project, tmp_path: Path) -> None:
    shutil.copy(REPO / "apply.py", project.root)
    shutil.copytree(REPO / "patchset", project.root / "patchset")
    done = subprocess.run(
        [sys.executable, str(project.root / "apply.py"), "status", "--json"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["applied"] is True


def test_missing_module_is_one_line(tmp_path: Path) -> None:
    shutil.copy(REPO / "apply.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "-S", "-I", str(tmp_path / "apply.py"), "status"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "tomlkit" in done.stderr
    assert "make setup" in done.stderr


def test_missing_module_starts_the_virtual_environment(tmp_path: Path) -> None:
    shutil.copy(REPO / "apply.py", tmp_path)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "started $@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-S", "-I", str(tmp_path / "apply.py"), "status", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stdout == f"started {tmp_path / 'apply.py'} status --json\n"


def test_no_git(project: Project, call, tmp_path: Path) -> None:
    done = call("status", PATH=str(tmp_path))
    assert done.returncode == 2
    assert "git is not on PATH" in done.stderr
    assert "Traceback" not in done.stderr


def test_cache_can_be_moved(project: Project, as_json, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "elsewhere"))
    sdist = next(project.cache.glob("*.tar.gz"))
    code, document = as_json("fetch", "--source", str(sdist))
    assert code == 0
    assert Path(document["path"]).parent == tmp_path / "elsewhere"
    assert os.listdir(tmp_path / "elsewhere")
