# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Every rule of lint, each on its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
from apply_support import SPDX, Project


def _edit(project: Project, old: str, new: str) -> None:
    file = project.patches / project.names()[0]
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def _rename(project: Project, new: str) -> None:
    file = project.patches / project.names()[1]
    file.rename(file.with_name(new))


def _copy(project: Project, new: str) -> None:
    shutil.copy(project.patches / project.names()[1], project.patches / new)


def _clear(project: Project) -> None:
    for name in project.names():
        (project.patches / name).unlink()


def _overlay(project: Project, path: str, text: str) -> None:
    file = project.overlay / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


CASES: dict[str, tuple[Callable[[Project], object], str]] = {
    "empty folder": (_clear, "empty-folder"),
    "no folder": (lambda p: shutil.rmtree(p.patches), "empty-folder"),
    "gap": (lambda p: _rename(p, "0003-engine-take-two-steps.patch"), "unordered"),
    "zero": (lambda p: _rename(p, "0000-engine-take-two-steps.patch"), "unordered"),
    "twice": (lambda p: _copy(p, "0001-other.patch"), "duplicate-number"),
    "odd name": (lambda p: _rename(p, "2-Engine.patch"), "file-name"),
    "other topic": (lambda p: _rename(p, "0002-motor.patch"), "file-name"),
    "stray": (lambda p: (p.patches / "note.txt").write_text("x"), "stray-file"),
    "no why": (lambda p: _edit(p, "Why: a test\n", ""), "missing-header"),
    "empty why": (lambda p: _edit(p, "Why: a test\n", "Why:\n"), "missing-header"),
    "no upstream": (lambda p: _edit(p, "Upstream: ", "Up: "), "missing-header"),
    "no end": (lambda p: _edit(p, "Removed when: ", "Ends: "), "missing-header"),
    "no class": (lambda p: _edit(p, "Class: local\n", ""), "missing-header"),
    "bad class": (lambda p: _edit(p, "Class: local", "Class: mine"), "bad-class"),
    "no subject": (lambda p: _edit(p, "Subject: ", "Topic: "), "no-subject"),
    "commit id": (lambda p: _edit(p, "From 0000", "From 0001"), "not-exported"),
    "plain diff": (lambda p: _edit(p, "From 0000", "0000"), "not-exported"),
    "spaces": (
        lambda p: _edit(p, "+LIMIT = 2\n", "+LIMIT = 2 \n"), "trailing-whitespace",
    ),
    "lock": (lambda p: _edit(p, "Why: a test", "Why: another"), "lock-hash"),
    "lost": (lambda p: (p.patches / p.names()[1]).unlink(), "lock-hash"),
    "unlocked": (lambda p: _copy(p, "0003-engine-more.patch"), "not-locked"),
    "into overlay": (
        lambda p: _edit(p, "a/vllm/config.py b/vllm/config.py",
                        "a/vllm/extra.py b/vllm/extra.py"),
        "touches-overlay",
    ),
    "outside": (
        lambda p: _edit(p, "a/vllm/config.py b/vllm/config.py", "a/x.py b/x.py"),
        "outside",
    ),
    "new file": (
        lambda p: _edit(p, "index ", "new file mode 100644\nindex "), "not-a-change",
    ),
    "mode": (lambda p: _edit(p, "index ", "old mode 100644\nindex "), "not-a-change"),
    "overlay over upstream": (
        lambda p: _overlay(p, "vllm/other.py", f"{SPDX}\n"), "replaces-upstream",
    ),
    "overlay outside": (
        lambda p: _overlay(p, "tools/x.py", f"{SPDX}\n"), "outside",
    ),
    "no spdx": (lambda p: _overlay(p, "vllm/new.py", "NEW = 1\n"), "no-spdx"),
    "overlay spaces": (
        lambda p: _overlay(p, "vllm/new.py", f"{SPDX}\nNEW = 1 \n"),
        "trailing-whitespace",
    ),
    "overlay changed": (
        lambda p: _overlay(p, "vllm/extra.py", f"{SPDX}\nEXTRA = 8\n"), "lock-hash",
    ),
}  # fmt: skip


def test_clean_project(project: Project, as_json) -> None:
    code, document = as_json("lint")
    assert (code, document["findings"]) == (0, [])


@pytest.mark.parametrize("case", CASES)
def test_rule(project: Project, as_json, case: str) -> None:
    spoil, rule = CASES[case]
    spoil(project)
    code, document = as_json("lint")
    assert code == 1
    rules = {f["rule"] for f in document["findings"] if f["level"] == "error"}
    assert rule in rules
    # A change of bytes is a lock error too; nothing else may come with it.
    extra = {"lock-hash", "not-locked", "unordered", "file-name", "no-subject"}
    assert rules - {rule} <= extra


def test_many_lines_are_a_warning(project: Project, as_json) -> None:
    lines = "".join(f"# more {n}\n" for n in range(61))
    project.commit("vllm/other.py", ("OTHER = 1\n", lines), "other: long")
    project.run("export")
    code, document = as_json("lint")
    assert code == 0
    (found,) = document["findings"]
    assert (found["level"], found["rule"]) == ("warning", "many-lines")
    assert "62 changed lines" in found["text"]


def test_without_a_work_tree(project: Project, as_json) -> None:
    shutil.rmtree(project.tree)
    assert as_json("lint")[0] == 0
