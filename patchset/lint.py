# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Errors and warnings about the patch files and the overlay."""

from __future__ import annotations

import re
from dataclasses import dataclass

from patchset.layout import Layout
from patchset.lock import Release
from patchset.series import (
    CLASSES,
    FILE_NAME,
    HEADERS,
    Patch,
    file_name,
    overlay_blobs,
    overlay_files,
    read_series,
)
from patchset.source import in_subset

MANY_LINES = 60
_SPDX = "SPDX-License-Identifier: Apache-2.0"
_SPDX_ENDINGS = (".py", ".pyi", ".cpp", ".cu", ".cuh", ".h", ".sh")


@dataclass(frozen=True)
class Finding:
    """One thing that lint found.

    Args:
        level: ``error`` or ``warning``.
        rule: Short name, stable.
        file: Path from the repository root.
        text: What is wrong and what to do.
    """

    level: str
    rule: str
    file: str
    text: str


def lint(layout: Layout, release: Release) -> list[Finding]:
    """Check patches/ and overlay/ of one release; reads local files only."""
    folder = layout.patches(release.name)
    shown = layout.show(folder)
    found: list[Finding] = []

    def add(level: str, rule: str, file: str, text: str) -> None:
        found.append(Finding(level, rule, file, text))

    series = read_series(folder)
    overlay = overlay_files(layout.overlay)
    if not series:
        add("error", "empty-folder", shown, "holds no patch; export the work tree")
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.suffix != ".patch" and not path.name.startswith("."):
                add("error", "stray-file", layout.show(path), "is no .patch file")
    numbers: dict[int, str] = {}
    for position, patch in enumerate(series, start=1):
        file = f"{shown}/{patch.name}"
        _name(add, file, patch, position, numbers)
        _headers(add, file, patch)
        _content(add, file, patch, set(overlay), release)
    _lock(add, shown, release, series, layout)
    _overlay(add, layout, release, series)
    return found


def lint_other(layout: Layout, release: Release) -> list[Finding]:
    """Check the patches of a release that is not the one worked on.

    An overlay that changed since that release was locked is one warning.
    """
    found = lint(layout, release)
    moved = [
        f for f in found if f.rule == "lock-hash" and f.file.startswith("overlay/")
    ]
    kept = [f for f in found if not f.file.startswith("overlay/")]
    if moved:
        text = (
            f"{len(moved)} files differ from the entry of {release.name}; "
            "run apply.py lock and test on that release too"
        )
        kept.append(Finding("warning", "lock-hash", "overlay", text))
    return kept


def _name(add, file: str, patch: Patch, position: int, numbers: dict) -> None:
    if not FILE_NAME.fullmatch(patch.name):
        add("error", "file-name", file, "want NNNN-topic.patch, lower case")
        return
    number = patch.number
    if number in numbers:
        add(
            "error",
            "duplicate-number",
            file,
            f"number {number:04d} is taken by {numbers[number]}",
        )
    elif number != position:
        add(
            "error",
            "unordered",
            file,
            f"number {number:04d} at place {position}; numbers run from 0001 "
            "without gaps",
        )
    numbers.setdefault(number, patch.name)
    want = file_name(number, patch.subject)
    if patch.subject and patch.name != want:
        add("error", "file-name", file, f"export names it {want}; rename or export")


def _headers(add, file: str, patch: Patch) -> None:
    if not patch.subject:
        add("error", "no-subject", file, "the Subject: header is missing or empty")
    for name in HEADERS:
        value = patch.header(name)
        if not value:
            add("error", "missing-header", file, f"no `{name}:` line in the message")
        elif name == "Class" and value not in CLASSES:
            add(
                "error",
                "bad-class",
                file,
                f"Class is {value!r}, want one of {', '.join(CLASSES)}",
            )


