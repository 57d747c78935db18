# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Single files of a wheel on a server, by HTTP ranges, without the whole of it."""

from __future__ import annotations

import io
import zipfile

import requests

from patchset.errors import CannotRun

_TIMEOUT = (20, 60)
_BLOCK = 1 << 18


class _Ranges(io.RawIOBase):
    """A file on a server, read in blocks that are kept."""

    def __init__(self, session: requests.Session, url: str) -> None:
        self.session = session
        self.url = url
        self.blocks: dict[int, bytes] = {}
        self.place = 0
        reply = session.get(
            url, headers={"Range": "bytes=0-0"}, stream=True, timeout=_TIMEOUT
        )
        with reply:
            reply.raise_for_status()
            span = reply.headers.get("Content-Range", "")
        if "/" not in span:
            raise requests.RequestException("the server does not serve ranges")
        self.size = int(span.rpartition("/")[2])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.size}
        self.place = start[whence] + offset
        return self.place

    def readinto(self, buffer) -> int:
        number, inside = divmod(self.place, _BLOCK)
        data = self._block(number)[inside : inside + len(buffer)]
        buffer[: len(data)] = data
        self.place += len(data)
        return len(data)

    def _block(self, number: int) -> bytes:
        if number * _BLOCK >= self.size:
            return b""
        if number not in self.blocks:
            last = min((number + 1) * _BLOCK, self.size) - 1
            reply = self.session.get(
                self.url,
                headers={"Range": f"bytes={number * _BLOCK}-{last}"},
                timeout=_TIMEOUT,
            )
            reply.raise_for_status()
            self.blocks[number] = reply.content
        return self.blocks[number]


def open_wheel(session: requests.Session, url: str, name: str) -> zipfile.ZipFile:
    """Open a wheel on a server for reading.

    Raises:
        CannotRun: The server does not answer, or serves no ranges.
    """
    try:
        return zipfile.ZipFile(io.BufferedReader(_Ranges(session, url), _BLOCK))
    except (requests.RequestException, zipfile.BadZipFile, OSError) as err:
        text = (str(err).splitlines() or [type(err).__name__])[0][:160]
        raise CannotRun(f"cannot read {name} on the index: {text}") from None
