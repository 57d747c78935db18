# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Whether the upstream names that the overlay uses still mean the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from patchset.symbols import (
    Definition,
    Function,
    Tree,
    absolute,
    accepts,
    difference,
    fits,
    members,
    signature,
)


@dataclass(frozen=True)
class Problem:
    """One use of an upstream name that the target does not serve as the pin did.

    Args:
        level: ``breaks``, or ``note`` where the use still fits.
        change: ``module gone``, ``moved``, ``gone``, ``signature``, ``abstract`` or
            ``clash`` (the target has a file of that path itself).
        use: ``import``, ``call``, ``subclass``, ``override``, ``attribute``, ``file``.
    """

    level: str
    change: str
    file: str
    line: int
    name: str
    use: str
    text: str


@dataclass
class Checked:
    """Outcome of the overlay check: how many uses were looked up, and problems."""

    uses: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def breaks(self) -> list[Problem]:
        return [p for p in self.problems if p.level == "breaks"]

    def data(self) -> dict[str, Any]:
        return {"uses": self.uses, "problems": [asdict(p) for p in self.problems]}


def check(overlay: dict[str, Path], pin: Tree, target: Tree) -> Checked:
    """Resolve every upstream name that overlay modules use, on both sides.

    Only what the pin resolves counts: the rest comes from patches or from outside.

    Args:
        overlay: Overlay path to file.
        pin: Source that the overlay was written for.
        target: Source to check against.
    """
    done = Checked()
    own = {
        p.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for p in overlay
        if p.endswith(".py")
    }
    for path, file in overlay.items():
        if path in target.files:
            text = "the target has a file of this path; rename the overlay's"
            done.problems.append(
                Problem("breaks", "clash", f"overlay/{path}", 1, path, "file", text)
            )
        if path.endswith(".py"):
            _File(done, path, file, own, pin, target).run()
    done.problems.sort(key=lambda p: (p.level, p.file, p.line, p.name))
    return done