def _content(add, file: str, patch: Patch, overlay: set, release: Release) -> None:
    paths = patch.paths()
    if not paths:
        add("error", "no-diff", file, "changes nothing")
    for path in paths:
        if path in overlay:
            add(
                "error",
                "touches-overlay",
                file,
                f"changes overlay/{path}; make that change in overlay/",
            )
        elif not in_subset(release, path):
            add("error", "outside", file, f"{path} is not in the pinned subset")
    kinds = r"^(new file mode|deleted file mode|old mode|rename from|GIT binary)"
    for kind in sorted(set(re.findall(kinds, patch.diff, re.M))):
        add(
            "error",
            "not-a-change",
            file,
            f"`{kind}`: a patch only changes the text of upstream files; new files "
            "belong in overlay/",
        )
    spaces = [
        line for line in patch.diff.splitlines() if re.match(r"^\+.*[ \t]+$", line)
    ]
    if spaces:
        add("error", "trailing-whitespace", file, f"in {len(spaces)} added lines")
    lines = patch.changed_lines()
    if lines > MANY_LINES:
        add(
            "warning",
            "many-lines",
            file,
            f"{lines} changed lines, over {MANY_LINES}; move logic to overlay/",
        )
    if re.search(r"^From [0-9a-f]{40} ", patch.data.decode("utf-8", "replace")):
        if not patch.data.startswith(b"From " + b"0" * 40):
            add("error", "not-exported", file, "carries a commit id; run export")
    else:
        add("error", "not-exported", file, "is no git format-patch file; run export")


def _lock(add, shown: str, release: Release, series, layout: Layout) -> None:
    pinned = {p.file: p.sha256 for p in release.patches}
    for patch in series:
        file = f"{shown}/{patch.name}"
        if patch.name not in pinned:
            add("error", "not-locked", file, "is not in the lock; run apply.py lock")
        elif pinned[patch.name] != patch.sha256:
            add(
                "error",
                "lock-hash",
                file,
                "differs from the lock; run apply.py lock if the change is meant",
            )
    for name in sorted(set(pinned) - {p.name for p in series}):
        add("error", "lock-hash", f"{shown}/{name}", "is in the lock, not on disk")
    blobs = overlay_blobs(layout.overlay)
    for path in sorted(set(blobs) ^ set(release.overlay)) + sorted(
        p for p in blobs if p in release.overlay and blobs[p] != release.overlay[p]
    ):
        add(
            "error",
            "lock-hash",
            f"overlay/{path}",
            "differs from the lock; run apply.py lock if the change is meant",
        )


def _overlay(add, layout: Layout, release: Release, series) -> None:
    touched = {path for patch in series for path in patch.paths()}
    locked = {t.path for p in release.patches for t in p.touched}
    upstream = _upstream_paths(layout, release)
    for path, source in overlay_files(layout.overlay).items():
        file = f"overlay/{path}"
        if path in upstream or path in locked - touched:
            add(
                "error",
                "replaces-upstream",
                file,
                "replaces an upstream file; change that file by a patch instead",
            )
        if not path.startswith("vllm/"):
            add("error", "outside", file, "overlay files lie under overlay/vllm/")
        data = source.read_bytes()
        if path.endswith(_SPDX_ENDINGS) and _SPDX not in data[:400].decode(
            "utf-8", "replace"
        ):
            add("error", "no-spdx", file, f"lacks the line `# {_SPDX}` at its head")
        if path.endswith(_SPDX_ENDINGS) and re.search(rb"[ \t]+$", data, re.M):
            add("error", "trailing-whitespace", file, "has spaces at a line's end")


def _upstream_paths(layout: Layout, release: Release) -> set[str]:
    """List the upstream paths, from the work tree if there is one."""
    from patchset import gitio, worktree
    from patchset.errors import PatchsetError

    folder = layout.worktree(release.version)
    if not folder.is_dir():
        return set()
    try:
        repo = gitio.open_repo(folder)
        record = worktree.load_record(repo)
        return set(gitio.tree_files(repo, record.base)) if record else set()
    except PatchsetError:
        return set()
