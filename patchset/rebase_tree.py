# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The repository of a rebase: pin and target side by side, patches one by one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from patchset import gitio
from patchset.errors import CannotRun
from patchset.gitio import git
from patchset.layout import Layout, write_atomic
from patchset.lock import Release
from patchset.rebase_target import Target, import_target
from patchset.series import Patch, read_series
from patchset.source import cached, import_upstream

PIN, TARGET, PATCHED = "pin", "target", "pin-patched"
APPLIED, FUZZ, ABSORBED = "applied", "fuzz", "absorbed"
CONFLICTED, SKIPPED, DROPPED = "conflicted", "skipped", "dropped"
GOOD = (APPLIED, FUZZ, ABSORBED, DROPPED)
_RECORD = "ddtree-rebase.json"
_AM = (*gitio.AM_FLAGS, "--rerere-autoupdate")


@dataclass
class Outcome:
    """What became of one patch.

    Args:
        patch: File name.
        status: ``applied``, ``fuzz``, ``absorbed``, ``conflicted``, ``skipped`` (it
            fails where a patch that conflicted is missing) or ``dropped`` (by hand).
        how: For ``fuzz``: ``three-way``, ``remembered`` (a resolution that rerere
            knew) or ``by hand``.
        after: For ``skipped``: the patches that conflicted in the same files.
        conflicts: For ``conflicted`` and ``skipped``: one entry per file.
        commit: Its commit on the target; empty where there is none.
    """

    patch: str
    subject: str
    status: str
    how: str = ""
    after: list[str] = field(default_factory=list)
    conflicts: list[dict[str, Any]] = field(default_factory=list)
    moved: list[dict[str, str]] = field(default_factory=list)
    commit: str = ""
    git: str = ""


@dataclass
class Record:
    """What a rebase tree is; kept inside its .git folder.

    Args:
        pin: Release that the series comes from.
        onto: Version or label of the target.
        base: The target's upstream commit.
        head: The last commit before the first conflict, or the last of all.
        patches: File name to sha256 of the series that was tried.
        outcomes: One per patch.
        mark: Fingerprint of the tree as the tool left it.
    """

    pin: str
    onto: str
    base: str
    commit: str
    head: str = ""
    patches: dict[str, str] = field(default_factory=dict)
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    mark: str = ""

    def save(self, repo: git.Repo) -> None:
        data = json.dumps(asdict(self), indent=1).encode()
        write_atomic(Path(repo.git_dir) / _RECORD, data, sync=False)

    @property
    def results(self) -> list[Outcome]:
        return [Outcome(**row) for row in self.outcomes]


