# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""upstream.lock: what is pinned, with hashes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit
from packaging.version import InvalidVersion, Version
from tomlkit.exceptions import ParseError

from patchset.errors import CannotRun
from patchset.layout import write_atomic

LOCK_VERSION = 1
_SHA1 = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TEXT = re.compile(r"\S.*", re.S)


@dataclass(frozen=True)
class Touch:
    """One file that a patch changes, with git blob ids before and after."""

    path: str
    pre: str
    post: str


@dataclass(frozen=True)
class PatchPin:
    """One patch file, its sha256 and what it changes."""

    file: str
    sha256: str
    touched: tuple[Touch, ...]


@dataclass(frozen=True)
class Wheel:
    """One published wheel; `differs` maps paths to blob ids unlike the sdist's."""

    project: str
    file: str
    sha256: str
    differs: Mapping[str, str]


@dataclass(frozen=True)
class Release:
    """Everything the lock pins for one upstream release.

    Args:
        name: Key in the lock, which is also the folder under patches/.
        built_as: Commit ids that published builds record in ``_version.py``.
        include: Prefixes of the upstream paths that the work tree holds.
        exclude: Paths below them that it does not hold.
        upstream_tree: Git tree id of the upstream subset, empty while unknown.
        final_tree: Git tree id after patches and overlay, empty while unknown.
        overlay: Overlay path to git blob id.
    """

    name: str
    version: str
    tag: str
    commit: str
    git: str
    torch: str
    triton: str
    built_as: tuple[str, ...]
    sdist_name: str
    sdist_sha256: str
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    upstream_tree: str
    final_tree: str
    wheels: tuple[Wheel, ...]
    image: Mapping[str, str]
    patches: tuple[PatchPin, ...]
    overlay: Mapping[str, str] = field(default_factory=dict)

    @property
    def commit_tag(self) -> str:
        """The short commit as upstream's ``_version.py`` records it."""
        return f"g{self.commit[:9]}"

    def images(self) -> dict[str, tuple[str, str]]:
        """Map each patched path to its blob ids before the first, after the last."""
        found: dict[str, tuple[str, str]] = {}
        for patch in self.patches:
            for touch in patch.touched:
                first = found.get(touch.path, (touch.pre, ""))[0]
                found[touch.path] = (first, touch.post)
        return found


class _Table:
    """Typed access to one table; every error names the whole field."""

    def __init__(self, data: Any, where: str, file: str) -> None:
        self.where = where
        self.file = file
        if not isinstance(data, Mapping):
            self.bad(where, data, "a table")
        self.data = data

    def bad(self, where: str, value: Any, want: str) -> None:
        shown = "nothing" if value is None else repr(value)
        raise CannotRun(
            f"{self.file}: {where} is {shown}, want {want}; "
            "restore the file from version control or correct that field"
        )

    def text(self, key: str, pattern: re.Pattern[str], want: str, *, empty=False):
        value = self.data.get(key, "" if empty else None)
        if empty and value == "":
            return ""
        if not isinstance(value, str) or not pattern.fullmatch(value):
            self.bad(f"{self.where}.{key}", value, want)
        return str(value)

    def word(self, key: str) -> str:
        return self.text(key, _TEXT, "a text that is not empty")

    def list_of_tables(self, key: str) -> list[_Table]:
        value = self.data.get(key, [])
        if not isinstance(value, list):
            self.bad(f"{self.where}.{key}", value, "a list of tables")
        return [
            _Table(item, f"{self.where}.{key}[{n}]", self.file)
            for n, item in enumerate(value)
        ]

    def words(self, key: str) -> tuple[str, ...]:
        value = self.data.get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            self.bad(f"{self.where}.{key}", value, "a list of texts")
        return tuple(str(v) for v in value)

    def path(self, key: str = "path") -> str:
        value = self.word(key)
        if value.startswith("/") or ".." in value.split("/"):
            self.bad(f"{self.where}.{key}", value, "a relative path without '..'")
        return value

    def sub(self, key: str) -> _Table:
        return _Table(self.data.get(key, {}), f"{self.where}.{key}", self.file)


