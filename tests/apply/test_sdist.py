# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The real series on the real sdist: lock, export, times. RELEASE names another."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from apply_support import REPO, snapshot

from patchset.lock import Lock

pytestmark = pytest.mark.sdist
RELEASE = Lock(REPO / "upstream.lock").release(os.environ.get("RELEASE") or None)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout with the pinned source fetched."""
    root = tmp_path_factory.mktemp("real") / "project"
    root.mkdir()
    for name in ("patches", "overlay"):
        if (REPO / name).is_dir():
            shutil.copytree(
                REPO / name,
                root / name,
                ignore=shutil.ignore_patterns("__pycache__", ".*"),
            )
    shutil.copy(REPO / "upstream.lock", root)
    shared = Path(os.environ.get("DDTREE_CACHE", REPO / "build" / "cache"))
    if shared.is_dir():
        # Other releases may lie there too, from rebase-check.
        cache = root / "build" / "cache"
        cache.mkdir(parents=True)
        for path in shared.glob(f"vllm-{RELEASE.version}[.-]*tar*"):
            shutil.copy(path, cache)
    return root


def _run(root: Path, *argv: str) -> tuple[int, dict, float]:
    began = time.monotonic()
    env = {k: v for k, v in os.environ.items() if k != "DDTREE_CACHE"}
    done = subprocess.run(
        [
            sys.executable, str(REPO / "apply.py"), *argv, "--json",
            "--root", str(root), "--release", RELEASE.name,
        ],
        capture_output=True, text=True, check=False, env=env,
    )  # fmt: skip
    took = time.monotonic() - began
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), took


@pytest.fixture(scope="module")
def fetched(real: Path) -> Path:
    code, document, _ = _run(real, "fetch")
    assert code == 0, document
    return real


@pytest.fixture(scope="module")
def applied(fetched: Path) -> Path:
    code, document, took = _run(fetched, "apply")
    assert code == 0, document
    assert document["lock_matches"] is True
    # 30 s is promised for two idle cores; a shared machine gets twice that.
    assert took < 60, took
    print(f"apply took {took:.1f} s")
    return fetched


def test_apply_makes_the_locked_tree_again(applied: Path) -> None:
    first = _run(applied, "status")[1]
    code, document, _ = _run(applied, "apply", "--force")
    assert code == 0
    assert document["head"] == first["head"]
    assert {p["state"] for p in first["patches"]} <= {"applied"}


def test_verify(applied: Path) -> None:
    code, document, took = _run(applied, "verify")
    assert code == 0, [c for c in document["checks"] if not c["ok"]]
    print(f"verify took {took:.1f} s")
    assert took < 30, took


def test_export_is_a_zero_diff(applied: Path) -> None:
    before = {n: snapshot(applied / n) for n in ("patches", "overlay")}
    lock = (applied / "upstream.lock").read_bytes()
    code, document, _ = _run(applied, "export")
    assert (code, document["written"], document["removed"]) == (0, [], [])
    assert {n: snapshot(applied / n) for n in ("patches", "overlay")} == before
    assert (applied / "upstream.lock").read_bytes() == lock


def test_lint(applied: Path) -> None:
    code, document, _ = _run(applied, "lint")
    assert code == 0, [f for f in document["findings"] if f["level"] == "error"]


def test_install_over_the_files_of_the_sdist(applied: Path, tmp_path: Path) -> None:
    import tarfile

    site = tmp_path / "site"
    with tarfile.open(applied / "build/cache" / RELEASE.sdist_name) as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            if path.startswith("vllm/") and member.isfile():
                member.name, member.uid, member.gid = path, os.getuid(), os.getgid()
                tar.extract(member, site)
    info = site / f"vllm-{RELEASE.version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: vllm\nVersion: {RELEASE.version}\n")
    before = snapshot(site)
    code, document, took = _run(applied, "install", "--site", str(site))
    assert code == 0, document
    print(f"install took {took:.1f} s")
    assert took < 30, took
    assert _run(applied, "install", "--site", str(site), "--check")[0] == 0
    assert _run(applied, "uninstall", "--site", str(site))[0] == 0
    assert snapshot(site) == before
