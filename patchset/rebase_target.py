# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""What a series is rebased onto: a version of the index, or a path."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import requests
from packaging.version import InvalidVersion, Version
from pypi_simple import DistributionPackage, NoSuchProjectError, ProjectPage, PyPISimple

from patchset import gitio
from patchset.download import fetch_sdist, open_index, without_secret
from patchset.errors import CannotRun
from patchset.gitio import git
from patchset.layout import Layout, sha256_of, temp_folder, write_atomic
from patchset.lock import Lock, Release
from patchset.source import Source, import_upstream, in_subset
from patchset.ui import Output

PROJECT = "vllm"
_TIMEOUT = (20, 60)
_COMMIT = re.compile(r"^(?:__commit_id__ = )?commit_id = ['\"]g([0-9a-f]{7,40})", re.M)


@dataclass(frozen=True)
class Target:
    """A release, or a tree, that the series is tried on.

    Args:
        release: The pin with the target's version, commit and sdist in it; of what is
            computed later (trees, wheels, patches, overlay) it holds nothing.
        kind: ``sdist``, ``folder`` or ``git``.
        path: The sdist, the folder, or the git checkout.
        yanked: Why the index took it back; empty where it did not.
    """

    release: Release
    kind: str
    path: Path
    yanked: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> str:
        return self.release.version


def newest(page: ProjectPage, *, pre: bool) -> str | None:
    """Give the newest version that has an sdist and was not yanked.

    Args:
        page: The project on the index.
        pre: Count pre-releases and development releases too.
    """
    found = [
        Version(p.version)
        for p in page.packages
        if p.package_type == "sdist" and p.version and not p.is_yanked and _valid(p)
    ]
    stable = [v for v in found if pre or not v.is_prerelease]
    return str(max(stable)) if stable else None


def _valid(package: DistributionPackage) -> bool:
    try:
        Version(package.version or "")
    except InvalidVersion:
        return False
    return True


def project_page(index: PyPISimple, project: str = PROJECT) -> ProjectPage:
    """Ask the index for one project.

    Raises:
        CannotRun: It does not answer, or does not know the project.
    """
    shown = without_secret(index.endpoint)
    try:
        return index.get_project_page(project, timeout=_TIMEOUT)
    except NoSuchProjectError:
        raise CannotRun(f"the index {shown} has no project {project}") from None
    except (requests.RequestException, ValueError) as err:
        text = (str(err).splitlines() or [type(err).__name__])[0][:200]
        raise CannotRun(
            f"cannot reach the index {shown}: {text}; check the network, name "
            "another index with PIP_INDEX_URL, or give --onto the path of an sdist"
        ) from None


def resolve(
    layout: Layout, lock: Lock, pin: Release, onto: str, out: Output, *, pre: bool
) -> Target | None:
    """Find the target and bring its source into the cache.

    Args:
        onto: A version, ``latest``, or the path of an sdist, an unpacked tree or a
            git checkout.

    Returns:
        The target; None where nothing is newer than the pin.

    Raises:
        CannotRun: The index or the path does not have it.
    """
    if onto == "latest":
        index, session = open_index()
        with index:
            page = project_page(index)
        version = newest(page, pre=pre)
        if version is None:
            raise CannotRun(
                f"--onto latest: the index has no stable sdist of {PROJECT}; "
                "allow pre-releases with --pre, or name a version"
            )
        if Version(version) <= Version(pin.version):
            return None
        return _from_index(layout, lock, pin, version, out)
    if re.search(r"[/\\~]|^\.|\.tar\.gz$", onto) or Path(onto).is_dir():
        return _from_path(layout, pin, Path(onto).expanduser())
    try:
        version = str(Version(onto.removeprefix("v")))
    except InvalidVersion:
        raise CannotRun(
            f"--onto {onto}: want a version, latest, or the path of an sdist, an "
            "unpacked source tree or a git checkout"
        ) from None
    if Version(version) == Version(pin.version):
        raise CannotRun(
            f"--onto {onto}: is the release that the series is for; give another"
        )
    return _from_index(layout, lock, pin, version, out)


def _from_index(
    layout: Layout, lock: Lock, pin: Release, version: str, out: Output
) -> Target:
    layout.cache.mkdir(parents=True, exist_ok=True)
    name = f"{PROJECT}-{version}.tar.gz"
    path, side = layout.cache / name, layout.cache / f"{name}.json"
    facts = _known(layout, lock, version, path, side)
    if facts is None:
        index, session = open_index()
        with index:
            page = project_page(index)
        package = next((p for p in page.packages if p.filename == name), None)
        if package is None:
            latest = newest(page, pre=False) or "none"
            raise CannotRun(
                f"--onto {version}: the index has no {name}; its newest stable "
                f"release is {latest}"
            )
        sha256 = (package.digests or {}).get("sha256")
        if not sha256:
            raise CannotRun(f"the index gives no sha256 for {name}; use another index")
        why = (package.yanked_reason or "no reason given") if package.is_yanked else ""
        facts = {"sha256": sha256, "yanked": why}
        release = _release(pin, version, "0" * 40, name, sha256)
        if not (path.is_file() and sha256_of(path) == sha256):
            fetch_sdist(path, release, out, layout.show(path))
        write_atomic(side, json.dumps(facts).encode())
    if facts["yanked"]:
        out.warn(f"{PROJECT} {version} was yanked from the index: {facts['yanked']}")
    commit = _commit_of_sdist(path)
    return Target(
        _release(pin, version, commit, name, facts["sha256"]),
        "sdist",
        path,
        facts["yanked"],
        {"torch": _torch_of_sdist(path)},
    )


