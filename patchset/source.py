# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The pinned source: from the sdist, from git, or from a path."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from patchset import gitio
from patchset.errors import CannotRun, CheckFailed, Mismatch
from patchset.gitio import git
from patchset.layout import Layout, sha256_of, temp_folder, write_atomic
from patchset.lock import Release
from patchset.ui import Output

_BAD_TAR = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, OSError)


@dataclass(frozen=True)
class Source:
    """A fetched source in the cache.

    Args:
        kind: ``sdist``, whose file was checked by sha256, or ``tree`` where there is
            none and the subset came from git or a path.
        path: The archive to read: the sdist, or the faster plain archive of the pinned
            subset, which is checked by its git tree id.
    """

    kind: str
    path: Path


def sdist_path(layout: Layout, release: Release) -> Path:
    return layout.cache / release.sdist_name


def tree_path(layout: Layout, release: Release) -> Path:
    return layout.cache / f"vllm-{release.version}-{release.commit[:12]}.tree.tar"


def in_subset(release: Release, path: str) -> bool:
    """Say whether the work tree holds this upstream path."""
    if path in release.exclude:
        return False
    return any(
        path.startswith(prefix) if prefix.endswith("/") else path == prefix
        for prefix in release.include
    )


def cached(layout: Layout, release: Release, *, remove: bool = True) -> Source:
    """Give the fetched source, checked.

    Args:
        remove: Remove a damaged sdist.

    Raises:
        CannotRun: Nothing was fetched yet.
        Mismatch: The cached sdist is not the pinned one.
    """
    sdist, tree = sdist_path(layout, release), tree_path(layout, release)
    usable = tree.is_file() and bool(release.upstream_tree)
    if sdist.is_file():
        check_sdist(sdist, release, remove=remove, shown=layout.show(sdist))
        return Source("sdist", tree if usable else sdist)
    if usable:
        return Source("tree", tree)
    raise CannotRun(
        f"vLLM {release.version} is not in {layout.show(layout.cache)}; "
        "run `python apply.py fetch` first"
    )


def check_sdist(path: Path, release: Release, *, remove: bool, shown: str) -> None:
    """Compare an sdist with the lock; a bad one is removed if it is ours."""
    found = sha256_of(path)
    if found == release.sdist_sha256:
        return
    tail = "; it is left as it is, give another file"
    if remove:
        path.unlink()
        tail = "; it was removed, run `python apply.py fetch` again"
    raise Mismatch(
        f"{shown} is damaged or is another file: sha256 is {found}, "
        f"the lock has {release.sdist_sha256}{tail}",
        file=shown,
        found=found,
        want=release.sdist_sha256,
    )


def members(source: Source, release: Release) -> Iterator[tuple[str, str, bytes]]:
    """Give path, git mode and content of every file of the pinned subset.

    Raises:
        Mismatch: The archive cannot be read, or holds a link or an odd path.
    """
    mode = "r:" if source.path.name.endswith(".tree.tar") else "r:gz"
    try:
        with tarfile.open(source.path, mode) as archive:
            for member in archive:
                path = member.name.partition("/")[2]
                if member.isdir() or not in_subset(release, path):
                    continue
                if not member.isfile() or ".." in path.split("/"):
                    raise Mismatch(f"{source.path.name}: {path} is no plain file")
                handle = archive.extractfile(member)
                data = handle.read() if handle else b""
                yield path, "100755" if member.mode & 0o100 else "100644", data
    except _BAD_TAR as err:
        source.path.unlink(missing_ok=True)
        raise Mismatch(
            f"{source.path.name} cannot be read ({err}); it was removed, run "
            "`python apply.py fetch` again",
            file=source.path.name,
        ) from None


def import_upstream(
    repo: git.Repo, source: Source, release: Release, *, check: bool = True
) -> str:
    """Commit the pinned upstream subset to an empty repository.

    Args:
        check: Compare the tree id with the lock, where the lock has one.

    Returns:
        The commit id.

    Raises:
        Mismatch: The files are not those that the lock pins.
    """
    commit = gitio.fast_import(
        repo, members(source, release), upstream_subject(release)
    )
    tree = repo.git.rev_parse(f"{commit}^{{tree}}")
    if check and release.upstream_tree and tree != release.upstream_tree:
        source.path.unlink(missing_ok=True)
        raise Mismatch(
            f"{source.path.name}: its files make the tree {tree}, the lock has "
            f"{release.upstream_tree}; this is not vLLM {release.version} at "
            f"{release.commit[:12]}; it was removed from the cache, fetch again",
            file=source.path.name,
            found=tree,
            want=release.upstream_tree,
        )
    return commit


def upstream_subject(release: Release) -> str:
    return f"upstream vLLM {release.version} ({release.commit[:12]})"


def fetch(
    layout: Layout, release: Release, where: str, out: Output
) -> tuple[Source, bool]:
    """Bring the pinned source into the cache and check it.

    Args:
        where: ``sdist``, ``git``, or a path to an sdist file, an unpacked tree or a
            git checkout.

    Returns:
        The source, and whether it was there already.
    """
    try:
        layout.cache.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise CannotRun(f"cannot make {layout.cache}: {err.strerror}") from None
    if where == "sdist":
        return _fetch_index(layout, release, out)
    if where == "git":
        return _fetch_git(layout, release, out)
    path = Path(where).expanduser()
    if path.is_file():
        check_sdist(path, release, remove=False, shown=str(path))
        target = sdist_path(layout, release)
        if not (target.exists() and target.samefile(path)):
            write_atomic(target, path.read_bytes())
        return _with_subset(layout, release), False
    if path.is_dir():
        return _from_folder(layout, release, path, out), False
    raise CannotRun(
        f"--source {where}: want sdist, git, or the path of an sdist file, "
        "an unpacked source tree or a git checkout"
    )


