"""Metrics of a database: their names, what was not measured."""

from pathlib import Path

import pandas as pd
import pytest

from dlrm_workbook.analysis.gpu import copy_table, kernel_table, stall_table
from dlrm_workbook.recordings.hpctoolkit.metrics import (
    canonical_name,
    canonical_names,
    derive,
    meaning_of,
    reason_without_value,
    unit_of,
)
from tests.gpu_database import made


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


NEWER = {
    "CPUTIME (sec)": "CPUTIME (s)",
    "GPUOP (sec)": "GPUOP (s)",
    "GKER (sec)": "GKER (s)",
    "GKER:THR_REG_ACUMU": "GKER:THR_VREG_ACUMU",
    "GKER:BLKS_ACUMU": "GKER:BLKS_AVG_ACUMU",
    "GKER:DYMEM_ACUMU (B)": "GKER:DYMEM_ACUMU (b)",
    "GKER:FGP_ACT_ACUMU": "GKER:WARP_ACT_ACUMU",
    "GKER:FGP_MAX_ACUMU": "GKER:WARP_AVL_ACUMU",
    "GXCOPY (sec)": "GXCOPY (s)",
    "GXCOPY:H2D (B)": "GXCOPY:H2D (b)",
    "GXCOPY:D2H (B)": "GXCOPY:D2H (b)",
    "GINS": "GCYCLES",
    "GINS:STL_ANY": "GCYCLES:STL",
    "GINS:STL_GMEM": "GCYCLES:STL:GMEM",
    "GINS:STL_IDEP": "GCYCLES:STL:IDEP",
    "GINS:STL_SYNC": "GCYCLES:STL:SYNC",
}
INTEL = {"GINS:STL_GMEM": "GCYCLES:STL:SBID", "GINS:STL_IDEP": "GCYCLES:STL:DIST"}


def test_a_database_in_newer_names_gives_the_same_tables(tmp_path: Path) -> None:
    old, new = made(tmp_path / "old.d"), made(tmp_path / "new.d", spelled=NEWER)
    for table in (kernel_table, copy_table, stall_table):
        pd.testing.assert_frame_equal(table(old), table(new))
    for metric in ("cpu_time_ms", "gpu_time_ms", "launches", "copy_bytes", "calls"):
        assert (old.value_table(metric) == new.value_table(metric)).all()
    assert new.meta["pc_sampling"] == old.meta["pc_sampling"]


def test_two_stalls_of_an_intel_gpu_that_mean_the_same_add_up(tmp_path: Path) -> None:
    stalls = stall_table(made(tmp_path / "intel.d", spelled=NEWER | INTEL))
    held = stalls.groupby("reason")["warp_cycles"].sum()
    assert held["IDEP"] == 200 + 150 + 100 + 150
