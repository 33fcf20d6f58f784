"""What the compare and sweep notebooks show, run in this process on made profiles."""

import json
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from compare_profiles import PARTS, TINY, noisy, saved
from test_notebooks import run_cells

from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_workbook.analysis.ensemble import WHOLE_STEP
from dlrm_workbook.ground.runs import RunError, RunFolder
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.show.tables import Text, TextTable
from dlrm_workbook.trials.sweep.analyse import SweepSummary
from dlrm_workbook.trials.sweep.plan import Sweep

SIZES = [16, 32, 64, 128, 256]


def titles(shown: list[Any]) -> list[str]:
    return [v.layout.title.text for v in shown if isinstance(v, go.Figure)]


def test_the_compare_notebook_of_finished_runs(tmp_path: Path) -> None:
    places = [saved(tmp_path / "a", noisy(0)), saved(tmp_path / "b", noisy(1, {PARTS[0]: 2.0}))]
    out = tmp_path / "out"
    shown = run_cells("compare", runs=places, output_folder=str(out))  # type: ignore[arg-type]
    assert titles(shown) == [
        "Speed-up, predicted and measured",
        "Difference of each part, after minus before",
        "Call tree of the run after, coloured by its time over that before",
    ]
    texts = " ".join(v.markdown for v in shown if isinstance(v, Text))
    assert "finished runs are compared; `dlrm run compare" in texts and "x slower" in texts
    tables = [v for v in shown if isinstance(v, TextTable)]
    assert len(tables) >= 3
    assert any("slower" in row for table in tables for row in table.rows)
    assert json.loads((out / "compare.json").read_text())["status"] == "finished"
    for value in shown:
        if isinstance(value, TextTable):
            assert "nan" not in value._repr_html_().lower()


class Measured:
    """Stands in for the profile notebook: the top MLP grows with the batch, the data does not."""

    def __call__(self, of: Parameters, place: Path, done: dict[str, Path]) -> None:
        size = of.training.batch_size
        if size == 32 and of.model.embedding_dim == 4:
            raise RunError("the machine was switched off", RunFolder(place, {}))
        scale = {PARTS[1]: size / 16, PARTS[2]: size / 16}
        profile = noisy(size, scale, {"parameters": of.to_sections()})
        done["profile"] = Path(saved(place / "profile", profile))


class MeasuredWithoutProfiler(Measured):
    """The same, with iterations without a profiler: they took 5 ms."""

    def __call__(self, of: Parameters, place: Path, done: dict[str, Path]) -> None:
        super().__call__(of, place, done)
        profile = Profile.load(done["profile"] / "profile")
        profile.meta["unprofiled_iteration_ms"] = [5.0] * 20
        profile.save_meta(done["profile"] / "profile")


def test_the_parts_of_a_sweep_add_up_to_its_points(tmp_path: Path) -> None:
    parameters = parameters_from_sections(TINY | {"sweep": {"training.batch_size": [16, 64]}})
    sweep = Sweep.begin(tmp_path, parameters, ["profile"], {}, "dlrm run profile")
    assert sweep.run(MeasuredWithoutProfiler()) == 0
    found = SweepSummary(tmp_path)
    assert found.points["ms_per_iteration"].tolist() == [5.0, 5.0]
    parts = found.times[found.times["component"] != WHOLE_STEP]
    assert parts.groupby("run")["time_ms"].sum().tolist() == pytest.approx([5.0, 5.0])
    whole = found.times[found.times["component"] == WHOLE_STEP]
    assert whole["time_ms"].tolist() == pytest.approx([5.0, 5.0])


def test_the_sweep_notebook_shows_every_point(tmp_path: Path) -> None:
    grid = {"training.batch_size": SIZES, "model.embedding_dim": [8, 4]}
    parameters = parameters_from_sections(TINY | {"sweep": grid})
    sweep = Sweep.begin(tmp_path, parameters, ["profile"], {}, "dlrm run profile")
    assert sweep.run(Measured()) == 1
    shown = run_cells("sweep", sweep_folder=str(tmp_path), output_folder=str(tmp_path / "page"))
    first, *curves = titles(shown)
    assert first == "Share of each part at each point"
    assert sorted(curves) == ["Time of each part along batch", "Time of each part along dim"]
    text = " ".join(v.markdown for v in shown if isinstance(v, Text))
    assert "9 of 10 points finished" in text and "switched off" in text
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [row["status"] for row in summary["points"]].count("finished") == 9
    laws = {
        (law["component"], law["held"]): law["sentence"]
        for law in summary["laws"]
        if law["leaf"] == "training.batch_size"
    }
    assert laws["top_mlp", "dim 8"].startswith("linear in batch")
    assert laws["data", "dim 8"].startswith("does not depend on batch")
