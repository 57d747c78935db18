# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""A child's way to its parent: lines on what was its stdout."""

from __future__ import annotations

import json
import os
from typing import IO, Any

_pipe: IO[str] | None = None


def open_channel() -> None:
    """Keep stdout for ``say``; what else is printed, by workers too, goes to stderr."""
    global _pipe
    _pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def say(word: str, value: Any = None) -> None:
    """A line of one word, and of a JSON value if there is one."""
    end = "" if value is None else " " + json.dumps(value)
    print(word + end, file=_pipe, flush=True)


def emit(**result: Any) -> None:
    """One result."""
    say("RESULT", result)
