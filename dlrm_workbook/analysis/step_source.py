"""Which statements of a function make the batch, read from its source text.

The statement that calls ``backward`` depends on others, those on further ones: what the loss is
made of. Of these, the ones that build nodes of the backward pass, or need what those built, are
the model; the others make its inputs. The text is parsed and never run.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

SELF = ("self", "cls")

FILLS = ("append", "appendleft", "extend", "insert", "add", "update", "setdefault")
"""Methods that put something into a list, set or dictionary."""


@dataclass
class Statement:
    """A statement, or the header of a compound one: its lines, and the names in it.

    Attributes:
        defines: names that it binds.
        changes: the object a method of which it calls, such as ``buffer`` in ``buffer.put(row)``.
        uses: names that it reads.
        called: of these, those that it calls.
        objects: of these, those that it calls, or calls a method of.
        node: the statement as parsed.
    """

    lines: range
    defines: set[str] = field(default_factory=set)
    changes: set[str] = field(default_factory=set)
    uses: set[str] = field(default_factory=set)
    called: set[str] = field(default_factory=set)
    objects: set[str] = field(default_factory=set)
    node: ast.AST | None = None


@dataclass
class StepSource:
    """What the statements of one function do for the backward pass that begins in it.

    Attributes:
        batch, model: numbers of lines.
        parameters: arguments of the function, and attributes of its object, of which batches
            are made.
    """

    batch: set[int]
    model: set[int]
    parameters: set[str]


class Source:
    """The statements of a function, or of a whole file. ``text`` may be indented, its first line
    has the number ``first``. A SyntaxError says that it is not Python."""

    def __init__(self, text: str, first: int) -> None:
        tree = ast.parse(textwrap.dedent(text))
        ast.increment_lineno(tree, first - 1)
        body: list[ast.stmt] = tree.body
        self.arguments: list[str] = []
        if len(body) == 1 and isinstance(body[0], (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = body[0].args
            self.arguments = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            body = body[0].body
        self.statements = list(_statements(body))

    def at(self, line: int) -> Statement | None:
        """The innermost statement on a line; of several the one that runs the backward pass."""
        holds = [one for one in self.statements if line in one.lines]
        runs = {id(one) for one in holds if one.node and "backward" in ast.dump(one.node)}
        return min(holds, key=lambda one: (len(one.lines), id(one) not in runs), default=None)

    def attributes(self) -> set[str]:
        """Attributes of its object, such as ``self.x``, that the function binds."""
        defined = set[str]().union(*(one.defines for one in self.statements))
        return {name for name in defined if _is_attribute(name)}

    def step(
        self,
        line: int,
        wanted: set[str] | None,
        built: set[int],
        methods: Mapping[str, set[str]] = MappingProxyType({}),
    ) -> StepSource:
        """What makes up the loss, or an argument, that the statement on a line needs. ``wanted``
        are the names that count (None: all of the statement), ``built`` the lines that build nodes
        of the backward pass, ``methods`` the attributes of the object that each of its methods
        binds."""
        begin = self.at(line)
        if begin is None:
            return StepSource(set(), {line}, set())
        needed = set(begin.uses) if wanted is None else set(wanted)
        grad = [bool(built & set(one.lines)) for one in self.statements]
        modules = set[str]().union(
            *(one.objects for one, builds in zip(self.statements, grad, strict=True) if builds)
        )
        chosen: set[int] = set()
        while True:
            before = len(needed), len(chosen)
            for number, one in enumerate(self.statements):
                defines = one.defines | (one.changes - modules)
                for called in one.called:
                    defines |= methods.get(called, set())
                if defines & needed and one is not begin:
                    chosen.add(number)
                    # a module that is called is no input; what a plain statement calls may be
                    needed |= one.uses - one.called if grad[number] else one.uses
            if (len(needed), len(chosen)) == before:
                break
        made: set[str] = set()
        model = {number for number in chosen if grad[number]}
        while True:
            before = len(model), len(made)
            made = made.union(*(self.statements[number].defines for number in model))
            model |= {number for number in chosen if self.statements[number].uses & made}
            if (len(model), len(made)) == before:
                break
        of = {True: set(begin.lines), False: set[int]()}
        for number in chosen:
            of[number in model] |= set(self.statements[number].lines)
        return StepSource(
            of[False] - of[True],
            of[True],
            needed & set(self.arguments) | {n for n in needed if _is_attribute(n)},
        )

    def passed(self, line: int, function: str, source: Source, names: set[str]) -> set[str]:
        """Names that the statement on a line passes to a function as arguments of given names."""
        statement = self.at(line)
        passed: set[str] = set()
        for call in ast.walk(statement.node) if statement and statement.node else ():
            if not isinstance(call, ast.Call) or _last_name(call.func) != function:
                continue
            arguments = source.arguments
            if arguments[:1] and arguments[0] in SELF and isinstance(call.func, ast.Attribute):
                arguments = arguments[1:]
            for number, value in enumerate(call.args):
                at = arguments[number] if number < len(arguments) else ""
                if at in names or isinstance(value, ast.Starred) or not at:
                    passed |= _names(value)
            for keyword in call.keywords:
                if keyword.arg is None or keyword.arg in names:
                    passed |= _names(keyword.value)
        # what a method of the same object was given before
        return passed | {name for name in names if _is_attribute(name)}


def _statements(body: Sequence[ast.stmt]) -> Iterator[Statement]:
    for node in body:
        inner: list[ast.stmt] = [
            *getattr(node, "body", []),
            *getattr(node, "orelse", []),
            *getattr(node, "finalbody", []),
            *(stmt for handler in getattr(node, "handlers", []) for stmt in handler.body),
            *(stmt for case in getattr(node, "cases", []) for stmt in case.body),
        ]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        last = (node.end_lineno or node.lineno) + 1
        end = min((stmt.lineno for stmt in inner), default=last)
        statement = Statement(range(node.lineno, max(end, node.lineno + 1)), node=node)
        blocks = (ast.stmt, ast.ExceptHandler, ast.match_case)
        headers = [child for child in ast.iter_child_nodes(node) if not isinstance(child, blocks)]
        for header in headers:
            _collect(header, statement)
        if isinstance(node, ast.AugAssign):
            statement.uses |= _names(node.target)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            method = node.value.func
            if isinstance(method, ast.Attribute):
                fills = method.attr in FILLS  # such as rows.append(row), which no module has
                (statement.defines if fills else statement.changes).update(_roots(method.value))
        yield statement
        yield from _statements(inner)


def _collect(node: ast.AST, statement: Statement) -> None:
    for one in ast.walk(node):
        if isinstance(one, ast.Call):
            statement.objects |= _roots(one.func)
            value = one.func.value if isinstance(one.func, ast.Attribute) else None
            if value is None or (isinstance(value, ast.Name) and value.id in SELF):
                statement.called |= _roots(one.func)
        if isinstance(one, (ast.Name, ast.Attribute, ast.Subscript)):
            stored = not isinstance(one.ctx, ast.Load)
            target = statement.defines if stored else statement.uses
            target |= _roots(one)


def _roots(node: ast.AST) -> set[str]:
    """The variable that a chain of attributes, items and calls begins with; ``self.x`` is one."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call, ast.Starred)):
        inner = node.func if isinstance(node, ast.Call) else node.value
        if isinstance(node, ast.Attribute) and isinstance(inner, ast.Name) and inner.id in SELF:
            return {f"{inner.id}.{node.attr}"}
        node = inner
    return {node.id} if isinstance(node, ast.Name) and node.id not in SELF else set()


def _names(node: ast.AST) -> set[str]:
    return set[str]().union(*(_roots(one) for one in ast.walk(node)))


def _is_attribute(name: str) -> bool:
    return name.partition(".")[0] in SELF and "." in name


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