class _File:
    """The check of one overlay module."""

    def __init__(
        self,
        done: Checked,
        path: str,
        file: Path,
        own: set[str],
        pin: Tree,
        target: Tree,
    ) -> None:
        self.done = done
        self.path = f"overlay/{path}"
        self.tree = ast.parse(file.read_bytes(), str(file))
        self.is_package = path.endswith("/__init__.py")
        self.name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.own = own
        self.pin = pin
        self.target = target
        # Local name -> where it was imported from.
        self.imported: dict[str, tuple[str, str | None]] = {}
        self.seen: set[tuple[str, str, int]] = set()

    def run(self) -> None:
        for node, soft in _with_fallbacks(self.tree, False):
            if isinstance(node, ast.ImportFrom):
                self._import_from(node, soft)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self._module(alias.name, node.lineno, soft)
                    whole = alias.name if alias.asname else alias.name.split(".")[0]
                    self.imported[alias.asname or whole] = (whole, None)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                self._call(node)
            elif isinstance(node, ast.Attribute):
                self._attribute(node)
            elif isinstance(node, ast.ClassDef):
                _Class(self, node).run()
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._parameters(node, {})

    def report(
        self, level: str, change: str, line: int, name: str, use: str, text: str
    ) -> None:
        if (change, name, line) not in self.seen:
            self.seen.add((change, name, line))
            self.done.problems.append(
                Problem(level, change, self.path, line, name, use, text)
            )

    # Imports.

    def _upstream(self, module: str) -> bool:
        return module.split(".")[0] == self.pin.package and module not in self.own

    def _module(self, module: str, line: int, soft: bool) -> bool:
        if not self._upstream(module) or self.pin.locate(module) is None:
            return False
        self.done.uses += 1
        if self.target.locate(module) is not None:
            return True
        level = "note" if soft else "breaks"
        text = f"the target has no module {module}"
        self.report(level, "module gone", line, module, "import", text)
        return False

    def _import_from(self, node: ast.ImportFrom, soft: bool) -> None:
        module = absolute(self.name, self.is_package, node)
        if module in self.own or not self._upstream(module):
            return
        for alias in node.names:
            if f"{module}.{alias.name}" in self.own:
                continue
            self.imported[alias.asname or alias.name] = (module, alias.name)
            if self.pin.resolve(module, alias.name) is None:
                continue
            self.done.uses += 1
            if self.target.resolve(module, alias.name) is None:
                self._missing(module, alias.name, node.lineno, soft)

    def _missing(self, module: str, name: str, line: int, soft: bool) -> None:
        level = "note" if soft else "breaks"
        whole = f"{module}.{name}"
        places = self.target.find(name)
        if places:
            text = f"the target has {name} in {', '.join(places[:3])}"
            self.report(level, "moved", line, whole, "import", text)
            return
        if self.target.locate(module) is None:
            text = f"the target has no module {module}, and {name} nowhere else"
            self.report(level, "module gone", line, whole, "import", text)
            return
        text = f"{module} of the target has no {name}, nor has another module"
        self.report(level, "gone", line, whole, "import", text)

    # Uses.

    def pair(self, node: ast.AST) -> tuple[Definition, Definition] | None:
        """Resolve an expression on both sides; None unless both have it."""
        one, two = self._find(self.pin, node), self._find(self.target, node)
        return (one, two) if one is not None and two is not None else None

    def _find(self, tree: Tree, node: ast.AST) -> Definition | None:
        while isinstance(node, ast.Subscript):
            node = node.value
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except SyntaxError:
                return None
        if isinstance(node, ast.BinOp):  # X | None
            return self._find(tree, node.left)
        if isinstance(node, ast.Name) and node.id in self.imported:
            module, name = self.imported[node.id]
            return tree.locate(module) if name is None else tree.resolve(module, name)
        if isinstance(node, ast.Attribute):
            left = self._find(tree, node.value)
            if left is not None and left.kind == "module":
                return tree.resolve(left.module, node.attr)
        return None

    def _attribute(self, node: ast.Attribute) -> None:
        """Check ``module.name`` and ``Class.name``."""
        pair = self.pair(node.value)
        if pair is None:
            return
        one, two = pair
        if one.kind == "module":
            if self.pin.resolve(one.module, node.attr) is None:
                return
            self.done.uses += 1
            if (
                two.kind == "module"
                and self.target.resolve(two.module, node.attr) is None
            ):
                self._missing(one.module, node.attr, node.lineno, False)
        elif one.kind == "class":
            self.member(one, two, node.attr, node.lineno, "attribute", None)

    def _call(self, node: ast.Call) -> None:
        pair = self.pair(node.func)
        if pair is not None:
            one, two = pair
            if one.kind == "function":
                self.done.uses += 1
                self.compare(one.node, two.node, one.name, node, node.lineno, False)
            elif one.kind == "class" and two.kind == "class":
                self.member(one, two, "__init__", node.lineno, "call", node)
            return
        if isinstance(node.func, ast.Attribute):
            pair = self.pair(node.func.value)
            if pair is not None and pair[0].kind == "class":
                self.member(*pair, node.func.attr, node.lineno, "call", node)

    def member(
        self,
        one: Definition,
        two: Definition,
        name: str,
        line: int,
        use: str,
        call: ast.Call | None,
    ) -> None:
        """Check an attribute of an upstream class, and a call of it."""
        old = self.pin.member(one, name)
        if old is None:
            return
        self.done.uses += 1
        new = self.target.member(two, name)
        whole = f"{one.name}.{name}"
        if new is None:
            if name != "__init__":
                text = f"{two.name} of the target has no {name}"
                self.report("breaks", "gone", line, whole, use, text)
            return
        if call is not None:
            self.compare(old[1], new[1], whole, call, line, True)

    def compare(
        self,
        old: ast.AST | None,
        new: ast.AST | None,
        name: str,
        call: ast.Call,
        line: int,
        bound: bool,
    ) -> None:
        """Compare two signatures and try our call on the new one."""
        one = signature(old, bound=bound) if old else None
        two = signature(new, bound=bound) if new else None
        if one is None or two is None:
            return
        words = difference(one, two)
        if not words:
            return
        level = "note" if fits(two, call) else "breaks"
        tail = "our call still fits" if level == "note" else "our call does not fit"
        self.report(level, "signature", line, name, "call", f"{words}; {tail}")

    def _parameters(self, node: Function, known: dict[str, ast.AST]) -> None:
        """Check attributes of parameters whose annotation is an upstream class."""
        types = dict(known)
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        types.update({a.arg: a.annotation for a in every if a.annotation is not None})
        for part in ast.walk(node):
            if isinstance(part, ast.Assign) and isinstance(part.value, ast.Name):
                for target in part.targets:
                    if isinstance(target, ast.Name) and part.value.id in types:
                        types.setdefault(target.id, types[part.value.id])
        self.attributes(node, types)

    def attributes(self, node: ast.AST, types: dict[str, ast.AST]) -> None:
        """Check ``name.attr`` and ``name.method()`` for names of known types."""
        pairs = {n: p for n, t in types.items() if (p := self.pair(t)) is not None}
        calls = {id(c.func): c for c in ast.walk(node) if isinstance(c, ast.Call)}
        for part in ast.walk(node):
            if not isinstance(part, ast.Attribute):
                continue
            pair = pairs.get(ast.unparse(part.value))
            if pair is not None and {pair[0].kind, pair[1].kind} == {"class"}:
                call = calls.get(id(part))
                use = "call" if call else "attribute"
                self.member(*pair, part.attr, part.lineno, use, call)


