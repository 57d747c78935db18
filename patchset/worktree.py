# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The work tree under build/: upstream, one commit per patch, one for the overlay."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from patchset import gitio
from patchset.errors import CannotRun, CheckFailed
from patchset.gitio import git
from patchset.layout import Layout, move_into_place, temp_folder, write_atomic
from patchset.lock import PatchPin, Release, Touch
from patchset.series import Patch, overlay_blobs, overlay_files, read_series
from patchset.source import Source, cached, import_upstream
from patchset.ui import Output

OVERLAY_SUBJECT = "ddtree overlay"
_RECORD = "ddtree.json"


@dataclass
class Record:
    """What a work tree was made from; kept inside its .git folder.

    Args:
        base: The upstream commit.
        head: The last commit that this tool made.
        patches: File name to sha256, in order, of all patches of the series.
        commits: File name to commit id; an absorbed patch has an empty one.
        overlay: Overlay path to blob id.
        done: Whether the tree is complete.
        mended: Whether a conflict was resolved by hand, so that the tree holds work
            that patches/ does not.
        canonical: Whether the commits are in the order that `apply` makes.
    """

    release: str
    base: str
    head: str = ""
    patches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)
    overlay: dict[str, str] = field(default_factory=dict)
    done: bool = False
    mended: bool = False
    canonical: bool = True

    def save(self, repo: git.Repo) -> None:
        data = json.dumps(asdict(self), indent=1).encode()
        write_atomic(Path(repo.git_dir) / _RECORD, data, sync=False)

    @property
    def absorbed(self) -> list[str]:
        return [name for name, commit in self.commits.items() if not commit]

    @property
    def waiting(self) -> list[str]:
        return [name for name in self.patches if name not in self.commits]


def load_record(repo: git.Repo) -> Record | None:
    """Read the record of a work tree; None where this tool did not make it."""
    try:
        return Record(**json.loads((Path(repo.git_dir) / _RECORD).read_text()))
    except (OSError, ValueError, TypeError):
        return None


class Conflict(CheckFailed):
    """A patch did not apply."""


def start(folder: Path, layout: Layout, release: Release, source: Source) -> Record:
    """Begin a work tree in an empty folder: the upstream commit, checked out."""
    repo = gitio.create(folder)
    base = import_upstream(repo, source, release)
    repo.git.reset("--hard", "--quiet", base)
    series = read_series(layout.patches(release.name))
    record = Record(
        release=release.name,
        base=base,
        head=base,
        patches={p.name: p.sha256 for p in series},
        overlay=overlay_blobs(layout.overlay),
    )
    record.save(repo)
    return record


def continue_series(
    repo: git.Repo,
    record: Record,
    patches: Sequence[Patch],
    tick: Callable[[str], None] = lambda name: None,
) -> None:
    """Apply the patches that wait, one commit each.

    Raises:
        git.GitCommandError: One does not apply; ``record.waiting[0]`` names it.
    """
    for patch in patches:
        if patch.name in record.commits:
            continue
        before = repo.git.rev_parse("HEAD")
        gitio.am(repo, patch.path)
        after = repo.git.rev_parse("HEAD")
        record.commits[patch.name] = after if after != before else ""
        record.head = after
        record.save(repo)
        tick(patch.name)


def add_overlay(repo: git.Repo, record: Record, files: Mapping[str, Path]) -> None:
    """Commit the overlay; an empty one gets a commit too, so that export finds it.

    Raises:
        CheckFailed: An overlay file would replace an upstream one.
    """
    upstream = gitio.tree_files(repo, record.base)
    clash = sorted(set(files) & set(upstream))
    if clash:
        raise CheckFailed(
            f"overlay/{clash[0]} would replace an upstream file; change that file by a "
            "patch instead",
            clash=clash,
        )
    rows = ((path, "100644", file.read_bytes()) for path, file in files.items())
    head = repo.git.rev_parse("HEAD")
    record.head = gitio.fast_import(repo, rows, OVERLAY_SUBJECT, parent=head)
    repo.git.reset("--hard", "--quiet", record.head)
    record.done = True
    record.save(repo)


def build(
    folder: Path, layout: Layout, release: Release, source: Source, out: Output
) -> Record:
    """Make a complete work tree in an empty folder.

    Raises:
        git.GitCommandError: A patch does not apply; the folder stays.
    """
    record = start(folder, layout, release, source)
    repo = gitio.open_repo(folder)
    series = read_series(layout.patches(release.name))
    with out.bar(len(series), "applying", unit="patch") as bar:
        continue_series(repo, record, series, lambda name: bar.update(1))
    add_overlay(repo, record, overlay_files(layout.overlay))
    return record


def pins(repo: git.Repo, record: Record, patches: Sequence[Patch]) -> list[PatchPin]:
    """Compute the lock's entries for an applied series."""
    entries = []
    for patch in patches:
        commit = record.commits.get(patch.name)
        rows = gitio.changes(repo, commit) if commit else []
        touched = tuple(Touch(path, old, new) for _, path, old, new, _, _ in rows)
        entries.append(PatchPin(patch.name, patch.sha256, touched))
    return entries


