# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The work tree: commits, repeatability, safety of local edits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from apply_support import COMMIT, VERSION, Project, snapshot


def test_one_commit_for_upstream_each_patch_and_overlay(project: Project) -> None:
    assert project.git("log", "--reverse", "--format=%s").splitlines() == [
        f"upstream vLLM {VERSION} ({COMMIT[:12]})",
        "config: raise limit",
        "engine: take two steps",
        "ddtree overlay",
    ]
    assert (project.tree / "vllm/tree/__init__.py").read_text().endswith("42\n")
    assert "LIMIT = 2" in (project.tree / "vllm/config.py").read_text()
    assert not (project.tree / "README.md").exists()
    assert not (project.tree / "vllm/_version.py").exists()
    assert (project.tree / "vllm/sub/tool.sh").stat().st_mode & 0o100
    assert project.git("status", "--porcelain") == ""


def test_commit_ids_repeat(project: Project) -> None:
    before = project.git("rev-parse", "HEAD")
    project.run("apply", "--force")
    assert project.git("rev-parse", "HEAD") == before
    shutil.rmtree(project.tree)
    project.run("apply")
    assert project.git("rev-parse", "HEAD") == before


def test_hostile_git_configuration_changes_nothing(
    project: Project, call, tmp_path: Path
) -> None:
    before = project.git("rev-parse", "HEAD")
    home = tmp_path / "home"
    hooks = home / "hooks"
    hooks.mkdir(parents=True)
    for name in ("pre-commit", "applypatch-msg", "pre-applypatch", "post-checkout"):
        (hooks / name).write_text("#!/bin/sh\nexit 1\n")
        (hooks / name).chmod(0o755)
    (home / "attributes").write_text("* text eol=crlf\n")
    (home / ".gitconfig").write_text(
        f"[core]\nhooksPath={hooks}\nautocrlf=true\neol=crlf\nfileMode=false\n"
        f"attributesFile={home}/attributes\n"
        "[commit]\ngpgsign=true\n[am]\nkeepcr=false\nthreeWay=false\n"
        "[user]\nname=Eve\nemail=eve@example.invalid\n[diff]\nnoprefix=true\n"
        "mnemonicPrefix=true\nrenames=copies\n[format]\nsignature=x\nsubjectPrefix=Q\n"
        "numbered=true\nattach=true\n[init]\ndefaultBranch=zzz\n[i18n]\n"
        "commitEncoding=latin1\n[apply]\nwhitespace=error\nignoreWhitespace=change\n"
    )
    hostile = {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home),
        "GIT_DIR": str(tmp_path / "nowhere"),
        "GIT_INDEX_FILE": str(tmp_path / "index"),
        "GIT_AUTHOR_NAME": "Eve",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.autocrlf",
        "GIT_CONFIG_VALUE_0": "true",
        "GIT_TEMPLATE_DIR": str(hooks),
        "TZ": "Asia/Tokyo",
        "LC_ALL": "C.UTF-8",
    }
    done = call("apply", "--force", **hostile)
    assert done.returncode == 0, done.stderr
    assert project.git("rev-parse", "HEAD") == before
    kept = snapshot(project.patches)
    assert call("export", **hostile).returncode == 0
    assert snapshot(project.patches) == kept


def test_second_apply_changes_nothing(project: Project, as_json) -> None:
    before = snapshot(project.tree)
    code, document = as_json("apply")
    assert code == 0
    assert document["fresh"] is False
    assert document["lock_matches"] is True
    assert snapshot(project.tree) == before


def test_edited_overlay_is_applied_anew(project: Project, as_json) -> None:
    (project.overlay / "vllm/extra.py").write_text("EXTRA = 2\n")
    code, document = as_json("apply")
    assert code == 0
    assert document["fresh"] is True
    assert document["lock_matches"] is False
    assert (project.tree / "vllm/extra.py").read_text() == "EXTRA = 2\n"


