# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""A Docker engine for the tests: the one that answers, or a private one.

A private engine needs root, ``dockerd`` and ``mmdebstrap`` (Debian: docker.io and
mmdebstrap). It has no bridge; builds and containers use the host's network.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Another client that is earlier on PATH may lack what is needed.
DOCKER = "/usr/bin/docker" if Path("/usr/bin/docker").exists() else "docker"
BASE = "ddtree-test-base:python"
PULLED = "python:3.12-slim-bookworm"
PACKAGES = "python3,python3-venv,ca-certificates,libnuma1"


class NoEngine(Exception):
    """Why no engine can be had here."""


@dataclass
class Engine:
    """A running engine.

    Attributes:
        environment: For ``docker`` and ``apply.py build``.
    """

    environment: dict[str, str]

    def docker(self, *words: str, check: bool = True, timeout: float = 900, **more):
        """Run the client; output is captured as text."""
        done = subprocess.run(
            [DOCKER, *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            **more,
        )
        if check and done.returncode:
            raise AssertionError(f"docker {' '.join(words[:3])}: {done.stderr[-3000:]}")
        return done


def _environment(**more: str) -> dict[str, str]:
    found = {**os.environ, "DOCKER_BUILDKIT": "1", **more}
    found["PATH"] = f"{Path(DOCKER).parent}:{found['PATH']}"
    return found


def _answers(environment: dict[str, str]) -> bool:
    done = subprocess.run([DOCKER, "info"], env=environment, capture_output=True)
    return done.returncode == 0


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    """The engine, with a base image ``BASE`` of Debian and Python.

    Raises:
        NoEngine: There is none and none can be started.
    """
    if shutil.which(DOCKER) is None:
        raise NoEngine("docker is not installed")
    ours = _environment()
    if _answers(ours):
        found = Engine(ours)
        make_base(found)
        yield found
        return
    missing = [name for name in ("dockerd", "mmdebstrap") if shutil.which(name) is None]
    if os.geteuid() != 0:
        missing.append("root")
    if missing:
        raise NoEngine(f"no engine answers, and a private one lacks {missing}")
    # The socket's path has to be short.
    folder = Path(tempfile.mkdtemp(prefix="dde", dir="/tmp"))
    socket = f"unix://{folder}/s"
    environment = _environment(DOCKER_HOST=socket, DOCKER_CONFIG=str(folder / "cfg"))
    log = open(folder / "log", "wb")  # noqa: SIM115
    words = ["-H", socket, "--data-root", f"{folder}/data", "--exec-root"]
    words += [f"{folder}/exec", "--pidfile", f"{folder}/pid"]
    words += ["--storage-driver=overlay2", "--iptables=false", "--ip-masq=false"]
    daemon = subprocess.Popen(
        ["dockerd", *words, "--bridge=none"], stdout=log, stderr=log
    )
    try:
        end = time.monotonic() + 60
        while not _answers(environment):
            if daemon.poll() is not None or time.monotonic() > end:
                text = (folder / "log").read_text(errors="replace")
                raise NoEngine(f"dockerd does not start: {text[-1500:]}")
            time.sleep(0.5)
        found = Engine(environment)
        make_base(found)
        yield found
    finally:
        daemon.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(60)
        daemon.kill()
        log.close()
        for mount in (folder / "exec/netns").glob("*"):
            subprocess.run(["umount", str(mount)], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def make_base(found: Engine) -> None:
    """Debian with Python, made here; pulled only where mmdebstrap is missing."""
    done = found.docker("image", "inspect", BASE, check=False)
    if done.returncode == 0:
        return
    if shutil.which("mmdebstrap") is None:
        done = found.docker("pull", PULLED, check=False)
        if done.returncode:
            raise NoEngine(f"no mmdebstrap, and {PULLED} cannot be pulled")
        found.docker("tag", PULLED, BASE)
        return
    clean = 'rm -f "$1"/etc/resolv.conf "$1"/etc/hostname'
    make = subprocess.Popen(
        [
            "mmdebstrap",
            "--quiet",
            "--variant=minbase",
            "--dpkgopt=force-unsafe-io",
            f"--include={PACKAGES}",
            f"--customize-hook={clean}",
            "bookworm",
            "-",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    loaded = subprocess.run(
        [DOCKER, "import", "-", BASE],
        env=found.environment,
        stdin=make.stdout,
        capture_output=True,
    )
    errors = make.stderr.read().decode(errors="replace") if make.stderr else ""
    if make.wait() or loaded.returncode:
        raise NoEngine(f"no base image: {errors[-800:]} {loaded.stderr[-400:]!r}")


def build_words() -> list[str]:
    """Arguments of ``apply.py build`` for this machine: network and certificates."""
    words = ["--network", "host"]
    for name in ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        path = os.environ.get(name)
        if path and Path(path).is_file():
            return [*words, "--secret", f"cacerts={path}"]
    default = "/etc/ssl/certs/ca-certificates.crt"
    if Path(default).is_file():
        words += ["--secret", f"cacerts={default}"]
    return words
