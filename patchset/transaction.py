# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Many file changes as one: stage all, write a journal, then rename.

A run that is killed before the journal is in place has changed nothing. One killed
later is finished by `recover`, because every step can be done twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchset.errors import CannotRun

FOLDER = ".ddtree-txn"
_JOURNAL = "journal.json"


@contextlib.contextmanager
def held(package: Path) -> Iterator[None]:
    """Hold a package folder, so that two runs do not change it at once."""
    handle = os.open(package, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CannotRun(
                f"another apply.py works on {package}; wait for it to end"
            ) from None
        yield
    finally:
        os.close(handle)


def interrupted(package: Path) -> bool:
    """Say whether a killed run left a journal."""
    return (package / FOLDER / _JOURNAL).exists()


def recover(package: Path) -> str | None:
    """Finish what a killed run had begun, or tidy what it had staged.

    Returns:
        What that run was doing, if there was a journal.
    """
    folder = package / FOLDER
    if not folder.exists():
        return None
    journal = folder / _JOURNAL
    label = None
    if journal.exists():
        data = json.loads(journal.read_text(encoding="utf-8"))
        label = str(data["label"])
        _carry_out(package.parent, folder, data["steps"])
        journal.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    return label


@dataclass
class Transaction:
    """Changes to an installed package; paths are relative to its parent folder.

    There is one step per path, the last one asked for, so that the order of steps
    does not matter and each can be repeated.

    Args:
        package: The package folder.
        label: What the change is, for `recover`.
    """

    package: Path
    label: str
    _writes: dict[str, dict[str, Any]] = field(default_factory=dict)
    _deletes: dict[str, None] = field(default_factory=dict)
    _folders: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.folder = self.package / FOLDER
        self._staged: dict[str, bytes] = {}

    def write(
        self, path: str, data: bytes, mode: int = 0o644, mtime_ns: int | None = None
    ) -> None:
        """Give a file a new content; folders are made."""
        self._deletes.pop(path, None)
        name = str(len(self._staged))
        self._staged[name] = data
        self._writes.pop(path, None)
        self._writes[path] = {
            "do": "write",
            "path": path,
            "staged": name,
            "mode": mode,
            "ns": mtime_ns,
        }

    def delete(self, path: str) -> None:
        """Remove a file if it is there."""
        self._writes.pop(path, None)
        self._deletes[path] = None

    def remove_empty(self, path: str) -> None:
        """Remove a folder at the end if it is there and empty."""
        self._folders.add(path)

    def remove_tree(self, path: str) -> None:
        """Remove a folder and what is in it now."""
        root = self.package.parent
        for item in sorted((root / path).rglob("*")):
            name = item.relative_to(root).as_posix()
            if item.is_dir() and not item.is_symlink():
                self.remove_empty(name)
            else:
                self.delete(name)
        self.remove_empty(path)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps: writes, removals, then folders, deepest first."""
        folders = sorted(self._folders, key=lambda name: (-name.count("/"), name))
        return [
            *self._writes.values(),
            *({"do": "delete", "path": path} for path in self._deletes),
            *({"do": "rmdir", "path": path} for path in folders),
        ]

    def commit(self) -> None:
        """Stage everything, write the journal, carry it out.

        Raises:
            CannotRun: A folder cannot be written to; nothing was changed.
        """
        self._check_access()
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            for step in self._writes.values():
                self._stage(step)
            # All written first: the disk then takes most of them in one go.
            for step in self._writes.values():
                _sync(self.folder / step["staged"])
            text = json.dumps({"label": self.label, "steps": self.steps})
            (self.folder / "journal.new").write_bytes(text.encode())
            _sync(self.folder / "journal.new")
        except OSError as err:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise CannotRun(
                f"cannot write to {self.package}: {err.strerror}; nothing was changed"
            ) from None
        os.replace(self.folder / "journal.new", self.folder / _JOURNAL)
        _sync(self.folder)
        recover(self.package)

    def _stage(self, step: dict[str, Any]) -> None:
        path = self.folder / step["staged"]
        path.write_bytes(self._staged[step["staged"]])
        os.chmod(path, step["mode"])
        if step["ns"] is not None:
            os.utime(path, ns=(step["ns"], step["ns"]))

    def _check_access(self) -> None:
        root = self.package.parent
        for step in self.steps:
            folder = (root / step["path"]).parent
            while not folder.exists():
                folder = folder.parent
            if not os.access(folder, os.W_OK | os.X_OK):
                raise CannotRun(
                    f"no permission to write in {folder}; run as the user who "
                    "installed vLLM"
                )


def _carry_out(root: Path, folder: Path, steps: list[dict[str, Any]]) -> None:
    for step in steps:
        path = root / step["path"]
        if step["do"] == "write":
            staged = folder / step["staged"]
            if staged.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                os.replace(staged, path)
        elif step["do"] == "delete":
            path.unlink(missing_ok=True)
        elif step["do"] == "rmdir":
            with contextlib.suppress(OSError):
                path.rmdir()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
