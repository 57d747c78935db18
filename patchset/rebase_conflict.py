# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""What a conflict is about: files, hunks, functions, what upstream did there."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchset import gitio
from patchset.gitio import git
from patchset.rebase_target import Target
from patchset.rebase_tree import PIN, TARGET
from patchset.series import Patch

_LINES = 12  # of each side that a report quotes
_COMMITS = 10
_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@ ?(.*)$")


def show(repo: git.Repo, rev: str, path: str) -> str | None:
    """Give a file of a commit as text; None where it is not there."""
    try:
        data = repo.git.cat_file(
            "blob",
            f"{rev}:{path}",
            stdout_as_string=False,
            strip_newline_in_stdout=False,
        )
    except git.GitCommandError:
        return None
    return data.decode("utf-8", "replace")


@dataclass(frozen=True)
class Span:
    """A function, method or class: its dotted name and line range, 1-based."""

    name: str
    first: int
    last: int


def spans(text: str) -> list[Span]:
    """List functions and classes of a Python file; empty where it does not parse."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    found: list[Span] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}" if prefix else child.name
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                found.append(Span(name, first, child.end_lineno or child.lineno))
            visit(child, name)

    visit(tree, "")
    return found


def enclosing(text: str, line: int) -> str:
    """Name the innermost function or class around a line; empty at module level."""
    around = [s for s in spans(text) if s.first <= line <= s.last]
    return min(around, key=lambda s: s.last - s.first).name if around else ""


@dataclass(frozen=True)
class Marked:
    """One region between conflict markers.

    Args:
        first: Line of the opening marker in the conflicted file.
        last: Line of the closing marker.
        line: First line of the region once the target's side is taken.
    """

    first: int
    last: int
    line: int
    ours: list[str]
    theirs: list[str]


def marked(text: str) -> tuple[list[Marked], str]:
    """Find the regions between conflict markers.

    Returns:
        The regions, and the file with the target's side taken in each.
    """
    found: list[Marked] = []
    kept: list[str] = []
    side, first, start = "", 0, 0
    ours: list[str] = []
    theirs: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("<<<<<<< ") and not side:
            side, first, start, ours, theirs = "ours", number, len(kept) + 1, [], []
        elif line == "=======" and side == "ours":
            side = "theirs"
        elif line.startswith(">>>>>>> ") and side == "theirs":
            found.append(Marked(first, number, start, ours, theirs))
            side = ""
        elif side == "theirs":
            theirs.append(line)
        else:
            kept.append(line)
            if side == "ours":
                ours.append(line)
    return found, "\n".join(kept) + "\n"


def describer(
    repo: git.Repo, target: Target, pin_commit: str
) -> Callable[[Patch, str], list[dict[str, Any]]]:
    """Give the function that describes a stopped tree, one entry per file."""

    def describe(patch: Patch, text: str) -> list[dict[str, Any]]:
        stages: dict[str, set[str]] = {}
        raw = repo.git.ls_files("--unmerged", "-z")
        for row in [r for r in raw.split("\0") if r]:
            head, path = row.split("\t", 1)
            stages.setdefault(path, set()).add(head.split(" ")[2])
        rows = [_file(repo, patch, path, found) for path, found in stages.items()]
        if not rows:
            rows = _without_merge(repo, patch, text)
        for row in rows:
            row["commits"] = upstream_commits(target, pin_commit, row["file"])
        return rows

    return describe


def _file(repo: git.Repo, patch: Patch, path: str, stages: set[str]) -> dict[str, Any]:
    pin, new = show(repo, PIN, path), show(repo, TARGET, path)
    row: dict[str, Any] = {
        "file": path,
        "kind": "content",
        "hunks": [],
        "functions": [],
        "hints": [],
    }
    if "2" not in stages or new is None:
        row["kind"] = "deleted upstream"
        row["functions"] = [
            {"name": n, "change": "gone with the file"}
            for n in touched(patch, path, pin)
        ]
        row["hints"] = where_now(repo, [f["name"] for f in row["functions"]])
        return row
    file = Path(repo.working_dir) / path
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    regions, ours = marked(text)
    for hunk in regions:
        row["hunks"].append(
            {
                "lines": [hunk.first, hunk.last],
                "target_line": hunk.line,
                "function": enclosing(ours, hunk.line),
                "ours": hunk.ours[:_LINES],
                "theirs": hunk.theirs[:_LINES],
                "cut": max(len(hunk.ours), len(hunk.theirs)) > _LINES,
            }
        )
    names = touched(patch, path, pin) + [h["function"] for h in row["hunks"]]
    row["functions"] = changed_functions(pin or "", new, names)
    gone = [f["name"] for f in row["functions"] if f["change"] == "removed"]
    row["hints"] = where_now(repo, gone)
    return row


def _without_merge(repo: git.Repo, patch: Patch, text: str) -> list[dict[str, Any]]:
    """Describe what git refused before it merged anything."""
    found = re.findall(r"patch failed: (.+?):(\d+)", text)
    found += [(p, "1") for p in re.findall(r"error: (.+?): (?:does not|No such)", text)]
    rows: dict[str, dict[str, Any]] = {}
    for path, line in found or [(p, "1") for p in patch.paths()]:
        new = show(repo, TARGET, path)
        row = rows.setdefault(
            path,
            {
                "file": path,
                "kind": "content" if new is not None else "deleted upstream",
                "hunks": [],
                "functions": [],
                "hints": [],
            },
        )
        function = enclosing(show(repo, PIN, path) or "", int(line))
        row["hunks"].append(
            {
                "lines": [int(line), int(line)],
                "target_line": int(line),
                "function": function,
                "ours": [],
                "theirs": [],
                "cut": False,
            }
        )
    return list(rows.values())


def touched(patch: Patch, path: str, pin: str | None) -> list[str]:
    """Name the functions that a patch's hunks lie in, by the pin's source."""
    names: list[str] = []
    for part in re.split(r"^(?=diff --git )", patch.diff, flags=re.M):
        if not part.startswith(f"diff --git a/{path} "):
            continue
        for match, line in _changes(part):
            name = enclosing(pin, line) if pin else ""
            names.append(name or _from_header(match))
    return list(dict.fromkeys(n for n in names if n))


def _changes(diff: str) -> Iterator[tuple[str, int]]:
    """Give each hunk's heading and the old line at which it first changes one."""
    line, heading, waiting = 0, "", False
    for text in diff.splitlines():
        match = _HUNK.match(text)
        if match:
            line, heading, waiting = int(match[1]), match[2], True
        elif waiting and text[:1] in "+-":
            yield heading, line
            waiting = False
        else:
            line += 1


