"""Metrics of a database: their names, what was not measured."""

from __future__ import annotations

import pytest

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
    assert all(isinstance(result, str) for result in derive({}, {}).values())
