# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""A finished rebase as patches/vVERSION and an entry of upstream.lock."""

from __future__ import annotations

import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomlkit

from patchset import exporting, gitio, worktree
from patchset.errors import CannotRun, CheckFailed
from patchset.layout import Layout, temp_folder, write_atomic
from patchset.lint import lint
from patchset.lock import Lock, Release
from patchset.rebase_entry import as_toml, gather
from patchset.rebase_target import Target
from patchset.rebase_tree import Outcome
from patchset.series import overlay_blobs, overlay_files, read_series
from patchset.source import sdist_path
from patchset.ui import Output


def save(
    layout: Layout,
    lock: Lock,
    target: Target,
    outcomes: list[Outcome],
    folder: Path,
    args: Namespace,
    out: Output,
) -> dict[str, Any]:
    """Write the carried series; everything is tried in a temporary copy first.

    The lock is written last: a run that is killed before has pinned nothing.

    Returns:
        Release name, written files and the final tree id.

    Raises:
        CheckFailed: The target is the pinned release, lint finds an error, or files
            that no lock entry knows would be overwritten.
        CannotRun: The target is no sdist, or the index does not answer.
    """
    name = target.release.name
    pin = lock.release(args.release)
    if target.kind != "sdist":
        raise CannotRun(
            f"--save needs an sdist, {target.path} is none; give --onto a version of "
            "the index or the path of an sdist"
        )
    if name in (pin.name, str(lock.default)):
        raise CheckFailed(f"{name} is the pinned release; --save never touches it")
    repo = gitio.open_repo(folder)
    commits = [o.commit for o in outcomes if o.commit]
    patches = exporting.render_patches(repo, commits)
    place = layout.patches(name)
    _refuse_unknown(layout, lock, name, place, patches)
    entry = gather(repo, target, pin, args.commit, out)
    release = replace(target.release, commit=entry.commit)
    cached = sdist_path(layout, release)
    if not (cached.exists() and cached.samefile(target.path)):
        write_atomic(cached, target.path.read_bytes())

    temp = temp_folder(layout.build, "save")
    try:
        staged = Layout(temp / "root", layout.cache)
        series = staged.patches(name)
        series.mkdir(parents=True)
        for file, data in patches.items():
            (series / file).write_bytes(data)
        for path, source in overlay_files(layout.overlay).items():
            (staged.overlay / path).parent.mkdir(parents=True, exist_ok=True)
            (staged.overlay / path).write_bytes(source.read_bytes())
        staged.lock_file.write_bytes(
            _with_entry(lock, name, as_toml(target, pin, entry))
        )
        text = _computed(staged, name, out)
        staged.lock_file.write_bytes(text)
        found = lint(staged, Lock(staged.lock_file).release(name))
        errors = [f for f in found if f.level == "error"]
        if errors:
            rows = "; ".join(f"{f.file}: {f.text} [{f.rule}]" for f in errors[:5])
            raise CheckFailed(
                f"nothing was saved, lint finds {len(errors)} errors: {rows}. Mend "
                f"them in {layout.show(folder)} or overlay/, then run this again"
            )
        written = []
        for path in sorted(place.glob("*.patch")):
            if path.name not in patches:
                path.unlink()
        for path in sorted(series.glob("*.patch")):
            write_atomic(place / path.name, path.read_bytes())
            written.append(layout.show(place / path.name))
        written += _torch_file(layout, target, pin)
        lock.write(text)
        written.append(lock.shown)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    final = Lock(layout.lock_file).release(name).final_tree
    out.say(f"saved {len(patches)} patches as patches/{name}, tree {final}")
    out.say(f"  python apply.py verify --release {name}")
    out.say(f"  make test RELEASE={name} VENV=.venv-{target.version}")
    return {"release": name, "written": written, "final_tree": final}


def _torch_file(layout: Layout, target: Target, pin: Release) -> list[str]:
    """Write the requirements of a release that needs another torch than the pin."""
    wanted = target.facts.get("torch", {})
    if wanted.get("torch", pin.torch) == pin.torch:
        return []
    path = layout.root / "requirements" / f"torch-{target.release.name}.txt"
    lines = [
        f"# What vLLM {target.version} was built for, as in torch.txt.",
        *(f"{name}=={version}" for name, version in wanted.items()),
    ]
    write_atomic(path, ("\n".join(lines) + "\n").encode())
    return [layout.show(path)]


def _refuse_unknown(
    layout: Layout, lock: Lock, name: str, place: Path, patches: dict[str, bytes]
) -> None:
    """Refuse to overwrite patch files that neither this run nor the lock made."""
    known = {}
    if name in lock.names:
        known = {p.file: p.sha256 for p in lock.release(name).patches}
    for patch in read_series(place):
        if (
            patches.get(patch.name) == patch.data
            or known.get(patch.name) == patch.sha256
        ):
            continue
        raise CheckFailed(
            f"{layout.show(patch.path)} would be overwritten and is not what the lock "
            "has; move it away or lock it, then run this again"
        )


def _with_entry(lock: Lock, name: str, entry: str) -> bytes:
    """Give the lock's bytes with an entry added, or replaced."""
    doc = tomlkit.parse(tomlkit.dumps(lock.doc))
    if name in doc["releases"]:
        del doc["releases"][name]
    text = tomlkit.dumps(doc).rstrip("\n")
    return f"{text}\n\n{entry}".encode()


def _computed(staged: Layout, name: str, out: Output) -> bytes:
    """Apply the staged series and fill in what the lock computes."""
    lock = Lock(staged.lock_file)
    release = lock.release(name)
    temp, record, repo = worktree.build_temporary(staged, release, out, "tree")
    try:
        return lock.render(
            name,
            upstream_tree=repo.git.rev_parse(f"{record.base}^{{tree}}"),
            final_tree=repo.git.rev_parse("HEAD^{tree}"),
            patches=worktree.pins(repo, record, read_series(staged.patches(name))),
            overlay=overlay_blobs(staged.overlay),
        )
    finally:
        repo.close()
        shutil.rmtree(temp, ignore_errors=True)
