# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Where prose, progress and the JSON document go."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

SCHEMA_VERSION = 1


class Output:
    """Prose on stdout, or on stderr when stdout carries a JSON document.

    Args:
        command: Name of the subcommand, repeated in the document.
        as_json: Whether stdout carries one JSON document.
    """

    def __init__(self, command: str, as_json: bool) -> None:
        self.command = command
        self.as_json = as_json
        self.warnings: list[str] = []
        stream = sys.stderr if as_json else sys.stdout
        self._prose = Console(
            file=stream, highlight=False, soft_wrap=True, markup=False, emoji=False
        )
        self._errors = Console(
            file=sys.stderr, highlight=False, soft_wrap=True, markup=False, emoji=False
        )

    def say(self, text: str) -> None:
        """Print a result for a person."""
        self._prose.print(text)

    def note(self, text: str) -> None:
        """Print what is being done, on stderr."""
        self._errors.print(text, style="dim")

    def warn(self, text: str) -> None:
        """Print a warning on stderr and keep it for the document."""
        self.warnings.append(text)
        self._errors.print(f"warning: {text}", style="yellow")

    def fail(self, text: str) -> None:
        """Print the one error of a command on stderr."""
        self._errors.print(f"error: {text}", style="red")

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Print a table with the given columns."""
        table = Table(title=title, title_justify="left", title_style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        self._prose.print(table)

    def bar(self, total: int | None, label: str, unit: str = "B") -> tqdm:
        """Make a progress bar on stderr; it stays silent where that is no terminal."""
        return tqdm(
            total=total,
            desc=label,
            unit=unit,
            unit_scale=unit == "B",
            unit_divisor=1024,
            file=sys.stderr,
            leave=False,
            disable=None,
        )

    def document(self, code: int, data: dict[str, Any], error: Any = None) -> None:
        """Write the JSON document, if one was asked for."""
        if not self.as_json:
            return
        whole = {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "ok": code == 0,
            "exit_code": code,
            "error": error,
            "warnings": self.warnings,
            **data,
        }
        json.dump(whole, sys.stdout, indent=2, sort_keys=False, default=str)
        sys.stdout.write("\n")
        sys.stdout.flush()