def unsaved(repo: git.Repo, release: Release) -> list[str]:
    """Say what would be lost if the work tree went away; empty when nothing.

    Work counts as saved when the tree is the one that the tool made, or is the one
    that the lock names as final.
    """
    problems = []
    if gitio.in_progress(repo):
        problems.append("an unfinished am, rebase, merge or cherry-pick")
    edits = gitio.dirty(repo)
    if edits:
        shown = ", ".join(edits[:5]) + (" ..." if len(edits) > 5 else "")
        problems.append(f"{len(edits)} edited or new files ({shown})")
    record = load_record(repo)
    head = repo.git.rev_parse("HEAD")
    tree = repo.git.rev_parse("HEAD^{tree}")
    if record is None:
        problems.append("commits of unknown origin (apply.py did not make this tree)")
    elif head != record.head and tree != release.final_tree:
        names = repo.git.rev_list("--count", f"{record.head}..HEAD")
        problems.append(f"{names} commits that were not exported")
    elif record.mended and tree != release.final_tree:
        problems.append("patches mended after a conflict that were not exported")
    known = ["HEAD"] + ([record.head] if record and record.head else [])
    aside = repo.git.rev_list("--branches", "--count", "--not", *known)
    if int(aside):
        problems.append(f"{aside} commits on other branches")
    if repo.git.for_each_ref("refs/stash"):
        problems.append("stashed edits")
    return problems


def same_inputs(record: Record, layout: Layout, release: Release) -> bool:
    """Say whether a work tree was made from what patches/ and overlay/ hold now."""
    series = read_series(layout.patches(release.name))
    return (
        record.done
        and record.canonical
        and not record.mended
        and record.release == release.name
        and record.patches == {p.name: p.sha256 for p in series}
        and list(record.patches) == [p.name for p in series]
        and record.overlay == overlay_blobs(layout.overlay)
    )


@dataclass
class Applied:
    """Outcome of `apply`: where the tree is, and whether it had to be made."""

    path: Path
    record: Record
    tree: str
    fresh: bool


def apply(
    layout: Layout, release: Release, out: Output, *, dry_run: bool, force: bool
) -> Applied:
    """Make the work tree under build/, or find that it is there already.

    Raises:
        Conflict: A patch does not apply; the tree in conflict is kept.
        CheckFailed: The present tree holds work that would be lost.
    """
    target = layout.worktree(release.version)
    waiting = layout.conflict(release.version)
    if waiting.exists() and not (force or dry_run):
        raise CheckFailed(
            f"an apply that met a conflict waits in {layout.show(waiting)}; run "
            "`python apply.py apply --continue` or `python apply.py apply --abort` "
            "first (--force throws it away)",
            conflict=str(waiting),
        )
    source = cached(layout, release)
    if target.exists() and not dry_run and not force:
        repo = gitio.open_repo(target)
        problems = unsaved(repo, release)
        if problems:
            raise CheckFailed(
                f"{layout.show(target)} holds work that would be lost: "
                f"{'; '.join(problems)}. Commit it there and run `python apply.py "
                "export`, or throw it away with `python apply.py apply --force`",
                unsaved=problems,
            )
        record = load_record(repo)
        head = repo.git.rev_parse("HEAD")
        if record and head == record.head and same_inputs(record, layout, release):
            tree = repo.git.rev_parse("HEAD^{tree}")
            return Applied(target, record, tree, fresh=False)
    temp = temp_folder(layout.build, "apply")
    folder = temp / target.name
    try:
        try:
            record = build(folder, layout, release, source, out)
        except git.GitCommandError as err:
            from patchset.conflict import keep

            raise keep(layout, release, folder, err, dry_run=dry_run) from None
        repo = gitio.open_repo(folder)
        tree = repo.git.rev_parse("HEAD^{tree}")
        repo.close()
        if not dry_run:
            move_into_place(folder, target)
            if force and waiting.exists():
                shutil.rmtree(waiting)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return Applied(target, record, tree, fresh=True)


def build_temporary(
    layout: Layout, release: Release, out: Output, label: str
) -> tuple[Path, Record, git.Repo]:
    """Make a complete tree in a temporary folder that the caller removes.

    Raises:
        CheckFailed: A patch does not apply.
    """
    source = cached(layout, release)
    temp = temp_folder(layout.build, label)
    folder = temp / "tree"
    try:
        record = build(folder, layout, release, source, out)
    except git.GitCommandError as err:
        repo = gitio.open_repo(folder)
        held = load_record(repo)
        name = held.waiting[0] if held and held.waiting else "a patch"
        shutil.rmtree(temp, ignore_errors=True)
        raise CheckFailed(
            f"{name} does not apply ({gitio.reason(err)}); run "
            "`python apply.py apply` to see where",
            git=gitio.message_of(err),
        ) from None
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise
    return temp, record, gitio.open_repo(folder)


def require(layout: Layout, release: Release, folder: Path | None) -> git.Repo:
    """Open the applied work tree, or another one that the user names.

    Raises:
        CannotRun: There is none.
    """
    where = folder or layout.worktree(release.version)
    if not where.is_dir():
        raise CannotRun(
            f"{layout.show(where)} does not exist; run `python apply.py apply` first"
        )
    return gitio.open_repo(where)
