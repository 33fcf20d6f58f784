"""Metrics of a database: their names, what was not measured, formulas of a taxonomy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from databases import written

from dlrm_workbook.recordings.hpctoolkit.database import read_database
from dlrm_workbook.recordings.hpctoolkit.derived import Input, evaluate, parse_formula
from dlrm_workbook.recordings.hpctoolkit.format import DatabaseError
from dlrm_workbook.recordings.hpctoolkit.metrics import (
    canonical_name,
    derive,
    meaning_of,
    unit_of,
)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("GINST:STL_ANY", "GINS:STL_ANY"),
        ("GCYCLES:ISU", "GINS:STL_NONE"),
        ("GKER:BLK", "GKER:BLKS"),
        ("GKER:BLK_ACUMU", "GKER:BLKS_ACUMU"),
        ("GKER:BLK_THR_ACUMU", "GKER:BLK_THR_ACUMU"),
        ("CPUTIME (s)", "CPUTIME (sec)"),
        ("PAPI_TOT_CYC", "PAPI_TOT_CYC"),
        ("perf::cpu-clock", "perf::cpu-clock"),
    ],
)
def test_canonical_names(name: str, canonical: str) -> None:
    assert canonical_name(name) == canonical
    assert canonical_name(canonical) == canonical
    assert meaning_of(name) and isinstance(unit_of(name), str)


def test_nothing_measured_is_never_a_number() -> None:
    assert all(isinstance(result, str) for result in derive({}).values())


def test_derived_formulas_of_a_taxonomy(tmp_path: Path) -> None:
    taxonomy = """
version: 0
inputs:
  - &a {metric: CPUTIME (sec), scope: execution, formula: $$, combine: sum}
  - &b {metric: GPUOP (sec), scope: execution}
roots:
  - name: Both
    variants:
      Sum: {formula: {inclusive: {standard: [*a, +, *b]}, exclusive: {+: [*a, *b]}}}
    children:
      - name: Share
        variants: {Sum: {formula: {inclusive: [100 *, [*a, /, [*a, +, *b]]]}}}
  - name: Copied
    variants: {Sum: {formula: first}}
    children: [{name: Twice, variants: {Sum: {formula: {inclusive: ['2 *', *a]}}}}]
  - name: Wanting
    variants: {Sum: {formula: {inclusive: {/: [*a, {metric: L1, scope: execution}]}}}}
"""
    database = read_database(written(tmp_path, taxonomy=taxonomy))
    a, b = database.column("CPUTIME (sec)"), database.column("GPUOP (sec)")
    for profile in (0, 1):
        a, b = (database.column(n, profile=profile) for n in ("CPUTIME (sec)", "GPUOP (sec)"))
        both = database.derived_column("Both", "inclusive", profile)
        np.testing.assert_allclose(both, a + b)
        share = database.derived_column("Share", "inclusive", profile)
        np.testing.assert_allclose(share, 100 * a / (a + b))
        copied = database.derived_column("Copied", "inclusive", profile)
        np.testing.assert_allclose(copied, 2 * a)
    with pytest.raises(DatabaseError, match="no metric 'L1'"):
        database.derived_column("Wanting", "inclusive")


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("2 - 3 - 4", -5),
        ("2 ^ 3 ^ 2", 512),
        ("-2 ^ 2", -4),
        ("$$ * $$", 9),
        ("min(3, 4, max(1, 2))", 2),
        (["4*", [5, "- 2"]], 12),
        ({"/": [{"*": [100, 2]}, 4]}, 50),
        ({"sum": [1, 2, [3, "*", 4]]}, 15),
        ({"prod": [2, 3]}, 6),
        ({"pow": [2, 10]}, 1024),
        ({"log": [8, 2]}, 3),
        ({"sqrt": [16]}, 4),
        ({"floor": [2.5]}, 2),
        ({"strict floor": [3]}, 2),
        ({"ceil": [2.5]}, 3),
        ({"strict ceil": [3]}, 4),
        ({"/": [1, 0]}, math.nan),
    ],
)
def test_formulas(formula: Any, value: float) -> None:
    found = float(evaluate(parse_formula(formula), lambda _: np.float64(3)))
    assert found == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(
    "formula",
    ["1 +", "(1", "1)", "1 2", "foo(1)", "sqrt(1, 2)", "a.b", "1, 2", "", "min", None, True, [],
     {"a": 1, "b": 2}, {"/": [1]}, "__import__('os')"],
)  # fmt: skip
def test_formulas_that_are_refused(formula: Any) -> None:
    with pytest.raises(DatabaseError):
        parse_formula(formula)


def test_formula_bombs_are_refused() -> None:
    node: Any = Input("m", "execution") and 1
    for _ in range(40):
        node = [node, "+", node]
    with pytest.raises(DatabaseError, match="more than 20000 steps"):
        parse_formula(node)
    for _ in range(100):
        node = [node]
    with pytest.raises(DatabaseError, match="nested deeper"):
        parse_formula(node)
