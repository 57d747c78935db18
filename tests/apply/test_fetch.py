# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Fetching from a package index, from git, from paths; damage on the way."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from apply_support import VERSION, Project

NAME = f"vllm-{VERSION}.tar.gz"


class Index:
    """A PEP 503 index on 127.0.0.1 whose downloads can go wrong.

    Args:
        data: The sdist.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.cuts: list[int] = []  # bytes to send before hanging up, per request
        self.ranges = True
        self.status = 200
        self.present = True
        self.requests: list[str | None] = []
        self.total_claim: int | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.serve(self)

            def log_message(self, *args) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def serve(self, reply: BaseHTTPRequestHandler) -> None:
        if reply.path.startswith("/simple/"):
            known = reply.path == "/simple/vllm/"
            name = NAME if self.present else "vllm-0.0.1.tar.gz"
            page = f'<a href="/files/{name}">{name}</a>'.encode()
            reply.send_response(200 if known else 404)
            reply.send_header("Content-Type", "text/html")
            reply.send_header("Content-Length", str(len(page)))
            reply.end_headers()
            reply.wfile.write(page)
            return
        wanted = reply.headers.get("Range")
        self.requests.append(wanted)
        if self.status != 200:
            reply.send_error(self.status)
            return
        start = 0
        if wanted and self.ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(self.data):
                reply.send_response(416)
                reply.send_header("Content-Range", f"bytes */{len(self.data)}")
                reply.send_header("Content-Length", "0")
                reply.end_headers()
                return
            reply.send_response(206)
            end = len(self.data) - 1
            span = f"bytes {start}-{end}/{len(self.data)}"
            reply.send_header("Content-Range", span)
        else:
            reply.send_response(200)
        body = self.data[start:]
        reply.send_header("Content-Length", str(self.total_claim or len(body)))
        reply.end_headers()
        cut = self.cuts.pop(0) if self.cuts else len(body)
        reply.wfile.write(body[:cut])


@pytest.fixture
def empty(project: Project) -> Project:
    """A project with an empty cache; the sdist lies beside it."""
    shutil.move(project.cache / NAME, project.root.parent / NAME)
    shutil.rmtree(project.cache)
    return project


@pytest.fixture
def index(empty: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    server = Index((empty.root.parent / NAME).read_bytes())
    monkeypatch.setenv("PIP_INDEX_URL", server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.server.shutdown()


def test_fetch_from_the_index(empty: Project, index: Index, as_json) -> None:
    code, document = as_json("fetch")
    assert (code, document["source"], document["present"]) == (0, "sdist", False)
    assert (empty.cache / NAME).read_bytes() == index.data
    code, document = as_json("fetch")
    assert (code, document["present"]) == (0, True)
    assert len(index.requests) == 1
    empty.run("apply", "--force")


def test_interrupted_download_is_resumed(empty: Project, index: Index, as_json) -> None:
    index.cuts = [100, 200]
    code, document = as_json("fetch")
    assert code == 0, document
    assert index.requests == [None, "bytes=100-", "bytes=300-"]
    assert (empty.cache / NAME).read_bytes() == index.data


def test_part_of_an_earlier_run_is_resumed(
    empty: Project, index: Index, as_json
) -> None:
    index.cuts = [10, 10, 10, 10]
    code, document = as_json("fetch")
    assert code == 2
    assert "40 bytes are kept" in document["error"]["message"]
    assert not (empty.cache / NAME).exists()
    assert as_json("fetch")[0] == 0
    assert index.requests[-1] == "bytes=40-"


def test_server_without_ranges(empty: Project, index: Index, as_json) -> None:
    index.ranges = False
    index.cuts = [100]
    assert as_json("fetch")[0] == 0
    assert (empty.cache / NAME).read_bytes() == index.data


@pytest.mark.parametrize("length", ["whole", "longer"])
def test_odd_part_files(empty: Project, index: Index, as_json, length: str) -> None:
    empty.cache.mkdir()
    part = empty.cache / f"{NAME}.part"
    part.write_bytes(index.data + (b"x" if length == "longer" else b""))
    assert as_json("fetch")[0] == 0
    assert (empty.cache / NAME).read_bytes() == index.data
    assert not part.exists()


def test_part_of_another_file_is_started_anew(
    empty: Project, index: Index, as_json
) -> None:
    empty.cache.mkdir()
    (empty.cache / f"{NAME}.part").write_bytes(b"z" * 50)
    code, document = as_json("fetch")
    assert code == 0
    assert any("starting anew" in text for text in document["warnings"])


def test_damaged_download_is_named_and_removed(
    empty: Project, index: Index, as_json
) -> None:
    index.data = index.data[:-5] + b"WRONG"
    code, document = as_json("fetch")
    assert code == 3
    assert NAME in document["error"]["message"]
    found = hashlib.sha256(index.data).hexdigest()
    assert document["error"]["found"] == found
    assert list(empty.cache.iterdir()) == []


def test_truncated_file_on_the_server(empty: Project, index: Index, as_json) -> None:
    index.data = index.data[:-50]
    assert as_json("fetch")[0] == 3
    assert list(empty.cache.iterdir()) == []


def test_damaged_cached_file_is_fetched_again(
    empty: Project, index: Index, as_json
) -> None:
    assert as_json("fetch")[0] == 0
    (empty.cache / NAME).write_bytes(b"damaged")
    code, document = as_json("fetch")
    assert (code, document["present"]) == (0, False)
    assert any(NAME in text for text in document["warnings"])
    assert (empty.cache / NAME).read_bytes() == index.data


@pytest.mark.parametrize("status", [404, 503])
def test_server_errors(empty: Project, index: Index, as_json, status: int) -> None:
    index.status = status
    code, document = as_json("fetch")
    assert code == 2
    assert f"HTTP status {status}" in document["error"]["message"]
    assert len(index.requests) == (1 if status == 404 else 4)


def test_index_without_the_file(empty: Project, index: Index, as_json) -> None:
    index.present = False
    code, document = as_json("fetch")
    assert code == 2
    assert "PIP_INDEX_URL" in document["error"]["message"]


def test_index_that_does_not_answer(empty: Project, monkeypatch, as_json) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    code, document = as_json("fetch")
    assert code == 2
    assert "127.0.0.1:9" in document["error"]["message"]
    assert "secret" not in document["error"]["message"]


def _checkout(folder: Path, sdist: Path) -> str:
    """Make a git repository of the synthetic upstream; give its commit."""
    folder.mkdir()
    with tarfile.open(sdist) as tar:
        for member in tar.getmembers():
            member.name = member.name.partition("/")[2]
            if member.name and member.name != "vllm/_version.py":
                member.uid = member.gid = 0
                tar.extract(member, folder)
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.invalid")
    for argv in (
        ("init", "-q"),
        ("add", "-A"),
        (*identity, "commit", "-q", "-m", "upstream", "--no-gpg-sign"),
        ("config", "uploadpack.allowAnySHA1InWant", "true"),
    ):
        subprocess.run(["git", "-C", str(folder), *argv], check=True)
    done = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "HEAD"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.strip()


def _pin(project: Project, commit: str, url: str) -> None:
    from apply_support import COMMIT, UPSTREAM_GIT

    text = project.lock.read_text()
    project.lock.write_text(text.replace(COMMIT, commit).replace(UPSTREAM_GIT, url))


def test_git_and_paths_give_the_same_tree(empty: Project, as_json) -> None:
    sdist = empty.root.parent / NAME
    folder = empty.root.parent / "clone"
    commit = _checkout(folder, sdist)
    _pin(empty, commit, folder.as_uri())
    plain = empty.root.parent / "plain"
    shutil.copytree(folder, plain, ignore=shutil.ignore_patterns(".git"))
    trees = set()
    for where in ("git", str(folder), str(plain), str(sdist)):
        shutil.rmtree(empty.cache, ignore_errors=True)
        code, document = as_json("fetch", "--source", where)
        assert code == 0, document
        assert document["source"] == ("sdist" if where == str(sdist) else "tree")
        code, document = as_json("apply", "--force")
        assert code == 0, document
        trees.add(document["tree"])
        assert document["lock_matches"] is True
        assert as_json("verify")[0] == 0
    assert len(trees) == 1
    assert as_json("fetch", "--source", "git")[0] == 0


def test_git_without_the_commit(empty: Project, as_json) -> None:
    folder = empty.root.parent / "clone"
    _checkout(folder, empty.root.parent / NAME)
    _pin(empty, "f" * 40, folder.as_uri())
    code, document = as_json("fetch", "--source", "git")
    assert code == 2
    assert "ffffffffffff" in document["error"]["message"]


def test_wrong_paths(empty: Project, as_json, tmp_path: Path) -> None:
    bad = tmp_path / "bad.tar.gz"
    bad.write_bytes(b"x")
    code, document = as_json("fetch", "--source", str(bad))
    assert code == 3
    assert "bad.tar.gz" in document["error"]["message"]
    assert bad.exists()  # it is the user's own file
    code, document = as_json("fetch", "--source", str(tmp_path / "none"))
    assert code == 2
    (tmp_path / "folder").mkdir()
    code, document = as_json("fetch", "--source", str(tmp_path / "folder"))
    assert code == 2
    assert "vllm/__init__.py" in document["error"]["message"]


def test_changed_tree_is_refused(empty: Project, as_json) -> None:
    folder = empty.root.parent / "changed"
    _checkout(folder, empty.root.parent / NAME)
    (folder / "vllm/other.py").write_text("OTHER = 7\n")
    code, document = as_json("fetch", "--source", str(folder))
    assert code == 3
    assert str(folder) in document["error"]["message"]
    assert not list(empty.cache.glob("*.tar"))
