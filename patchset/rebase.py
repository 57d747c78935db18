# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""`apply.py rebase`: try the series and the overlay on another release."""

from __future__ import annotations

import shutil
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from patchset import gitio, rebase_report, rebase_tree
from patchset.errors import DONE, FAILED, CannotRun, CheckFailed
from patchset.gitio import git
from patchset.layout import Layout, move_into_place, temp_folder, write_atomic
from patchset.lock import Lock, Release
from patchset.overlay_check import Checked, check
from patchset.rebase_conflict import describer
from patchset.rebase_target import Target, resolve
from patchset.rebase_tree import GOOD, Outcome, Record
from patchset.series import Patch, overlay_files
from patchset.symbols import Tree
from patchset.ui import Output


def folder_of(layout: Layout, version: str) -> Path:
    return layout.build / f"rebase-{version}"


def run(args: Namespace, layout: Layout, out: Output) -> tuple[int, dict[str, Any]]:
    """Run the command; gives exit code and JSON data.

    Raises:
        CheckFailed: A work tree holds a person's unfinished work, or nothing can be
            saved.
        CannotRun: Network, disk, or a target that is none.
    """
    lock = Lock(layout.lock_file)
    pin = lock.release(args.release)
    began = time.monotonic()
    with layout.locked():
        if args.abort:
            return _abort(layout, args.onto, out)
        target = resolve(layout, lock, pin, args.onto, out, pre=args.pre)
        if target is None:
            return _nothing(layout, pin, args.report, out)
        series = rebase_tree.series_of(layout, pin)
        folder = folder_of(layout, target.version)
        began = time.monotonic()
        resumed = _waiting(layout, folder, series, args.force)
        if resumed is not None:
            outcomes, repo = _continue(folder, resumed, series)
        else:
            outcomes, repo = _begin(layout, pin, target, series, folder, out)
        with repo:
            checked = _overlay(layout, repo)
        report = rebase_report.data(
            pin, target, outcomes, checked, time.monotonic() - began
        )
        report |= {"worktree": str(folder), "resumed": resumed is not None}
        rebase_report.print_report(out, report)
        again = target.version if args.onto == "latest" else args.onto
        steps = _next(layout, folder, again, target.version, outcomes, checked)
        if args.report:
            files = rebase_report.write(args.report, report, steps)
            report["report"] = [str(f) for f in files]
            out.say(f"report: {', '.join(layout.show(f) for f in files)}")
        for line in steps:
            out.say(f"  {line}")
        clean = report["clean"]
        if args.save:
            if not clean:
                out.warn("nothing was saved: not all apply")
            else:
                from patchset.rebase_save import save

                report["saved"] = save(
                    layout, lock, target, outcomes, folder, args, out
                )
    return (DONE if clean else FAILED), report


def _nothing(
    layout: Layout, pin: Release, report: Path | None, out: Output
) -> tuple[int, dict[str, Any]]:
    text = f"nothing to do: the index has nothing newer than vLLM {pin.version}"
    out.say(text)
    if report:
        try:
            write_atomic(
                report / f"rebase-{pin.version}.md",
                f"# vLLM {pin.version}\n\nN{text[1:]}.\n".encode(),
            )
        except OSError as err:
            raise CannotRun(f"--report {report}: {err.strerror}") from None
    return DONE, {
        "release": pin.name,
        "pin": pin.version,
        "onto": pin.version,
        "clean": True,
        "patches": [],
        "nothing_to_do": True,
    }


def _abort(layout: Layout, onto: str, out: Output) -> tuple[int, dict[str, Any]]:
    folder = folder_of(layout, onto.removeprefix("v"))
    if not folder.exists():
        there = ", ".join(
            p.name.removeprefix("rebase-")
            for p in sorted(layout.build.glob("rebase-*"))
            if (p / ".git").is_dir()
        )
        raise CannotRun(
            f"--onto {onto}: nothing to abort, there is no {layout.show(folder)}; "
            f"--abort takes a version with a work tree: {there or 'there is none'}"
        )
    shutil.rmtree(folder)
    out.say(f"removed {layout.show(folder)}")
    return DONE, {"onto": onto, "aborted": str(folder)}


