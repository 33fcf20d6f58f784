"""``explain``: the one object by which notebooks and people ask about a run or a recording."""

import json
import runpy
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
import pytest
from recordings import SEVERAL, recording

from dlrm_core.base.errors import InputError
from dlrm_workbook import explain
from dlrm_workbook.analysis.sentences import in_markdown
from dlrm_workbook.cli import main
from dlrm_workbook.report import Report
from dlrm_workbook.samples import SAMPLE
from dlrm_workbook.show.tables import Text, TextTable
from dlrm_workbook.show.views import VIEWS


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


@pytest.mark.parametrize("name", ["a run of ours", "dlrm-h100-pc.d", "several ranks"])
def test_every_view_shows_something_or_has_its_reason(name: str) -> None:
    places = {"a run of ours": SAMPLE, "several ranks": recording(SEVERAL)}
    report = explain(places.get(name) or recording(name))
    for view in VIEWS:
        table, shown = report.table(view), report.show(view).outputs
        assert bool(report.absent(view)) <= table.empty, view
        said = [output.markdown for output in shown if isinstance(output, Text)]
        if reason := report.absent(view):
            assert said[-1] == f"*Not measured: {in_markdown(reason)}.*", view
        figures = [output for output in shown if isinstance(output, go.Figure)]
        assert len(figures) <= 1 and all(figure.layout.title.text for figure in figures), view
        for listed in (output for output in shown if isinstance(output, TextTable)):
            assert listed.caption == VIEWS[view].title and "nan" not in repr(listed), view
    assert set(VIEWS) <= set(dir(report))
    with pytest.raises(InputError, match="has no figure; these have one: bars"):
        report.figure("passes")
    with pytest.raises(AttributeError, match="it has source, headline"):
        _ = report.no_such_table


def test_what_a_recording_cannot_tell_is_an_empty_frame_with_the_reason(report: Report) -> None:
    for name in ("kernels", "idle"):
        table = getattr(report, name)
        assert isinstance(table, pd.DataFrame) and table.empty
        assert "GPU" in table.attrs["not_measured"], name


def test_a_change_is_predicted_and_a_place_without_a_recording_refused(report, tmp_path) -> None:
    (row,) = report.predict({"training.precision": "bf16"}).itertuples()
    assert row.low_ms <= row.mid_ms <= row.high_ms
    assert report.to_hatchet().dataframe["cpu_time_ms"].sum() > 0
    with pytest.raises(InputError, match=str(tmp_path)):
        explain(tmp_path)


def test_explain_prints_60_lines_at_most_and_writes_nothing(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explain", str(SAMPLE)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "# seed-cpu" and "Data generation takes 27% of each step" in printed[2]
    assert len(printed) <= 60 and any(line.startswith("| data forward |") for line in printed)
    assert not list(tmp_path.iterdir())
    assert main(["explain", "nowhere"]) != 0


def test_a_headline_is_judged_by_what_it_must_and_must_not_say() -> None:
    diagnose = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "diagnose.py"))
    entry = {"answer": "a cause", "says": ["27%", "Data"], "never": ["GPU"]}
    heads = ["Data takes 27%.", "27%", "The GPU: Data 27%", "nothing"]
    judged = [diagnose["judged"](entry, head, "") for head in heads]
    assert judged == ["right", "partly", "wrong", "wrong"]
    assert diagnose["judged"](entry, "nothing", "Data: 27%") == "partly"
    answers = {SAMPLE.name: entry, "missing": entry}
    (row, missing) = diagnose["trials"](answers, SAMPLE.parent)
    assert (row["judgement"], missing["judgement"]) == ("right", "wrong")


def test_a_figure_saves_itself(report: Report, tmp_path: Path) -> None:
    saved = report.figure("parts").save(tmp_path / "parts.svg")
    assert saved.read_text(encoding="utf-8").startswith("<svg")
