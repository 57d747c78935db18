# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""One function per subcommand: arguments in, exit code and JSON data out."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from typing import Any

from patchset import conflict, exporting, installed, source, worktree
from patchset import install as installing
from patchset import lint as linting
from patchset import site as sites
from patchset import verify as verifying
from patchset.errors import DONE, FAILED, MISMATCH, CannotRun
from patchset.layout import Layout
from patchset.lock import Lock
from patchset.ui import Output

Result = tuple[int, dict[str, Any]]


def _lock(layout: Layout) -> Lock:
    return Lock(layout.lock_file)


def fetch(args: Namespace, layout: Layout, out: Output) -> Result:
    release = _lock(layout).release(args.release)
    with layout.locked():
        found, present = source.fetch(layout, release, args.source, out)
    shown = layout.show(found.path)
    verb = "already there and intact" if present else "fetched and checked"
    out.say(f"vLLM {release.version}: {verb}: {shown}")
    return DONE, {
        "release": release.name,
        "source": found.kind,
        "path": str(found.path),
        "present": present,
    }


def apply(args: Namespace, layout: Layout, out: Output) -> Result:
    release = _lock(layout).release(args.release)
    with layout.locked():
        if args.abort:
            gone = conflict.abort(layout, release)
            out.say(f"removed {layout.show(gone)}")
            return DONE, {"release": release.name, "aborted": str(gone)}
        if args.resume:
            done = conflict.resume(layout, release, out, force=args.force)
        else:
            done = worktree.apply(
                layout, release, out, dry_run=args.dry_run, force=args.force
            )
    record = done.record
    if not record.patches:
        out.warn(f"patches/{release.name} holds no patch yet")
    if done.tree != release.final_tree:
        out.warn(
            "the result is not the tree that upstream.lock names; if the change is "
            "meant, run `python apply.py lock`"
        )
    count = len(record.patches) - len(record.absorbed)
    where = layout.show(done.path)
    how = "would be applied to" if args.dry_run else "applied in"
    if not done.fresh:
        how = "were applied already in"

    out.say(f"{count} patches and {len(record.overlay)} overlay files {how} {where}")
    if record.absorbed:
        out.say(f"{len(record.absorbed)} absorbed: {', '.join(record.absorbed)}")
    return DONE, {
        "release": release.name,
        "worktree": str(done.path),
        "dry_run": args.dry_run,
        "fresh": done.fresh,
        "applied": [n for n, c in record.commits.items() if c],
        "absorbed": record.absorbed,
        "overlay": len(record.overlay),
        "head": record.head,
        "tree": done.tree,
        "lock_matches": done.tree == release.final_tree,
    }


def status(args: Namespace, layout: Layout, out: Output) -> Result:
    lock = _lock(layout)
    release = lock.release(args.release)
    data = verifying.status(layout, lock, release)
    out.say(f"pin       vLLM {release.version}, {release.tag}, {release.commit}")
    out.say(f"source    {data['source'] or 'not fetched'}")
    state = "applied" if data["applied"] else "not applied"
    if data["edited"]:
        state += f", {len(data['edited'])} edited files"
    out.say(f"work tree {data['worktree']}: {state}")
    if data["conflict"]:
        out.say(f"conflict  waits in {data['conflict']}")
    rows = [
        [
            p["file"],
            p["state"],
            p["class"] or "?",
            str(p["lines"]),
            "yes" if p["locked"] else "no",
        ]
        for p in data["patches"]
    ]
    out.table("patches", ["file", "state", "class", "lines", "as locked"], rows)
    for subject in data["extra_commits"]:
        out.say(f"commit without a patch file: {subject}")
    drift = [f"{k} {p}" for k, paths in data["overlay"].items() for p in paths]
    if data["applied"]:
        out.say(f"overlay   {'; '.join(drift) or 'no drift'}")
    matches = all(data["lock"].values())
    out.say(f"lock      {'matches' if matches else 'differs: run apply.py verify'}")
    return DONE, data


def verify(args: Namespace, layout: Layout, out: Output) -> Result:
    release = _lock(layout).release(args.release)
    with layout.locked():
        report = verifying.verify(layout, release, out)
    for check in report.wrong:
        out.say(f"differs: {check['what']}")
        out.say(f"  found {check['found']}")
        out.say(f"  want  {check['want']}")
    out.say(f"{len(report.checks) - len(report.wrong)} of {len(report.checks)} hold")
    for item in report.not_checked:
        out.say(f"not checked here: {item}")
    code = MISMATCH if report.wrong else DONE
    return code, {
        "release": release.name,
        "checks": report.checks,
        "not_checked": report.not_checked,
    }


