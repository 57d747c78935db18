# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Engines in processes of their own, which can be watched and killed whole."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

SCRIPTS = Path(__file__).resolve().parent.parent


class BenchError(Exception):
    """What the user has to mend, in one line."""


class Hang(BenchError):
    """An engine said nothing for too long and was killed."""


def exit_on_sigterm() -> None:
    """Have SIGTERM end this process through its ``finally`` blocks.

    Children have process groups of their own, so that nobody else ends them.
    """

    def stop(*_: Any) -> None:
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)


class Child:
    """One engine in a process of its own; its other output goes to stderr.

    Args:
        job: What ``benchlib.child`` is told at the start; ``arm`` is its name.
        environment: Variables in addition to this process's.
        log: File for its other output in place of stderr.
        silence: Seconds without a result after which it counts as hung; None waits
            for ever.
        command: For tests, another program.

    Raises:
        Hang: From every method that waits, after ``silence`` seconds.
        BenchError: From every method that waits, if the engine failed.
    """

    def __init__(
        self,
        job: dict[str, Any],
        environment: dict[str, str] | None = None,
        log: IO[str] | None = None,
        silence: float | None = None,
        command: list[str] | None = None,
    ) -> None:
        self.arm = job["arm"]
        self.silence = silence
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
            json.dump(job, file)
        self.file = Path(file.name)
        paths = [str(SCRIPTS), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(p for p in paths if p)
        self.process = subprocess.Popen(
            command or [sys.executable, "-m", "benchlib.child", file.name],
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # a group to kill, workers included
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line)

    def _line(self) -> str:
        """The next line, or an empty one after the process's end."""
        begin = time.monotonic()
        while True:
            gone = self.process.poll() is not None
            # Workers that outlive their parent keep the pipe open: no end of file.
            with contextlib.suppress(queue.Empty):
                return self._lines.get(timeout=1)
            if gone:
                return ""
            if self.silence and time.monotonic() - begin > self.silence:
                raise Hang(
                    f"arm {self.arm!r} said nothing for {self.silence:g} s and was "
                    "killed"
                )

    def results(self) -> Iterator[dict[str, Any]]:
        """Results as they come, up to the end of the start or of what was asked."""
        try:
            while line := self._line():
                if line.startswith("RESULT "):
                    yield json.loads(line[7:])
                elif line.startswith("FAILED "):
                    reason = json.loads(line[7:])
                    raise BenchError(f"the engine of arm {self.arm!r} failed: {reason}")
                elif line == "DONE\n":
                    return
            raise BenchError(f"the engine of arm {self.arm!r} ended; see its output")
        except BaseException:
            self.kill()
            raise

    def wait(self) -> list[dict[str, Any]]:
        """All ``results``."""
        return list(self.results())

    def tell(self, **changes: Any) -> None:
        """Start one measurement, with ``changes`` to the job."""
        with contextlib.suppress(BrokenPipeError):  # results() says so
            self.process.stdin.write(json.dumps(changes) + "\n")
            self.process.stdin.flush()

    def ask(self, **changes: Any) -> list[dict[str, Any]]:
        """Results of one measurement, with ``changes`` to the job."""
        self.tell(**changes)
        return self.wait()

    def kill(self) -> None:
        """End the process and all that it started, workers that hang included."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        # The next engine wants the memory of the last worker.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            for _ in range(50):
                os.killpg(self.process.pid, 0)
                time.sleep(0.1)

    def end(self) -> None:
        """Let it stop, without waiting for that."""
        self.file.unlink(missing_ok=True)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self) -> None:
        self.end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=60)
        self.kill()


def run_child(job: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Results of an engine that measures once; ``options`` are ``Child``'s."""
    child = Child(job, **options)
    try:
        child.wait()
        return child.ask()
    finally:
        child.close()
