# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The lock entry of a new release: commit, versions and published wheels."""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from dataclasses import dataclass, field
from typing import Any

import requests
import tomlkit
from packaging.version import Version
from pypi_simple import DistributionPackage

from patchset import gitio
from patchset.download import open_index
from patchset.errors import CannotRun
from patchset.gitio import git
from patchset.layout import blob_id
from patchset.lock import Release
from patchset.rebase_target import Target, project_page
from patchset.rebase_tree import TARGET
from patchset.remote_zip import open_wheel
from patchset.site import PROJECTS
from patchset.ui import Output

UNKNOWN = "unknown"
_VERSION = "vllm/_version.py"
_ID = re.compile(r"^(?:__commit_id__ = )?commit_id = ['\"]([^'\"]+)['\"]", re.M)


@dataclass
class Entry:
    """What a lock entry says besides hashes of trees, patches and the overlay."""

    commit: str
    torch: str
    triton: str
    built_as: list[str]
    wheels: list[dict[str, Any]] = field(default_factory=list)


def gather(
    repo: git.Repo, target: Target, pin: Release, commit: str | None, out: Output
) -> Entry:
    """Ask git and the index for what the source does not say.

    Args:
        repo: The rebase's repository.
        target: Its target, an sdist.
        pin: The release that the series comes from.
        commit: The full commit that the user names.

    Raises:
        CannotRun: The commit cannot be learnt, or the index does not answer.
    """
    full = full_commit(target.release, commit)
    torch = target.facts.get("torch", {}).get("torch", UNKNOWN)
    entry = Entry(full, torch, UNKNOWN, [f"g{full[:9]}"])
    index, session = open_index()
    with index:
        if torch == pin.torch:
            entry.triton = pin.triton
        elif torch != UNKNOWN:
            entry.triton = _triton(index, session, torch)
        sums = _sums(repo)
        for project in PROJECTS:
            for package in _wheels(index, project, target.version):
                out.note(f"reading {package.filename} on the index")
                row = _wheel(session, package, project, sums, entry)
                entry.wheels.append(row)
    for name in ("torch", "triton"):
        if getattr(entry, name) == UNKNOWN:
            out.warn(f"the version of {name} is not known; set it in upstream.lock")
    return entry


def full_commit(release: Release, given: str | None) -> str:
    """Give the full commit id of a release.

    Raises:
        CannotRun: It is not given and the git server does not say, or it is not the
            one that the source records.
    """
    short = release.commit
    if given is None and len(short) == 40:
        return short
    if given is None:
        try:
            with gitio.user_configuration():
                raw = git.Git().ls_remote(
                    release.git,
                    f"refs/tags/{release.tag}",
                    f"refs/tags/{release.tag}^{{}}",
                )
        except git.GitCommandError as err:
            raise CannotRun(
                f"cannot ask {release.git} for the commit of {release.tag} "
                f"({gitio.reason(err)}); name it with --commit, the source records "
                f"{short or 'none'}"
            ) from None
        found = [line.split()[0] for line in raw.splitlines() if line.strip()]
        if not found:
            raise CannotRun(
                f"{release.git} has no tag {release.tag}; name the commit with --commit"
            )
        given = found[-1]
    if not re.fullmatch(r"[0-9a-f]{40}", given):
        raise CannotRun(f"--commit {given}: want a full commit id of 40 hex digits")
    if short and not given.startswith(short):
        raise CannotRun(
            f"--commit {given}: the source records {short}; give the commit that "
            f"{release.tag} was built from"
        )
    return given


def _wheels(index: Any, project: str, version: str) -> list[DistributionPackage]:
    try:
        page = project_page(index, project)
    except CannotRun as err:
        if "has no project" in str(err):
            return []
        raise
    found = [
        p
        for p in page.packages
        if p.package_type == "wheel" and p.version and _same(p.version, version)
    ]
    # x86_64 first, as published builds are used most.
    return sorted(found, key=lambda p: ("x86_64" not in p.filename, p.filename))


def _same(one: str, two: str) -> bool:
    try:
        return Version(one) == Version(two)
    except ValueError:
        return False


