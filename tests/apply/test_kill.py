# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""SIGKILL at every step: the old state or the new one, never a mixture."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from apply_support import SPDX, Project, snapshot


class Ended(NamedTuple):
    """How a child ended: its exit code or minus the signal, and its operations."""

    code: int
    operations: int


def _driven(at: int, *argv: str, **env: str) -> Ended:
    """Run a command in a child that kills itself before its nth file operation."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 99
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            os.environ.update(env)
            code = _counted(at, list(argv), writing)
        finally:
            os._exit(code)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        count = int(pipe.read() or 0)
    return Ended(os.waitstatus_to_exitcode(status), count)


def _counted(at: int, argv: list[str], writing: int) -> int:
    count = 0

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return inner

    for name in ("replace", "rename", "unlink", "rmdir", "mkdir", "fsync", "utime"):
        setattr(os, name, wrapped(getattr(os, name)))
    from patchset.cli import main

    code = main(argv, root=".")
    os.write(writing, str(count).encode())
    return code


def _points(total: int, most: int) -> list[int]:
    step = max(1, total // most)
    return sorted({*range(1, total + 1, step), total})


def _operations(done: Ended) -> int:
    assert done.code == 0
    return done.operations


@pytest.mark.parametrize("command", ["install", "uninstall"])
def test_killed_install_is_finished_or_never_began(
    project: Project, cpu_site: Path, tmp_path: Path, command: str, as_json
) -> None:
    root = ("--root", str(project.root))
    stock = snapshot(cpu_site)
    start = tmp_path / "start"
    shutil.copytree(cpu_site, start, symlinks=True)
    assert snapshot(start) == stock
    if command == "uninstall":
        assert project.main("install", "--site", str(start)) == 0
    trial = tmp_path / "trial"
    shutil.copytree(start, trial)
    total = _operations(_driven(0, command, "--site", str(trial), *root))
    assert total > 20
    files = {k: v[2] for k, v in snapshot(start).items() if len(v) == 3}
    states = set()
    for at in _points(total, 12):
        shutil.rmtree(trial)
        shutil.copytree(start, trial)
        done = _driven(at, command, "--site", str(trial), *root)
        assert done.code == -signal.SIGKILL, at
        code, document = as_json("install", "--site", str(trial), "--check")
        states.add(document["state"])
        if document["state"] in ("absent", "installed") and code == (
            3 if command == "install" else 0
        ):
            now = snapshot(trial)
            kept = {
                k: v[2]
                for k, v in now.items()
                if len(v) == 3 and ".ddtree-txn" not in k
            }
            assert kept == files, at
        code, document = as_json(command, "--site", str(trial))
        assert code == 0, (at, document)
        assert not (trial / "vllm/.ddtree-txn").exists()
        if command == "install":
            assert as_json("install", "--site", str(trial), "--check")[0] == 0
            assert project.main("uninstall", "--site", str(trial)) == 0
        assert snapshot(trial) == stock, at
    assert "interrupted" in states, states


def test_check_only_reports_an_interrupted_install(
    project: Project, site: Path, as_json
) -> None:
    root = ("--root", str(project.root))
    total = _operations(_driven(0, "install", "--site", str(site), *root))
    assert project.main("uninstall", "--site", str(site)) == 0
    for at in range(total // 2, total):
        _driven(at, "install", "--site", str(site), *root)
        before = snapshot(site)
        code, document = as_json("install", "--site", str(site), "--check")
        assert snapshot(site) == before
        if document["state"] == "interrupted":
            assert code == 3
            break
        assert project.main("uninstall", "--site", str(site)) == 0
    else:
        pytest.fail("no point left a journal")
    # The other command finishes it too, then does its own work.
    assert project.main("uninstall", "--site", str(site)) == 0
    assert not (site / "vllm/.ddtree").exists()


@pytest.mark.parametrize("exchange", ["", "1"])
def test_killed_apply_leaves_the_old_tree_or_the_new(
    project: Project, tmp_path: Path, exchange: str, as_json
) -> None:
    env = {"DDTREE_NO_EXCHANGE": exchange} if exchange else {}
    (project.overlay / "vllm/extra.py").write_text(f"{SPDX}\nEXTRA = 2\n")
    kept = tmp_path / "kept"
    shutil.copytree(project.root, kept, symlinks=True)
    root = ("--root", str(project.root))
    total = _operations(_driven(0, "apply", *root, **env))
    new = project.git("rev-parse", "HEAD")
    seen = set()
    points = _points(total, 6) + list(range(max(1, total - 3), total + 1))
    for at in sorted(set(points)):
        shutil.rmtree(project.root)
        shutil.copytree(kept, project.root, symlinks=True)
        old = project.git("rev-parse", "HEAD")
        done = _driven(at, "apply", *root, **env)
        if done.code == 0:
            continue  # rmtree's own calls vary by a few
        assert done.code == -signal.SIGKILL
        aside = project.tree.parent / f".old-{project.tree.name}"
        assert project.tree.exists() or aside.exists(), at
        code, document = as_json("apply")
        assert code == 0, (at, document)
        seen.add(document["fresh"])
        assert project.git("rev-parse", "HEAD") == new != old
        assert project.git("status", "--porcelain") == ""
        left = [p.name for p in project.tree.parent.iterdir()]
        assert sorted(left) == [".lock", "cache", project.tree.name], at
    assert seen == {True, False}


@pytest.mark.parametrize("command", ["fetch", "lock"])
def test_killed_fetch_and_lock(project: Project, tmp_path: Path, command: str) -> None:
    root = ("--root", str(project.root))
    sdist = next(project.cache.glob("*.tar.gz"))
    data = sdist.read_bytes()
    other = tmp_path / sdist.name
    other.write_bytes(data)
    whole = project.lock.read_bytes()
    head, sign, tail = whole.partition(b'final = "')
    stale = head + sign + b"0" * 40 + tail[40:]
    argv = ("fetch", "--source", str(other)) if command == "fetch" else ("lock",)

    def prepare() -> None:
        if command == "fetch":
            shutil.rmtree(project.cache)
            project.cache.mkdir()
        else:
            project.lock.write_bytes(stale)

    prepare()
    total = _operations(_driven(0, *argv, *root))
    for at in _points(total, 6):
        prepare()
        _driven(at, *argv, *root)
        if sdist.exists():
            assert sdist.read_bytes() == data
        assert project.lock.read_bytes() in (whole, stale)
        project.run(*argv)
        assert sdist.read_bytes() == data
        assert project.lock.read_bytes() == whole
