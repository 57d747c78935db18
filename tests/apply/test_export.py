# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Export: zero diff, determinism, sorting of commits, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from apply_support import HEADERS, SPDX, VERSION, Project, snapshot


def _saved(project: Project) -> dict:
    return {
        **{f"patches/{k}": v for k, v in snapshot(project.patches).items()},
        **{f"overlay/{k}": v for k, v in snapshot(project.overlay).items()},
        "lock": project.lock.read_bytes(),
    }


def test_apply_then_export_is_a_zero_diff(project: Project, as_json) -> None:
    before = _saved(project)
    code, document = as_json("export")
    assert code == 0
    assert document["written"] == document["removed"] == []
    assert _saved(project) == before
    project.run("apply", "--force")
    project.run("export")
    assert _saved(project) == before


def test_patch_files_depend_on_the_commit_alone(project: Project) -> None:
    assert project.names() == [
        "0001-config-raise-limit.patch",
        "0002-engine-take-two-steps.patch",
    ]
    text = (project.patches / project.names()[0]).read_text()
    assert text.startswith(f"From {'0' * 40} Mon Sep 17 00:00:00 2001\n")
    assert "\nSubject: [PATCH] config: raise limit\n" in text
    assert "Class: local\n" in text
    assert not text.rstrip().endswith(VERSION)
    assert " 1 file changed" not in text
    assert "\n-- \n" not in text


def test_new_commits_become_patches_and_overlay(project: Project, as_json) -> None:
    project.commit("vllm/other.py", ("= 1", "= 2"), "other: Ünïcode, [brackets] & more")
    file = project.tree / "vllm/tree/new.py"
    file.write_text(f"{SPDX}\nNEW = 1\n")
    (project.tree / "vllm/extra.py").unlink()
    project.git("add", "-A")
    project.git("commit", "-qm", "more for the overlay")
    want = project.git("rev-parse", "HEAD^{tree}")
    code, document = as_json("export")
    assert code == 0, document
    assert document["final_tree"] == want
    assert document["removed"] == ["overlay/vllm/extra.py"]
    assert project.names()[2] == "0003-other-n-code-brackets-more.patch"
    assert (project.overlay / "vllm/tree/new.py").exists()
    code, document = as_json("apply")
    assert (code, document["tree"], document["lock_matches"]) == (0, want, True)
    log = project.git("log", "--format=%s").splitlines()
    assert log[0] == "ddtree overlay"
    assert log[1] == "other: Ünïcode, [brackets] & more"
    before = _saved(project)
    project.run("export")
    assert _saved(project) == before
    assert as_json("verify")[0] == 0


def test_removed_and_reordered_commits(project: Project) -> None:
    base = project.git("rev-list", "--max-parents=0", "HEAD")
    first, second, overlay = project.git(
        "rev-list", "--reverse", f"{base}..HEAD"
    ).splitlines()
    project.git("reset", "-q", "--hard", base)
    for commit in (second, overlay, first):
        project.git("cherry-pick", commit)
    project.run("export")
    assert project.names() == [
        "0001-engine-take-two-steps.patch",
        "0002-config-raise-limit.patch",
    ]
    project.git("reset", "-q", "--hard", "HEAD^")
    project.run("export")
    assert project.names() == ["0001-engine-take-two-steps.patch"]
    project.run("apply")
    assert project.main("lock", "--check") == 0


@pytest.mark.parametrize(
    ("subject", "word"),
    [("fixup! config: raise limit", "autosquash"), ("both kinds", "split it")],
)
def test_commits_that_cannot_be_exported(
    project: Project, as_json, subject: str, word: str
) -> None:
    (project.tree / "vllm/other.py").write_text("OTHER = 2\n")
    if "both" in subject:
        (project.tree / "vllm/extra.py").write_text("EXTRA = 2\n")
    project.git("commit", "-qam", subject)
    before = _saved(project)
    code, document = as_json("export")
    assert code == 1
    assert word in document["error"]["message"]
    assert _saved(project) == before


@pytest.mark.parametrize("how", ["delete", "mode"])
def test_upstream_files_only_change_in_content(
    project: Project, as_json, how: str
) -> None:
    file = project.tree / "vllm/other.py"
    if how == "delete":
        file.unlink()
    else:
        file.chmod(0o755)
    project.git("commit", "-qam", f"other\n\n{HEADERS}")
    code, document = as_json("export")
    assert code == 1
    assert "vllm/other.py" in document["error"]["message"]


