# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Patches that do not apply, that merge, or that upstream has already."""

from __future__ import annotations

from pathlib import Path

import pytest
from apply_support import Project, snapshot


def _independent(project: Project, change: tuple[str, str], subject: str) -> bytes:
    """Make a patch of vllm/config.py against upstream itself."""
    base = project.git("rev-list", "--max-parents=0", "HEAD")
    head = project.git("rev-parse", "HEAD")
    project.git("checkout", "-q", "--detach", base)
    project.commit("vllm/config.py", change, subject)
    data = project.git(
        "format-patch", "-1", "--stdout", "--full-index", "--zero-commit", "-N"
    )
    project.git("checkout", "-q", "-B", "ddtree", head)
    return data.encode() + b"\n"


@pytest.fixture
def stopped(project: Project) -> Project:
    """A project whose third patch of four conflicts with the first."""
    data = _independent(project, ("LIMIT = 1", "LIMIT = 3"), "config: other limit")
    (project.patches / "0003-config-other-limit.patch").write_bytes(data)
    project.commit("vllm/other.py", ("= 1", "= 2"), "other: two")
    last = project.git("format-patch", "-1", "--stdout", "--full-index", "-N")
    (project.patches / "0004-other-two.patch").write_text(last + "\n")
    project.git("reset", "-q", "--hard", "HEAD^")
    return project


def test_conflict_says_which_where_and_what_now(stopped: Project, as_json) -> None:
    before = snapshot(stopped.tree)
    code, document = as_json("apply")
    assert code == 1
    error = document["error"]
    assert (error["number"], error["total"]) == (3, 4)
    assert error["patch"] == "0003-config-other-limit.patch"
    assert error["places"] == [{"file": "vllm/config.py", "line": 21}]
    text = error["message"]
    assert "patch 3 of 4" in text
    assert "vllm/config.py:21" in text
    assert "build/vllm-1.2.0 is untouched" in text
    for command in (
        "git -C build/vllm-1.2.0.conflict am --continue",
        "python apply.py apply --continue",
        "python apply.py export",
        "python apply.py apply --abort",
    ):
        assert command in text
    assert snapshot(stopped.tree) == before
    assert "<<<<<<<" in (stopped.conflict / "vllm/config.py").read_text()


def test_continue_after_resolving(stopped: Project, as_json) -> None:
    assert stopped.main("apply") == 1
    code, document = as_json("apply", "--continue")
    assert code == 1
    assert "am --continue" in document["error"]["message"]
    file = stopped.conflict / "vllm/config.py"
    head = file.read_text().split("<<<<<<<")[0]
    file.write_text(head + "LIMIT = 4\n")
    stopped.git("add", "-u", tree=stopped.conflict)
    stopped.git("am", "--continue", tree=stopped.conflict)
    code, document = as_json("apply", "--continue")
    assert code == 0, document
    assert len(document["applied"]) == 4
    assert not stopped.conflict.exists()
    assert "LIMIT = 4" in (stopped.tree / "vllm/config.py").read_text()
    # The mended patch is nowhere else yet: it must not be thrown away.
    code, document = as_json("apply")
    assert code == 1
    assert "mended" in document["error"]["message"]
    stopped.run("export")
    stopped.run("apply")
    assert "LIMIT = 4" in (stopped.tree / "vllm/config.py").read_text()
    assert stopped.main("lock", "--check") == 0


def test_second_conflict_on_continue(stopped: Project, as_json) -> None:
    path = stopped.patches / "0004-other-two.patch"
    data = path.read_text().replace("-OTHER = 1", "-OTHER = 0")
    path.write_text(data)
    assert stopped.main("apply") == 1
    stopped.git("am", "--skip", tree=stopped.conflict)
    code, document = as_json("apply", "--continue")
    assert code == 1
    assert document["error"]["number"] == 4
    assert document["error"]["places"] == [{"file": "vllm/other.py", "line": 1}]
    assert "apply --reject" in document["error"]["message"]
    assert stopped.conflict.exists()


def test_abort_and_begin_again(stopped: Project, as_json) -> None:
    assert stopped.main("apply") == 1
    code, document = as_json("apply")
    assert code == 1
    assert "waits in build/vllm-1.2.0.conflict" in document["error"]["message"]
    before = snapshot(stopped.tree)
    assert stopped.main("apply", "--abort") == 0
    assert not stopped.conflict.exists()
    assert snapshot(stopped.tree) == before
    assert stopped.main("apply", "--abort") == 2
    assert stopped.main("apply", "--continue") == 2


def test_dry_run_keeps_no_tree(stopped: Project, as_json) -> None:
    code, document = as_json("apply", "--dry-run")
    assert code == 1
    assert document["error"]["conflict"] is None
    assert not stopped.conflict.exists()


def test_changed_context_merges_three_way(project: Project, as_json) -> None:
    data = _independent(project, ("# 17\n", "# seventeen\n"), "config: spell it")
    assert b" LIMIT = 1" in data  # the context that the first patch changes
    (project.patches / "0003-config-spell-it.patch").write_bytes(data)
    code, document = as_json("apply")
    assert code == 0, document
    text = (project.tree / "vllm/config.py").read_text()
    assert "# seventeen\n" in text
    assert "LIMIT = 2\n" in text


def test_patch_that_upstream_has_is_absorbed(project: Project, as_json) -> None:
    first = project.patches / project.names()[0]
    copy = first.read_text().replace("raise limit", "raise it too")
    (project.patches / "0003-config-raise-it-too.patch").write_text(copy)
    code, document = as_json("apply")
    assert code == 0, document
    assert document["absorbed"] == ["0003-config-raise-it-too.patch"]
    assert len(document["applied"]) == 2
    code, document = as_json("status")
    assert [p["state"] for p in document["patches"]] == [
        "applied",
        "applied",
        "absorbed",
    ]


def test_other_commands_name_the_patch(stopped: Project, as_json) -> None:
    for command in ("lock", "verify"):
        code, document = as_json(command)
        assert code == 1
        assert "0003-config-other-limit.patch" in document["error"]["message"]
    assert not list(Path(stopped.root / "build").glob(".tmp-*"))


def test_file_that_is_no_patch(project: Project, as_json) -> None:
    (project.patches / "0003-junk.patch").write_text("junk\n")
    code, document = as_json("apply")
    assert code == 1
    text = document["error"]["message"]
    assert "patch 3 of 3, 0003-junk.patch, does not apply: Patch is empty." in text
