# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The report of a rebase: JSON data, Markdown, and the lines for a terminal."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from patchset.errors import CannotRun
from patchset.layout import write_atomic
from patchset.lock import Release
from patchset.overlay_check import Checked
from patchset.rebase_target import Target
from patchset.rebase_tree import CONFLICTED, GOOD, SKIPPED, Outcome
from patchset.ui import Output


def data(
    pin: Release,
    target: Target,
    outcomes: list[Outcome],
    checked: Checked,
    seconds: float,
) -> dict[str, Any]:
    """Give the report as plain data; the same as in the JSON file."""
    counts: dict[str, int] = {}
    for outcome in outcomes:
        counts[outcome.status] = counts.get(outcome.status, 0) + 1
    return {
        "release": pin.name,
        "pin": pin.version,
        "pin_commit": pin.commit,
        "onto": target.version,
        "onto_commit": target.release.commit,
        "onto_kind": target.kind,
        "yanked": target.yanked,
        "clean": is_clean(outcomes, checked),
        "counts": counts,
        "patches": [asdict(o) for o in outcomes],
        "overlay": checked.data(),
        "seconds": round(seconds, 1),
    }


def is_clean(outcomes: list[Outcome], checked: Checked) -> bool:
    """Say whether all patches apply and nothing that the overlay uses is gone."""
    return all(o.status in GOOD for o in outcomes) and not checked.breaks


def about(outcome: dict[str, Any]) -> str:
    """Say in one line what a patch's outcome is about."""
    parts = []
    for entry in outcome["conflicts"]:
        names = [h["function"] for h in entry["hunks"] if h["function"]]
        names = list(dict.fromkeys(names))
        where = f" in {', '.join(names)}" if names else ""
        hunks = len(entry["hunks"])
        if entry["kind"] == "content":
            what = f"{hunks} {'hunk' if hunks == 1 else 'hunks'}{where}"
        else:
            what = entry["kind"]
        parts.append(f"{entry['file']}: {what}")
    parts += [f"{m['from']} is now {m['to']}" for m in outcome["moved"]]
    if outcome["after"]:
        parts.insert(0, f"builds on {', '.join(outcome['after'])}")
    if outcome["how"] and not parts:
        parts.append(outcome["how"])
    return "; ".join(parts)


def print_report(out: Output, report: dict[str, Any]) -> None:
    """Print patches and overlay problems for a person."""
    out.say(f"{report['release']} onto {report['onto']}")
    for patch in report["patches"]:
        text = about(patch)
        tail = f": {text}" if text else ""
        out.say(f"  {patch['status']:10} {patch['patch']}{tail}")
    for problem in report["overlay"]["problems"]:
        out.say(
            f"overlay {problem['level']}: {problem['file']}:{problem['line']}: "
            f"{problem['name']} ({problem['use']}): {problem['text']}"
        )
    broken = sum(p["level"] == "breaks" for p in report["overlay"]["problems"])
    out.say(
        f"overlay: {report['overlay']['uses']} uses of upstream names checked, "
        f"{broken} broken"
    )


def markdown(report: dict[str, Any], next_steps: list[str]) -> str:
    """Give the report as Markdown."""
    lines = [
        f"# {report['release']} onto vLLM {report['onto']}",
        "",
        f"Pin {report['pin']} ({report['pin_commit'][:12]}), target {report['onto']} "
        f"({report['onto_commit'][:12] or 'commit unknown'}), "
        f"{report['seconds']} s.",
        "",
        _verdict(report),
        "",
        "| patch | status | about |",
        "|---|---|---|",
    ]
    for patch in report["patches"]:
        text = about(patch).replace("|", "\\|")
        lines.append(f"| {patch['patch']} | {patch['status']} | {text} |")
    for patch in report["patches"]:
        if patch["status"] in (CONFLICTED, SKIPPED):
            lines += ["", f"## {patch['patch']}: {patch['status']}"]
            for entry in patch["conflicts"]:
                lines += _entry(entry)
    lines += ["", "## Overlay", ""]
    problems = report["overlay"]["problems"]
    lines.append(f"{report['overlay']['uses']} uses of upstream names checked.")
    if problems:
        lines += ["", "| | where | name | use | what |", "|---|---|---|---|---|"]
    for p in problems:
        text = p["text"].replace("|", "\\|")
        lines.append(
            f"| {p['level']} | {p['file']}:{p['line']} | `{p['name']}` | {p['use']} "
            f"| {text} |"
        )
    if next_steps:
        lines += ["", "## To go on", "", "```sh", *next_steps, "```"]
    return "\n".join(lines) + "\n"


def _verdict(report: dict[str, Any]) -> str:
    counts = ", ".join(f"{n} {name}" for name, n in report["counts"].items())
    broken = sum(p["level"] == "breaks" for p in report["overlay"]["problems"])
    head = "All apply" if report["clean"] else "Does not apply as it is"
    tail = f"; {broken} uses of the overlay are broken" if broken else ""
    yanked = (
        f" This release was yanked: {report['yanked']}." if report["yanked"] else ""
    )
    return f"**{head}**: {counts}{tail}.{yanked}"


def _entry(entry: dict[str, Any]) -> list[str]:
    lines = ["", f"`{entry['file']}`: {entry['kind']}"]
    for f in entry["functions"]:
        count = f" ({f['lines']} lines)" if f.get("lines") else ""
        lines.append(f"- `{f['name']}`: {f['change']} upstream{count}")
    lines += [f"- {hint}" for hint in entry["hints"]]
    lines += [f"- upstream: {commit}" for commit in entry.get("commits", [])]
    for hunk in entry["hunks"]:
        first, last = hunk["lines"]
        where = f" in `{hunk['function']}`" if hunk["function"] else ""
        lines += ["", f"Lines {first} to {last} of the conflict{where}:", ""]
        if not hunk["ours"] and not hunk["theirs"]:
            continue
        more = ["..."] if hunk["cut"] else []
        lines += ["```", "<<<<<<< upstream", *hunk["ours"], "======="]
        lines += [*hunk["theirs"], ">>>>>>> patch", *more, "```"]
    return lines


def write(
    folder: Path, report: dict[str, Any], next_steps: list[str]
) -> tuple[Path, Path]:
    """Write both files.

    Returns:
        Paths of the JSON and of the Markdown file.

    Raises:
        CannotRun: The folder cannot be written to.
    """
    stem = folder / f"rebase-{report['onto']}"
    files = (stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.md"))
    text = json.dumps(report, indent=2, default=str) + "\n"
    try:
        write_atomic(files[0], text.encode())
        write_atomic(files[1], markdown(report, next_steps).encode())
    except OSError as err:
        raise CannotRun(f"--report {folder}: {err.strerror}; give another") from None
    return files
