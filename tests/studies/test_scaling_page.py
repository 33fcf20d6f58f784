"""The scaling page: what it asks for, measures without TorchRec, says and draws."""

import json
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import plotly.graph_objects as go
import pytest
from scaling_records import document, parameters

from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_core.config import Parameters, load_parameters
from dlrm_studies.scaling import analyse as scaling
from dlrm_studies.scaling import measure, tables
from dlrm_studies.scaling import show as figures
from dlrm_studies.scaling.model.choice import Slowness
from dlrm_studies.scaling.model.communication import study_table
from dlrm_studies.scaling.model.published import mlperf_scaling
from dlrm_studies.scaling.model.record import (
    exchange_times,
    imbalance,
    measured_iterations,
    parts_by_rank,
    predicted_and_measured,
    shown_iteration,
)
from dlrm_workbook.ground.machine import REPOSITORY
from dlrm_workbook.runner.run import run_notebooks
from dlrm_workbook.show.tables import show
from dlrm_workbook.show.theme import FIGURE_TYPE

RUNS = [(1, 512, "table_wise"), (2, 512, "table_wise"), (4, 512, "row_wise")]
COUNTS = (1, 2, 4, 64)


def with_spans(made: dict[str, Any]) -> dict[str, Any]:
    """The record with one iteration of its last run over time."""
    last = made["runs"][-1]["run"]
    spans = [
        {"run": last, "rank": rank, "iteration": 5, "component": name, "phase": "forward"}
        | {"start_ms": 2.0 * place, "end_ms": 2.0 * place + 1.5}
        for rank in range(4)
        for place, name in enumerate(("embedding", "bottom_mlp", "top_mlp"))
    ]
    for row in made["collectives"]:
        row["start_ms"] = 1.0
    return made | {"spans": spans}


@pytest.fixture
def record(tmp_path: Path) -> Path:
    file = tmp_path / "record.json"
    file.write_text(json.dumps(with_spans(document(RUNS, slow_rank=1.5))))
    return file


def shown(record: Path, **asked: Any) -> scaling.Scaling:
    found = scaling.start(parameters(), record.parent, record=str(record), **asked)
    found.measure()
    return found


def verdict(found: scaling.Scaling, strong: pd.DataFrame, weak: pd.DataFrame) -> str:
    given = (found.network.name, strong, weak, found.record, found.parameters)
    return tables.scaling_verdict(*given).markdown