def _known(
    layout: Layout, lock: Lock, version: str, path: Path, side: Path
) -> dict[str, Any] | None:
    """Give what is known of a cached sdist, so that no network is needed."""
    if not path.is_file():
        return None
    for name in lock.names:
        release = lock.release(name)
        if release.version == version and release.sdist_sha256 == sha256_of(path):
            return {"sha256": release.sdist_sha256, "yanked": ""}
    try:
        facts = json.loads(side.read_text())
        if facts["sha256"] == sha256_of(path):
            return {"sha256": facts["sha256"], "yanked": facts.get("yanked", "")}
    except (OSError, ValueError, KeyError):
        pass
    return None


def _release(
    pin: Release, version: str, commit: str, sdist: str, sha256: str
) -> Release:
    return replace(
        pin,
        name=f"v{version}",
        version=version,
        tag=f"v{version}",
        commit=commit,
        built_as=(f"g{commit[:9]}",),
        sdist_name=sdist,
        sdist_sha256=sha256,
        upstream_tree="",
        final_tree="",
        wheels=(),
        image={},
        patches=(),
        overlay={},
    )


def _member(path: Path, wanted: str) -> str:
    """Read one small file of an sdist; empty where it is missing."""
    try:
        with tarfile.open(path, "r:gz") as tar:
            for member in tar:
                if member.name.partition("/")[2] == wanted:
                    handle = tar.extractfile(member)
                    return handle.read().decode("utf-8", "replace") if handle else ""
    except (tarfile.TarError, OSError, EOFError) as err:
        raise CannotRun(f"{path.name} cannot be read as an sdist: {err}") from None
    return ""


def _commit_of_sdist(path: Path) -> str:
    """Give the commit that ``_version.py`` records, as far as it does."""
    match = _COMMIT.search(_member(path, "vllm/_version.py"))
    return match[1] if match else ""


def _torch_of_sdist(path: Path) -> dict[str, str]:
    """Map the torch packages that an sdist asks for to their versions."""
    found = re.findall(
        r"^Requires-Dist: (torch(?:vision|audio)?)==([\w.]+)$",
        _member(path, "PKG-INFO"),
        re.M,
    )
    return dict(found)


def _from_path(layout: Layout, pin: Release, path: Path) -> Target:
    shown = str(path)
    if path.is_file():
        match = re.search(r"-(\d[^/]*?)\.tar\.gz$", path.name)
        version = match[1] if match else ""
        text = _member(path, "vllm/__init__.py")
        if not version or not (text or _member(path, "PKG-INFO")):
            raise CannotRun(
                f"--onto {shown}: is no sdist of vLLM; want vllm-VERSION.tar.gz"
            )
        release = _release(
            pin, version, _commit_of_sdist(path), path.name, sha256_of(path)
        )
        return Target(release, "sdist", path, "", {"torch": _torch_of_sdist(path)})
    if not (path / "vllm" / "__init__.py").is_file():
        raise CannotRun(
            f"--onto {shown}: no such version and no vllm/__init__.py in it; give a "
            "version, latest, an sdist, an unpacked source tree or a git checkout"
        )
    if (path / ".git").exists():
        repo = gitio.open_repo(path)
        commit = repo.git.rev_parse("HEAD")
        with gitio.user_configuration():
            try:
                text = repo.git.describe("--tags", "--always")
            except git.GitCommandError:
                text = commit[:12]
        name = re.sub(r"[^A-Za-z0-9.+-]", "-", text.removeprefix("v"))
        release = _release(pin, name, commit, f"vllm-{name}.tar.gz", "0" * 64)
        return Target(release, "git", path.resolve())
    info = path / "PKG-INFO"
    match = None
    if info.is_file():
        match = re.search(r"^Version: (\S+)", info.read_text(errors="replace"), re.M)
    name = match[1] if match else re.sub(r"[^A-Za-z0-9.+-]", "-", path.resolve().name)
    file = path / "vllm" / "_version.py"
    found = _COMMIT.search(file.read_text(errors="replace")) if file.is_file() else None
    release = _release(
        pin, name, found[1] if found else "", f"vllm-{name}.tar.gz", "0" * 64
    )
    return Target(release, "folder", path.resolve())


def import_target(layout: Layout, repo: git.Repo, target: Target) -> str:
    """Commit the target's subset to a repository, without a parent.

    Returns:
        The commit id.
    """
    release = target.release
    subject = f"upstream vLLM {release.version} ({release.commit[:12] or 'unknown'})"
    if target.kind == "sdist":
        # A bad archive is removed by the reader; a user's own file must stay.
        if target.path.parent == layout.cache:
            return import_upstream(
                repo, Source("sdist", target.path), release, check=False
            )
        temp = temp_folder(layout.build, "sdist")
        try:
            copy = Path(shutil.copy(target.path, temp / target.path.name))
            return import_upstream(repo, Source("sdist", copy), release, check=False)
        finally:
            shutil.rmtree(temp, ignore_errors=True)
    rows = _folder(target.path, release)
    if target.kind == "git":
        rows = _checkout(target.path, release)
    return gitio.fast_import(repo, rows, subject)


def _folder(folder: Path, release: Release) -> Iterator[tuple[str, str, bytes]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if "__pycache__" in name or not in_subset(release, name):
            continue
        if path.is_file() and not path.is_symlink():
            runs = path.stat().st_mode & 0o100
            yield name, "100755" if runs else "100644", path.read_bytes()


def _checkout(folder: Path, release: Release) -> Iterator[tuple[str, str, bytes]]:
    repo = gitio.open_repo(folder)
    files = gitio.tree_files(repo, release.commit)
    names = [
        p for p in sorted(files) if in_subset(release, p) and files[p][0][:3] == "100"
    ]
    contents = gitio.read_blobs(repo, (files[p][1] for p in names))
    for path, data in zip(names, contents, strict=True):
        yield path, files[path][0], data
