"""Makes one self-contained Python file out of the definitions of this package that some of its names need.

Only what is reached is taken, as it stands in its module, comments included; imports among the modules go, and of two
definitions with one name both get their module's name behind it. Left out are branches for Triton's engine, which must
return and have no `else`.
"""

from __future__ import annotations

import ast
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "hybridize"
_ENGINE = "uses_triton"  # an `if` that asks this is about the other engine
Place = tuple[str, str]  # a module, and a name that it defines
Span = tuple[int, int]  # bytes of a module's source


@dataclass
class _Module:
    """One module's source, the statement that binds each name at its top, and where imported names come from."""

    name: str
    source: bytes
    tree: ast.Module
    bound: dict[str, ast.stmt] = field(default_factory=dict)
    ours: dict[str, Place] = field(default_factory=dict)  # local name -> module and name of this package
    theirs: dict[str, str] = field(default_factory=dict)  # local name -> the import statement
    below: list[str] = field(default_factory=list)  # modules that are imported when this one is

    @property
    def lines(self) -> list[int]:
        """Where each line begins."""
        starts = [0]
        for line in self.source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    def span(self, node: ast.AST) -> Span:
        """The bytes of a node."""
        starts = self.lines
        first = min([node, *getattr(node, "decorator_list", [])], key=lambda n: n.lineno)
        begin = starts[first.lineno - 1] + (0 if first is not node else node.col_offset)
        return begin, starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]


@cache
def _module(name: str) -> _Module:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(name)
    source = Path(spec.origin).read_bytes()
    module = _Module(name, source, ast.parse(source))
    for statement in module.tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            module.below += [n for n, _ in _imported(statement) if n.split(".")[0] == PACKAGE]
            _note_import(module, statement)
        else:
            for bound in _binds(statement):
                module.bound[bound] = statement
    return module


def _imported(statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, ast.alias]]:
    for alias in statement.names:
        yield (alias.name if isinstance(statement, ast.Import) else str(statement.module)), alias


def _note_import(module: _Module, statement: ast.Import | ast.ImportFrom) -> None:
    for source, alias in _imported(statement):
        local = alias.asname or alias.name.split(".")[0]
        if source.split(".")[0] == PACKAGE and isinstance(statement, ast.ImportFrom):
            module.ours[local] = source, alias.name
        elif source != "__future__":
            renamed = f" as {alias.asname}" if alias.asname else ""
            where = f"from {source} " if isinstance(statement, ast.ImportFrom) else ""
            module.theirs[local] = f"{where}import {alias.name}{renamed}"


