# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Where things lie in the repository, and small helpers for files."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from patchset.errors import CannotRun

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@dataclass(frozen=True)
class Layout:
    """Paths of one checkout of the project.

    Args:
        root: The folder that holds apply.py.
        cache: Where fetched sources are kept.
    """

    root: Path
    cache: Path

    @classmethod
    def at(cls, root: Path | str) -> Layout:
        """Make the layout of a checkout; ``$DDTREE_CACHE`` moves the cache."""
        root = Path(root).resolve()
        cache = os.environ.get("DDTREE_CACHE")
        where = Path(cache).expanduser() if cache else root / "build" / "cache"
        return cls(root, where if where.is_absolute() else root / where)

    @property
    def build(self) -> Path:
        return self.root / "build"

    @property
    def lock_file(self) -> Path:
        return self.root / "upstream.lock"

    @property
    def overlay(self) -> Path:
        return self.root / "overlay"

    def patches(self, release: str) -> Path:
        return self.root / "patches" / release

    def worktree(self, version: str) -> Path:
        return self.build / f"vllm-{version}"

    def conflict(self, version: str) -> Path:
        return self.build / f"vllm-{version}.conflict"

    def show(self, path: Path) -> str:
        """Give a path as a user would type it from the repository root."""
        try:
            return str(path.relative_to(self.root))
        except ValueError:
            return str(path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the build folder; a second command is refused.

        Raises:
            CannotRun: Another run holds it, or it cannot be made.
        """
        try:
            self.build.mkdir(parents=True, exist_ok=True)
            handle = open(self.build / ".lock", "a")  # noqa: SIM115
        except OSError as err:
            raise CannotRun(f"cannot write to {self.build}: {err.strerror}") from None
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise CannotRun(
                    f"another apply.py works in {self.show(self.build)}; "
                    "wait for it to end, then run this again"
                ) from None
            recover(self.build)
            yield


def recover(build: Path) -> None:
    """Tidy what a killed run left: temporary trees, and a half-done move."""
    for old in build.glob(".old-*"):
        target = build / old.name.removeprefix(".old-")
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(old, target)
    for left in build.glob(".tmp-*"):
        shutil.rmtree(left, ignore_errors=True)


def temp_folder(build: Path, label: str) -> Path:
    """Make a folder that `recover` removes if this run is killed."""
    build.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".tmp-{label}-", dir=build))


def move_into_place(new: Path, target: Path) -> None:
    """Put a finished folder at `target`; a kill leaves the old one or the new one."""
    if not target.exists():
        os.rename(new, target)
        return
    if _exchange(new, target):
        shutil.rmtree(new, ignore_errors=True)
        return
    aside = target.parent / f".old-{target.name}"
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(target, aside)
    os.rename(new, target)
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, two: Path) -> bool:
    """Swap two names in one step where the system can; say whether it did."""
    if os.environ.get("DDTREE_NO_EXCHANGE"):
        return False
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    done = call(
        _AT_FDCWD,
        os.fsencode(one),
        _AT_FDCWD,
        os.fsencode(two),
        ctypes.c_uint(_RENAME_EXCHANGE),
    )
    return done == 0


def write_atomic(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a file beside its place, then move it there.

    Args:
        sync: Wait for the disk; not worth it for what can be made again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.flush()
            if sync:
                os.fsync(out.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def sha256_of(path: Path) -> str:
    """Hash a file: hexadecimal sha256."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def blob_id(data: bytes) -> str:
    """Give the git blob id (hexadecimal sha1) of some bytes."""
    head = b"blob %d\0" % len(data)
    return hashlib.sha1(head + data, usedforsecurity=False).hexdigest()
