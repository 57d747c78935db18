# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Names of a Python source tree in git, resolved without importing anything."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field

from patchset import gitio
from patchset.gitio import git

Function = ast.FunctionDef | ast.AsyncFunctionDef
_DEPTH = 12  # of re-exports and of base classes


@dataclass(frozen=True)
class Definition:
    """Where a name is defined.

    Args:
        kind: ``module``, ``class``, ``function``, ``value``, ``outside`` (imported
            from another package) or ``dynamic`` (by a module's ``__getattr__``).
        module: Dotted name of the module that defines it.
        name: Its name there.
    """

    kind: str
    module: str
    name: str
    node: ast.AST | None = None


@dataclass
class Module:
    """Top-level names of one module."""

    name: str
    is_package: bool
    names: dict[str, ast.AST] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)


class Tree:
    """The Python modules of one commit.

    Args:
        repo: The repository.
        rev: The commit.
        package: Top-level package; names from others are ``outside``.
    """

    def __init__(self, repo: git.Repo, rev: str, package: str = "vllm") -> None:
        self.repo = repo
        self.rev = rev
        self.package = package
        self.files = {p: oid for p, (_, oid) in gitio.tree_files(repo, rev).items()}
        self._modules: dict[str, Module | None] = {}

    def path(self, module: str) -> str | None:
        """Give the file of a module; None where there is none."""
        base = module.replace(".", "/")
        for path in (f"{base}.py", f"{base}/__init__.py"):
            if path in self.files:
                return path
        return None

    def is_folder(self, module: str) -> bool:
        prefix = module.replace(".", "/") + "/"
        return any(p.startswith(prefix) and p.endswith(".py") for p in self.files)

    def module(self, name: str) -> Module | None:
        """Read a module; None where it is missing or does not parse."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> Module | None:
        path = self.path(name)
        if path is None:
            return None
        data = next(gitio.read_blobs(self.repo, [self.files[path]]))
        try:
            tree = ast.parse(data)
        except (SyntaxError, ValueError):
            return None
        found = Module(name, path.endswith("/__init__.py"))
        for node in top_level(tree.body):
            _enter(found, node)
        return found

    def resolve(self, module: str, name: str, depth: int = 0) -> Definition | None:
        """Find what a name of a module is, through re-exports.

        Returns:
            The definition; None where there is none.
        """
        if module.split(".")[0] != self.package:
            return Definition("outside", module, name)
        held = self.module(module)
        if held is None or depth > _DEPTH:
            inner = f"{module}.{name}"
            known = self.path(inner) or (held is None and self.is_folder(inner))
            return Definition("module", inner, "") if known else None
        node = held.names.get(name)
        if node is not None:
            return Definition(_kind(node), module, name, node)
        if name in held.imports:
            source, inner = held.imports[name]
            if inner is None:
                return self.locate(source)
            found = self.resolve(source, inner, depth + 1)
            if found is not None:
                return found
        for source in held.stars:
            found = self.resolve(source, name, depth + 1)
            if found is not None and found.kind != "outside":
                return found
        if self.path(f"{module}.{name}"):
            return Definition("module", f"{module}.{name}", "")
        if "__getattr__" in held.names:
            return Definition("dynamic", module, name)
        return None

    def locate(self, module: str) -> Definition | None:
        """Find a module."""
        if module.split(".")[0] != self.package:
            return Definition("outside", module, "")
        if self.path(module) or self.is_folder(module):
            return Definition("module", module, "")
        return None

    def find(self, name: str) -> list[str]:
        """List modules that define a class or function of some name at top level."""
        try:
            raw = self.repo.git.grep(
                "-lE",
                rf"^(async def|def|class) {name}\b|^{name}(:.*)? = ",
                self.rev,
                "--",
                f"{self.package}/*.py",
            )
        except git.GitCommandError:
            return []
        paths = [line.split(":", 1)[-1] for line in raw.splitlines()]
        return [
            p.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            for p in paths
        ]

    # Classes.

    def bases(self, found: Definition) -> Iterator[Definition]:
        """Give a class and its base classes that the tree defines, nearest first."""
        seen: set[tuple[str, str]] = set()

        def walk(one: Definition, depth: int) -> Iterator[Definition]:
            if (one.module, one.name) in seen or depth > _DEPTH:
                return
            seen.add((one.module, one.name))
            yield one
            assert isinstance(one.node, ast.ClassDef)
            for expression in one.node.bases:
                base = self.expression(one.module, expression)
                if base is not None and base.kind == "class":
                    yield from walk(base, depth + 1)

        if isinstance(found.node, ast.ClassDef):
            yield from walk(found, 0)

    def expression(self, module: str, node: ast.AST) -> Definition | None:
        """Resolve a dotted name written in a module; subscripts are passed over."""
        while isinstance(node, ast.Subscript):
            node = node.value
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except SyntaxError:
                return None
        if isinstance(node, ast.Name):
            return self.resolve(module, node.id)
        if isinstance(node, ast.Attribute):
            left = self.expression(module, node.value)
            if left is not None and left.kind == "module":
                return self.resolve(left.module, node.attr)
        return None

    def member(self, found: Definition, name: str) -> tuple[str, ast.AST] | None:
        """Find an attribute of a class or its bases.

        Returns:
            Name of the class that has it, and its node.
        """
        for one in self.bases(found):
            assert isinstance(one.node, ast.ClassDef)
            node = members(one.node).get(name)
            if node is not None:
                return one.name, node
        return None

    def abstract(self, found: Definition) -> set[str]:
        """Name the abstract methods that a class leaves to its subclasses."""
        open_names: set[str] = set()
        done: set[str] = set()
        for one in self.bases(found):
            assert isinstance(one.node, ast.ClassDef)
            for name, node in members(one.node).items():
                if isinstance(node, Function) and _has(node, "abstractmethod"):
                    if name not in done:
                        open_names.add(name)
                else:
                    done.add(name)
        return open_names


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Give the statements of a body, those under if, try and with included."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.For):
                yield from top_level(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from top_level(handler.body)


def _enter(module: Module, node: ast.stmt) -> None:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        module.names[node.name] = node
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Name):
                    module.names.setdefault(part.id, node)
    elif isinstance(node, ast.ImportFrom):
        source = absolute(module.name, module.is_package, node)
        for alias in node.names:
            if alias.name == "*":
                module.stars.append(source)
            else:
                module.imports[alias.asname or alias.name] = (source, alias.name)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            whole = alias.name if alias.asname else alias.name.split(".")[0]
            module.imports[alias.asname or whole] = (whole, None)


def absolute(module: str, is_package: bool, node: ast.ImportFrom) -> str:
    """Give the absolute name of the module that an import statement names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    keep = len(parts) - node.level + (1 if is_package else 0)
    return ".".join(parts[:keep] + ([node.module] if node.module else []))