def _binds(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [n.id for target in targets if target is not None for n in ast.walk(target) if isinstance(n, ast.Name)]


def _resolved(place: Place) -> Place:
    """Where a name is defined that a module may only pass on."""
    module = _module(place[0])
    if place[1] in module.bound:
        return place
    if place[1] in module.ours:
        return _resolved(module.ours[place[1]])
    raise LookupError(f"{place[0]} neither defines nor imports {place[1]}")


class _Names(ast.NodeVisitor):
    """The global names that a statement reads or binds, each with its node; and what is to be left out of it."""

    def __init__(self) -> None:
        self.found: list[tuple[str, ast.AST]] = []
        self.left_out: list[ast.stmt] = []
        self.lazy: dict[str, Place] = {}
        self.scopes: list[tuple[set[str], bool]] = []  # names bound there, and whether it is a class's body

    def visit_Name(self, node: ast.Name) -> None:
        if not any(node.id in names for names, _ in self.scopes):
            self.found.append((node.id, node))

    def visit_If(self, node: ast.If) -> None:
        if any(isinstance(n, ast.Name) and n.id == _ENGINE for n in ast.walk(node.test)):
            self.left_out.append(node)
        else:
            self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if str(node.module).split(".")[0] == PACKAGE:
            self.left_out.append(node)
            self.lazy.update({alias.asname or alias.name: (str(node.module), alias.name) for alias in node.names})

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
        arguments = [n for n in ast.walk(node.args) if isinstance(n, ast.arg)]
        notes = [n.annotation for n in arguments if n.annotation] + ([node.returns] if node.returns else [])
        for part in [*outside, *notes]:
            self.visit(part)
        self._within(node.body, {n.arg for n in arguments} | _locals(node.body))

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._within([node.body], {n.arg for n in ast.walk(node.args) if isinstance(n, ast.arg)})

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in [*node.decorator_list, *node.bases, *(k.value for k in node.keywords)]:
            self.visit(part)
        self.scopes.append(({name for statement in node.body for name in _binds(statement)}, True))
        for statement in node.body:
            self.visit(statement)
        self.scopes.pop()

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        self.scopes.append(({n for g in node.generators for n in _stored(g.target)}, False))
        self.generic_visit(node)
        self.scopes.pop()

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def _within(self, body: Iterable[ast.AST], names: set[str]) -> None:
        # A method does not see the names of its class's body.
        outer, self.scopes = self.scopes, [scope for scope in self.scopes if not scope[1]] + [(names, False)]
        for part in body:
            self.visit(part)
        self.scopes = outer


def _stored(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _locals(body: list[ast.stmt]) -> set[str]:
    """What a function's body binds, imports of this package apart; of functions in it only their names."""
    names: set[str] = set()
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {a.asname or a.name.split(".")[0] for n, a in _imported(node) if n.split(".")[0] != PACKAGE}
        if isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if not isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            waiting += ast.iter_child_nodes(node)
        else:  # only what := binds leaks out of these
            waiting += [n.target for n in ast.walk(node) if isinstance(n, ast.NamedExpr)]
    return names


def bundle(roots: Iterable[Place]) -> tuple[str, list[Place]]:
    """Python source of all that the (module, name) pairs need, without a header; and where its definitions are from.

    LookupError when a name is nowhere to be found.
    """
    needed: dict[Place, _Names] = {}
    waiting = [_resolved(root) for root in roots]
    while waiting:
        place = waiting.pop()
        if place in needed:
            continue
        names = needed[place] = _Names()
        module = _module(place[0])
        names.visit(module.bound[place[1]])
        waiting += [target for name, _ in names.found if (target := _target(module, names, name))]
    chosen = _choose_names(needed)
    imports = {
        _module(place[0]).theirs[name]
        for place, names in needed.items()
        for name, _ in names.found
        if name in _module(place[0]).theirs and not _target(_module(place[0]), names, name)
    }
    parts = ["\n".join(_sorted_imports(imports))]
    for module in _in_order(dict.fromkeys(place[0] for place in needed)):
        statements = {
            id(module.bound[name]): (module.bound[name], names)
            for (home, name), names in needed.items()
            if home == module.name
        }
        if not statements:
            continue
        about, _, _ = " ".join((ast.get_docstring(module.tree) or "").split()).partition(". ")
        title = f"{module.name.removeprefix(f'{PACKAGE}.')}: {about.rstrip('.')}."
        parts.append(textwrap.fill(title, 120, initial_indent="# ", subsequent_indent="# "))
        for statement, names in sorted(statements.values(), key=lambda pair: pair[0].lineno):
            parts.append(_rewritten(module, statement, names, chosen))
    return "\n\n\n".join(parts) + "\n", sorted(needed)


def _target(module: _Module, names: _Names, name: str) -> Place | None:
    """What of this package a global name of a module means."""
    if name in names.lazy:
        return _resolved(names.lazy[name])
    if name in module.bound:
        return module.name, name
    return _resolved(module.ours[name]) if name in module.ours else None


def _choose_names(needed: Iterable[Place]) -> dict[Place, str]:
    places = list(needed)
    counts = Counter(name for _, name in places)
    taken = {local for module, _ in places for local in _module(module).theirs}
    chosen = {}
    for module, name in places:
        tail = "_".join(module.split(".")[-2:])
        chosen[module, name] = f"{name}_{tail}" if counts[name] > 1 or name in taken else name
    return chosen


def _in_order(names: Iterable[str]) -> Iterator[_Module]:
    """Modules, each behind those that it imports."""
    done: set[str] = set()

    def visit(name: str) -> Iterator[_Module]:
        if name in done:
            return
        done.add(name)
        module = _module(name)
        for below in module.below:
            yield from visit(below)
        yield module

    for name in names:
        yield from visit(name)


def _sorted_imports(statements: Iterable[str]) -> list[str]:
    plain = sorted(s for s in statements if s.startswith("import"))
    members: dict[str, list[str]] = {}
    for statement in statements:
        if statement.startswith("from"):
            source, _, name = statement.removeprefix("from ").partition(" import ")
            members.setdefault(source, []).append(name)
    return plain + [f"from {source} import {', '.join(sorted(members[source]))}" for source in sorted(members)]


def _rewritten(module: _Module, statement: ast.stmt, names: _Names, chosen: dict[Place, str]) -> str:
    """The statement's source with the comment above it, other names, and what is left out gone."""
    edits: list[tuple[Span, bytes]] = []
    for node in names.left_out:
        begin, end = module.span(node)
        line = module.source.rfind(b"\n", 0, begin) + 1
        edits.append(((line, end + 1), b""))
    for name, found in names.found:
        target = _target(module, names, name)
        if target and chosen[target] != name:
            edits.append((module.span(found), chosen[target].encode()))
    begin, end = module.span(statement)
    for name in _binds(statement):
        if chosen.get((module.name, name), name) != name and isinstance(statement, ast.FunctionDef | ast.ClassDef):
            at = module.source.index(name.encode(), module.lines[statement.lineno - 1])
            edits.append(((at, at + len(name)), chosen[module.name, name].encode()))
    above = module.source[:begin].splitlines(keepends=True)
    while above and above[-1].startswith(b"#"):
        begin -= len(above.pop())
    text = module.source
    for (first, last), new in sorted(edits, reverse=True):
        text = text[:first] + new + text[last:]
        end += len(new) - (last - first)
    return text[begin:end].decode()
