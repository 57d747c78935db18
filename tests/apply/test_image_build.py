# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""``apply.py build``: the context, the command, and what is missing. No engine runs."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
from apply_support import RELEASE, Project, make_site

FAKE = """#!/bin/sh
if [ "$1" = info ]; then [ -z "$DOWN" ] || {{ echo "cannot connect" >&2; exit 1; }}; exit 0; fi
echo "$DOCKER_BUILDKIT $@" > {log}
exit ${{CODE:-0}}
"""  # noqa: E501


@pytest.fixture
def tools(tmp_path: Path, monkeypatch) -> Path:
    """A docker and a podman that only record how they were called."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("docker", "podman"):
        (folder / name).write_text(FAKE.format(log=folder / f"{name}.log"))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("BUILDER", raising=False)
    return folder


def _words(tools: Path, name: str = "docker") -> list[str]:
    return shlex.split((tools / f"{name}.log").read_text())


def _arguments(words: list[str]) -> dict[str, str]:
    pairs = [words[i + 1] for i, word in enumerate(words) if word == "--build-arg"]
    return dict(pair.split("=", 1) for pair in pairs)


def test_docker_is_called(project: Project, tools: Path):
    assert project.main("build") == 0
    words = _words(tools)
    assert words[:2] == ["1", "build"]
    context = Path(words[-1])
    assert context == project.root / "build" / f"image-{RELEASE}"
    assert words[words.index("--tag") + 1] == f"ddtree-vllm:{RELEASE}"
    given = _arguments(words)
    assert given["BASE_IMAGE"] == "example/image:1@sha256:00"
    assert given["BASE_NAME"] == "example/image:1"
    assert given["BASE_DIGEST"] == "sha256:00"
    assert given["RELEASE"] == RELEASE
    assert len(given["TREE"]) == 40


def test_an_install_from_the_context(project: Project, tools: Path, site: Path, call):
    """The bundle is enough, and gives what the work tree gives."""
    assert project.main("build") == 0
    context = Path(_words(tools)[-1])
    project.run("install", "--site", str(site))
    other = make_site(site.parent / "other", "vllm")
    (project.root / "build" / "cache").rename(site.parent / "cache-away")
    (context / "none").mkdir()
    done = call(
        "install", "--site", str(other), "--bundle", str(context / "bundle"),
        PATH=str(context / "none"),  # no git
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for path in ("config.py", "engine.py", "extra.py", "tree/__init__.py"):
        assert (other / "vllm" / path).read_bytes() == (
            site / "vllm" / path
        ).read_bytes()


@pytest.mark.parametrize(
    "spoil, code, says",
    [
        (lambda p: p.write_text("x"), 3, "is not as upstream.lock has it"),
        (lambda p: p.unlink(), 2, "files/vllm/config.py: No such file"),
    ],
)
def test_a_spoilt_bundle(project: Project, tools, site, call, spoil, code, says):
    project.run("build")
    bundle = Path(_words(tools)[-1]) / "bundle"
    spoil(bundle / "files/vllm/config.py")
    before = (site / "vllm/config.py").read_bytes()
    done = call("install", "--site", str(site), "--bundle", str(bundle))
    assert done.returncode == code
    assert says in done.stderr
    assert (site / "vllm/config.py").read_bytes() == before


def test_print_needs_no_builder(project: Project, tools, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("BUILDER", "podman")
    assert project.main("build", "--print", "--cpu") == 0
    line = capsys.readouterr().out.strip()
    assert line.startswith("podman build --file ")
    assert "docker/Dockerfile.cpu" in line
    assert f"--tag ddtree-vllm-cpu:{RELEASE}" in line


def test_options_reach_the_builder(project: Project, tools, tmp_path):
    file = tmp_path / "ca"
    file.write_text("x")
    code = project.main(
        "build", "--builder", "podman", "--base-image", "mine:1@sha256:ab",
        "--platform", "linux/arm64", "--network", "host", "--tag", "t:1",
        "--secret", f"cacerts={file}", "--build-arg", "REVISION=abc",
        "--opt=--no-cache --pull",
    )  # fmt: skip
    assert code == 0
    words = _words(tools, "podman")
    assert f"id=cacerts,src={file}" in words
    assert words[words.index("--format") + 1] == "docker"
    assert {"linux/arm64", "host", "t:1", "--no-cache", "--pull"} <= set(words)
    given = _arguments(words)
    assert given["BASE_IMAGE"] == "mine:1@sha256:ab"
    assert given["BASE_DIGEST"] == "sha256:ab"
    assert given["REVISION"] == "abc"


@pytest.mark.parametrize(
    "words, env, code, says",
    [
        (["--builder", "kaniko"], {}, 2, "--builder kaniko: want docker or podman"),
        ([], {"BUILDER": "x"}, 2, "--builder x: want docker or podman"),
        ([], {"DOWN": "1"}, 2, "docker does not answer (cannot connect)"),
        ([], {"CODE": "9"}, 1, "docker build ended with code 9"),
        (["--secret", "cacerts"], {}, 2, "--secret cacerts: write NAME=VALUE"),
        (["--secret", "cacerts=/no"], {}, 2, "/no is no file"),
        (["--build-arg", "X"], {}, 2, "--build-arg X: write NAME=VALUE"),
        (["--release", "v9"], {}, 2, "v9"),
    ],
)
def test_refused(project: Project, tools, monkeypatch, call, words, env, code, says):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    done = call("build", *words)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_no_builder_at_all(project: Project, call, tmp_path):
    git = tmp_path / "only-git"
    git.mkdir()
    (git / "git").symlink_to("/usr/bin/git")
    done = call("build", PATH=str(git))
    assert done.returncode == 2
    assert "docker is not installed: install it, or use BUILDER=podman" in done.stderr


def test_edited_patches_are_refused(project: Project, tools):
    file = next((project.root / "patches" / RELEASE).glob("*.patch"))
    file.write_text(file.read_text() + "\n")
    assert project.main("build") == 3
    assert not (tools / "docker.log").exists()


def test_json(project: Project, tools, capsys):
    assert project.main("build", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["tag"] == f"ddtree-vllm:{RELEASE}"