def load(repo: git.Repo) -> Record | None:
    """Read the record; None where this tool did not make the tree."""
    try:
        return Record(**json.loads((Path(repo.git_dir) / _RECORD).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def fingerprint(repo: git.Repo) -> str:
    """Hash what a person can change in a tree: HEAD, edits, the running am."""
    digest = hashlib.sha256(repo.git.rev_parse("HEAD").encode())
    digest.update(repo.git.status("--porcelain", "-z", "--no-renames").encode())
    for name in sorted(n for n in gitio.dirty(repo) if n):
        file = Path(repo.working_dir) / name
        digest.update(name.encode() + (file.read_bytes() if file.is_file() else b""))
    following = Path(repo.git_dir) / "rebase-apply" / "next"
    digest.update(following.read_bytes() if following.exists() else b"")
    return digest.hexdigest()


def create(folder: Path, layout: Layout) -> git.Repo:
    """Make the repository; resolutions are remembered in the cache."""
    repo = gitio.create(folder)
    with repo.config_writer() as config:
        for section, option, value in (
            ("merge", "renames", "true"),
            ("merge", "conflictstyle", "merge"),
            ("rerere", "enabled", "true"),
            ("rerere", "autoupdate", "true"),
        ):
            config.set_value(section, option, value)
    memory = layout.cache / "rr-cache"
    memory.mkdir(parents=True, exist_ok=True)
    os.symlink(memory.resolve(), Path(repo.git_dir) / "rr-cache")
    return repo


def import_both(
    repo: git.Repo, layout: Layout, pin: Release, target: Target, series: list[Patch]
) -> str:
    """Bring in the pin, every step of the series on it, and the target.

    The steps are there for their blobs: a three-way merge needs what each patch was
    made against. Nothing is checked out for them.

    Returns:
        The target's commit, checked out.

    Raises:
        CannotRun: A patch does not apply to the pin itself.
    """
    base = import_upstream(repo, cached(layout, pin), pin)
    repo.git.tag(PIN, base)
    index = Path(repo.git_dir) / "ddtree-index"
    parent = base
    with repo.git.custom_environment(GIT_INDEX_FILE=str(index)):
        repo.git.read_tree(base)
        for patch in series:
            try:
                repo.git.apply("--cached", "--whitespace=nowarn", str(patch.path))
            except git.GitCommandError as err:
                raise CannotRun(
                    f"{patch.name} does not apply to the pin {pin.name} itself "
                    f"({gitio.reason(err)}); run `python apply.py apply` first"
                ) from None
            tree = repo.git.write_tree()
            parent = repo.git.commit_tree(tree, "-p", parent, "-m", patch.subject)
            repo.git.tag(f"{PIN}-{patch.number or 0:04d}", parent)
    index.unlink()
    repo.git.tag(PATCHED, parent)
    commit = import_target(layout, repo, target)
    repo.git.tag(TARGET, commit)
    repo.git.reset("--hard", "--quiet", commit)
    return commit


def _am(repo: git.Repo, patches: Sequence[Path]) -> str:
    """Apply patches; gives what git printed.

    Raises:
        git.GitCommandError: One does not apply.
    """
    _, out, err = repo.git.am(*_AM, *map(str, patches), with_extended_output=True)
    return f"{out}\n{err}"


def try_patch(repo: git.Repo, patch: Patch) -> Outcome:
    """Apply one patch; on a conflict the am is left unfinished."""
    before = repo.git.rev_parse("HEAD")
    how = ""
    try:
        text = _am(repo, [patch.path])
    except git.GitCommandError as err:
        text = gitio.message_of(err)
        if not gitio.in_progress(repo) or not _remembered(repo):
            return Outcome(patch.name, patch.subject, CONFLICTED, git=text)
        try:
            repo.git.am("--continue")
        except git.GitCommandError:
            repo.git.am("--skip")  # the remembered resolution leaves nothing over
        how = "remembered"
    after = repo.git.rev_parse("HEAD")
    if after == before:
        return Outcome(patch.name, patch.subject, ABSORBED, how=how)
    three_way = "Falling back to patching base and 3-way merge" in text
    status = FUZZ if three_way or how else APPLIED
    how = how or ("three-way" if three_way else "")
    done = Outcome(patch.name, patch.subject, status, how, commit=after)
    paths = {row[1] for row in gitio.changes(repo, after)}
    lost = [p for p in patch.paths() if p not in paths]
    if lost and status == FUZZ:
        new = sorted(paths - set(patch.paths()))
        done.moved = [{"from": p, "to": ", ".join(new)} for p in lost if new]
    return done


def _remembered(repo: git.Repo) -> bool:
    """Say whether rerere resolved, and so staged, every file of a stopped patch."""
    if repo.git.ls_files("--unmerged"):
        return False
    return bool(repo.git.diff("--cached", "--name-only"))


def paths_of(patch: Patch) -> set[str]:
    return set(patch.paths())


def run_series(
    repo: git.Repo, series: list[Patch], describe, tick=lambda: None
) -> list[Outcome]:
    """Try every patch in order, going on past those that conflict.

    A patch that fails where an earlier one is missing from the same file is
    ``skipped``: its failure says little about the target.

    Args:
        describe: Gives the conflict entries of a stopped tree, for one patch.
        tick: Called after each patch.
    """
    outcomes: list[Outcome] = []
    missing: dict[str, set[str]] = {}
    for patch in series:
        done = try_patch(repo, patch)
        if done.status == CONFLICTED:
            done.conflicts = describe(patch, done.git)
            done.after = [n for n, p in missing.items() if p & paths_of(patch)]
            if done.after:
                done.status = SKIPPED
            missing[patch.name] = paths_of(patch)
            if gitio.in_progress(repo):
                repo.git.am("--skip")
        outcomes.append(done)
        tick()
    return outcomes


def stop_at_first(
    repo: git.Repo, base: str, series: list[Patch], outcomes: list[Outcome]
) -> str:
    """Go back to the first conflict and leave `git am` waiting there.

    The am session holds all patches that follow, so that ``git am --continue`` goes
    on to the next conflict or the end.

    Returns:
        The commit before the conflict.
    """
    first = next(i for i, o in enumerate(outcomes) if o.status not in GOOD)
    head = next((o.commit for o in reversed(outcomes[:first]) if o.commit), base)
    repo.git.reset("--hard", "--quiet", head)
    with contextlib.suppress(git.GitCommandError):
        _am(repo, [p.path for p in series[first:]])
    return head


def collect(repo: git.Repo, record: Record, series: list[Patch]) -> list[Outcome]:
    """Sort the commits of a tree in which a person resolved conflicts.

    Commits belong to patches by their subject, in order. A patch without a commit is
    ``absorbed`` where its change is there already, else ``dropped``.
    """
    known = {o.patch: o for o in record.results}
    lines = repo.git.log("--reverse", "--format=%H%x00%s", f"{record.base}..HEAD")
    commits = [line.split("\0", 1) for line in lines.splitlines()]
    outcomes = []
    for patch in series:
        before = known.get(patch.name)
        match = next((c for c in commits if c[1] == patch.subject), None)
        if match is None:
            if before is not None and before.status == ABSORBED:
                outcomes.append(before)
            else:
                status = ABSORBED if _contained(repo, patch) else DROPPED
                outcomes.append(Outcome(patch.name, patch.subject, status))
            continue
        commits.remove(match)
        if before is not None and before.commit == match[0]:
            outcomes.append(before)
            continue
        done = Outcome(patch.name, patch.subject, FUZZ, "by hand", commit=match[0])
        if _plain(repo, patch, match[0]):
            done.status, done.how = APPLIED, ""
        outcomes.append(done)
    outcomes += [
        Outcome(f"(new) {s}", s, APPLIED, "new commit", commit=c) for c, s in commits
    ]
    return outcomes


@contextlib.contextmanager
def _scratch_index(repo: git.Repo, rev: str) -> Iterator[None]:
    index = Path(repo.git_dir) / "ddtree-index"
    try:
        with repo.git.custom_environment(GIT_INDEX_FILE=str(index)):
            repo.git.read_tree(rev)
            yield
    finally:
        index.unlink(missing_ok=True)


def _contained(repo: git.Repo, patch: Patch) -> bool:
    """Say whether a patch's change is in HEAD already: it applies in reverse."""
    with _scratch_index(repo, "HEAD"):
        try:
            repo.git.apply("--cached", "--check", "--reverse", str(patch.path))
        except git.GitCommandError:
            return False
    return True


def _plain(repo: git.Repo, patch: Patch, commit: str) -> bool:
    """Say whether a commit is what plain `git apply` makes of the patch."""
    with _scratch_index(repo, f"{commit}^"):
        try:
            repo.git.apply("--cached", "--whitespace=nowarn", str(patch.path))
            tree = repo.git.write_tree()
        except git.GitCommandError:
            return False
    return tree == repo.git.rev_parse(f"{commit}^{{tree}}")


def series_of(layout: Layout, pin: Release) -> list[Patch]:
    """Read the series.

    Raises:
        CannotRun: There is none.
    """
    series = read_series(layout.patches(pin.name))
    if not series:
        raise CannotRun(f"patches/{pin.name} holds no patch; there is nothing to move")
    return series
