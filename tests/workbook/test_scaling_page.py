"""The scaling page: what it asks for, measures without TorchRec, says and draws."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import nbformat
import plotly.graph_objects as go
import pytest
from scaling_records import document, parameters

from dlrm_core.config import Parameters, load_parameters
from dlrm_core.errors import InputError, MissingToolError
from dlrm_workbook.analysis.ranks.check import predicted_and_measured
from dlrm_workbook.analysis.ranks.communication import study_table
from dlrm_workbook.analysis.ranks.published import published_scaling
from dlrm_workbook.analysis.ranks.record import (
    Slowness,
    exchange_times,
    imbalance,
    measured_iterations,
    parts_by_rank,
    shown_iteration,
)
from dlrm_workbook.runner.run import run_notebook
from dlrm_workbook.runs import REPOSITORY
from dlrm_workbook.show.theme import FIGURE_TYPE
from dlrm_workbook.studies.scaling import (
    notebook as scaling,
)
from dlrm_workbook.studies.scaling import (
    notebook as scaling_alone,
)
from dlrm_workbook.studies.scaling import (
    show as rank_figures,
)
from dlrm_workbook.studies.scaling import (
    show as scaling_check_figures,
)
from dlrm_workbook.studies.scaling import (
    show as scaling_figures,
)
from dlrm_workbook.studies.scaling import (
    show as scaling_model_figures,
)
from dlrm_workbook.studies.scaling import (
    show_tables as scaling_model_presentation,
)
from dlrm_workbook.studies.scaling import (
    show_tables as scaling_presentation,
)

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


# ---- what is asked for ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"ranks": [0]}, r"ranks is \[0\], expected numbers of 1 or more"),
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
    ranks = found.volume_ranks()
    assert ranks == 64
    volumes = found.volumes(ranks).query("sharding == 'table_wise' and what == 'pooled vectors'")
    assert volumes["total_bytes"].item() == 1024 << 20
    memory = found.memory(ranks)
    table_wise = memory[memory["sharding"] == "table_wise"]
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


def test_without_torchrec_one_process_is_timed_and_the_rest_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dlrm_workbook.studies.scaling.measure as ranks

    def absent(*given: Any, **named: Any) -> dict[str, Any]:
        raise MissingToolError("training on several ranks needs torchrec, which is not installed")

    monkeypatch.setattr(ranks, "measure_scaling", absent)
    once = scaling_alone.parts_of(parameters(64), 64, tmp_path)
    components = {row["component"] for row in once}
    assert {"bottom_mlp", "embedding", "interaction", "top_mlp"} <= components
    assert {row["iteration"] for row in once} == set(range(scaling_alone.PROFILE_ITERATIONS))
    assert all(row["time_ms"] > 0 for row in once if row["component"] == "top_mlp")

    def timed(given: Parameters, batch_size: int, folder: Path) -> list[dict[str, Any]]:
        return [row | {"batch_size": batch_size} for row in once]

    monkeypatch.setattr(scaling_alone, "parts_of", timed)
    found = scaling.start(parameters(64), tmp_path)
    found.measure()
    assert "needs torchrec" in found.record.reasons["parts"]
    assert set(found.record.compute_profile["batch_size"]) == {1, 16, 64}
    assert found.link is None and found.link_check is None
    assert found.predicted("strong", COUNTS)["mid_ms"].notna().all()
    text = scaling_presentation.not_measured_text(found.record.reasons).markdown
    assert "link_probe: not measured: training on several ranks needs torchrec" in text
    assert "Nothing was measured on several ranks" in (
        scaling_presentation.findings_text(found.findings(), found.record).markdown
    )
    # what was measured is there for another page
    again = shown(found.file)
    assert len(again.record.compute_profile) == len(found.record.compute_profile)


def test_what_ranks_do_without_is_said(
    record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dlrm_workbook.studies.scaling.measure as ranks

    made = json.loads(record.read_text())
    monkeypatch.setattr(ranks, "measure_scaling", lambda *given, **named: made)
    for backend in ("torch", "fused"):
        given = parameters()
        training = dataclasses.replace(given.training, dense_backend=backend)
        found = scaling.start(dataclasses.replace(given, training=training), tmp_path)
        found.measure()
        said = "training.dense_backend: fused has no effect on several ranks" in found.sentence
        assert said == (backend == "fused")


def test_one_rank_alone_has_no_findings(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    file.write_text(json.dumps(document(RUNS[:1])))
    found = shown(file)
    said = scaling_presentation.findings_text(found.findings(), found.record).markdown
    assert said == "Nothing was measured on several ranks: one was asked for."


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
    published = published_scaling()
    figures = {
        "iterations": scaling_figures.iteration_bars(strong, "strong"),
        "efficiency": scaling_figures.efficiency_lines({"strong": strong, "weak": weak}, measured),
        "shardings": scaling_figures.sharding_lines(found.by_sharding(COUNTS), strong),
        "lanes": rank_figures.exchange_lanes(choice.prediction.schedule.events, "lanes"),
        "ranks over time": rank_figures.rank_lanes(shown_iteration(found.record, 2), "ranks"),
        "ranks": rank_figures.rank_bars(parts, "ranks"),
        "map": rank_figures.imbalance_map(parts),
        "check": scaling_check_figures.predicted_measured_dots(checked),
        "volumes": scaling_model_figures.volume_bars(found.volumes(4), 4),
        "link": scaling_model_figures.link_curves(found.link_check, found.link),
        "stragglers": scaling_model_figures.straggler_lines(slow, "jitter"),
        "published": scaling_check_figures.published_dots(published),
    }
    for name, drawn in figures.items():
        assert isinstance(drawn, go.Figure) and len(drawn.data), name
    stacked = [
        sum(values) for values in zip(*(t.y for t in figures["iterations"].data), strict=True)
    ]
    assert stacked == pytest.approx(strong["mid_ms"].tolist())
    assert {t.y[0] for t in figures["ranks over time"].data if t.y and t.y[0]} == {
        f"rank {rank}, {lane}" for rank in range(4) for lane in ("step", "exchanges")
    }
    (heat,) = figures["map"].data
    assert (
        heat.z[list(heat.y).index("embedding")][3] > 0 > heat.z[list(heat.y).index("embedding")][0]
    )

    tables = [
        scaling_model_presentation.study_table(study_table()),
        scaling_model_presentation.volumes_table(found.volumes(4)),
        scaling_model_presentation.memory_table(found.memory(4)),
        scaling_model_presentation.links_table(found.links),
        scaling_presentation.scaling_table(strong),
        scaling_presentation.candidates_table(choice.candidates),
        scaling_presentation.measured_table(measured),
        scaling_presentation.check_table(checked),
        scaling_presentation.imbalance_table(imbalance(found.record)),
        scaling_presentation.exchanges_table(exchange_times(found.record), found.record.runs),
        scaling_model_presentation.stragglers_table(slow),
        scaling_model_presentation.published_table(published),
        scaling_model_presentation.shares_table(found.shares(), found.study),
    ]
    for table in tables:
        assert table.rows and all(len(row) == len(table.columns) for row in table.rows)
        assert "nan" not in table._repr_html_().lower()
    sources = scaling_model_presentation.published_sources(published).markdown
    assert all(source in sources for source in published["source"])
    assert all(assumed in sources for assumed in published["not_published"])
    verdict = scaling_presentation.verdict(found, strong, weak).markdown
    best = strong.loc[strong["mid_ms"].idxmin()]
    assert f"on {best['ranks']} ranks" in verdict and "Strong scaling over OPA" in verdict
    assert (
        "rank 3"
        in scaling_presentation.findings_text(found.findings(), found.record).markdown.lower()
    )


def test_what_cannot_be_predicted_is_a_row_with_its_reason(record: Path) -> None:
    found = shown(record, memory_gb=0.001)
    strong = found.predicted("strong", (1, 2))
    assert strong["mid_ms"].isna().all()
    rows = scaling_presentation.scaling_table(strong).rows
    assert all("No sharding fits" in row[-1] for row in rows)
    assert scaling_figures.iteration_bars(strong, "none").data is not None
    assert "Nothing can be predicted" not in (
        scaling_presentation.verdict(found, strong, strong).markdown
    )


@pytest.mark.notebook
def test_the_notebook_shows_a_record(record: Path, tmp_path: Path) -> None:
    quick = REPOSITORY / "parameters" / "quick.yaml"
    given = [f"record={record}", "gpu=H100-SXM", "inside=NVLink 4 (H100)", "ranks_per_node=8"]
    folder = run_notebook(
        "scaling", quick, [*given, "between=InfiniBand NDR"], output_root=tmp_path / "out"
    )
    page = folder.html.read_text()
    for title in ("Verdict", "Which sharding", "All ranks", "Published scaling"):
        assert title in page
    cells = nbformat.read(folder.ipynb, as_version=4).cells
    outputs = [out for cell in cells for out in cell.get("outputs", []) if "data" in out]
    # all but those of a benchmark's results, which may not be there
    assert sum(FIGURE_TYPE in out["data"] for out in outputs) >= 13
    assert not any(out.output_type == "error" for out in outputs)
