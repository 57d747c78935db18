# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Rebasing onto later releases: every outcome of a patch, and the work tree."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from apply_support import COMMIT, FILES, REPO, VERSION, Project, snapshot
from rebase_support import CONFIG, ENGINE, sdist

NEW = "1.3.0"
FIRST = "0001-config-raise-limit.patch"
SECOND = "0002-engine-take-two-steps.patch"
# Lines around upstream's change of the first patch's context.
CONTEXT = CONFIG.replace("# 18\n", "# eighteen\n")
OTHER_LIMIT = CONFIG.replace("LIMIT = 1", "LIMIT = 7")
OTHER_STEP = ENGINE.replace("step(1)", "step(9)")

Rebase = Callable[..., tuple[int, dict]]


@pytest.fixture
def tree(project: Project) -> Path:
    return project.root / "build" / f"rebase-{NEW}"


@pytest.fixture
def rebase(project: Project, as_json, tmp_path: Path) -> Rebase:
    """Rebase onto a release that differs from the pin by some files."""

    def run(changes: dict[str, str | None] | None, *argv: str) -> tuple[int, dict]:
        if changes is not None:
            sdist(tmp_path / "new", NEW, changes)
        path = tmp_path / "new" / f"vllm-{NEW}.tar.gz"
        return as_json("rebase", "--onto", str(path), *argv)

    return run


def _statuses(document: dict) -> list[str]:
    return [p["status"] for p in document["patches"]]


def test_clean(project: Project, rebase: Rebase, tree: Path) -> None:
    before = {n: snapshot(project.root / n) for n in ("patches", "overlay")}
    lock, built = project.lock.read_bytes(), snapshot(project.tree)
    code, document = rebase({"vllm/other.py": "OTHER = 2\n"})
    assert (code, _statuses(document)) == (0, ["applied", "applied"])
    assert document["clean"] is True
    assert "LIMIT = 2" in (tree / "vllm/config.py").read_text()
    assert "OTHER = 2" in (tree / "vllm/other.py").read_text()
    # Nothing that is pinned was touched.
    assert {n: snapshot(project.root / n) for n in ("patches", "overlay")} == before
    assert (project.lock.read_bytes(), snapshot(project.tree)) == (lock, built)


def test_fuzz_is_three_way(project: Project, rebase: Rebase, tree: Path) -> None:
    text = "# 0\n# 1\n" + CONTEXT
    code, document = rebase({"vllm/config.py": text})
    assert code == 0
    assert [(p["status"], p["how"]) for p in document["patches"]] == [
        ("fuzz", "three-way"),
        ("applied", ""),
    ]
    want = text.replace("LIMIT = 1", "LIMIT = 2")
    assert (tree / "vllm/config.py").read_text() == want


def test_absorbed(project: Project, rebase: Rebase, tree: Path) -> None:
    code, document = rebase({"vllm/engine.py": ENGINE.replace("(1)", "(2)")})
    assert (code, _statuses(document)) == (0, ["applied", "absorbed"])
    assert document["patches"][1]["commit"] == ""


def test_conflict_says_where(project: Project, rebase: Rebase, tree: Path) -> None:
    code, document = rebase({"vllm/engine.py": OTHER_STEP})
    assert (code, _statuses(document)) == (1, ["applied", "conflicted"])
    (entry,) = document["patches"][1]["conflicts"]
    assert (entry["file"], entry["kind"]) == ("vllm/engine.py", "content")
    (hunk,) = entry["hunks"]
    assert (hunk["lines"], hunk["target_line"]) == ([2, 6], 2)
    assert hunk["function"] == "run"
    assert (hunk["ours"], hunk["theirs"]) == (["    step(9)"], ["    step(2)"])
    assert entry["functions"] == [{"name": "run", "change": "changed", "lines": "2"}]
    assert "<<<<<<<" in (tree / "vllm/engine.py").read_text()


