# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Recompute the lock: `verify`, `lock` and `status`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import Any

from patchset import gitio, worktree
from patchset.errors import CannotRun, Mismatch
from patchset.layout import Layout, blob_id
from patchset.lock import Lock, PatchPin, Release
from patchset.series import overlay_blobs, read_series
from patchset.source import cached
from patchset.ui import Output


@dataclass
class Report:
    """Outcome of `verify`.

    Args:
        checks: One row per check: what, whether it holds, found, wanted.
        not_checked: What the lock records and no local file can confirm.
    """

    checks: list[dict[str, Any]] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)

    def add(self, what: str, found: Any, want: Any) -> None:
        self.checks.append(
            {"what": what, "ok": found == want, "found": found, "want": want}
        )

    @property
    def wrong(self) -> list[dict[str, Any]]:
        return [check for check in self.checks if not check["ok"]]


def verify(layout: Layout, release: Release, out: Output) -> Report:
    """Recompute everything in the lock that local files can confirm.

    Raises:
        CannotRun: The source was not fetched.
        Mismatch: The source is damaged.
        CheckFailed: A patch does not apply.
    """
    report = Report()
    source = cached(layout, release)
    if source.kind == "sdist":
        # `cached` compared it already; a wrong one does not get here.
        report.add("sdist sha256", release.sdist_sha256, release.sdist_sha256)
    else:
        report.not_checked.append("sdist sha256 (the source came from git or a path)")
    series = read_series(layout.patches(release.name))
    pinned = {p.file: p for p in release.patches}
    report.add("patch files", [p.name for p in series], [p for p in pinned])
    for patch in series:
        if patch.name in pinned:
            report.add(f"{patch.name} sha256", patch.sha256, pinned[patch.name].sha256)
    overlay = overlay_blobs(layout.overlay)
    for path in sorted(set(overlay) | set(release.overlay)):
        report.add(f"overlay/{path}", overlay.get(path), release.overlay.get(path))
    temp, record, repo = worktree.build_temporary(layout, release, out, "verify")
    try:
        base = repo.git.rev_parse(f"{record.base}^{{tree}}")
        final = repo.git.rev_parse("HEAD^{tree}")
        computed = worktree.pins(repo, record, series)
        repo.close()
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    report.add("upstream tree", base, release.upstream_tree)
    for pin in computed:
        _compare_touched(report, pin, pinned.get(pin.file))
    report.add("final tree", final, release.final_tree)
    _check_worktree(report, layout, release)
    report.not_checked += [f"wheel {w.file}" for w in release.wheels]
    if release.image:
        report.not_checked.append(f"image {release.image.get('name', '')}")
    return report


def _compare_touched(report: Report, found: PatchPin, want: PatchPin | None) -> None:
    if want is None:
        return
    new = {t.path: f"{t.pre}..{t.post}" for t in found.touched}
    old = {t.path: f"{t.pre}..{t.post}" for t in want.touched}
    for path in sorted(set(new) | set(old)):
        report.add(f"{found.file} {path}", new.get(path), old.get(path))


def _check_worktree(report: Report, layout: Layout, release: Release) -> None:
    folder = layout.worktree(release.version)
    if not folder.is_dir():
        report.not_checked.append(f"{layout.show(folder)} (not applied)")
        return
    repo = gitio.open_repo(folder)
    tree = repo.git.rev_parse("HEAD^{tree}")
    report.add(f"{layout.show(folder)} tree", tree, release.final_tree)
    report.add(f"{layout.show(folder)} edited files", gitio.dirty(repo), [])