def _waiting(
    layout: Layout, folder: Path, series: list[Patch], force: bool
) -> Record | None:
    """Look at a tree of an earlier run: go on from it, or make it anew.

    Returns:
        The record of a tree in which a person finished the series; None where the
        tree is missing or as this tool left it.

    Raises:
        CheckFailed: It holds work that is not finished, or is for another series.
    """
    if not folder.exists() or force:
        return None
    shown = layout.show(folder)
    repo = gitio.open_repo(folder)
    record = rebase_tree.load(repo)
    if record is None:
        raise CheckFailed(
            f"{shown} was not made by this command; move it away, or add --force to "
            "remove it"
        )
    if record.mark == rebase_tree.fingerprint(repo):
        return None
    again = "then run this again (--force throws the tree away)"
    if gitio.in_progress(repo):
        raise CheckFailed(
            f"{shown} still waits: resolve, then git -C {shown} add -u && "
            f"git -C {shown} am --continue, {again}",
            worktree=str(folder),
        )
    edits = gitio.dirty(repo)
    if edits:
        raise CheckFailed(
            f"{shown} has edits that are in no commit: {', '.join(edits[:5])}; commit "
            f"them or take them back, {again}",
            worktree=str(folder),
            unsaved=edits,
        )
    if record.patches != {p.name: p.sha256 for p in series}:
        raise CheckFailed(
            f"patches/{record.pin} changed since {shown} was made; add --force to "
            "begin anew (rerere knows the resolutions)",
            worktree=str(folder),
        )
    return record


def _continue(
    folder: Path, record: Record, series: list[Patch]
) -> tuple[list[Outcome], git.Repo]:
    repo = gitio.open_repo(folder)
    return rebase_tree.collect(repo, record, series), repo


def _begin(
    layout: Layout,
    pin: Release,
    target: Target,
    series: list[Patch],
    folder: Path,
    out: Output,
) -> tuple[list[Outcome], git.Repo]:
    """Try the whole series in a new tree and put that in place."""
    temp = temp_folder(layout.build, "rebase")
    try:
        place = temp / folder.name
        repo = rebase_tree.create(place, layout)
        base = rebase_tree.import_both(repo, layout, pin, target, series)
        with out.bar(len(series), "patches", unit="patch") as bar:
            outcomes = rebase_tree.run_series(
                repo,
                series,
                describer(repo, target, pin.commit),
                lambda: bar.update(1),
            )
        record = Record(pin.name, target.version, base, target.release.commit)
        record.patches = {p.name: p.sha256 for p in series}
        record.head = repo.git.rev_parse("HEAD")
        if any(o.status not in GOOD for o in outcomes):
            record.head = rebase_tree.stop_at_first(repo, base, series, outcomes)
            _forget_later(outcomes)
        record.outcomes = [vars(o) for o in outcomes]
        record.mark = rebase_tree.fingerprint(repo)
        record.save(repo)
        repo.close()
        move_into_place(place, folder)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return outcomes, gitio.open_repo(folder)


def _forget_later(outcomes: list[Outcome]) -> None:
    """Drop commit ids after the first conflict: those were a rehearsal."""
    first = next(i for i, o in enumerate(outcomes) if o.status not in GOOD)
    for outcome in outcomes[first:]:
        outcome.commit = ""


def _overlay(layout: Layout, repo: git.Repo) -> Checked:
    pin, target = Tree(repo, rebase_tree.PIN), Tree(repo, rebase_tree.TARGET)
    return check(overlay_files(layout.overlay), pin, target)


def _next(
    layout: Layout,
    folder: Path,
    onto: str,
    version: str,
    outcomes: list[Outcome],
    checked: Checked,
) -> list[str]:
    """Give the commands that go on from here."""
    tree = layout.show(folder)
    steps: list[str] = []
    first = next((o for o in outcomes if o.status not in GOOD), None)
    if first is not None:
        repo = gitio.open_repo(folder)
        steps.append(f"# {first.patch} waits in {tree}")
        if repo.git.ls_files("--unmerged"):
            steps += [f"git -C {tree} status", "# edit the files that it names, then"]
        else:
            steps.append(f"git -C {tree} apply --reject .git/rebase-apply/patch")
            steps.append("# mend by hand, then")
        steps += [
            f"git -C {tree} add -u && git -C {tree} am --continue",
            f"# or, where the patch is not needed any more: git -C {tree} am --skip",
            "# git stops at the next conflict in the same way; at the end",
        ]
    if first is not None or checked.breaks:
        if checked.breaks:
            steps.append("# mend overlay/ where the table says that it breaks, then")
        steps.append(f"python apply.py rebase --onto {onto} --save")
        steps.append(f"# to give up: python apply.py rebase --onto {version} --abort")
    return steps