def _fetch_index(layout: Layout, release: Release, out: Output) -> tuple[Source, bool]:
    target = sdist_path(layout, release)
    if target.is_file():
        try:
            check_sdist(target, release, remove=True, shown=layout.show(target))
            return _with_subset(layout, release), True
        except Mismatch as err:
            out.warn(str(err).replace("run `python apply.py fetch` again", "fetching"))
    # Imported here because the index client takes a second to load.
    from patchset.download import fetch_sdist

    fetch_sdist(target, release, out, layout.show(target))
    return _with_subset(layout, release), False


def _with_subset(layout: Layout, release: Release) -> Source:
    """Unpack the subset of a checked sdist, so that later commands read it fast."""
    sdist = Source("sdist", sdist_path(layout, release))
    if release.upstream_tree:
        if not tree_path(layout, release).is_file():
            _write_tree(layout, release, members(sdist, release), sdist.path.name)
        else:
            _check_tree(layout, Source("tree", tree_path(layout, release)), release)
    return sdist


class _Progress(git.RemoteProgress):
    """Show git's own progress on a bar."""

    def __init__(self, bar: tqdm) -> None:
        super().__init__()
        self._bar = bar

    def update(self, op_code, cur_count, max_count=None, message="") -> None:
        if op_code & self.RECEIVING:
            self._bar.total = int(max_count or 0) or None
            self._bar.update(int(cur_count) - self._bar.n)


def _fetch_git(layout: Layout, release: Release, out: Output) -> tuple[Source, bool]:
    target = tree_path(layout, release)
    if target.is_file():
        _check_tree(layout, Source("tree", target), release)
        return Source("tree", target), True
    temp = temp_folder(layout.build, "clone")
    try:
        out.note(f"fetching {release.commit[:12]} of {release.git}")
        repo = git.Repo.init(temp, bare=True)
        with gitio.user_configuration(), out.bar(None, "clone", "object") as bar:
            try:
                git.Remote.create(repo, "upstream", release.git).fetch(
                    release.commit, progress=_Progress(bar), depth=1, no_tags=True
                )
            except git.GitCommandError as err:
                raise CannotRun(
                    f"cannot fetch {release.commit[:12]} from {release.git}: "
                    f"{gitio.reason(err)}"
                ) from None
        return _archive(layout, release, repo), False
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _archive(layout: Layout, release: Release, repo: git.Repo) -> Source:
    """Write the subset of the pinned commit of a repository into the cache."""
    files = gitio.tree_files(repo, release.commit)
    wanted = [p for p in sorted(files) if in_subset(release, p)]
    contents = gitio.read_blobs(repo, (files[p][1] for p in wanted))
    rows = ((p, files[p][0], data) for p, data in zip(wanted, contents, strict=True))
    return _write_tree(layout, release, rows, f"commit {release.commit[:12]}")


def _write_tree(
    layout: Layout,
    release: Release,
    rows: Iterator[tuple[str, str, bytes]],
    origin: str,
) -> Source:
    """Write a plain archive of the subset, check its tree id, move it into place."""
    target = tree_path(layout, release)
    handle, name = tempfile.mkstemp(
        prefix=".tmp-", suffix=".tree.tar", dir=layout.cache
    )
    try:
        with os.fdopen(handle, "wb") as out, tarfile.open(fileobj=out, mode="w") as tar:
            for path, mode, data in rows:
                info = tarfile.TarInfo(f"vllm-{release.version}/{path}")
                info.size = len(data)
                info.mode = int(mode[-3:], 8)
                tar.addfile(info, io.BytesIO(data))
        try:
            _check_tree(layout, Source("tree", Path(name)), release)
        except Mismatch as err:
            raise Mismatch(
                f"{origin} is not vLLM {release.version}: its files make the tree "
                f"{err.details.get('found')}, the lock has {release.upstream_tree}",
                **err.details,
            ) from None
        os.chmod(name, 0o644)
        os.replace(name, target)
    finally:
        if os.path.exists(name):
            os.unlink(name)
    return Source("tree", target)


def _check_tree(layout: Layout, source: Source, release: Release) -> None:
    if not release.upstream_tree:
        raise CheckFailed(
            f'upstream.lock: releases."{release.name}".tree.upstream is empty, so that '
            "only the sdist can be checked; run fetch and lock with the sdist first"
        )
    temp = temp_folder(layout.build, "check")
    try:
        import_upstream(gitio.create(temp), source, release)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _from_folder(layout: Layout, release: Release, folder: Path, out: Output) -> Source:
    if (folder / ".git").exists():
        repo = gitio.open_repo(folder)
        try:
            repo.git.cat_file("-e", f"{release.commit}^{{commit}}")
        except git.GitCommandError:
            out.warn(
                f"{folder} does not have commit {release.commit[:12]}; "
                "its files are compared instead"
            )
        else:
            return _archive(layout, release, repo)
    if not (folder / "vllm" / "__init__.py").is_file():
        raise CannotRun(
            f"--source {folder}: no vllm/__init__.py in it; give the top folder of an "
            "unpacked vLLM source tree"
        )

    def rows() -> Iterator[tuple[str, str, bytes]]:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if "__pycache__" in name or not in_subset(release, name):
                continue
            if path.is_file() and not path.is_symlink():
                runs = path.stat().st_mode & 0o100
                yield name, "100755" if runs else "100644", path.read_bytes()

    return _write_tree(layout, release, rows(), str(folder))