def _kind(node: ast.AST) -> str:
    if isinstance(node, ast.ClassDef):
        return "class"
    return "function" if isinstance(node, Function) else "value"


def _has(node: Function | ast.ClassDef, decorator: str) -> bool:
    return any(decorator in ast.unparse(d) for d in node.decorator_list)


def members(node: ast.ClassDef) -> dict[str, ast.AST]:
    """Map attributes of a class to their nodes: methods, fields, ``self.x = ...``."""
    found: dict[str, ast.AST] = {}
    methods = []
    for child in top_level(node.body):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[child.name] = child
            if not isinstance(child, ast.ClassDef):
                methods.append(child)
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            for target in targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        found.setdefault(part.id, child)
    for method in methods:
        for part in ast.walk(method):
            if (
                isinstance(part, ast.Attribute)
                and isinstance(part.ctx, ast.Store)
                and isinstance(part.value, ast.Name)
                and part.value.id in ("self", "cls")
            ):
                found.setdefault(part.attr, part)
    return found


def signature(node: ast.AST, *, bound: bool) -> inspect.Signature | None:
    """Make the signature of a function or method from its source.

    Args:
        node: The function.
        bound: Leave out ``self`` or ``cls``.
    """
    if not isinstance(node, Function):
        return None
    kinds = inspect.Parameter
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    without = len(plain) - len(arguments.defaults)
    rows = []
    for number, arg in enumerate(plain):
        kind = kinds.POSITIONAL_OR_KEYWORD
        if number < len(arguments.posonlyargs):
            kind = kinds.POSITIONAL_ONLY
        default = kinds.empty if number < without else None
        rows.append(kinds(arg.arg, kind, default=default))
    if bound and rows and not _has(node, "staticmethod"):
        rows = rows[1:]
    if arguments.vararg:
        rows.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for arg, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        default = kinds.empty if value is None else None
        rows.append(kinds(arg.arg, kinds.KEYWORD_ONLY, default=default))
    if arguments.kwarg:
        rows.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(rows)


def difference(old: inspect.Signature, new: inspect.Signature) -> str:
    """Say in words how a signature changed; empty where it did not."""
    one, two = old.parameters, new.parameters
    parts = []
    gone = [n for n in one if n not in two]
    if gone:
        parts.append(f"without {', '.join(gone)}")
    fresh = [n for n in two if n not in one]
    needed = [
        n
        for n in fresh
        if two[n].default is inspect.Parameter.empty
        and two[n].kind
        not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    if needed:
        parts.append(f"needs {', '.join(needed)}")
    optional = [n for n in fresh if n not in needed]
    if optional:
        parts.append(f"takes {', '.join(optional)}")
    both = [n for n in one if n in two]
    if [n for n in two if n in one] != both:
        parts.append("in another order")
    other = [
        n
        for n in both
        if one[n].kind != two[n].kind
        or (one[n].default is None) != (two[n].default is None)
    ]
    if other:
        parts.append(f"with other kinds of {', '.join(other)}")
    return "; ".join(parts)


def fits(new: inspect.Signature, call: ast.Call) -> bool:
    """Say whether a call can be made; with ``*args`` or ``**kwargs`` it may be."""
    stars = any(isinstance(a, ast.Starred) for a in call.args)
    stars = stars or any(k.arg is None for k in call.keywords)
    words = {k.arg: None for k in call.keywords if k.arg is not None}
    try:
        if stars:
            plain = [a for a in call.args if not isinstance(a, ast.Starred)]
            new.bind_partial(*plain, **words)
        else:
            new.bind(*call.args, **words)
    except TypeError:
        return False
    return True


def accepts(ours: inspect.Signature, base: inspect.Signature, by_name: bool) -> bool:
    """Say whether a call with every argument of the base class reaches ours."""
    kinds = inspect.Parameter
    places: list[None] = []
    words: dict[str, None] = {}
    for name, parameter in base.parameters.items():
        if parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
            continue
        named = parameter.kind == kinds.KEYWORD_ONLY
        if named or (by_name and parameter.kind == kinds.POSITIONAL_OR_KEYWORD):
            words[name] = None
        else:
            places.append(None)
    try:
        ours.bind(*places, **words)
    except TypeError:
        return False
    return True
