"""``explain``: the one object by which notebooks and people ask about a run or a recording."""

import json

import pandas as pd
import pytest

from dlrm_core.base.errors import InputError
from dlrm_workbook import explain
from dlrm_workbook.report import Report
from dlrm_workbook.samples import SAMPLE


@pytest.fixture(scope="module")
def report() -> Report:
    return explain(SAMPLE)


def test_tables_are_frames_that_are_computed_once_and_agree(report: Report) -> None:
    assert report.parts is report.parts
    assert report.parts["share"].sum() == pytest.approx(1.0)
    titles = [finding.title for finding in report.ranked_findings]
    assert list(report.findings["title"]) == titles
    assert titles[0].split()[0] in report.headline
    assert report.document["headline"] == report.headline
    assert json.loads(json.dumps(report.document))["quality"] == report.quality


def test_what_a_recording_cannot_tell_is_an_empty_frame_with_the_reason(report: Report) -> None:
    for name in ("kernels", "idle"):
        table = getattr(report, name)
        assert isinstance(table, pd.DataFrame) and table.empty
        assert "GPU" in table.attrs["not_measured"], name


def test_a_change_is_predicted_and_a_place_without_a_recording_refused(
    report: Report, tmp_path
) -> None:
    (row,) = report.predict({"training.precision": "bf16"}).itertuples()
    assert row.low_ms <= row.mid_ms <= row.high_ms
    assert report.to_hatchet().dataframe["cpu_time_ms"].sum() > 0
    with pytest.raises(InputError, match=str(tmp_path)):
        explain(tmp_path)
