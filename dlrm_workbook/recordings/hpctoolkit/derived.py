"""Derived metrics of ``metrics/default.yaml``: formulas parsed by hand, computed on columns.

Source: ``doc/METRICS.yaml`` of HPCToolkit. A formula is written in YAML: a
sequence is a parenthesised infix expression whose elements may hold several
tokens (``[4*, [*x, -, *y]]``), a one-entry map is a function or operator with
its arguments (``{/: [*x, *y]}``), and a map with ``metric`` is an input. A
formula becomes a short postfix program; nothing of the file is ever evaluated
as Python.

Where an input has no value, or a divisor is 0, the result is NaN: no value.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from dlrm_workbook.recordings.hpctoolkit.format import DatabaseError

Floats = npt.NDArray[np.float64]

MOST_STEPS = 20_000
"""Of one formula; YAML aliases let a few lines stand for any number of them."""
MOST_NESTING = 60

VARIABLE = "$$"
TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<operator>[-+*/^(),])|"
    r"(?P<variable>\$\$)|(?P<name>[A-Za-z][A-Za-z ]*))"
)
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "negate": 3, "^": 4}
FUNCTIONS = {
    "+": (1, 10_000),
    "*": (1, 10_000),
    "-": (2, 2),
    "/": (2, 2),
    "^": (2, 2),
    "sum": (1, 10_000),
    "prod": (1, 10_000),
    "pow": (2, 2),
    "sqrt": (1, 1),
    "log": (1, 2),
    "min": (1, 10_000),
    "max": (1, 10_000),
    "floor": (1, 1),
    "strict floor": (1, 1),
    "ceil": (1, 1),
    "strict ceil": (1, 1),
}
"""Name to the least and most arguments."""


@dataclass(frozen=True)
class Input:
    """A summary statistic that a formula refers to, as ``meta.db`` describes it."""

    metric: str
    scope: str
    formula: str = VARIABLE
    combine: str = "sum"


Step = float | Input | tuple[str, int]
"""A postfix program's step: a number, an input (``$$`` too), or (operation, arguments)."""
Program = tuple[Step, ...]
THE_VARIABLE = Input(VARIABLE, "")


