# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Download of the sdist from a package index, resumable and checked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import requests
import urllib3
from pypi_simple import DistributionPackage, NoSuchProjectError, PyPISimple

from patchset.errors import CannotRun, Mismatch
from patchset.layout import sha256_of
from patchset.lock import Release
from patchset.ui import Output

TRIES = 4
_TIMEOUT = (20, 60)
_CHUNK = 1 << 16


def without_secret(url: str) -> str:
    """Give a URL without the user name and password that it may carry."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def pip_setting(name: str) -> str | None:
    """Read a setting of pip, as pip itself would: environment, then its files."""
    value = os.environ.get(f"PIP_{name.upper().replace('-', '_')}")
    if value:
        return value
    pip = shutil.which("pip")
    for command in ([sys.executable, "-m", "pip"], [pip] if pip else None):
        if command is None:
            continue
        done = subprocess.run(
            [*command, "config", "get", f"global.{name}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip()
    return None


def open_index() -> tuple[PyPISimple, requests.Session]:
    """Open the index that pip would use; the library's own default without one."""
    session = requests.Session()
    bundle = os.environ.get("REQUESTS_CA_BUNDLE") or pip_setting("cert")
    bundle = bundle or os.environ.get("SSL_CERT_FILE")
    if bundle and Path(bundle).exists():
        session.verify = bundle
        session.trust_env = True
    url = pip_setting("index-url") or os.environ.get("UV_DEFAULT_INDEX")
    url = url or os.environ.get("UV_INDEX_URL")
    if url:
        return PyPISimple(url, session=session), session
    return PyPISimple(session=session), session


def find_sdist(index: PyPISimple, release: Release) -> DistributionPackage:
    """Look the sdist up on the index.

    Raises:
        CannotRun: The index does not answer, or does not have it.
    """
    project = release.sdist_name.rsplit("-", 1)[0]
    shown = without_secret(index.endpoint)
    try:
        page = index.get_project_page(project, timeout=_TIMEOUT)
    except NoSuchProjectError:
        raise CannotRun(f"the index {shown} has no project {project}") from None
    except requests.RequestException as err:
        raise CannotRun(f"cannot reach the index {shown}: {_reason(err)}") from None
    except ValueError as err:
        raise CannotRun(f"the index {shown} gave no usable page: {err}") from None
    for package in page.packages:
        if package.filename == release.sdist_name:
            return package
    raise CannotRun(
        f"the index {shown} has no {release.sdist_name}; name another index with "
        "PIP_INDEX_URL, or use `fetch --source git` or `fetch --source FILE`"
    )


def fetch_sdist(target: Path, release: Release, out: Output, shown: str) -> None:
    """Download the sdist to `target`, resuming an earlier part.

    Raises:
        CannotRun: The download did not end; its part is kept for the next run.
        Mismatch: The file is not the pinned one; it is named and removed.
    """
    index, session = open_index()
    with index:
        package = find_sdist(index, release)
        part = target.with_name(target.name + ".part")
        resumed = part.exists() and part.stat().st_size > 0
        _complete(session, package.url, part, out, target.name)
        found = sha256_of(part)
        if found != release.sdist_sha256 and resumed:
            out.warn(f"{shown}.part does not continue the pinned file; starting anew")
            part.unlink()
            _complete(session, package.url, part, out, target.name)
            found = sha256_of(part)
    if found != release.sdist_sha256:
        part.unlink()
        raise Mismatch(
            f"{target.name} from {without_secret(package.url)} is damaged or is "
            f"another file: sha256 is {found}, the lock has {release.sdist_sha256}; "
            "it was removed, try again or use another index",
            file=target.name,
            found=found,
            want=release.sdist_sha256,
        )
    os.replace(part, target)


def _complete(
    session: requests.Session, url: str, part: Path, out: Output, label: str
) -> None:
    """Read until the server says that the file is whole, in at most `TRIES` goes."""
    problem = ""
    for attempt in range(TRIES):
        if attempt:
            out.note(f"{label}: {problem}; trying again")
            time.sleep(min(2**attempt, 5) * float(os.environ.get("DDTREE_WAIT", "1")))
        try:
            _read(session, url, part, out, label)
            return
        except (requests.RequestException, urllib3.exceptions.HTTPError) as err:
            response = getattr(err, "response", None)
            problem = _reason(err)
            if response is not None and 400 <= response.status_code < 500:
                break
        except _CutShort as err:
            problem = str(err)
        except OSError as err:
            raise CannotRun(f"cannot write {part.name}: {err.strerror}") from None
    kept = part.stat().st_size if part.exists() else 0
    raise CannotRun(
        f"{label}: {problem}; {kept} bytes are kept in {part.name}, run "
        "`python apply.py fetch` again to resume"
    )


class _CutShort(Exception):
    """The connection ended before the file did."""


def _read(
    session: requests.Session, url: str, part: Path, out: Output, label: str
) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with session.get(url, headers=headers, stream=True, timeout=_TIMEOUT) as reply:
        if reply.status_code == 416:
            total = re.search(r"/(\d+)$", reply.headers.get("Content-Range", ""))
            if total and int(total[1]) == have:
                return
            part.unlink()
            raise _CutShort("the kept part does not fit the file")
        reply.raise_for_status()
        span = re.match(
            r"bytes (\d+)-\d+/(\d+)", reply.headers.get("Content-Range", "")
        )
        if reply.status_code == 206 and span and int(span[1]) == have:
            total_size: int | None = int(span[2])
        else:
            have = 0
            length = reply.headers.get("Content-Length")
            total_size = int(length) if length else None
        with (
            open(part, "ab" if have else "wb") as file,
            out.bar(total_size, label) as bar,
        ):
            bar.update(have)
            while chunk := reply.raw.read(_CHUNK, decode_content=False):
                file.write(chunk)
                have += len(chunk)
                bar.update(len(chunk))
    if total_size is not None and have < total_size:
        raise _CutShort(f"the connection ended after {have} of {total_size} bytes")


def _reason(err: Exception) -> str:
    response = getattr(err, "response", None)
    if response is not None:
        return f"HTTP status {response.status_code}"
    text = str(err.args[0] if err.args else err)
    text = re.sub(r"://[^/@\s]+@", "://", text)
    return f"{type(err).__name__} ({text.splitlines()[0][:160] if text else 'no text'})"