def test_git_goes_on_as_usual_and_the_result_is_saved(
    project: Project, rebase: Rebase, tree: Path, capsys, index
) -> None:
    """Two conflicts in a row, one am session, then --save."""
    changes = {"vllm/config.py": OTHER_LIMIT, "vllm/engine.py": OTHER_STEP}
    code, document = rebase(changes)
    # Independent patches: the second is judged by itself.
    assert (code, _statuses(document)) == (1, ["conflicted", "conflicted"])
    code, document = rebase(None, "--save", "--commit", "0" * 40)
    assert (code, "saved" in document) == (1, False)
    (tree / "vllm/config.py").write_text(CONFIG.replace("LIMIT = 1", "LIMIT = 8"))
    code, document = rebase(None)
    assert code == 1
    assert "am --continue" in document["error"]["message"]
    project.git("add", "-u", tree=tree)
    done = subprocess.run(
        ["git", "-C", str(tree), "am", "--continue"], capture_output=True, check=False
    )
    assert done.returncode != 0, "the second conflict stops git as well"
    (tree / "vllm/engine.py").write_text(ENGINE.replace("step(1)", "step(10)"))
    project.git("add", "-u", tree=tree)
    project.git("am", "--continue", tree=tree)
    from rebase_support import COMMIT as NEW_COMMIT

    code, document = rebase(None, "--save", "--commit", "f" * 40)
    assert code == 2
    assert "the source records 89abcdef0" in document["error"]["message"]
    pinned = snapshot(project.patches)
    code, document = rebase(None, "--save", "--commit", NEW_COMMIT)
    assert code == 0, document
    assert [p["how"] for p in document["patches"]] == ["by hand", "by hand"]
    assert document["saved"]["release"] == f"v{NEW}"
    assert snapshot(project.patches) == pinned
    assert project.main("lint", "--release", f"v{NEW}") == 0
    assert project.main("verify", "--release", f"v{NEW}") == 0
    project.run("apply", "--release", f"v{NEW}")
    built = project.root / "build" / f"vllm-{NEW}"
    assert "LIMIT = 8" in (built / "vllm/config.py").read_text()
    assert (built / "vllm/tree/__init__.py").is_file()
    assert project.main("verify") == 0
    # The next attempt knows both resolutions.
    shutil.rmtree(tree)
    code, document = rebase(None)
    assert code == 0
    assert [p["how"] for p in document["patches"]] == ["remembered", "remembered"]


def test_skipped_after_a_conflict_in_the_same_file(
    project: Project, rebase: Rebase, tree: Path
) -> None:
    project.run("apply", "--force")
    project.commit("vllm/config.py", ("LIMIT = 2", "LIMIT = 3"), "config: once more")
    project.run("export")
    code, document = rebase({"vllm/config.py": OTHER_LIMIT})
    assert code == 1
    assert _statuses(document) == ["conflicted", "applied", "skipped"]
    assert document["patches"][2]["after"] == [FIRST]
    skip = ["git", "-C", str(tree), "am", "--skip"]
    done = subprocess.run(skip, capture_output=True, check=False)
    assert done.returncode != 0, "git goes on to the third patch, which fails"
    assert rebase(None)[0] == 1
    project.git("am", "--skip", tree=tree)
    code, document = rebase(None)
    assert (code, _statuses(document)) == (0, ["dropped", "applied", "dropped"])


def test_file_renamed(project: Project, rebase: Rebase, tree: Path) -> None:
    code, document = rebase({"vllm/config.py": None, "vllm/settings.py": CONFIG})
    assert (code, _statuses(document)) == (0, ["fuzz", "applied"])
    assert document["patches"][0]["moved"] == [
        {"from": "vllm/config.py", "to": "vllm/settings.py"}
    ]
    assert "LIMIT = 2" in (tree / "vllm/settings.py").read_text()


def test_file_deleted(project: Project, rebase: Rebase, tree: Path) -> None:
    moved = "class Loop:\n    def run(self):\n        pass\n"
    changes = {"vllm/engine.py": None, "vllm/loop.py": moved}
    code, document = rebase(changes)
    assert (code, _statuses(document)) == (1, ["applied", "conflicted"])
    (entry,) = document["patches"][1]["conflicts"]
    assert entry["kind"] == "deleted upstream"
    assert entry["functions"] == [{"name": "run", "change": "gone with the file"}]
    assert entry["hints"] == ["run is defined in vllm/loop.py:2"]