@pytest.mark.parametrize(
    "kind", ["edit", "new", "staged", "commit", "unknown", "branch", "stash"]
)
def test_local_work_is_never_lost(project: Project, kind: str, as_json) -> None:
    file = project.tree / "vllm/other.py"
    if kind == "edit":
        file.write_text("OTHER = 2\n")
    elif kind == "new":
        file = project.tree / "vllm/new.py"
        file.write_text("NEW = 1\n")
    elif kind == "staged":
        file.write_text("OTHER = 2\n")
        project.git("add", "-A")
    elif kind == "commit":
        project.commit("vllm/other.py", ("= 1", "= 2"), "other: two")
    elif kind == "branch":
        here = project.git("rev-parse", "--abbrev-ref", "HEAD").strip()
        project.git("checkout", "-q", "-b", "mine")
        project.commit("vllm/other.py", ("= 1", "= 2"), "other: two")
        project.git("checkout", "-q", here)
    elif kind == "stash":
        file.write_text("OTHER = 2\n")
        project.git("stash")
    else:
        (project.tree / ".git/ddtree.json").unlink()
    (project.overlay / "vllm/extra.py").write_text("EXTRA = 2\n")
    before = snapshot(project.tree)
    code, document = as_json("apply")
    assert code == 1
    assert "--force" in document["error"]["message"]
    assert document["error"]["unsaved"]
    after = snapshot(project.tree)
    assert {k: v for k, v in after.items() if k != ".git/index"} == {
        k: v for k, v in before.items() if k != ".git/index"
    }
    project.run("apply", "--force")
    assert (project.tree / "vllm/other.py").read_text() == "OTHER = 1\n"
    assert not (project.tree / "vllm/new.py").exists()


def test_dry_run_moves_nothing(project: Project, as_json) -> None:
    (project.overlay / "vllm/extra.py").write_text("EXTRA = 2\n")
    before = snapshot(project.tree)
    code, document = as_json("apply", "--dry-run")
    assert (code, document["dry_run"]) == (0, True)
    assert snapshot(project.tree) == before
    assert not list(project.tree.parent.glob(".tmp-*"))


def test_not_fetched_says_so(project: Project, as_json) -> None:
    shutil.rmtree(project.cache)
    code, document = as_json("apply", "--force")
    assert code == 2
    assert "apply.py fetch" in document["error"]["message"]


def test_overlay_cannot_replace_upstream(project: Project, as_json) -> None:
    (project.overlay / "vllm/other.py").write_text("OTHER = 3\n")
    code, document = as_json("apply")
    assert code == 1
    assert "overlay/vllm/other.py" in document["error"]["message"]


def test_caches_and_hidden_files_stay_out_of_the_overlay(project: Project) -> None:
    cache = project.overlay / "vllm/__pycache__"
    cache.mkdir()
    (cache / "extra.cpython-311.pyc").write_bytes(b"x")
    (project.overlay / "vllm/.hidden").write_text("x")
    (project.overlay / "vllm/extra.py~").write_text("x")
    head = project.git("rev-parse", "HEAD")
    project.run("apply", "--force")
    assert project.git("rev-parse", "HEAD") == head


def test_link_in_the_overlay_is_refused(project: Project, as_json) -> None:
    (project.overlay / "vllm/link.py").symlink_to("extra.py")
    code, document = as_json("apply")
    assert code == 2
    assert "plain file" in document["error"]["message"]


def test_damaged_cache_is_named_and_removed(project: Project, as_json) -> None:
    sdist = next(project.cache.glob("*.tar.gz"))
    sdist.write_bytes(sdist.read_bytes()[:-7])
    code, document = as_json("apply", "--force")
    assert code == 3
    assert sdist.name in document["error"]["message"]
    assert not sdist.exists()


@pytest.mark.parametrize("how", ["cut", "change"])
def test_damaged_subset_is_named_and_removed(
    project: Project, as_json, how: str
) -> None:
    tree = next(project.cache.glob("*.tree.tar"))
    data = tree.read_bytes()
    data = data[:700] if how == "cut" else data.replace(b"OTHER = 1", b"OTHER = 9")
    tree.write_bytes(data)
    code, document = as_json("apply", "--force")
    assert code == 3
    assert tree.name in document["error"]["message"]
    assert not tree.exists()
    project.run("apply", "--force")


def test_unused_release_name(project: Project, as_json) -> None:
    code, document = as_json("apply", "--release", "v9")
    assert code == 2
    assert "v9" in document["error"]["message"]


def test_two_runs_at_once(project: Project, call) -> None:
    from patchset.layout import Layout

    with Layout.at(project.root).locked():
        done = call("apply", "--force")
    assert done.returncode == 2
    assert "another apply.py" in done.stderr


def test_empty_series_is_applied_with_a_warning(project: Project, as_json) -> None:
    shutil.rmtree(project.patches)
    code, document = as_json("apply")
    assert code == 0
    assert document["applied"] == []
    assert any("no patch" in text for text in document["warnings"])
