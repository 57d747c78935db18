# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The CPU image serves; the CUDA Dockerfile checks its base and its result."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from engine import Engine

LOCKED_DOWN = [
    "--network", "host", "--shm-size", "1g", "--read-only", "--tmpfs", "/tmp:exec",
    "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
    "--user", "12345:12345",
]  # fmt: skip
PROMPTS = ["def main(", "import os\n", "class Error(", "    return self", "# The ",
           "for i in range(", "if not ", "Raise ValueError"]  # fmt: skip
TOKENS = 40
START_SECONDS = 400


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Served:
    """A container that serves, and a client for it."""

    def __init__(self, docker: Engine, image: str, name: str, *words: str) -> None:
        self.docker, self.name, self.port = docker, name, free_port()
        docker.docker("rm", "--force", name, check=False)
        begin = time.monotonic()
        docker.docker(
            "run", "--detach", "--name", name, *LOCKED_DOWN, *words, image,
            "--port", str(self.port),
        )  # fmt: skip
        self.begin = begin
        url = f"http://127.0.0.1:{self.port}/v1"
        self.client = openai.OpenAI(base_url=url, api_key="x", timeout=300)

    def log(self) -> str:
        done = self.docker.docker("logs", self.name, check=False)
        return done.stdout + done.stderr

    def wait(self) -> float:
        """Seconds until Docker calls it healthy."""
        form = "{{.State.Status}} {{.State.Health.Status}}"
        while True:
            state = self.docker.docker("inspect", "--format", form, self.name).stdout
            if state.split() == ["running", "healthy"]:
                return time.monotonic() - self.begin
            spent = time.monotonic() - self.begin
            if state.startswith("exited") or spent > START_SECONDS:
                pytest.fail(
                    f"{state.strip()} after {spent:.0f} s\n{self.log()[-4000:]}"
                )
            time.sleep(1)

    def complete(self, prompt: str) -> str:
        answer = self.client.completions.create(
            model="tiny-qwen3", prompt=prompt, max_tokens=TOKENS, temperature=0.0
        )
        return answer.choices[0].text

    def stop(self) -> tuple[int, float]:
        """Exit code and seconds from SIGTERM to the end."""
        begin = time.monotonic()
        self.docker.docker("stop", "--time", "20", self.name)
        seconds = time.monotonic() - begin
        form = "{{.State.ExitCode}}"
        code = self.docker.docker("inspect", "--format", form, self.name).stdout
        return int(code), seconds


@contextlib.contextmanager
def serving(docker: Engine, image: str, name: str, *words: str) -> Iterator[Served]:
    served = Served(docker, image, name, *words)
    try:
        yield served
    finally:
        docker.docker("rm", "--force", name, check=False)


@pytest.fixture(scope="module")
def servers(docker: Engine, cpu_image: str) -> Iterator[tuple[Served, Served]]:
    """One with trees and one without, started together."""
    with (
        serving(docker, cpu_image, "ddtree-tree") as tree,
        serving(docker, cpu_image, "ddtree-off", "--env", "DDTREE=off") as plain,
    ):
        seconds = tree.wait(), plain.wait()
        print(f"healthy after {seconds[0]:.0f} and {seconds[1]:.0f} s")
        yield tree, plain


def test_labels(docker: Engine, cpu_image: str):
    form = "{{json .Config}}"
    done = docker.docker("image", "inspect", "--format", form, cpu_image)
    config = json.loads(done.stdout)
    labels = config["Labels"]
    for name in ("source", "revision", "version", "base.name", "base.digest"):
        assert labels[f"org.opencontainers.image.{name}"]
    assert len(labels["ddtree.patch-set.tree"]) == 40
    assert config["Entrypoint"] == ["ddtree-entrypoint", "vllm", "serve"]
    assert config["Healthcheck"]["Test"] == ["CMD", "ddtree-health"]