def test_report_files(project: Project, rebase: Rebase, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    code, document = rebase({"vllm/engine.py": OTHER_STEP}, "--report", str(folder))
    assert code == 1
    data = json.loads((folder / f"rebase-{NEW}.json").read_text())
    assert data["patches"] == document["patches"]
    text = (folder / f"rebase-{NEW}.md").read_text()
    assert f"| {SECOND} | conflicted | vllm/engine.py: 1 hunk in run |" in text
    assert "<<<<<<< upstream\n    step(9)\n=======\n    step(2)\n" in text
    for command in (
        f"git -C build/rebase-{NEW} am --continue",
        f"git -C build/rebase-{NEW} am --skip",
        "--save",
        f"--onto {NEW} --abort",
    ):
        assert command in text
    blocked = tmp_path / "file"
    blocked.write_text("")
    code, document = rebase(None, "--report", str(blocked))
    assert code == 2
    assert "--report" in document["error"]["message"]


def test_dirty_tree_is_kept(project: Project, rebase: Rebase, tree: Path) -> None:
    assert rebase({"vllm/engine.py": OTHER_STEP})[0] == 1
    # As the tool left it: made anew without a question.
    assert _statuses(rebase(None)[1]) == ["applied", "conflicted"]
    (tree / "vllm/other.py").write_text("MINE = 1\n")
    code, document = rebase(None)
    assert code == 1
    assert "still waits" in document["error"]["message"]
    project.git("am", "--skip", tree=tree)
    (tree / "vllm/other.py").write_text("MINE = 1\n")
    code, document = rebase(None)
    assert code == 1
    assert document["error"]["unsaved"] == ["vllm/other.py"]
    assert "MINE" in (tree / "vllm/other.py").read_text()
    assert rebase(None, "--force")[0] == 1
    assert "MINE" not in (tree / "vllm/other.py").read_text()


def test_series_changed_in_between(project: Project, rebase: Rebase, tree) -> None:
    assert rebase({"vllm/engine.py": OTHER_STEP})[0] == 1
    project.git("am", "--skip", tree=tree)
    project.run("apply", "--force")
    project.commit("vllm/other.py", ("= 1", "= 5"), "other: five")
    project.run("export")
    code, document = rebase(None)
    assert code == 1
    assert "begin anew" in document["error"]["message"]


def test_abort(project: Project, rebase: Rebase, tree: Path, as_json) -> None:
    assert rebase({"vllm/engine.py": OTHER_STEP})[0] == 1
    assert as_json("rebase", "--onto", NEW, "--abort")[0] == 0
    assert not tree.exists()
    code, document = as_json("rebase", "--onto", "latest", "--abort")
    assert code == 2
    assert "there is none" in document["error"]["message"]


def test_kill_and_run_again(project: Project, rebase: Rebase, tmp_path: Path) -> None:
    """Killed with -9 at several moments: nothing half-made is ever in place."""
    path = sdist(tmp_path / "new", NEW, {"vllm/engine.py": OTHER_STEP})
    argv = [
        sys.executable, str(REPO / "apply.py"), "rebase", "--onto", str(path),
        "--root", str(project.root), "--json",
    ]  # fmt: skip
    before = {n: snapshot(project.root / n) for n in ("patches", "overlay")}
    place = project.root / "build" / f"rebase-{NEW}"
    begin = time.monotonic()
    subprocess.run(argv, stdout=subprocess.DEVNULL, check=False)
    whole = time.monotonic() - begin
    shutil.rmtree(place)
    killed = 0
    for part in (0.3, 0.5, 0.7, 0.9):  # machines differ too much for seconds
        process = subprocess.Popen(
            argv,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        time.sleep(part * whole)
        if process.poll() is None:
            killed += 1
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if place.exists():
            assert (place / ".git/ddtree-rebase.json").is_file()
            shutil.rmtree(place)
    assert killed, "every run ended before it was killed"
    code, document = rebase(None)
    assert (code, _statuses(document)) == (1, ["applied", "conflicted"])
    assert not list((project.root / "build").glob(".tmp-*"))
    assert {n: snapshot(project.root / n) for n in ("patches", "overlay")} == before


def test_onto_a_folder_and_a_git_checkout(
    project: Project, as_json, tmp_path: Path
) -> None:
    folder = tmp_path / "unpacked"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    code, document = as_json("rebase", "--onto", str(folder))
    assert (code, document["onto_kind"]) == (0, "folder")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    (folder / "vllm/engine.py").write_text(OTHER_STEP)
    subprocess.run([*git, "commit", "-qam", "engine: nine steps"], check=True)
    code, document = as_json("rebase", "--onto", str(folder))
    assert (code, document["onto_kind"]) == (1, "git")
    code, document = as_json("rebase", "--onto", str(folder), "--save")
    assert code == 1, "not all apply, so that nothing is saved"


@pytest.mark.parametrize(
    ("onto", "words"),
    [
        ("nonsense", "want a version, latest"),
        (VERSION, "is the release that the series is for"),
        ("/nowhere/at/all", "no such version"),
    ],
)
def test_bad_targets(project: Project, as_json, onto: str, words: str) -> None:
    code, document = as_json("rebase", "--onto", onto)
    assert code == 2
    assert words in document["error"]["message"]
    assert COMMIT not in document["error"]["message"]


def test_marked_regions_are_named_by_the_merged_file() -> None:
    """What merged cleanly above a conflict must not shift the function's name."""
    from patchset.rebase_conflict import enclosing, marked

    text = """import added
import more


def first():
    return 1


def second():
<<<<<<< HEAD
    return 2
=======
    return 3
>>>>>>> patch
"""
    (region,), ours = marked(text)
    assert (region.first, region.last, region.line) == (10, 14, 10)
    assert (region.ours, region.theirs) == (["    return 2"], ["    return 3"])
    assert enclosing(ours, region.line) == "second"
    assert enclosing(ours, 1) == ""
