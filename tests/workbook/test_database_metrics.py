"""Metrics of a database: their names, what was not measured."""

from __future__ import annotations

import pytest

from dlrm_workbook.recordings.hpctoolkit.metrics import (
    canonical_name,
    canonical_names,
    derive,
    meaning_of,
    reason_without_value,
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
        ("GKER:BLKS_AVG_ACUMU", "GKER:BLKS_ACUMU"),
        ("GKER:WARP_ACT_ACUMU", "GKER:FGP_ACT_ACUMU"),
        ("GKER:WARP_AVL_ACUMU", "GKER:FGP_MAX_ACUMU"),
        ("GKER:THR_VREG_ACUMU", "GKER:THR_REG_ACUMU"),
        ("GKER:THR_SREG_ACUMU", "GKER:THR_SREG_ACUMU"),
        ("GKER (s)", "GKER (sec)"),
        ("GXCOPY:H2D (b)", "GXCOPY:H2D (B)"),
        ("GCYCLES", "GINS"),
        ("GCYCLES:STL", "GINS:STL_ANY"),
        ("GCYCLES:STL:HID", "GINS:STL_HID"),
        ("GCYCLES:STL:LMEM", "GINS:STL_LMEM"),
        ("GCYCLES:STL:SBID", "GINS:STL_IDEP"),
        ("GCYCLES:STL:ACTIVE", "GINS:STL_NONE"),
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


def test_cycles_and_instructions_of_newer_databases_stay_apart() -> None:
    assert canonical_names(["GCYCLES", "GINS", "GKER (s)"]) == {
        "GCYCLES": "GINS",
        "GINS": "GINS:EXEC",
        "GKER (s)": "GKER (sec)",
    }
    assert canonical_names(["GINS"]) == {"GINS": "GINS"}


def test_what_is_missing_is_not_said_of_cuda_alone() -> None:
    for name in ("GICOPY (sec)", "GINS:STL_MEM", "GKER:COUNT"):
        assert "for CUDA" not in reason_without_value(name, {})
