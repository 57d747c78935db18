# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""What an installed vLLM looks like: stock, patched, half-patched, changed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchset import transaction
from patchset.errors import Mismatch
from patchset.layout import blob_id
from patchset.lock import Release
from patchset.site import Site

FOLDER = "vllm/.ddtree"
MANIFEST = f"{FOLDER}/manifest.json"
ORIGINALS = f"{FOLDER}/originals"
_KEYS = ("tree", "files", "caches", "folders", "metadata")


@dataclass
class State:
    """What an installed vLLM looks like.

    Args:
        name: ``absent`` (stock), ``installed``, ``other`` (an intact install of
            another patch set), ``reinstalled`` (the wheel was put back over an
            install), ``incomplete`` (only added metadata is missing),
            ``interrupted``, or ``changed``.
        differs: One row per file that is not as expected.
    """

    name: str
    differs: list[dict[str, Any]] = field(default_factory=list)
    manifest: dict[str, Any] | None = None

    def rows(self, limit: int = 10) -> str:
        shown = [f"  {row['path']}: {row['is']}" for row in self.differs[:limit]]
        if len(self.differs) > limit:
            shown.append(f"  and {len(self.differs) - limit} more")
        return "\n".join(shown)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read what an install noted; None where there was none.

    Raises:
        Mismatch: It cannot be read.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema_version"] != 1:
            raise ValueError(f"schema_version is {data['schema_version']!r}")
        missing = [name for name in _KEYS if name not in data]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        return data
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise Mismatch(
            f"{path} cannot be read ({err}); reinstall vLLM, remove "
            f"{folder / FOLDER}, then install again"
        ) from None


def added_metadata(manifest: dict[str, Any] | None) -> set[str]:
    """Name the metadata folders that an install added."""
    files = (manifest or {}).get("metadata", [])
    return {row["path"].split("/")[0] for row in files}


def blob_of(path: Path) -> str | None:
    if path.is_symlink():
        return "link"
    return blob_id(path.read_bytes()) if path.is_file() else None


def examine(where: Site, release: Release) -> State:
    """Compare every file that an install changes with what it should be."""
    folder = where.folder
    manifest = read_manifest(folder)
    if transaction.interrupted(where.package):
        return State("interrupted", manifest=manifest)
    if manifest is None:
        return State(*_stock(where, release))
    wrong, restored = [], 0
    for row in manifest["files"]:
        found = blob_of(folder / row["path"])
        if found == row["post"]:
            continue
        if row["pre"] and found == row["pre"]:
            restored += 1
        wrong.append({"path": row["path"], "is": _words(found, row)})
    patched = [row for row in manifest["files"] if row["pre"]]
    if patched and restored == len(patched):
        others = [
            row["path"]
            for row in manifest["files"]
            if not row["pre"]
            and blob_of(folder / row["path"]) not in (None, row["post"])
        ]
        if not others:
            return State("reinstalled", wrong, manifest)
    lost = [
        {"path": row["path"], "is": "missing or changed"}
        for row in manifest["metadata"]
        if blob_of(folder / row["path"]) != row["post"]
    ]
    if wrong:
        return State("changed", wrong + lost, manifest)
    gone = [
        {"path": f"{ORIGINALS}/{row['path']}", "is": "missing or changed"}
        for row in patched
        if blob_of(folder / ORIGINALS / row["path"]) != row["pre"]
    ]
    if gone:
        return State("changed", gone + lost, manifest)
    same = manifest["tree"] == release.final_tree
    if lost:
        return State("incomplete" if same else "other", lost, manifest)
    return State("installed" if same else "other", [], manifest)


def _words(found: str | None, row: dict[str, Any]) -> str:
    if found is None:
        return "missing"
    if found == "link":
        return "a symbolic link"
    return "as in the wheel, not patched" if found == row["pre"] else "changed"


def _stock(where: Site, release: Release) -> tuple[str, list[dict[str, Any]]]:
    wrong = []
    variants = _variants(where, release)
    for path, (pre, post) in sorted(release.images().items()):
        found = blob_of(where.folder / path)
        if found in (pre, variants.get(path, pre)):
            continue
        words = {None: "missing", "link": "a symbolic link", post: "patched already"}
        wrong.append({"path": path, "is": words.get(found, "not the pinned file")})
    for path, blob in sorted(release.overlay.items()):
        target = where.folder / path
        if target.exists() or target.is_symlink():
            same = blob_of(target) == blob
            words_ = "there already, as in the overlay" if same else "another file"
            wrong.append({"path": path, "is": words_})
    return ("changed" if wrong else "absent"), wrong


def _variants(where: Site, release: Release) -> dict[str, str]:
    """Map paths to blob ids that a wheel of this project has instead of the sdist's."""
    return {
        path: blob
        for wheel in release.wheels
        if wheel.project == where.project
        for path, blob in wheel.differs.items()
    }