class _Parser:
    """Turns a YAML formula (or a formula string of ``meta.db``) into a program."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.steps: list[Step] = []

    def fail(self, problem: str) -> DatabaseError:
        return DatabaseError(f"{self.where}: {problem}")

    def emit(self, step: Step) -> None:
        self.steps.append(step)
        if len(self.steps) > MOST_STEPS:
            raise self.fail(f"a formula of more than {MOST_STEPS} steps")

    def formula(self, node: Any, depth: int = 0) -> None:
        """Emit the steps that leave the value of ``node`` on the stack."""
        if depth > MOST_NESTING:
            raise self.fail(f"a formula nested deeper than {MOST_NESTING}")
        if isinstance(node, dict):
            self._map(node, depth)
        else:
            self._infix(self._tokens(node if isinstance(node, list) else [node]), depth)

    def _map(self, node: dict[Any, Any], depth: int) -> None:
        if "metric" in node:
            values = [str(node.get(key, default)) for key, default in _INPUT_DEFAULTS.items()]
            self.emit(Input(*values))
            return
        if len(node) != 1:
            raise self.fail(f"a map of {len(node)} entries in a formula, one function expected")
        ((name, arguments),) = node.items()
        arguments = arguments if isinstance(arguments, list) else [arguments]
        for argument in arguments:
            self.formula(argument, depth + 1)
        self._call(str(name), len(arguments))

    def _call(self, name: str, count: int) -> None:
        if name == "-" and count == 1:
            self.emit(("negate", 1))
            return
        if name not in FUNCTIONS:
            raise self.fail(f"unknown function '{name[:40]}' in a formula")
        least, most = FUNCTIONS[name]
        if not least <= count <= most:
            raise self.fail(f"function '{name}' with {count} arguments")
        self.emit((name, count))

    def _tokens(self, elements: list[Any]) -> Iterator[Any]:
        """Numbers, operators and names as (kind, text); nested YAML nodes as they are."""
        for element in elements:
            if isinstance(element, bool) or element is None:
                raise self.fail(f"{element!r} in a formula")
            if isinstance(element, int | float):
                yield "number", float(min(max(element, -1e300), 1e300))
            elif isinstance(element, str):
                at = 0
                text = element.rstrip()
                while at < len(text):
                    match = TOKEN.match(text, at)
                    if match is None or match.lastgroup is None:
                        raise self.fail(f"'{text[at : at + 40]}' in a formula")
                    kind = match.lastgroup
                    value: Any = match[kind].strip()
                    yield kind, float(value) if kind == "number" else value
                    at = match.end()
            elif isinstance(element, dict | list):
                yield "node", element
            else:
                raise self.fail(f"a {type(element).__name__} in a formula")

    def _infix(self, tokens: Iterator[Any], depth: int) -> None:
        """Operators and parentheses by their precedence (shunting yard)."""
        pending: list[Any] = []  # operators, "(" and ("name", arguments so far)
        operand_next = True

        def unwind(least: int) -> None:
            while pending and isinstance(pending[-1], str) and pending[-1] != "(":
                if PRECEDENCE[pending[-1]] < least:
                    break
                operator = pending.pop()
                self.emit((operator, 1 if operator == "negate" else 2))

        for kind, value in tokens:
            if kind == "name":
                if not operand_next:
                    raise self.fail(f"'{value}' where an operator was expected")
                pending.append([value, 1])
                continue
            if value == "(" and operand_next:
                pending.append("(")
                continue
            if pending and isinstance(pending[-1], list):
                raise self.fail(f"function '{pending[-1][0]}' without arguments")
            if kind != "operator":
                if not operand_next:
                    raise self.fail("two values without an operator between them")
                if kind == "node":
                    self.formula(value, depth + 1)
                else:
                    self.emit(THE_VARIABLE if kind == "variable" else value)
                operand_next = False
            elif value in "-+" and operand_next:
                if value == "-":
                    pending.append("negate")
            elif operand_next:
                raise self.fail(f"'{value}' where a value was expected")
            elif value in "),":
                unwind(0)
                if not pending or pending[-1] != "(":
                    raise self.fail(f"'{value}' without an opening parenthesis")
                call = pending[-2] if len(pending) > 1 and isinstance(pending[-2], list) else None
                if value == ",":
                    if call is None:
                        raise self.fail("',' outside a function's arguments")
                    call[1] += 1
                    operand_next = True
                    continue
                pending.pop()
                if call is not None:
                    pending.pop()
                    self._call(call[0], call[1])
            else:
                # ^ binds to the right: an equal one that waits stays waiting.
                unwind(PRECEDENCE[value] + (value == "^"))
                pending.append(value)
                operand_next = True
        if operand_next:
            raise self.fail("a formula that ends where a value was expected")
        unwind(0)
        if pending:
            raise self.fail("a parenthesis that is not closed")


_INPUT_DEFAULTS = {"metric": "", "scope": "", "formula": VARIABLE, "combine": "sum"}


def parse_formula(node: Any, where: str = "formula") -> Program:
    """The program of a formula: a YAML node, or a string such as ``$$ * 2``.

    Raises:
        DatabaseError: naming ``where`` and what was not understood.
    """
    parser = _Parser(where)
    parser.formula(node)
    return tuple(parser.steps)


def evaluate(program: Program, value_of: Callable[[Input], Any]) -> Any:
    """Compute a program.

    Args:
        program: from ``parse_formula``.
        value_of: the value of an input: a number or an array; all arrays of one shape.

    Returns:
        An array of that shape, or a number. NaN where there is no value.
    """
    stack: list[Any] = []
    with np.errstate(all="ignore"):
        for step in program:
            if isinstance(step, tuple):
                name, count = step
                stack[-count:] = [OPERATIONS[name](*stack[-count:])]
            else:
                stack.append(value_of(step) if isinstance(step, Input) else np.float64(step))
    return stack[0]


def _folded(operation: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """An operation of two values as one of any number."""
    return lambda *values: functools.reduce(operation, values)


def _quotient(above: Any, below: Any) -> Any:
    """No value rather than infinity: a share of nothing does not exist."""
    return np.where(np.equal(below, 0), np.nan, np.divide(above, below))


def _logarithm(value: Any, base: Any = math.e) -> Any:
    return np.log(value) / np.log(base)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "sum": _folded(np.add),
    "+": _folded(np.add),
    "-": np.subtract,
    "prod": _folded(np.multiply),
    "*": _folded(np.multiply),
    "/": _quotient,
    "^": np.power,
    "pow": np.power,
    "negate": np.negative,
    "sqrt": np.sqrt,
    "log": _logarithm,
    "min": _folded(np.minimum),
    "max": _folded(np.maximum),
    "floor": np.floor,
    "ceil": np.ceil,
    # the nearest integer that is not the value itself
    "strict floor": lambda value: np.ceil(value) - 1,
    "strict ceil": lambda value: np.floor(value) + 1,
}


MOST_METRICS = 20_000


@dataclass(frozen=True)
class DerivedMetric:
    """One metric of a taxonomy, in one of its variants (``Sum``, ``Mean``, ``""``).

    Attributes:
        name: of the metric, for instance ``GKER:OCC_THR``.
        formulas: ``inclusive`` and ``exclusive`` to their program, where given.
    """

    name: str
    variant: str
    formulas: dict[str, Program]


def read_taxonomy(path: Path) -> list[DerivedMetric]:
    """The metrics of a taxonomy file, with their formulas.

    Formulas given as ``first`` or ``sum`` (of the children) are built from the
    children's.

    Raises:
        DatabaseError: not readable, not YAML, or a formula that is not understood.
    """
    try:
        text = path.read_bytes()
        # The C parser is ten times faster; a GPU database's taxonomy is 70 KB.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        document = yaml.load(text, Loader=loader)  # noqa: S506 (both are safe loaders)
    except OSError as problem:
        raise DatabaseError(f"{path}: cannot be read: {problem.strerror}") from problem
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        message = " ".join(str(problem).split())[:200]
        raise DatabaseError(f"{path}: not valid YAML: {message}") from problem
    except (TypeError, KeyError, AttributeError, OverflowError) as problem:
        # Damaged tags and merge keys surface as these from inside the YAML library.
        raise DatabaseError(f"{path}: not valid YAML: {problem!r}") from problem
    roots = document.get("roots") if isinstance(document, dict) else None
    if not isinstance(roots, list):
        raise DatabaseError(f"{path}: no list 'roots' of metrics in it")
    nodes: list[dict[str, Any]] = []
    waiting = list(reversed(roots))
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict) or len(nodes) > MOST_METRICS:
            raise DatabaseError(f"{path}: metric {len(nodes)} is not a map, or there are too many")
        nodes.append(node)
        children = node.get("children") or []
        if isinstance(children, list):
            waiting.extend(reversed(children))
    return [metric for node in nodes for metric in _variants(node, str(path))]


def _variants(node: dict[str, Any], path: str) -> Iterator[DerivedMetric]:
    name = str(node.get("name", ""))
    where = f"{path}: metric '{name[:80]}'"
    variants = node.get("variants")
    if not isinstance(variants, dict):
        return
    for variant, body in variants.items():
        given = body.get("formula") if isinstance(body, dict) else None
        formulas = {}
        for cost in ("inclusive", "exclusive"):
            formula = _resolve(node, str(variant), given, cost, where, 0)
            if formula is not None:
                formulas[cost] = formula
        yield DerivedMetric(name, str(variant), formulas)


def _resolve(
    node: dict[str, Any], variant: str, given: Any, cost: str, where: str, depth: int
) -> Program | None:
    """The program for one cost, or None where the taxonomy gives none."""
    if given in ("first", "sum"):
        if depth > MOST_NESTING:
            raise DatabaseError(f"{where}: nested deeper than {MOST_NESTING}")
        return _from_children(node, variant, str(given), cost, where, depth)
    if not isinstance(given, dict):
        return None
    formula = given.get(cost)
    if isinstance(formula, dict) and ("standard" in formula or "custom" in formula):
        formula = formula.get("standard", formula.get("custom"))
    return None if formula is None else parse_formula(formula, where)


def _from_children(
    node: dict[str, Any], variant: str, how: str, cost: str, where: str, depth: int
) -> Program | None:
    children = node.get("children")
    if not isinstance(children, list) or not children:
        return None
    wanted = (node["variants"][variant] or {}).get("child variant", variant)
    chosen = wanted if isinstance(wanted, list) else [wanted] * len(children)
    parts: list[Program] = []
    for child, child_variant in list(zip(children, chosen, strict=False))[
        : 1 if how == "first" else None
    ]:
        variants = child.get("variants") if isinstance(child, dict) else None
        body = variants.get(child_variant) if isinstance(variants, dict) else None
        given = body.get("formula") if isinstance(body, dict) else None
        part = _resolve(child, str(child_variant), given, cost, where, depth + 1) if body else None
        if part is None:
            return None  # a child without a value leaves its parent without one
        parts.append(part)
    steps = tuple(step for part in parts for step in part)
    if len(steps) > MOST_STEPS:
        raise DatabaseError(f"{where}: a formula of more than {MOST_STEPS} steps")
    return steps if len(parts) == 1 else (*steps, ("sum", len(parts)))
