# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The patch files and the overlay as they lie in the repository."""

from __future__ import annotations

import email
import email.policy
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from patchset.errors import CannotRun
from patchset.layout import blob_id

FILE_NAME = re.compile(r"(\d{4})-([a-z0-9]+(?:-[a-z0-9]+)*)\.patch")
HEADERS = ("Why", "Upstream", "Removed when", "Class")
CLASSES = ("backport", "pending", "local")
_SKIP_ENDINGS = (".pyc", ".pyo", ".orig", ".rej", ".swp", ".swo", "~", ".tmp")
_SKIP_FOLDERS = ("__pycache__",)


@dataclass(frozen=True)
class Patch:
    """One patch file.

    Args:
        path: The file.
        data: Its bytes.
        subject: Subject of the commit without ``[PATCH]``.
        body: Rest of the commit message.
        diff: The part from the first ``diff --git`` on.
    """

    path: Path
    data: bytes
    subject: str
    body: str
    diff: str

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def number(self) -> int | None:
        match = FILE_NAME.fullmatch(self.name)
        return int(match[1]) if match else None

    def header(self, name: str) -> str | None:
        """Give the text after ``name:`` in the message; None where there is none."""
        match = re.search(rf"^{re.escape(name)}:[ \t]*(.*)$", self.body, re.M)
        return match[1].strip() if match else None

    def paths(self) -> list[str]:
        """List the paths that the diff names."""
        found = re.findall(r"^diff --git a/(.+?) b/(.+)$", self.diff, re.M)
        return sorted({path for pair in found for path in pair})

    def changed_lines(self) -> int:
        """Count added and removed lines."""
        return len(re.findall(r"^(?:\+(?!\+\+ )|-(?!-- ))", self.diff, re.M))


def read_patch(path: Path) -> Patch:
    """Read one patch file.

    Raises:
        CannotRun: It cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as err:
        raise CannotRun(f"cannot read {path}: {err.strerror}") from None
    message = email.message_from_bytes(data, policy=email.policy.default)
    subject = re.sub(r"\s+", " ", str(message.get("Subject", ""))).strip()
    subject = re.sub(r"^\[PATCH\]\s*", "", subject)
    payload = message.get_payload(decode=True)
    text = payload.decode("utf-8", "replace") if isinstance(payload, bytes) else ""
    text = text.replace("\r\n", "\n")
    start = re.search(r"^diff --git ", text, re.M)
    cut = start.start() if start else len(text)
    body = re.split(r"^---\s*$", text[:cut], maxsplit=1, flags=re.M)[0]
    return Patch(path, data, subject, body, text[cut:])


def read_series(folder: Path) -> list[Patch]:
    """Read all patch files of a folder, in the order of their names."""
    if not folder.is_dir():
        return []
    return [read_patch(p) for p in sorted(folder.glob("*.patch"))]


def slug(subject: str) -> str:
    """Turn a subject into the topic part of a file name."""
    words = re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")
    return words[:52].strip("-") or "patch"


def file_name(number: int, subject: str) -> str:
    """Give the name that a patch has in the series."""
    return f"{number:04d}-{slug(subject)}.patch"


def overlay_files(folder: Path) -> dict[str, Path]:
    """Map each overlay path, as in the package, to the file that holds it.

    Caches, hidden files and editors' left-overs are passed over.

    Raises:
        CannotRun: An entry is neither a file nor a folder.
    """
    found: dict[str, Path] = {}
    if not folder.is_dir():
        return found
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if any(p.startswith(".") or p in _SKIP_FOLDERS for p in parts):
            continue
        if path.name.endswith(_SKIP_ENDINGS):
            continue
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CannotRun(f"{path} is no plain file; the overlay holds plain files")
        if path.is_file():
            found["/".join(parts)] = path
    return found


def overlay_blobs(folder: Path) -> dict[str, str]:
    """Map each overlay path to the git blob id of its content."""
    return {
        path: blob_id(file.read_bytes()) for path, file in overlay_files(folder).items()
    }