class Lock:
    """The lock file, read and checked.

    Args:
        path: The file.
        shown: How messages name it.

    Raises:
        CannotRun: It is missing, is no TOML, or a field is wrong; names the field.
    """

    def __init__(self, path: Path, shown: str = "upstream.lock") -> None:
        self.path = path
        self.shown = shown
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise CannotRun(f"{shown} is missing from {path.parent}") from None
        except (OSError, UnicodeDecodeError) as err:
            raise CannotRun(f"cannot read {shown}: {err}") from None
        try:
            self.doc = tomlkit.parse(text)
        except ParseError as err:
            raise CannotRun(f"{shown} is not valid TOML: {err}") from None
        version = self.doc.get("lock-version")
        if version != LOCK_VERSION:
            raise CannotRun(
                f"{shown}: lock-version is {version!r}, this tool reads "
                f"{LOCK_VERSION}; use the apply.py that came with the lock file"
            )
        top = _Table(self.doc, "", shown)
        self.default = top.data.get("default")
        releases = top.sub("releases").data
        self.names = [str(name) for name in releases]
        if self.default not in self.names:
            raise CannotRun(
                f"{shown}: default is {self.default!r}, want one of "
                f"{', '.join(self.names) or 'the releases, of which there are none'}"
            )

    def release(self, name: str | None = None) -> Release:
        """Read one release; the default one without a name."""
        name = name or str(self.default)
        if name not in self.names:
            raise CannotRun(
                f"--release {name}: {self.shown} pins {', '.join(self.names)}; "
                "give one of these"
            )
        table = _Table(self.doc["releases"][name], f'releases."{name}"', self.shown)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", name):
            table.bad("releases", name, "a name that can be a folder")
        version = table.word("version")
        try:
            Version(version)
        except InvalidVersion:
            table.bad(f"{table.where}.version", version, "a PEP 440 version")
        sdist, tree = table.sub("sdist"), table.sub("tree")
        image = table.sub("image").data
        return Release(
            name=name,
            version=version,
            tag=table.word("tag"),
            commit=table.text("commit", _SHA1, "a full commit id of 40 hex digits"),
            git=table.word("git"),
            torch=table.word("torch"),
            triton=table.word("triton"),
            built_as=table.words("built-as"),
            sdist_name=sdist.path("name"),
            sdist_sha256=sdist.text("sha256", _SHA256, "64 hex digits"),
            include=tree.words("include"),
            exclude=tree.words("exclude"),
            upstream_tree=tree.text("upstream", _SHA1, "40 hex digits", empty=True),
            final_tree=tree.text("final", _SHA1, "40 hex digits", empty=True),
            wheels=tuple(_wheel(w) for w in table.list_of_tables("wheels")),
            image={str(k): str(v) for k, v in image.items()},
            patches=tuple(_patch(p) for p in table.list_of_tables("patches")),
            overlay={
                f.path(): f.text("blob", _SHA1, "40 hex digits")
                for f in table.sub("overlay").list_of_tables("files")
            },
        )

    def render(
        self,
        name: str,
        *,
        upstream_tree: str,
        final_tree: str,
        patches: list[PatchPin],
        overlay: Mapping[str, str],
    ) -> bytes:
        """Give the file's bytes with the computed parts of one release replaced."""
        doc = tomlkit.parse(tomlkit.dumps(self.doc))
        table = doc["releases"][name]
        tree = table.setdefault("tree", tomlkit.table())
        tree["upstream"] = upstream_tree
        tree["final"] = final_tree
        table.pop("patches", None)
        table.pop("overlay", None)
        files = _rows({"path": p, "blob": overlay[p]} for p in sorted(overlay))
        section = tomlkit.table()
        section.add("files", files)
        table.append("overlay", section)
        if patches:
            series = tomlkit.aot()
            for patch in patches:
                entry = tomlkit.table()
                entry.add("file", patch.file)
                entry.add("sha256", patch.sha256)
                entry.add(
                    "touched",
                    _rows(
                        {"path": t.path, "pre": t.pre, "post": t.post}
                        for t in patch.touched
                    ),
                )
                series.append(entry)
            table.append("patches", series)
        text = re.sub(r"\n{3,}", "\n\n", tomlkit.dumps(doc)).rstrip("\n") + "\n"
        return text.encode()

    def write(self, data: bytes) -> None:
        """Replace the file in one step."""
        write_atomic(self.path, data)


def _rows(rows: Any) -> Any:
    array = tomlkit.array()
    for row in rows:
        inline = tomlkit.inline_table()
        inline.update(row)
        array.append(inline)
    return array.multiline(True) if len(array) else array


def _wheel(table: _Table) -> Wheel:
    return Wheel(
        project=table.word("project"),
        file=table.word("file"),
        sha256=table.text("sha256", _SHA256, "64 hex digits"),
        differs={
            d.path(): d.text("blob", _SHA1, "40 hex digits")
            for d in table.list_of_tables("differs")
        },
    )


def _patch(table: _Table) -> PatchPin:
    return PatchPin(
        file=table.path("file"),
        sha256=table.text("sha256", _SHA256, "64 hex digits"),
        touched=tuple(
            Touch(
                t.path(),
                t.text("pre", _SHA1, "40 hex digits"),
                t.text("post", _SHA1, "40 hex digits"),
            )
            for t in table.list_of_tables("touched")
        ),
    )