def export(args: Namespace, layout: Layout, out: Output) -> Result:
    lock = _lock(layout)
    release = lock.release(args.release)
    with layout.locked():
        done = exporting.export(
            layout, lock, release, out, folder=args.folder, force=args.force
        )
    for name in done.written:
        out.say(f"wrote   {name}")
    for name in done.removed:
        out.say(f"removed {name}")
    if not done.written and not done.removed:
        out.say("nothing to write: patches, overlay and lock are up to date")
    return DONE, {"release": release.name, **asdict(done)}


def lock(args: Namespace, layout: Layout, out: Output) -> Result:
    """Lock one release, or all of them: the overlay is in every entry."""
    held = _lock(layout)
    first = held.release(args.release)
    others = [] if args.release else [n for n in held.names if n != first.name]
    done: dict[str, tuple[bool, str]] = {}
    with layout.locked():
        for name in [first.name, *others]:
            held = _lock(layout)
            release = held.release(name)
            try:
                done[name] = verifying.relock(
                    layout, held, release, out, check=args.check
                )
            except CannotRun:
                if name == first.name:
                    raise
                out.warn(
                    f"{name} was left as it is, its source is not fetched: "
                    f"`python apply.py fetch --release {name}`, then lock again"
                )
                continue
            changed, final = done[name]
            state = "written" if changed else "up to date"
            out.say(f"{held.shown}: {name} {state}, tree {final}")
    changed, final = done[first.name]
    return DONE, {
        "release": first.name,
        "changed": changed,
        "final_tree": final,
        "releases": {n: {"changed": c, "final_tree": t} for n, (c, t) in done.items()},
    }


def lint(args: Namespace, layout: Layout, out: Output) -> Result:
    held = _lock(layout)
    release = held.release(args.release)
    found = linting.lint(layout, release)
    for name in [] if args.release else held.names:
        if name != release.name:
            # The overlay's own faults are found above; here only that it moved on.
            found += linting.lint_other(layout, held.release(name))
    errors = [f for f in found if f.level == "error"]
    for item in found:
        out.say(f"{item.file}: {item.level}: {item.text} [{item.rule}]")
    out.say(f"{len(errors)} errors, {len(found) - len(errors)} warnings")
    code = FAILED if errors else DONE
    return code, {"release": release.name, "findings": [asdict(f) for f in found]}


def install(args: Namespace, layout: Layout, out: Output) -> Result:
    release = _lock(layout).release(args.release)
    folder = sites.locate(args.python, args.site)
    added = installed.added_metadata(installed.read_manifest(folder))
    where = sites.inspect(folder, release, added)
    data: dict[str, Any] = {
        "release": release.name,
        "site": str(folder),
        "project": where.project,
        "version": where.version,
        "tree": release.final_tree,
    }
    if args.check:
        state = installed.examine(where, release)
        data |= {"state": state.name, "differs": state.differs}
        out.say(f"{where.package}: {_STATES[state.name]}")
        if state.differs:
            out.say(state.rows())
        return DONE if state.name == "installed" else MISMATCH, data
    done, manifest = installing.install(layout, release, where, out, args.bundle)
    kinds = [row["kind"] for row in manifest["files"]]
    counts = f"{kinds.count('patched')} patched, {kinds.count('added')} added files"
    out.say(f"{where.project} {where.version} in {folder}: {done}, {counts}")
    return DONE, {
        **data,
        "done": done,
        "patched": kinds.count("patched"),
        "added": kinds.count("added"),
        "metadata": [row["path"] for row in manifest["metadata"]],
    }


_STATES = {
    "absent": "stock, not patched",
    "installed": "installed and intact",
    "other": "holds another patch set, intact; install replaces it",
    "reinstalled": "the wheel was put back over an install; run install again",
    "incomplete": "package metadata is missing; run install again",
    "interrupted": "a killed run left it half-done; run the same command again",
    "changed": "files are not as expected",
}


def uninstall(args: Namespace, layout: Layout, out: Output) -> Result:
    release = _lock(layout).release(args.release)
    folder = sites.locate(args.python, args.site)
    done = installing.uninstall(folder, release, out)
    words = {
        "removed": "the wheel's own files are back",
        "cleaned": "the wheel was put back already; left-overs were removed",
        "absent": "nothing to do, it is not patched",
    }
    out.say(f"{folder}: {words[done]}")
    return DONE, {"release": release.name, "site": str(folder), "done": done}