class _Class:
    """An overlay class and what it takes from upstream base classes."""

    def __init__(self, file: _File, node: ast.ClassDef) -> None:
        self.file = file
        self.node = node
        self.own = members(node)

    def run(self) -> None:
        for base in self.node.bases:
            pair = self.file.pair(base)
            if pair is not None and {pair[0].kind, pair[1].kind} == {"class"}:
                self.file.done.uses += 1
                self._base(*pair)
        self._typed_fields()

    def _base(self, one: Definition, two: Definition) -> None:
        file = self.file
        fresh = file.target.abstract(two) - file.pin.abstract(one) - set(self.own)
        for name in sorted(fresh):
            file.report(
                "breaks",
                "abstract",
                self.node.lineno,
                f"{two.name}.{name}",
                "subclass",
                f"{self.node.name} has to define {name}, which is abstract now",
            )
        for name, node in self.own.items():
            if isinstance(node, Function):
                self._override(one, two, name, node)
        inner = {id(c.func): c for c in ast.walk(self.node) if isinstance(c, ast.Call)}
        for part in ast.walk(self.node):
            if not isinstance(part, ast.Attribute):
                continue
            left = ast.unparse(part.value)
            inherited = left in ("self", "cls") and part.attr not in self.own
            if inherited or left == "super()":
                call = inner.get(id(part))
                use = "call" if call else "attribute"
                file.member(one, two, part.attr, part.lineno, use, call)

    def _override(
        self, one: Definition, two: Definition, name: str, node: Function
    ) -> None:
        file = self.file
        old = file.pin.member(one, name)
        if old is None or name == "__init__":
            return
        file.done.uses += 1
        new = file.target.member(two, name)
        whole = f"{one.name}.{name}"
        if new is None:
            text = f"{two.name} of the target has no {name}: ours is never called"
            file.report("breaks", "gone", node.lineno, whole, "override", text)
            return
        before, after = signature(old[1], bound=True), signature(new[1], bound=True)
        ours = signature(node, bound=True)
        if before is None or after is None or ours is None:
            return
        words = difference(before, after)
        if words:
            held = [m for m in (True, False) if accepts(ours, before, m)]
            same = all(accepts(ours, after, mode) for mode in held)
            level = "note" if same else "breaks"
            tail = "ours still takes it" if same else "ours does not take it"
            text = f"{words}; {tail}"
            file.report(level, "signature", node.lineno, whole, "override", text)

    def _typed_fields(self) -> None:
        """Check ``self.x.attr`` where ``self.x`` is a parameter of a known type."""
        start = self.own.get("__init__")
        if not isinstance(start, Function):
            return
        types = {
            a.arg: a.annotation
            for a in [*start.args.args, *start.args.kwonlyargs]
            if a.annotation is not None
        }
        fields: dict[str, ast.AST] = {}
        for part in ast.walk(start):
            if isinstance(part, ast.Assign) and isinstance(part.value, ast.Name):
                for target in part.targets:
                    name = ast.unparse(target)
                    if name.startswith("self.") and part.value.id in types:
                        fields[name] = types[part.value.id]
        if not fields:
            return
        for method in self.own.values():
            if isinstance(method, Function):
                local = dict(fields)
                for part in ast.walk(method):
                    if isinstance(part, ast.Assign):
                        source = ast.unparse(part.value)
                        for target in part.targets:
                            if isinstance(target, ast.Name) and source in fields:
                                local[target.id] = fields[source]
                self.file.attributes(method, local)


def _with_fallbacks(node: ast.AST, soft: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Give all nodes, and whether a failing import there has a fallback."""
    for child in ast.iter_child_nodes(node):
        inner = soft
        if isinstance(child, ast.Try):
            inner = soft or any(
                h.type is not None and "Error" in ast.unparse(h.type)
                for h in child.handlers
            )
        yield child, inner
        yield from _with_fallbacks(child, inner)
