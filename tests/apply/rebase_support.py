# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Releases after the synthetic upstream, and an index on 127.0.0.1 that has them."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from apply_support import FILES

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
ENGINE = FILES["vllm/engine.py"]
CONFIG = FILES["vllm/config.py"]


def sdist(path: Path, version: str, changes: dict[str, str | None]) -> Path:
    """Write an sdist of a later release.

    Args:
        path: Folder to write to.
        version: Its version.
        changes: Path to new content; None removes the file.
    """
    files: dict[str, str | None] = {
        **FILES,
        "PKG-INFO": f"Name: vllm\nVersion: {version}\nRequires-Dist: torch==2.0.0\n",
        "vllm/_version.py": f"__commit_id__ = commit_id = 'g{COMMIT[:9]}'\n",
        **changes,
    }
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, text in files.items():
            if text is not None:
                info = tarfile.TarInfo(f"vllm-{version}/{name}")
                info.size = len(text.encode())
                info.mode = 0o775 if name.endswith(".sh") else 0o664
                tar.addfile(info, io.BytesIO(text.encode()))
    path.mkdir(parents=True, exist_ok=True)
    target = path / f"vllm-{version}.tar.gz"
    target.write_bytes(gzip.compress(raw.getvalue(), mtime=0))
    return target


class Index:
    """A PEP 503 index with hashes and yanked files, and byte ranges for downloads."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.yanked: dict[str, str] = {}
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.serve(self)

            def log_message(self, *args) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def add(self, path: Path, yanked: str | None = None) -> None:
        self.files[path.name] = path.read_bytes()
        if yanked is not None:
            self.yanked[path.name] = yanked

    def serve(self, reply: BaseHTTPRequestHandler) -> None:
        self.asked.append(reply.path)
        kind, _, rest = reply.path.strip("/").partition("/")
        if kind == "simple":
            project = rest.replace("-", "_")
            rows = [self._row(n) for n in self.files if n.split("-")[0] == project]
            self._send(reply, 200 if rows else 404, "\n".join(rows).encode())
            return
        data = self.files[rest]
        span = reply.headers.get("Range")
        if span is None:
            self._send(reply, 200, data, "application/octet-stream")
            return
        first, _, last = span.removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1 if last else None]
        reply.send_response(206)
        end = int(first) + len(part) - 1
        reply.send_header("Content-Range", f"bytes {first}-{end}/{len(data)}")
        reply.send_header("Content-Length", str(len(part)))
        reply.end_headers()
        reply.wfile.write(part)

    def _row(self, name: str) -> str:
        digest = hashlib.sha256(self.files[name]).hexdigest()
        why = self.yanked.get(name)
        mark = "" if why is None else f' data-yanked="{why}"'
        return f'<a href="/files/{name}#sha256={digest}"{mark}>{name}</a>'

    def _send(
        self,
        reply: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        kind: str = "text/html",
    ) -> None:
        reply.send_response(status)
        reply.send_header("Content-Type", kind)
        reply.send_header("Content-Length", str(len(body)))
        reply.end_headers()
        reply.wfile.write(body)
