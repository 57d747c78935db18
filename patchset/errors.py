# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Exit codes, and one exception class for each that is not 0."""

from __future__ import annotations

from typing import Any

DONE = 0
FAILED = 1
CANNOT_RUN = 2
MISMATCH = 3


class PatchsetError(Exception):
    """An error that ends the command with one message and no traceback.

    Args:
        message: What is wrong and what to do, for a person.
        details: Plain data for the JSON document.
    """

    exit_code = FAILED

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details


class CheckFailed(PatchsetError):
    """A patch or a check failed, or a change would lose work: exit code 1."""

    exit_code = FAILED


class CannotRun(PatchsetError):
    """Network, disk, usage or a missing program: exit code 2."""

    exit_code = CANNOT_RUN


class Mismatch(PatchsetError):
    """Something is not what the lock file says: exit code 3."""

    exit_code = MISMATCH