@pytest.fixture(scope="module")
def texts(servers) -> tuple[list[str], list[str]]:
    """Eight greedy completions at once of each server."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        got, want = (list(pool.map(s.complete, PROMPTS)) for s in servers)
    return got, want


def test_greedy_text_equals_plain(texts):
    got, want = texts
    assert got == want
    assert len(set(got)) > 4


def test_ddtree_is_on(servers):
    tree, plain = servers
    assert "DDTree is on: tree_budget=31" in tree.log()
    assert "DDTree is on" not in plain.log()


def test_chat_stream(servers):
    chunks = servers[0].client.chat.completions.create(
        model="tiny-qwen3",
        messages=[{"role": "user", "content": "def f("}],
        max_tokens=TOKENS,
        temperature=0.0,
        stream=True,
    )
    parts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert len([p for p in parts if p]) > 1
    assert "".join(parts).strip()


def test_end_of_the_servers(servers):
    """SIGTERM ends both with code 0. Later tests must not need them."""
    for served in servers:
        code, seconds = served.stop()
        print(f"{served.name}: code {code} after {seconds:.1f} s")
        assert code == 0, served.log()[-3000:]
        assert seconds < 20


def test_tensor_parallel_2(docker: Engine, cpu_image: str, texts):
    """Two ranks over gloo; the texts are those that one rank gave."""
    words = ["--env", "DDTREE_TP=2", "--env", "VLLM_CPU_OMP_THREADS_BIND=0|1"]
    with serving(docker, cpu_image, "ddtree-tp2", *words) as served:
        print(f"healthy after {served.wait():.0f} s")
        assert "tensor_parallel_size=2" in served.log()
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            assert list(pool.map(served.complete, PROMPTS)) == texts[0]
        code, seconds = served.stop()
        assert code == 0, served.log()[-3000:]
        assert seconds < 20


@pytest.mark.parametrize(
    "words, says",
    [
        (["--env", "DDTREE_DRAFTER=/nowhere"], "drafter /nowhere does not exist"),
        (["--env", "DDTREE_MODEL=/nowhere"], "model /nowhere does not exist"),
        (["--env", "DDTREE_MODEL=someone/model"], "is not in the cache"),
        (["--env", "DDTREE_BUDGET=128"], "DDTREE_BUDGET='128'"),
        (["--env", "DDTREE=maybe"], "DDTREE='maybe' is unknown"),
        (["--env", "DDTREE_DEVICE=cuda"], "no GPU is visible"),
    ],
)
def test_what_is_missing_is_told_in_one_line(docker, cpu_image, words, says):
    done = docker.docker("run", "--rm", *LOCKED_DOWN, *words, cpu_image, check=False)
    assert done.returncode == 2
    lines = [x for x in done.stderr.splitlines() if not x.startswith("ddtree: note")]
    assert len(lines) == 1, lines
    assert lines[0].startswith("ddtree: error: ")
    assert says in lines[0]


def test_cuda_dockerfile_on_a_good_base(docker, build, stand_in):
    """Checks, the change and the post-conditions run; 20 MB at most are added."""
    base = stand_in("good")
    build("--base-image", base, "--tag", "ddtree-test-cuda")
    form = "{{.Size}}"
    sizes = [
        int(docker.docker("image", "inspect", "--format", form, name).stdout)
        for name in (base, "ddtree-test-cuda")
    ]
    print(f"added: {(sizes[1] - sizes[0]) / 1e6:.1f} MB")
    assert 0 < sizes[1] - sizes[0] < 20e6
    done = docker.docker("history", "--no-trunc", "ddtree-test-cuda")
    assert "ddtree-health" in done.stdout
    # Nothing of the build is left.
    left = docker.docker(
        "run", "--rm", "--entrypoint", "sh", "ddtree-test-cuda", "-c",
        "ls -A /tmp /root/.cache 2>/dev/null; ls -ld /data",
    )  # fmt: skip
    assert left.stdout.splitlines()[-1].startswith("drwxrwxrwt")
    assert "build" not in left.stdout


@pytest.mark.parametrize(
    "name, edit, says",
    [
        (
            "version",
            "sed -i 's/^Version: .*/Version: 0.25.0/' vllm-*.dist-info/METADATA",
            "has vllm 0.25.0, the series is for vLLM",
        ),
        (
            "commit",
            "sed -i -E \"s/'g[0-9a-f]{9}'/'gdeadbeef0'/\" vllm/_version.py",
            "built from commit gdeadbeef0",
        ),
        (
            "edited",
            "echo '# mine' >> vllm/config/speculative.py",
            "are not as expected",
        ),
        ("none", "rm -rf vllm vllm-*.dist-info", "vLLM is not installed there"),
    ],
)
def test_cuda_dockerfile_refuses_a_bad_base(build, stand_in, name, edit, says):
    done = build("--base-image", stand_in(name, edit), "--tag", "bad", check=False)
    assert done.returncode == 1
    assert says in done.stdout + done.stderr
    assert "no image was tagged bad" in done.stderr
