"""Two precisions side by side: NVIDIA's published pairs, and ours as far as they ran."""

import math

import pytest

from dlrm_core.config import load_parameters
from dlrm_studies.precisions import COLUMNS, side_by_side
from dlrm_workbook.show.tables import show


def test_nvidias_pairs_are_those_of_its_tables(tmp_path):
    asked = {"precisions": ["bf16"], "results": ""}
    table = side_by_side(load_parameters("quick"), tmp_path, None, None, asked)
    assert list(tmp_path.iterdir()) == [], "nothing is trained where nothing was timed"
    a100 = table[table["hardware"] == "1 × A100-80GB"].set_index("quantity")
    expected = {
        "training": (2.84e6, 4.55e6),
        "latency": (1.49, 1.38),
        "time to train": (26.75, 16.27),
    }
    for quantity, both in expected.items():
        row = a100.loc[quantity]
        assert (row["in_first"], row["in_second"]) == both and row["first"] == "TF32"
        assert row["speedup"] == pytest.approx(
            both[1] / both[0] if quantity == "training" else both[0] / both[1]
        )
    assert math.isnan(a100.loc["AUC", "speedup"]) and "0.8025 (TF32)" in str(
        show(table, COLUMNS["pairs"])
    )
