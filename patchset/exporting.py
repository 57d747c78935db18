# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Commits of a work tree back to patches/, overlay/ and upstream.lock."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from patchset import gitio, worktree
from patchset.errors import CheckFailed
from patchset.gitio import git
from patchset.layout import Layout, sha256_of, temp_folder, write_atomic
from patchset.lock import Lock, Release
from patchset.series import file_name, overlay_blobs, overlay_files, read_series
from patchset.ui import Output


@dataclass
class Split:
    """The commits of a work tree, sorted.

    Args:
        base: The upstream commit.
        patches: Commits that become patches, in order.
        overlay_commits: Commits that belong to the overlay.
        marked: Whether the tree has an overlay commit at all.
    """

    base: str
    patches: list[str]
    overlay_commits: list[str]
    marked: bool


@dataclass
class Exported:
    """What `export` wrote: names of written and removed files, relative to root."""

    written: list[str]
    removed: list[str]
    patches: list[str]
    final_tree: str


def split(repo: git.Repo, shown: str) -> Split:
    """Sort the commits after upstream into patches and overlay.

    Raises:
        CheckFailed: A commit is a merge, a fixup, mixes both kinds, or adds, removes
            or changes the mode of an upstream file; says what to do.
    """
    record = worktree.load_record(repo)
    base = record.base if record else repo.git.rev_list("--max-parents=0", "HEAD")
    if "\n" in base:
        raise CheckFailed(f"{shown} has more than one root commit")
    upstream = gitio.tree_files(repo, base)
    lines = repo.git.rev_list("--reverse", "--parents", f"{base}..HEAD").splitlines()
    found = Split(base, [], [], False)
    for line in lines:
        commit, *parents = line.split()
        subject = repo.git.log("-1", "--format=%s", commit)
        named = f"commit {commit[:12]} ({subject})"
        if len(parents) != 1:
            raise CheckFailed(f"{named} is a merge; rebase it to a straight line")
        if subject.startswith(("fixup!", "squash!", "amend!")):
            raise CheckFailed(
                f"{named} is a fixup; fold it in with "
                f"git -C {shown} rebase -i --autosquash {base[:12]}"
            )
        inside, outside = [], []
        for status, path, _, _, old_mode, new_mode in gitio.changes(repo, commit):
            (inside if path in upstream else outside).append(path)
            if path in upstream and (status != "M" or old_mode != new_mode):
                raise CheckFailed(
                    f"{named} removes, adds or changes the mode of upstream's {path}; "
                    "a patch can only change the content of upstream files"
                )
        if inside and outside:
            raise CheckFailed(
                f"{named} changes upstream files ({inside[0]}) and files of the "
                f"overlay ({outside[0]}); split it: "
                f"git -C {shown} rebase -i {commit[:12]}^, mark "
                "it `edit`, then git reset HEAD^ and make two commits",
                upstream=inside,
                overlay=outside,
            )
        if subject == worktree.OVERLAY_SUBJECT and not inside:
            found.marked = True
            found.overlay_commits.append(commit)
        elif outside:
            found.overlay_commits.append(commit)
        elif inside:
            found.patches.append(commit)
        else:
            raise CheckFailed(f"{named} changes nothing; drop it")
    return found


def render_patches(repo: git.Repo, commits: list[str]) -> dict[str, bytes]:
    """Give file names and bytes of the series that some commits make."""
    return {
        file_name(number, repo.git.log("-1", "--format=%s", commit)): (
            gitio.format_patch(repo, commit)
        )
        for number, commit in enumerate(commits, start=1)
    }


def export(
    layout: Layout,
    lock: Lock,
    release: Release,
    out: Output,
    *,
    folder: Path | None,
    force: bool,
) -> Exported:
    """Write the commits of a work tree to patches/, overlay/ and the lock.

    Everything is rendered, applied again in a temporary tree and compared before the
    first file is written; the lock is written last.

    Args:
        folder: Another work tree than the one under build/.
        force: Overwrite edits made under patches/ or overlay/ since the last apply.

    Raises:
        CheckFailed: The work tree is dirty, a commit cannot be exported, or files
            changed on both sides.
    """
    repo = worktree.require(layout, release, folder)
    shown = layout.show(Path(repo.working_dir))
    record = worktree.load_record(repo)
    _refuse_unfinished(repo, record, shown)
    parts = split(repo, shown)
    patches = render_patches(repo, parts.patches)
    files = _overlay_of(repo, parts) if parts.overlay_commits or parts.marked else None
    _refuse_crossing(layout, release, record, patches, files, force=force)
    if record and files is not None and not force:
        tree_side = {p: oid for p, (_, oid) in files.items()}
        if tree_side == record.overlay:
            files = None  # not edited in the tree: what overlay/ holds now is newer

    temp = temp_folder(layout.build, "export")
    try:
        staged = Layout(temp / "root", layout.cache)
        _stage(staged, layout, release, repo, patches, files)
        made, tree_record, tree_repo = worktree.build_temporary(
            staged, release, out, "tree"
        )
        del made
        final = tree_repo.git.rev_parse("HEAD^{tree}")
        upstream = tree_repo.git.rev_parse(f"{tree_record.base}^{{tree}}")
        _compare(repo, tree_repo, parts, tree_record)
        series = read_series(staged.patches(release.name))
        text = lock.render(
            release.name,
            upstream_tree=upstream,
            final_tree=final,
            patches=worktree.pins(tree_repo, tree_record, series),
            overlay=overlay_blobs(staged.overlay),
        )
        tree_repo.close()
        result = Exported([], [], list(patches), final)
        _sync(
            staged.patches(release.name),
            layout.patches(release.name),
            layout,
            result,
            "*.patch",
        )
        if files is not None:
            _sync(staged.overlay, layout.overlay, layout, result, None)
        if lock.path.read_bytes() != text:
            lock.write(text)
            result.written.append(lock.shown)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    if record:
        _remember(repo, record, layout, release, parts)
    return result


