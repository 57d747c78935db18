# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""What happens when a patch does not apply: keep, continue, give up."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from patchset import gitio
from patchset.errors import CannotRun, CheckFailed
from patchset.gitio import git
from patchset.layout import Layout, move_into_place
from patchset.lock import Release
from patchset.series import overlay_files, read_series
from patchset.ui import Output
from patchset.worktree import (
    Applied,
    Conflict,
    Record,
    add_overlay,
    continue_series,
    load_record,
    unsaved,
)

_MARKER = re.compile(rb"^<{7} ", re.M)


def places(folder: Path, repo: git.Repo, text: str) -> list[dict[str, object]]:
    """Find file and line of every conflict in a stopped work tree."""
    found: list[dict[str, object]] = []
    raw = repo.git.diff("--name-only", "--diff-filter=U", "-z")
    for name in [n for n in raw.split("\0") if n]:
        path = folder / name
        data = path.read_bytes() if path.is_file() else b""
        lines = [data.count(b"\n", 0, m.start()) + 1 for m in _MARKER.finditer(data)]
        found += [{"file": name, "line": line} for line in lines or [1]]
    stopped = Path(repo.git_dir) / "rebase-apply" / "patch"
    if not found and stopped.exists():
        # Without the blobs of the other side git says no more than that; ask again.
        try:
            repo.git.apply("--check", str(stopped))
        except git.GitCommandError as err:
            text += gitio.message_of(err)
    if not found:
        for name, line in re.findall(r"patch failed: (.+?):(\d+)", text):
            found.append({"file": name, "line": int(line)})
    if not found:
        for name in re.findall(r"error: (.+?): (?:does not|No such)", text):
            found.append({"file": name, "line": 1})
    unique = {(p["file"], p["line"]): p for p in found}
    return list(unique.values())


def keep(
    layout: Layout,
    release: Release,
    folder: Path,
    err: git.GitCommandError,
    *,
    dry_run: bool,
) -> Conflict:
    """Move a stopped tree to its own place and describe it.

    Returns:
        The error to raise.
    """
    repo = gitio.open_repo(folder)
    record = load_record(repo)
    if record is None or not record.waiting:
        return Conflict(f"git stopped: {gitio.message_of(err)}")
    if not gitio.in_progress(repo):
        name = record.waiting[0]
        number = list(record.patches).index(name) + 1
        return Conflict(
            f"patch {number} of {len(record.patches)}, {name}: git am cannot use it: "
            f"{gitio.reason(err)}",
            patch=name,
            git=gitio.message_of(err),
        )
    where = places(folder, repo, gitio.message_of(err))
    repo.close()
    target = layout.conflict(release.version)
    if not dry_run:
        if target.exists():
            shutil.rmtree(target)
        move_into_place(folder, target)
    return describe(layout, release, record, where, err, kept=not dry_run)


def describe(
    layout: Layout,
    release: Release,
    record: Record,
    where: list[dict[str, object]],
    err: git.GitCommandError,
    *,
    kept: bool,
) -> Conflict:
    """Say which patch stopped, where, and what to do now."""
    name = record.waiting[0]
    number = list(record.patches).index(name) + 1
    total = len(record.patches)
    shown = ", ".join(f"{p['file']}:{p['line']}" for p in where)
    shown = shown or gitio.reason(err)
    tree = layout.show(layout.conflict(release.version))
    built = layout.worktree(release.version)
    lines = [f"patch {number} of {total}, {name}, does not apply: {shown}"]
    if built.exists():
        lines.append(f"  {layout.show(built)} is untouched.")
    else:
        lines.append(f"  {layout.show(built)} was not made.")
    if kept:
        merged = (Path(layout.conflict(release.version)) / ".git").exists() and bool(
            _unmerged(layout, release)
        )
        first = (
            f"edit the files in {tree}, then git -C {tree} add -u && "
            f"git -C {tree} am --continue"
            if merged
            else f"git -C {tree} apply --reject .git/rebase-apply/patch, mend by hand, "
            f"then git -C {tree} add -u && git -C {tree} am --continue"
        )
        lines += [
            f"  to continue: {first}",
            "               python apply.py apply --continue",
            "  to save:     python apply.py export"
            "   (after that; writes the mended patches to patches/)",
            "  to give up:  python apply.py apply --abort",
        ]
    return Conflict(
        "\n".join(lines),
        patch=name,
        number=number,
        total=total,
        places=where,
        conflict=tree if kept else None,
        git=gitio.message_of(err),
    )


def _unmerged(layout: Layout, release: Release) -> str:
    repo = gitio.open_repo(layout.conflict(release.version))
    return repo.git.diff("--name-only", "--diff-filter=U")


def resume(layout: Layout, release: Release, out: Output, *, force: bool) -> Applied:
    """Finish an apply that met a conflict.

    Raises:
        Conflict: A later patch does not apply either.
        CheckFailed: The conflict is not resolved, or work would be lost.
    """
    folder = layout.conflict(release.version)
    target = layout.worktree(release.version)
    shown = layout.show(folder)
    if not folder.exists():
        raise CannotRun(f"nothing to continue: there is no {shown}")
    repo = gitio.open_repo(folder)
    record = load_record(repo)
    if record is None:
        raise CannotRun(f"{shown} has no record; run `python apply.py apply --abort`")
    if gitio.in_progress(repo):
        raise CheckFailed(
            f"{shown} still waits: resolve, then git -C {shown} add -u && "
            f"git -C {shown} am --continue, then run this again"
        )
    edits = gitio.dirty(repo)
    if edits:
        raise CheckFailed(
            f"{shown} has edits that are in no commit: {', '.join(edits[:5])}; "
            "commit them or take them back, then run this again",
            unsaved=edits,
        )
    if target.exists() and not force:
        problems = unsaved(gitio.open_repo(target), release)
        if problems:
            raise CheckFailed(
                f"{layout.show(target)} holds work that would be lost: "
                f"{'; '.join(problems)}. Export it first, or add --force",
                unsaved=problems,
            )
    if record.waiting:
        # The patch that stopped: committed by `am --continue`, or skipped.
        head = repo.git.rev_parse("HEAD")
        record.commits[record.waiting[0]] = head if head != record.head else ""
        record.head = head
        record.mended = True
        record.save(repo)
    series = read_series(layout.patches(release.name))
    by_name = {p.name: p for p in series}
    gone = [name for name in record.waiting if name not in by_name]
    if gone:
        raise CheckFailed(
            f"{gone[0]} is no longer in patches/{release.name}; run `python apply.py "
            "apply --abort` and begin again"
        )
    try:
        continue_series(repo, record, [by_name[n] for n in record.waiting])
    except git.GitCommandError as err:
        where = places(folder, repo, gitio.message_of(err))
        raise describe(layout, release, record, where, err, kept=True) from None
    add_overlay(repo, record, overlay_files(layout.overlay))
    tree = repo.git.rev_parse("HEAD^{tree}")
    repo.close()
    move_into_place(folder, target)
    return Applied(target, record, tree, fresh=True)


def abort(layout: Layout, release: Release) -> Path:
    """Throw the tree in conflict away.

    Raises:
        CannotRun: There is none.
    """
    folder = layout.conflict(release.version)
    if not folder.exists():
        raise CannotRun(f"nothing to abort: there is no {layout.show(folder)}")
    shutil.rmtree(folder)
    return folder