def test_merges_and_empty_commits(project: Project, as_json) -> None:
    project.git("commit", "-q", "--allow-empty", "-m", "nothing")
    code, document = as_json("export")
    assert (code, "changes nothing" in document["error"]["message"]) == (1, True)
    project.git("reset", "-q", "--hard", "HEAD^")
    project.git("checkout", "-q", "-b", "side")
    project.commit("vllm/other.py", ("= 1", "= 2"), "side")
    project.git("checkout", "-q", "ddtree")
    project.git("merge", "-q", "--no-ff", "-m", "merge", "side")
    code, document = as_json("export")
    assert (code, "merge" in document["error"]["message"]) == (1, True)


@pytest.mark.parametrize("kind", ["edit", "new"])
def test_dirty_tree_is_refused(project: Project, as_json, kind: str) -> None:
    name = "vllm/other.py" if kind == "edit" else "vllm/new.py"
    (project.tree / name).write_text("OTHER = 2\n")
    code, document = as_json("export")
    assert code == 1
    assert name in document["error"]["message"]
    assert document["error"]["unsaved"] == [name]


def test_unfinished_rebase_is_refused(project: Project, as_json) -> None:
    (project.tree / ".git/rebase-merge").mkdir()
    code, document = as_json("export")
    assert code == 1
    assert "unfinished" in document["error"]["message"]


def test_edits_under_overlay_survive_an_export(project: Project) -> None:
    (project.overlay / "vllm/extra.py").write_text(f"{SPDX}\nEXTRA = 5\n")
    project.commit("vllm/other.py", ("= 1", "= 2"), "other: two")
    project.run("export")
    assert "EXTRA = 5" in (project.overlay / "vllm/extra.py").read_text()
    assert project.main("lock", "--check") == 0
    project.run("apply", "--force")
    assert "EXTRA = 5" in (project.tree / "vllm/extra.py").read_text()


def test_edits_on_both_sides_are_refused(project: Project, as_json) -> None:
    mine = f"{SPDX}\nEXTRA = 5\n"
    (project.overlay / "vllm/extra.py").write_text(mine)
    (project.tree / "vllm/extra.py").write_text(f"{SPDX}\nEXTRA = 6\n")
    project.git("commit", "-qam", "overlay again")
    code, document = as_json("export")
    assert code == 1
    assert "overlay/vllm/extra.py" in document["error"]["message"]
    assert (project.overlay / "vllm/extra.py").read_text() == mine
    project.run("export", "--force")
    assert "EXTRA = 6" in (project.overlay / "vllm/extra.py").read_text()


def test_patch_edited_on_disk_is_not_overwritten(project: Project, as_json) -> None:
    file = project.patches / project.names()[0]
    file.write_text(file.read_text().replace("Why: a test", "Why: better"))
    code, document = as_json("export")
    assert code == 1
    assert file.name in document["error"]["message"]
    assert "Why: better" in file.read_text()
    project.run("apply")
    project.run("export")
    assert "Why: better" in file.read_text()


def test_export_from_a_tree_made_by_hand(project: Project, tmp_path: Path) -> None:
    tree = tmp_path / "hand"
    base = project.git("rev-list", "--max-parents=0", "HEAD")
    project.git("clone", "-q", str(project.tree), str(tree), tree=tmp_path)
    project.git("checkout", "-q", "--detach", base, tree=tree)
    (tree / "vllm/other.py").write_text("OTHER = 8\n")
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.invalid")
    project.git(*identity, "commit", "-qam", f"other: eight\n\n{HEADERS}", tree=tree)
    overlay = snapshot(project.overlay)
    project.run("export", "--from", str(tree))
    assert project.names() == ["0001-other-eight.patch"]
    assert snapshot(project.overlay) == overlay
    project.run("apply")
    assert (project.tree / "vllm/other.py").read_text() == "OTHER = 8\n"


def test_export_from_another_upstream_is_refused(
    project: Project, tmp_path: Path, as_json
) -> None:
    tree = tmp_path / "hand"
    project.git("init", "-q", str(tree), tree=tmp_path)
    (tree / "vllm").mkdir()
    (tree / "vllm/other.py").write_text("OTHER = 1\n")
    (tree / "vllm/config.py").write_text("LIMIT = 7\n")
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.invalid")
    project.git("add", "-A", tree=tree)
    project.git(*identity, "commit", "-qm", "base", tree=tree)
    (tree / "vllm/other.py").write_text("OTHER = 8\n")
    project.git(*identity, "commit", "-qam", "other: eight", tree=tree)
    before = _saved(project)
    code, document = as_json("export", "--from", str(tree))
    assert code == 1
    assert "pinned upstream" in document["error"]["message"]
    assert _saved(project) == before


def test_export_without_a_tree(project: Project, as_json, tmp_path: Path) -> None:
    code, document = as_json("export", "--from", str(tmp_path / "none"))
    assert code == 2
    assert "does not exist" in document["error"]["message"]