def _refuse_unfinished(
    repo: git.Repo, record: worktree.Record | None, shown: str
) -> None:
    if gitio.in_progress(repo):
        raise CheckFailed(
            f"{shown} has an unfinished am, rebase, merge or cherry-pick; finish it "
            "or give it up, then export again"
        )
    if record and not record.done:
        raise CheckFailed(
            f"{shown} is not complete; run `python apply.py apply --continue` first"
        )
    edits = gitio.dirty(repo)
    if edits:
        names = ", ".join(edits[:5]) + (" ..." if len(edits) > 5 else "")
        raise CheckFailed(
            f"{shown} has edits that are in no commit: {names}; commit them there "
            f"(git -C {shown} add -A && git -C {shown} commit) or take them back",
            unsaved=edits,
        )


def _overlay_of(repo: git.Repo, parts: Split) -> dict[str, tuple[str, str]]:
    """Map overlay paths at HEAD to mode and blob id."""
    upstream = gitio.tree_files(repo, parts.base)
    whole = gitio.tree_files(repo, "HEAD")
    return {path: entry for path, entry in whole.items() if path not in upstream}


def _refuse_crossing(
    layout: Layout,
    release: Release,
    record: worktree.Record | None,
    patches: dict[str, bytes],
    files: dict[str, tuple[str, str]] | None,
    *,
    force: bool,
) -> None:
    """Refuse to overwrite edits under patches/ or overlay/ that the tree lacks."""
    if record is None or force:
        return
    here = {p.name: p.sha256 for p in read_series(layout.patches(release.name))}
    disk = {p.name: p.data for p in read_series(layout.patches(release.name))}
    if here != record.patches and disk != patches:
        names = sorted(set(here.items()) ^ set(record.patches.items()))
        raise CheckFailed(
            f"patches/{release.name}/{names[0][0]} changed since the last apply, so "
            "that export would overwrite it; apply it first, or add --force to take "
            "the work tree's side"
        )
    if files is None:
        return
    tree_side = {p: oid for p, (_, oid) in files.items()}
    disk_side = overlay_blobs(layout.overlay)
    if record.overlay not in (disk_side, tree_side) and disk_side != tree_side:
        crossed = set(disk_side.items()) ^ set(record.overlay.items())
        raise CheckFailed(
            f"overlay/{min(crossed)[0]} changed since the last apply, and the overlay "
            "changed in the work tree as well; copy one side over by hand, or add "
            "--force to take the work tree's side"
        )


def _stage(
    staged: Layout,
    layout: Layout,
    release: Release,
    repo: git.Repo,
    patches: dict[str, bytes],
    files: dict[str, tuple[str, str]] | None,
) -> None:
    series = staged.patches(release.name)
    series.mkdir(parents=True)
    staged.build.mkdir(parents=True)
    for name, data in patches.items():
        (series / name).write_bytes(data)
    staged.overlay.mkdir()
    if files is None:
        for path, source in overlay_files(layout.overlay).items():
            _put(staged.overlay / path, source.read_bytes())
    else:
        contents = gitio.read_blobs(repo, (oid for _, oid in files.values()))
        for path, data in zip(files, contents, strict=True):
            _put(staged.overlay / path, data)


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _compare(
    repo: git.Repo, made: git.Repo, parts: Split, record: worktree.Record
) -> None:
    """Check that the rendered series gives the upstream files of the work tree."""
    want = gitio.tree_files(repo, "HEAD")
    have = gitio.tree_files(made, "HEAD")
    base = gitio.tree_files(made, record.base)
    wrong = [p for p in base if want.get(p, ("", ""))[1] != have[p][1]]
    if wrong:
        raise CheckFailed(
            f"the exported series does not give the work tree's {wrong[0]}; the tree "
            "does not start at the pinned upstream, make it with "
            "`python apply.py apply`",
            wrong=wrong[:20],
        )


def _sync(
    new: Path, old: Path, layout: Layout, result: Exported, pattern: str | None
) -> None:
    """Make `old` hold what `new` holds; untouched files keep their times."""
    if pattern:
        have = {p.name: p for p in old.glob(pattern)}
        want = {p.name: p for p in new.glob(pattern)}
    else:
        have, want = overlay_files(old), overlay_files(new)
    for name, path in sorted(want.items()):
        target = old / name
        if name not in have or sha256_of(path) != sha256_of(target):
            write_atomic(target, path.read_bytes())
            result.written.append(layout.show(target))
    for name in sorted(set(have) - set(want)):
        have[name].unlink()
        result.removed.append(layout.show(have[name]))
        for parent in have[name].parents:
            if parent == old or any(parent.iterdir()):
                break
            os.rmdir(parent)


def _remember(
    repo: git.Repo,
    record: worktree.Record,
    layout: Layout,
    release: Release,
    parts: Split,
) -> None:
    """Note in the work tree that its commits are saved now."""
    series = read_series(layout.patches(release.name))
    record.head = repo.git.rev_parse("HEAD")
    record.mended = False
    record.canonical = parts.overlay_commits == [record.head]
    record.patches = {p.name: p.sha256 for p in series}
    record.commits = {p.name: c for p, c in zip(series, parts.patches, strict=True)}
    tree = _overlay_of(repo, parts)
    record.overlay = {path: oid for path, (_, oid) in tree.items()}
    record.save(repo)