def _sums(repo: git.Repo) -> dict[str, str]:
    """Map each path of the target to the sha256 that a wheel's RECORD would give."""
    files = gitio.tree_files(repo, TARGET)
    names = list(files)
    contents = gitio.read_blobs(repo, (files[n][1] for n in names))
    return {n: _digest(data) for n, data in zip(names, contents, strict=True)}


def _digest(data: bytes) -> str:
    raw = hashlib.sha256(data).digest()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _wheel(
    session: requests.Session,
    package: DistributionPackage,
    project: str,
    sums: dict[str, str],
    entry: Entry,
) -> dict[str, Any]:
    sha256 = (package.digests or {}).get("sha256")
    if not sha256:
        raise CannotRun(f"the index gives no sha256 for {package.filename}")
    row: dict[str, Any] = {
        "project": project,
        "file": package.filename,
        "sha256": sha256,
        "differs": {},
    }
    try:
        with open_wheel(session, package.url, package.filename) as wheel:
            _compare(wheel, row, sums, entry)
    except (requests.RequestException, zipfile.BadZipFile, KeyError) as err:
        raise CannotRun(f"cannot read {package.filename} on the index: {err}") from None
    return row


def _compare(
    wheel: zipfile.ZipFile, row: dict[str, Any], sums: dict[str, str], entry: Entry
) -> None:
    """Note which Python files of a wheel differ from the source."""
    names = wheel.namelist()
    if _VERSION in names:
        data = wheel.read(_VERSION)
        match = _ID.search(data.decode("utf-8", "replace"))
        if match is None:
            row["differs"][_VERSION] = blob_id(data)
        elif match[1] not in entry.built_as:
            entry.built_as.append(match[1])
    record = next((n for n in names if re.fullmatch(r"[^/]+\.dist-info/RECORD", n)), "")
    for line in wheel.read(record).decode().splitlines() if record else ():
        path, _, rest = line.partition(",")
        digest = rest.partition(",")[0].removeprefix("sha256=")
        if path in sums and digest != sums[path]:
            row["differs"][path] = blob_id(wheel.read(path))


def _triton(index: Any, session: requests.Session, torch: str) -> str:
    """Give the triton that a torch release asks for, from its Linux wheel."""
    found = [p for p in _wheels(index, "torch", torch) if "manylinux" in p.filename]
    for package in found[:1]:
        with open_wheel(session, package.url, package.filename) as wheel:
            name = next(
                n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")
            )
            text = wheel.read(name).decode("utf-8", "replace")
        match = re.search(r"^Requires-Dist: triton==([\w.]+)", text, re.M)
        if match:
            return match[1]
    return UNKNOWN


def as_toml(target: Target, pin: Release, entry: Entry) -> str:
    """Give the entry as TOML text; trees, patches and overlay are not in it."""
    release = target.release
    doc = tomlkit.document()
    releases = tomlkit.table(is_super_table=True)
    table = tomlkit.table()
    for key, value in (
        ("version", release.version),
        ("tag", release.tag),
        ("commit", entry.commit),
        ("git", release.git),
        ("built-as", entry.built_as),
        ("torch", entry.torch),
        ("triton", entry.triton),
    ):
        table.add(key, value)
    sdist = tomlkit.table()
    sdist.add("name", release.sdist_name)
    sdist.add("sha256", release.sdist_sha256)
    table.add("sdist", sdist)
    tree = tomlkit.table()
    tree.add("include", list(pin.include))
    tree.add("exclude", list(pin.exclude))
    tree.add("upstream", "")
    tree.add("final", "")
    table.add("tree", tree)
    if entry.wheels:
        rows = tomlkit.aot()
        for wheel in entry.wheels:
            rows.append(_wheel_table(wheel))
        table.add("wheels", rows)
    releases.add(release.name, table)
    doc.add("releases", releases)
    return tomlkit.dumps(doc)


def _wheel_table(wheel: dict[str, Any]) -> Any:
    table = tomlkit.table()
    for key in ("project", "file", "sha256"):
        table.add(key, wheel[key])
    if wheel["differs"]:
        rows = tomlkit.array()
        for path, blob in sorted(wheel["differs"].items()):
            inline = tomlkit.inline_table()
            inline.update({"path": path, "blob": blob})
            rows.append(inline)
        table.add("differs", rows.multiline(True))
    return table
