# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""verify, lock and status, and the lock file's own errors."""

from __future__ import annotations

import shutil

import pytest
from apply_support import SPDX, Project, snapshot


def _wrong(document: dict) -> list[str]:
    return [c["what"] for c in document["checks"] if not c["ok"]]


def test_everything_holds(project: Project, as_json) -> None:
    before = snapshot(project.root)
    code, document = as_json("verify")
    assert code == 0
    assert len(document["checks"]) >= 10
    assert any("wheel" in text for text in document["not_checked"])
    after = snapshot(project.root)
    changed = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
    assert changed <= {"build/.lock", f"build/{project.tree.name}/.git/index"}


def test_without_a_work_tree(project: Project, as_json) -> None:
    shutil.rmtree(project.tree)
    code, document = as_json("verify")
    assert code == 0
    assert any("not applied" in text for text in document["not_checked"])


def test_patch_changed(project: Project, as_json) -> None:
    name = project.names()[0]
    file = project.patches / name
    file.write_text(file.read_text().replace("+LIMIT = 2", "+LIMIT = 3"))
    code, document = as_json("verify")
    assert code == 3
    assert _wrong(document) == [
        f"{name} sha256",
        f"{name} vllm/config.py",
        "final tree",
    ]


def test_patch_missing(project: Project, as_json) -> None:
    (project.patches / project.names()[1]).unlink()
    code, document = as_json("verify")
    assert code == 3
    assert _wrong(document) == ["patch files", "final tree"]


def test_overlay_changed_missing_and_new(project: Project, as_json) -> None:
    (project.overlay / "vllm/extra.py").unlink()
    (project.overlay / "vllm/tree/__init__.py").write_text(f"{SPDX}\n")
    (project.overlay / "vllm/new.py").write_text(f"{SPDX}\n")
    code, document = as_json("verify")
    assert code == 3
    assert _wrong(document) == [
        "overlay/vllm/extra.py",
        "overlay/vllm/new.py",
        "overlay/vllm/tree/__init__.py",
        "final tree",
    ]


@pytest.mark.parametrize("field", ["final", "pre", "post", "sha256", "blob"])
def test_lock_changed(project: Project, as_json, field: str) -> None:
    head, sign, tail = project.lock.read_text().rpartition(f'{field} = "')
    digit = "0" if tail[0] != "0" else "1"
    project.lock.write_text(head + sign + digit + tail[1:])
    code, document = as_json("verify")
    assert code == 3
    assert _wrong(document)


def test_upstream_tree_changed_in_the_lock(project: Project, as_json) -> None:
    text = project.lock.read_text()
    head, sign, tail = text.partition('upstream = "')
    project.lock.write_text(head + sign + "0" * 40 + tail[40:])
    code, document = as_json("verify")
    assert code == 3
    assert "0" * 40 in document["error"]["message"]


def test_work_tree_edited(project: Project, as_json) -> None:
    (project.tree / "vllm/other.py").write_text("OTHER = 4\n")
    code, document = as_json("verify")
    assert code == 3
    assert _wrong(document) == ["build/vllm-1.2.0 edited files"]


def test_lock_check_and_write(project: Project, as_json) -> None:
    before = project.lock.read_bytes()
    assert as_json("lock", "--check")[0] == 0
    (project.overlay / "vllm/extra.py").write_text(f"{SPDX}\nEXTRA = 2\n")
    code, document = as_json("lock", "--check")
    assert code == 3
    assert "apply.py lock" in document["error"]["message"]
    assert project.lock.read_bytes() == before
    code, document = as_json("lock")
    assert (code, document["changed"]) == (0, True)
    assert project.lock.read_bytes() != before
    assert as_json("lock", "--check")[0] == 0
    (project.overlay / "vllm/extra.py").write_text(f"{SPDX}\nEXTRA = 1\n")
    project.run("lock")
    assert project.lock.read_bytes() == before


def test_status(project: Project, as_json) -> None:
    before = snapshot(project.root)
    code, document = as_json("status")
    assert code == 0
    assert document["applied"] is True
    assert document["source"] == "sdist"
    assert [p["state"] for p in document["patches"]] == ["applied", "applied"]
    assert document["overlay"] == {"modified": [], "missing": [], "extra": []}
    assert document["lock"] == {"patches": True, "overlay": True}
    assert snapshot(project.root) == before


def test_status_of_a_changed_project(project: Project, as_json) -> None:
    first, second = (project.patches / name for name in project.names())
    first.write_text(first.read_text().replace("+LIMIT = 2", "+LIMIT = 3"))
    second.write_text(second.read_text().replace("take two", "take both"))
    (project.overlay / "vllm/extra.py").write_text("EXTRA = 3\n")
    (project.overlay / "vllm/more.py").write_text("MORE = 3\n")
    (project.overlay / "vllm/tree/deep/__init__.py").unlink()
    code, document = as_json("status")
    assert code == 0
    assert [p["state"] for p in document["patches"]] == ["changed", "missing"]
    assert document["extra_commits"] == ["engine: take two steps"]
    assert document["overlay"] == {
        "modified": ["vllm/extra.py"],
        "missing": ["vllm/more.py"],
        "extra": ["vllm/tree/deep/__init__.py"],
    }
    assert document["lock"] == {"patches": False, "overlay": False}


def test_status_before_anything(project: Project, as_json) -> None:
    shutil.rmtree(project.root / "build")
    code, document = as_json("status")
    assert code == 0
    assert (document["applied"], document["source"]) == (False, None)
    assert {p["state"] for p in document["patches"]} == {"missing"}
    assert not (project.root / "build").exists()


def test_status_names_damage_and_keeps_it(project: Project, as_json) -> None:
    sdist = next(project.cache.glob("*.tar.gz"))
    sdist.write_bytes(b"damaged")
    code, document = as_json("status")
    assert (code, document["source"]) == (0, "damaged")
    assert sdist.exists()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("lock-version = 1", "lock-version = 2", "lock-version is 2"),
        ('default = "v1.2.0"', 'default = "v9"', "default is 'v9'"),
        ('version = "1.2.0"', 'version = "one"', ".version is 'one'"),
        ('commit = "0123', 'commit = "x123', ".commit is 'x123"),
        ('name = "vllm-', 'name = "../vllm-', ".sdist.name is '../vllm-"),
        ('torch = "2.0.0"', "torch = 2", ".torch is 2"),
        ("lock-version = 1", "lock-version = [", "not valid TOML"),
        ('path = "vllm/config.py"', 'path = "/etc/passwd"', "touched[0].path"),
        ('exclude = ["vllm/_version.py"]', "exclude = 3", ".tree.exclude is 3"),
    ],
)
def test_lock_errors_name_field_and_value(
    project: Project, as_json, old: str, new: str, words: str
) -> None:
    text = project.lock.read_text()
    assert old in text
    project.lock.write_text(text.replace(old, new))
    code, document = as_json("verify")
    assert code == 2
    assert words in document["error"]["message"]
    assert "\n" not in document["error"]["message"]


def test_no_lock(project: Project, as_json) -> None:
    project.lock.unlink()
    code, document = as_json("status")
    assert code == 2
    assert "upstream.lock is missing" in document["error"]["message"]
