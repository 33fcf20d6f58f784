"""Derived metrics of ``metrics/default.yaml``: a taxonomy's names, variants and formulas.

Source: ``doc/METRICS.yaml`` of HPCToolkit; formulas: :mod:`dlrm_core.profiling.formulas`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dlrm_core.profiling.format4 import DatabaseError
from dlrm_core.profiling.formulas import (
    MOST_NESTING,
    MOST_STEPS,
    Input,
    Program,
    parse_formula,
)

MOST_METRICS = 20_000


@dataclass(frozen=True)
class DerivedMetric:
    """One metric of a taxonomy, in one of its variants (``Sum``, ``Mean``, ``""``).

    Attributes:
        name: of the metric, for instance ``GKER:OCC_THR``.
        description: in the database's words.
        formulas: ``inclusive`` and ``exclusive`` to their program, where given.
    """

    name: str
    variant: str
    description: str
    formulas: dict[str, Program]

    @property
    def plain(self) -> bool:
        """Whether it only presents one measured metric as it is."""
        return all(
            len(program) == 1 and isinstance(program[0], Input)
            for program in self.formulas.values()
        )


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
    description = str(node.get("description") or node.get("short description") or "")
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
        yield DerivedMetric(name, str(variant), description, formulas)


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
