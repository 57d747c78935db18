# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Whether upstream names that the overlay uses are found on the target."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchset import gitio
from patchset.overlay_check import check
from patchset.symbols import Tree

PIN = {
    "vllm/__init__.py": "from vllm.api import LLM\nfrom vllm.base import *\n",
    "vllm/api.py": "class LLM:\n    pass\n",
    "vllm/lazy.py": "def __getattr__(name):\n    return 1\n",
    "vllm/base.py": """
from abc import ABC, abstractmethod

def helper(a, b, c=1):
    return a

class Config:
    limit: int = 1

class Root(ABC):
    @abstractmethod
    def must(self): ...

    def kept(self, x):
        self.state = 1

class Base(Root):
    def must(self): ...

    def hook(self, one, two=None, **kwargs): ...

    @staticmethod
    def plain(a): ...
""",
}
OVERLAY = """
from typing import TYPE_CHECKING

import vllm.base
from vllm import LLM, helper
from vllm.base import Base, Config
from vllm.lazy import anything

try:
    from vllm.base import Root
except ImportError:
    Root = object

if TYPE_CHECKING:
    from vllm.api import LLM as Type


class Ours(Base):
    def hook(self, one, two=None):
        super().hook(one, two)
        self.kept(self.state)

    def use(self, config: Config, api: "Type"):
        return config.limit, Base.plain(1), vllm.base.Config


def call():
    return helper(1, 2), LLM()
"""


@pytest.fixture
def run(tmp_path: Path):
    """Check the overlay against a target that differs by replacements in base.py."""
    file = tmp_path / "ours.py"
    file.write_text(OVERLAY)
    gitio.prepare_environment()

    def make(name: str, files: dict[str, str]) -> Tree:
        repo = gitio.create(tmp_path / name)
        rows = ((p, "100644", t.encode()) for p, t in files.items())
        return Tree(repo, gitio.fast_import(repo, rows, name))

    def go(*changes: tuple[str, str], **files: str | None):
        text = PIN["vllm/base.py"]
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        new = {**PIN, "vllm/base.py": text}
        for name, content in files.items():
            path = f"vllm/{name}.py"
            if content is None:
                del new[path]
            else:
                new[path] = content
        overlay = {"vllm/ours.py": file}
        return check(overlay, make("pin", PIN), make("target", new))

    return go


def _rows(found) -> list[tuple[str, str, str, str]]:
    return [(p.level, p.change, p.name, p.use) for p in found.problems]


def test_the_same_tree_has_no_problem(run) -> None:
    found = run()
    assert found.problems == []
    assert found.uses >= 15


def test_re_exports_are_followed(run) -> None:
    """LLM comes through vllm/__init__.py, helper through a star import there."""
    moved = "from vllm.far import LLM\n"
    assert run(api=moved, far=PIN["vllm/api.py"]).problems == []


def test_symbol_gone(run) -> None:
    found = run(("class Config:", "class Other:"))
    assert ("breaks", "gone", "vllm.base.Config", "import") in _rows(found)


def test_symbol_moved(run) -> None:
    found = run(
        ("class Config:\n    limit: int = 1\n", ""),
        config="class Config:\n    limit: int = 1\n",
    )
    row = next(p for p in found.problems if p.change == "moved")
    assert row.text == "the target has Config in vllm.config"


def test_module_gone(run) -> None:
    found = run(lazy=None)
    assert _rows(found) == [("breaks", "module gone", "vllm.lazy.anything", "import")]


def test_import_with_a_fallback_is_a_note(run) -> None:
    found = run(("Root", "Stem"))
    assert _rows(found) == [("note", "gone", "vllm.base.Root", "import")]


@pytest.mark.parametrize(
    ("change", "row"),
    [
        (("b, c=1)", "b, c)"), ("breaks", "signature", "helper", "call")),
        (("b, c=1)", "b, d=1)"), ("note", "signature", "helper", "call")),
        (("(a, b, c=1)", "(a, c=1)"), ("note", "signature", "helper", "call")),
        (("(a, b, c=1)", "(a)"), ("breaks", "signature", "helper", "call")),
        (
            ("one, two=None, **", "one, two, three, **"),
            ("breaks", "signature", "Base.hook", "override"),
        ),
        (("def hook", "def other"), ("breaks", "gone", "Base.hook", "override")),
        (("self.state", "self.status"), ("breaks", "gone", "Base.state", "attribute")),
        (("def kept(self, x)", "def kept(self)"),
         ("breaks", "signature", "Base.kept", "call")),
        (("limit: int", "bound: int"),
         ("breaks", "gone", "Config.limit", "attribute")),
        (("def plain(a)", "def plain(a, b)"),
         ("breaks", "signature", "Base.plain", "call")),
    ],
)  # fmt: skip
def test_uses(run, change: tuple[str, str], row: tuple[str, str, str, str]) -> None:
    assert row in _rows(run(change))


def test_new_abstract_method(run) -> None:
    fresh = "    @abstractmethod\n    def fresh(self): ...\n\n    def kept"
    found = run(("    def kept", fresh))
    assert ("breaks", "abstract", "Base.fresh", "subclass") in _rows(found)


def test_target_has_the_file_itself(run) -> None:
    found = run(ours="")
    assert ("breaks", "clash", "vllm/ours.py", "file") in _rows(found)