def _from_header(text: str) -> str:
    match = re.match(r"\s*(?:async\s+)?(?:def|class)\s+(\w+)", text)
    return match[1] if match else ""


def changed_functions(pin: str, new: str, names: list[str]) -> list[dict[str, str]]:
    """Say what upstream did to some functions between pin and target.

    Returns:
        Name and ``changed``, ``removed``, ``added`` or ``unchanged``; the innermost
        ones count, a class only by its name.
    """
    old_lines, new_lines = pin.splitlines(), new.splitlines()
    old = {s.name: s for s in spans(pin)}
    now = {s.name: s for s in spans(new)}
    rows = []
    for name in dict.fromkeys(n for n in names if n):
        if name in old and name in now:
            one = old_lines[old[name].first - 1 : old[name].last]
            two = new_lines[now[name].first - 1 : now[name].last]
            count = _changed(one, two)
            rows.append({"name": name, "change": "changed" if count else "unchanged"})
            if count:
                rows[-1]["lines"] = str(count)
        elif name in old:
            rows.append({"name": name, "change": "removed"})
        elif name in now:
            rows.append({"name": name, "change": "added"})
    return rows


def _changed(one: list[str], two: list[str]) -> int:
    return sum(
        line[:1] in "+-" and line[:3] not in ("+++", "---")
        for line in difflib.unified_diff(one, two, lineterm="", n=0)
        if not line.startswith("@@")
    )


def where_now(repo: git.Repo, names: list[str]) -> list[str]:
    """Find where the target defines functions or classes of some names."""
    hints = []
    for name in names:
        last = name.rsplit(".", 1)[-1]
        if not re.fullmatch(r"\w+", last) or re.fullmatch(r"__\w+__", last):
            continue
        try:
            raw = repo.git.grep(
                "-nE", rf"^\s*(async def|def|class) {last}\b", TARGET, "--", "vllm/*.py"
            )
        except git.GitCommandError:
            continue
        places = [":".join(line.split(":")[1:3]) for line in raw.splitlines()]
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        hints.append(f"{last} is defined in {', '.join(places[:3])}{more}")
    return hints


def upstream_commits(target: Target, pin_commit: str, path: str) -> list[str]:
    """List upstream's commits on a file since the pin, where a clone tells them."""
    if target.kind != "git":
        return []
    clone = gitio.open_repo(target.path)
    try:
        raw = clone.git.log(
            f"-{_COMMITS}", "--format=%h %s", f"{pin_commit}..HEAD", "--", path
        )
    except git.GitCommandError:
        return []
    return raw.splitlines()