# ---- what is asked for ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"ranks": [0]}, r"ranks is \[0\], expected numbers of 1 or more"),
        ({"ranks": ["a"]}, r"ranks is \['a'\], expected numbers of 1 or more"),
        ({"memory_gb": -3.0}, "memory_gb is -3.0, expected 0 or more"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"ranks_per_node": 8}, "inside is empty, but ranks_per_node is 8"),
        ({"between": ""}, "inside and between are empty"),
        ({"between": "InfiniBand NDX"}, "did you mean InfiniBand NDR"),
        ({"gpu": "A1000"}, "A1000"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(tmp_path: Path, asked: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        scaling.start(parameters(), tmp_path, **asked)


def test_a_page_predicts_at_the_study_s_full_size_on_paper(record: Path) -> None:
    large = load_parameters(REPOSITORY / "parameters" / "kalamkar_large.yaml")
    found = scaling.start(large, record.parent, record=str(record))
    found.measure()
    ranks = found.shown_ranks
    assert ranks == 64
    volumes = found.volumes(ranks).query("sharding == 'table_wise' and what == 'pooled vectors'")
    assert volumes["total_bytes"].item() == 1024 << 20
    memory = found.memory(ranks)
    table_wise = memory[memory["sharding"] == "table_wise"]
    assert table_wise["place"].tolist() == ["every rank"]
    assert (table_wise["table_bytes"] == 6_000_000 * 256 * 4).all()


def test_a_data_sheet_predicts_the_study_s_own_size_and_batches(record: Path) -> None:
    large = load_parameters(REPOSITORY / "parameters" / "kalamkar_large.yaml")
    joined = {"inside": "NVLink 4 (H100)", "between": "InfiniBand NDR", "ranks_per_node": 8}
    found = scaling.start(large, record.parent, record=str(record), gpu="H100-SXM", **joined)
    found.measure()
    strong, weak = found.predicted("strong", (1, 16)), found.predicted("weak", (1, 16))
    assert strong["batch_size"].tolist() == [16384, 16384]
    assert weak["batch_size"].tolist() == [512, 512 * 16]
    # 366 GiB of tables are no matter for one GPU of 80 GB
    assert strong["mid_ms"].isna().tolist() == [True, False]
    assert strong["memory_bytes"].iloc[1] < 80e9


# ---- measuring --------------------------------------------------------------------------


def test_without_torchrec_one_process_is_timed_and_the_rest_said(tmp_path, monkeypatch) -> None:
    def absent(*given: Any, **named: Any) -> dict[str, Any]:
        raise MissingToolError("training on several ranks needs torchrec, which is not installed")

    monkeypatch.setattr(measure, "measure_scaling", absent)
    once = measure.parts_of(parameters(64), 64, tmp_path)
    components = {row["component"] for row in once}
    assert {"bottom_mlp", "embedding", "interaction", "top_mlp"} <= components
    assert {row["iteration"] for row in once} == set(range(measure.PROFILE_ITERATIONS))
    assert all(row["time_ms"] > 0 for row in once if row["component"] == "top_mlp")

    def timed(given: Parameters, batch_size: int, folder: Path) -> list[dict[str, Any]]:
        return [row | {"batch_size": batch_size} for row in once]

    monkeypatch.setattr(measure, "parts_of", timed)
    found = scaling.start(parameters(64), tmp_path)
    found.measure()
    assert "needs torchrec" in found.record.reasons["parts"]
    assert set(found.record.compute_profile["batch_size"]) == {1, 16, 64}
    assert found.link is None and found.link_check is None
    assert found.predicted("strong", COUNTS)["mid_ms"].notna().all()
    text = tables.not_measured_text(found.record.reasons).markdown
    assert "link probe: not measured: training on several ranks needs torchrec" in text
    assert "Parts of ranks were not measured" in (
        tables.findings_text(found.findings(), found.record).markdown
    )
    # what was measured is there for another page
    again = shown(found.file)
    assert len(again.record.compute_profile) == len(found.record.compute_profile)


def test_what_ranks_do_without_is_said(record, tmp_path, monkeypatch) -> None:
    made = json.loads(record.read_text())
    monkeypatch.setattr(measure, "measure_scaling", lambda *given, **named: made)
    for notices in ([], ["training.cuda_graphs: true has no effect"]):
        found = scaling.start(parameters(), tmp_path)
        made["notices"] = notices
        found.measure()
        assert ("cuda_graphs" in found.sentence) == bool(notices)


def test_one_rank_alone_has_no_findings(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    file.write_text(json.dumps(document(RUNS[:1])))
    found = shown(file)
    said = tables.findings_text(found.findings(), found.record).markdown
    assert said == "Nothing was measured on several ranks: one was asked for."


def test_efficiency_is_drawn_of_records_without_runs_or_without_their_scaling(record: Path) -> None:
    found = shown(record)
    strong = found.predicted("strong", COUNTS)
    measured = measured_iterations(found.record).drop(columns="scaling")
    for table, marks in ((measured, 1), (measured.head(0), 0)):
        drawn = figures.efficiency_lines({"strong": strong}, table)
        assert sum("measured" in str(trace.name) for trace in drawn.data) == marks


# ---- said and drawn ---------------------------------------------------------------------


def test_every_table_and_figure_of_a_record(record: Path) -> None:
    found = shown(record)
    strong, weak = found.predicted("strong", COUNTS), found.predicted("weak", COUNTS)
    measured = measured_iterations(found.record)
    checked = predicted_and_measured(found.record, found.parameters)
    parts = parts_by_rank(found.record, 2)
    choice = found.choice(4)
    assert choice.prediction is not None and found.link is not None
    slow = found.stragglers(strong, Slowness())
    drawn = {
        "iterations": figures.iteration_bars(strong, "strong"),
        "efficiency": figures.efficiency_lines({"strong": strong, "weak": weak}, measured),
        "shardings": figures.sharding_lines(found.by_sharding(COUNTS), strong),
        "lanes": figures.lanes(choice.prediction.schedule.events, "lanes"),
        "ranks over time": figures.lanes(shown_iteration(found.record, 2), "ranks"),
        "ranks": figures.rank_bars(parts, "ranks"),
        "check": figures.predicted_measured_dots(checked),
        "volumes": figures.volume_bars(found.volumes(4), 4),
        "link": figures.link_curves(found.link_check, found.link),
        "stragglers": figures.straggler_lines(slow, "jitter"),
        "mlperf": figures.mlperf_dots(mlperf_scaling()),
    }
    for name, figure in drawn.items():
        assert isinstance(figure, go.Figure) and len(figure.data), name
    stacked = [sum(values) for values in zip(*(t.y for t in drawn["iterations"].data), strict=True)]
    assert stacked == pytest.approx(strong["mid_ms"].tolist())
    assert {t.y[0] for t in drawn["ranks over time"].data if t.y and t.y[0]} == {
        f"rank {rank}, {lane}" for rank in range(4) for lane in ("step", "exchanges")
    }

    shown_tables = [
        show(study_table(), tables.COLUMNS["study"]),
        show(found.volumes(4), tables.COLUMNS["volumes"]),
        show(found.memory(4), tables.COLUMNS["memory"]),
        show(found.links, tables.COLUMNS["links"]),
        show(strong, tables.COLUMNS["predicted"]),
        show(choice.candidates, tables.COLUMNS["candidates"]),
        show(measured, tables.COLUMNS["measured"]),
        show(checked, tables.COLUMNS["checked"]),
        show(imbalance(found.record), tables.COLUMNS["imbalance"]),
        show(exchange_times(found.record), tables.COLUMNS["exchanges"]),
        show(slow, tables.COLUMNS["stragglers"]),
        show(mlperf_scaling(), tables.COLUMNS["mlperf"]),
    ]
    for table in shown_tables:
        assert table.rows and all(len(row) == len(table.columns) for row in table.rows)
        assert "nan" not in table._repr_html_().lower()
    said = tables.mlperf_sentence(mlperf_scaling()).markdown
    assert "16 DGX H100: −12.8% for" in said and "mostly this: tables cut inside nodes." in said
    said = verdict(found, strong, weak)
    near_best = strong[strong["mid_ms"] <= strong["mid_ms"].min() * 1.01]
    assert f"Strong scaling over OPA gains up to {near_best['ranks'].min()} ranks" in said
    assert "rank 3" in tables.findings_text(found.findings(), found.record).markdown.lower()


def test_what_cannot_be_predicted_is_a_row_with_its_reason(record: Path) -> None:
    found = shown(record, memory_gb=0.001)
    strong = found.predicted("strong", (1, 2))
    assert strong["mid_ms"].isna().all()
    rows = show(strong, tables.COLUMNS["predicted"]).rows
    assert all("No sharding fits" in row[-1] for row in rows)
    assert figures.iteration_bars(strong, "none").data is not None
    assert "Nothing can be predicted" not in (verdict(found, strong, strong))


@pytest.mark.notebook
def test_the_notebook_shows_a_record(record: Path, tmp_path: Path) -> None:
    quick = REPOSITORY / "parameters" / "quick.yaml"
    given = [f"record={record}", "gpu=H100-SXM", "inside=NVLink 4 (H100)", "ranks_per_node=8"]
    folder = run_notebooks(
        ["scaling"], quick, [*given, "between=InfiniBand NDR"], output_root=tmp_path / "out"
    )
    page = folder.html.read_text()
    for title in ("Verdict", "Which sharding", "All ranks", "Published scaling"):
        assert title in page
    cells = nbformat.read(folder.ipynb, as_version=4).cells
    outputs = [out for cell in cells for out in cell.get("outputs", []) if "data" in out]
    assert sum(FIGURE_TYPE in out["data"] for out in outputs) == 12
    assert not any(out.output_type == "error" for out in outputs)