def relock(
    layout: Layout, lock: Lock, release: Release, out: Output, *, check: bool
) -> tuple[bool, str]:
    """Recompute the lock from patches/ and overlay/ as they are on disk.

    The upstream tree id is taken from a source whose sha256 the lock pins; it can be
    set where it is empty, never changed.

    Args:
        check: Only compare.

    Returns:
        Whether the lock differed, and the final tree id.

    Raises:
        Mismatch: `check` was given and the lock differs.
    """
    temp, record, repo = worktree.build_temporary(layout, release, out, "lock")
    try:
        final = repo.git.rev_parse("HEAD^{tree}")
        series = read_series(layout.patches(release.name))
        text = lock.render(
            release.name,
            upstream_tree=repo.git.rev_parse(f"{record.base}^{{tree}}"),
            final_tree=final,
            patches=worktree.pins(repo, record, series),
            overlay=overlay_blobs(layout.overlay),
        )
        repo.close()
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    differs = lock.path.read_bytes() != text
    if differs and check:
        raise Mismatch(
            f"{lock.shown} is not what patches/{release.name} and overlay/ give; "
            "run `python apply.py lock` if their change is meant",
            final_tree=final,
        )
    if differs:
        lock.write(text)
    return differs, final


def status(layout: Layout, lock: Lock, release: Release) -> dict[str, Any]:
    """Describe the pin, the work tree, each patch and the overlay; changes nothing."""
    folder = layout.worktree(release.version)
    series = read_series(layout.patches(release.name))
    pinned = {p.file: p.sha256 for p in release.patches}
    try:
        fetched: str | None = cached(layout, release, remove=False).kind
    except Mismatch:
        fetched = "damaged"
    except CannotRun:
        fetched = None
    data: dict[str, Any] = {
        "release": release.name,
        "version": release.version,
        "commit": release.commit,
        "source": fetched,
        "worktree": layout.show(folder),
        "applied": False,
        "edited": [],
        "conflict": None,
        "patches": [],
        "extra_commits": [],
        "overlay": {"modified": [], "missing": [], "extra": []},
        "lock": {
            "patches": {p.name: p.sha256 for p in series} == pinned,
            "overlay": overlay_blobs(layout.overlay) == dict(release.overlay),
        },
    }
    waiting = layout.conflict(release.version)
    if waiting.exists():
        data["conflict"] = layout.show(waiting)
    rendered: dict[str, str] = {}
    absorbed: set[str] = set()
    if folder.is_dir():
        repo = gitio.open_repo(folder)
        record = worktree.load_record(repo)
        data["applied"] = bool(record and record.done)
        data["head"] = repo.git.rev_parse("HEAD")
        data["tree"] = repo.git.rev_parse("HEAD^{tree}")
        data["edited"] = gitio.dirty(repo)
        base = record.base if record else repo.git.rev_list("--max-parents=0", "HEAD")
        absorbed = set(record.absorbed) if record else set()
        upstream = gitio.tree_files(repo, base)
        for commit in repo.git.rev_list("--reverse", f"{base}..HEAD").splitlines():
            paths = [row[1] for row in gitio.changes(repo, commit)]
            if any(path in upstream for path in paths):
                subject = repo.git.log("-1", "--format=%s", commit)
                rendered[subject] = gitio.format_patch(repo, commit).decode(
                    "utf-8", "replace"
                )
        data["overlay"] = _overlay_drift(layout, folder, upstream)
    for patch in series:
        if patch.name in absorbed:
            state = "absorbed"
        elif patch.subject not in rendered:
            state = "missing"
        elif rendered.pop(patch.subject) == patch.data.decode("utf-8", "replace"):
            state = "applied"
        else:
            state = "changed"
        data["patches"].append(
            {
                "file": patch.name,
                "state": state,
                "class": patch.header("Class"),
                "lines": patch.changed_lines(),
                "locked": pinned.get(patch.name) == patch.sha256,
            }
        )
    data["extra_commits"] = list(rendered)
    data["lock_file"] = lock.shown
    return data


def _overlay_drift(layout: Layout, folder: Any, upstream: Any) -> dict[str, list[str]]:
    """Compare overlay/ with the files of the work tree, committed or not."""
    want = overlay_blobs(layout.overlay)
    repo = gitio.open_repo(folder)
    raw = repo.git.ls_files("-z", "--cached", "--others", "--exclude-standard")
    have = {}
    for path in {p for p in raw.split("\0") if p and p not in upstream}:
        file = folder / path
        if file.is_file():
            have[path] = blob_id(file.read_bytes())
    return {
        "modified": sorted(p for p in want if p in have and have[p] != want[p]),
        "missing": sorted(set(want) - set(have)),
        "extra": sorted(set(have) - set(want)),
    }
