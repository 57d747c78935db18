# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Build the serving images with Docker or Podman."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from patchset import __version__, gitio
from patchset import install as installing
from patchset.errors import DONE, CannotRun, CheckFailed
from patchset.gitio import git
from patchset.layout import Layout
from patchset.lock import Lock, Release
from patchset.ui import Output

BUILDERS = ("docker", "podman")
CPU_BASE = "python:3.12-slim-bookworm"
# What the Dockerfiles read of the checkout, besides patches and bundle.
_COPIED = (
    "LICENSE",
    "NOTICE",
    "apply.py",
    "docker",
    "models",
    "overlay",
    "patchset",
    "requirements",
    "scripts/pins.py",
    "upstream.lock",
)


def run(args: Namespace, layout: Layout, out: Output) -> tuple[int, dict[str, Any]]:
    """``apply.py build``: make the context, then build, or print the command.

    Raises:
        CannotRun: No builder, no daemon, or an argument that cannot be used.
        CheckFailed: The build failed.
    """
    release = Lock(layout.lock_file).release(args.release)
    builder = args.builder or os.environ.get("BUILDER") or "docker"
    if builder not in BUILDERS:
        raise CannotRun(
            f"--builder {builder}: want {' or '.join(BUILDERS)} (BUILDER= says it too)"
        )
    for option, value in (("--secret", args.secret), ("--build-arg", args.build_arg)):
        for text in value:
            if "=" not in text:
                raise CannotRun(f"{option} {text}: write NAME=VALUE")
    if not args.print:
        check_builder(builder)
    context = make_context(layout, release, out)
    tag = args.tag or default_tag(release, args.cpu)
    command = build_command(args, layout, release, builder, context, tag)
    shown = shlex.join(command)
    data = {"release": release.name, "tag": tag, "command": command}
    data["context"] = str(context)
    if args.print:
        out.say(f"DOCKER_BUILDKIT=1 {shown}" if builder == "docker" else shown)
        return DONE, data
    out.note(shown)
    environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
    # With --json the document alone is on stdout.
    where = 2 if args.json else None
    done = subprocess.run(command, env=environment, stdout=where, check=False)
    if done.returncode:
        raise CheckFailed(
            f"{builder} build ended with code {done.returncode}, see above; no image "
            f"was tagged {tag}"
        )
    out.say(f"built {tag}")
    return DONE, data


def default_tag(release: Release, cpu: bool) -> str:
    """Name and tag of an image."""
    return f"ddtree-vllm{'-cpu' if cpu else ''}:{release.name}"


def check_builder(builder: str) -> None:
    """Refuse a builder that is not there, or whose daemon does not answer.

    Raises:
        CannotRun: With the remedy.
    """
    other = BUILDERS[1 - BUILDERS.index(builder)]
    if shutil.which(builder) is None:
        remedy = f"install it, or use BUILDER={other}"
        raise CannotRun(f"{builder} is not installed: {remedy}")
    done = subprocess.run(
        [builder, "info"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no answer"]
        raise CannotRun(
            f"{builder} does not answer ({lines[-1]}): start its service, set "
            f"DOCKER_HOST, or use BUILDER={other}"
        )


def make_context(layout: Layout, release: Release, out: Output) -> Path:
    """Make build/image-RELEASE: the tool, the pair and the patched files, checked.

    Raises:
        Mismatch: patches/ or overlay/ are not what the lock pins.
    """
    files = installing.contents(layout, release, out)
    with layout.locked():
        target = layout.build / f"image-{release.name}"
        temp = Path(tempfile.mkdtemp(prefix=".tmp-image-", dir=layout.build))
        try:
            for name in _COPIED:
                source, copy = layout.root / name, temp / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                if source.is_dir():
                    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
                    shutil.copytree(source, copy, ignore=ignore)
                elif source.is_file():
                    shutil.copy2(source, copy)
            shutil.copytree(
                layout.patches(release.name), temp / "patches" / release.name
            )
            installing.write_bundle(temp / "bundle", files)
            temp.chmod(0o755)
            shutil.rmtree(target, ignore_errors=True)
            os.rename(temp, target)
        finally:
            shutil.rmtree(temp, ignore_errors=True)
    return target


def base_image(args: Namespace, release: Release) -> tuple[str, str, str]:
    """Give what follows FROM, and name and digest for the labels."""
    if args.base_image:
        name, _, digest = args.base_image.partition("@")
        return args.base_image, name, digest or "unknown"
    if args.cpu:
        return CPU_BASE, CPU_BASE, "unknown"
    name, digest = release.image.get("name", ""), release.image.get("digest", "")
    if not name or not digest:
        raise CannotRun(
            f"upstream.lock: releases.{release.name}.image has no name and digest; "
            "give --base-image NAME@sha256:..."
        )
    return f"{name}@{digest}", name, digest


def build_command(
    args: Namespace,
    layout: Layout,
    release: Release,
    builder: str,
    context: Path,
    tag: str,
) -> list[str]:
    """Give the builder's command line."""
    base, base_name, base_digest = base_image(args, release)
    dockerfile = "Dockerfile.cpu" if args.cpu else "Dockerfile"
    revision, source = origin(layout)
    arguments = {
        "BASE_IMAGE": base,
        "RELEASE": release.name,
        "TREE": release.final_tree,
        "VERSION": f"{release.version}+ddtree.{__version__}",
        "REVISION": revision,
        "SOURCE": source,
        "BASE_NAME": base_name,
        "BASE_DIGEST": base_digest,
    }
    arguments.update(text.split("=", 1) for text in args.build_arg)
    command = [builder, "build", "--file", str(context / "docker" / dockerfile)]
    command += ["--tag", tag]
    if builder == "podman":  # its own format has no HEALTHCHECK
        command += ["--format", "docker"]
    for name, value in arguments.items():
        command += ["--build-arg", f"{name}={value}"]
    if args.platform:
        command += ["--platform", args.platform]
    if args.network:
        command += ["--network", args.network]
    for text in args.secret:
        name, path = text.split("=", 1)
        if not Path(path).expanduser().is_file():
            raise CannotRun(f"--secret {text}: {path} is no file")
        command += ["--secret", f"id={name},src={Path(path).expanduser()}"]
    command += [word for text in args.opt for word in shlex.split(text)]
    return [*command, str(context)]


def origin(layout: Layout) -> tuple[str, str]:
    """Commit of the checkout (``-dirty`` if edited) and where it was cloned from."""
    try:
        repo = git.Repo(layout.root)
        revision = repo.head.commit.hexsha
        if repo.is_dirty(untracked_files=False):
            revision += "-dirty"
        url = next(iter(repo.remote("origin").urls), "")
    except (git.InvalidGitRepositoryError, git.NoSuchPathError):
        return "unknown", "unknown"
    except (ValueError, gitio.git.GitCommandError):
        return revision, "unknown"
    # A local path says nothing to others.
    return revision, url if url.startswith(
        ("https://", "ssh://", "git@")
    ) else "unknown"
