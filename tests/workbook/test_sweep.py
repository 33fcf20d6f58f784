"""Sweeps: the grid, its errors, running to the end whatever happens, resuming."""

import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from compare_profiles import TINY

from dlrm_core.base.errors import InputError
from dlrm_core.config import Parameters, load_parameters, parameters_from_sections
from dlrm_workbook import cli
from dlrm_workbook.analysis.ensemble import swept_runs
from dlrm_workbook.ground.machine import REPOSITORY
from dlrm_workbook.ground.runs import RunError, RunFolder, latest_run
from dlrm_workbook.runner.index import write_index
from dlrm_workbook.trials.sweep import show as figures
from dlrm_workbook.trials.sweep.analyse import SweepSummary, newest_sweep
from dlrm_workbook.trials.sweep.plan import Sweep, describe_failures, sweep_points

SWEEP = {
    "training.batch_size": [8, 16],
    "model.embedding_dim, model.bottom_mlp": [[8, [8, 16, 8]], [4, [8, 4]]],
}


def parameters(sweep: Any = None) -> Parameters:
    return parameters_from_sections(TINY | {"sweep": SWEEP if sweep is None else sweep})


def test_every_combination_is_a_point_the_last_leaf_fastest() -> None:
    points = sweep_points(parameters())
    assert [(p.change["training.batch_size"], p.change["model.embedding_dim"]) for p in points] == [
        (8, 8),
        (8, 4),
        (16, 8),
        (16, 4),
    ]
    assert points[1].parameters.model.bottom_mlp == (8, 4)
    assert points[1].name == "02-batch_size=8+embedding_dim=4+bottom_mlp=8-4"
    assert len({point.name for point in points}) == 4
    assert points[0].label.startswith("training.batch_size = 8, model.embedding_dim = 8")


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"training.batchsize": [1]}, "unknown parameter training.batchsize; did you mean"),
        ({"training.batch_size": 512}, "is 512, expected a list of values"),
        ({"training.batch_size": []}, "expected a list of values"),
        ({"training.batch_size": [8, 8]}, "has the value 8 twice"),
        (
            {"training.batch_size": [8, 0]},
            r"sweep point 2 \(training.batch_size = 0\): training.batch_size is 0, expected at",
        ),
        (
            {"model.embedding_dim, model.bottom_mlp": [[8, [8, 16, 8]], [4, [8, 9]]]},
            r"sweep point 2 .*model.bottom_mlp ends in 9, but model.embedding_dim is 4",
        ),
        ({"model.embedding_dim, model.bottom_mlp": [8]}, "expected a list of 2 values"),
        (
            {"training.seed": [1], "training.seed, data.generator": [[2, "zipf"]]},
            "names training.seed in two keys",
        ),
    ],
)
def test_a_grid_that_cannot_work_is_refused(sweep: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        sweep_points(parameters(sweep))


def test_sweeps_come_from_files_and_options(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(TINY | {"sweep": SWEEP}))
    assert load_parameters(file).sweep == SWEEP
    assert "sweep" not in load_parameters(file).to_sections()
    more = load_parameters(file, ["sweep.data.generator=[uniform, zipf]"])
    assert len(sweep_points(more)) == 8
    other = load_parameters(file, ["sweep={training.seed: [1, 2, 3]}"])
    assert len(sweep_points(other)) == 3
    with pytest.raises(InputError, match="sweep is 3"):
        load_parameters(file, ["sweep=3"])
    example = load_parameters(REPOSITORY / "parameters" / "sweep-small.yaml")
    assert len(sweep_points(example)) == 6


# ---- running --------------------------------------------------------------------


class Runner:
    """Stands in for the notebooks of a point: fails, or is interrupted, where it is told."""

    def __init__(self, failing: Mapping[int, int] | None = None) -> None:
        self.failing = dict(failing or {})
        self.ran: list[int] = []

    def __call__(self, of: Parameters, place: Path, done: dict[str, Path]) -> None:
        number = int(place.name[:2])
        self.ran.append(number)
        if code := self.failing.pop(number, 0):
            raise RunError(f"point {number} went wrong", RunFolder(place, {}), code)
        done["profile"] = place / "profile"
        done["profile"].mkdir(parents=True)


def begin(folder: Path) -> Sweep:
    return Sweep.begin(folder, parameters(), ["profile"], {}, "dlrm run profile -f small.yaml")


def test_a_failing_point_does_not_stop_the_others(tmp_path: Path) -> None:
    sweep, runner = begin(tmp_path), Runner({2: 1})
    assert sweep.run(runner) == 1
    assert runner.ran == [1, 2, 3, 4]
    record = json.loads((tmp_path / "sweep.json").read_text())
    assert record["status"] == "failed"
    assert [row["status"] for row in record["points"]] == [
        "finished",
        "failed",
        "finished",
        "finished",
    ]
    said = describe_failures(sweep)
    assert said.startswith("1 of 4 points") and "point 2 went wrong" in said
    # only what did not finish is run again, and the record heals
    again = Sweep.open(tmp_path)
    assert f"point 2 ({sweep.points[1].name})" in describe_failures(again)
    assert again.run(runner) == 0 and runner.ran == [1, 2, 3, 4, 2]
    record = json.loads((tmp_path / "sweep.json").read_text())
    assert record["status"] == "finished" and "error" not in record["points"][1]
    assert describe_failures(again) == ""


def test_an_interruption_stops_and_is_resumed(tmp_path: Path) -> None:
    sweep, runner = begin(tmp_path), Runner({3: 130})
    assert sweep.run(runner) == 130
    assert runner.ran == [1, 2, 3]
    assert json.loads((tmp_path / "sweep.json").read_text())["status"] == "interrupted"
    moved = tmp_path.rename(tmp_path.parent / "moved")
    again = Sweep.open(moved)
    assert again.run(runner) == 0 and runner.ran == [1, 2, 3, 3, 4]
    assert all(place.is_dir() for place in swept_runs(again.folder, "profile").values())


def test_a_sweep_is_resumed_with_what_it_began_with(tmp_path: Path) -> None:
    sweep = begin(tmp_path)
    sweep.require_same(parameters(), ["profile"], {})
    with pytest.raises(InputError, match=r"notebooks \[.profile.\], but now it is \[.train.\]"):
        sweep.require_same(parameters(), ["train"], {})
    with pytest.raises(InputError, match=r"batch_size \[8, 16\], but now it is \[8\]"):
        sweep.require_same(parameters(SWEEP | {"training.batch_size": [8]}), ["profile"], {})
    other = parameters_from_sections(
        TINY | {"sweep": SWEEP, "data": TINY["data"] | {"generator": "zipf"}}
    )
    with pytest.raises(InputError, match=r"data.generator .uniform., but now it is .zipf."):
        sweep.require_same(other, ["profile"], {})
    with pytest.raises(InputError, match=r"own\.change"):
        sweep.require_same(parameters(), ["profile"], {"change": "{}"})
    with pytest.raises(InputError, match="is no sweep's folder"):
        Sweep.open(tmp_path / "nothing")


def test_a_page_says_which_part_is_largest_at_how_many_points() -> None:
    points = pd.DataFrame(
        {
            "label": ["training.batch_size = 8", "training.batch_size = 16", "a", "b"],
            "status": "finished",
            "samples_per_second": [10.0, 20.0, 5.0, 4.0],
            "top": ["data", "embedding", "embedding", ""],
            "top_share": [0.5, 0.29, 0.405, math.nan],
            "quality": "green",
        }
    )
    points.insert(5, "of_best", points["samples_per_second"] / 20)
    said = figures.sweep_verdict(points, "").markdown
    assert "**batch 16**, 20 samples/s, which is 5.00x faster than b" in said
    assert "embedding at 2 of 3 points (29% to 40%), data at 1 (50%)." in said
    # an unreliable point is never the best, and is marked
    points.loc[1, ["quality", "of_best"]] = "red", math.nan
    points.loc[0, ["quality", "of_best"]] = "amber", 1.0
    said = figures.sweep_verdict(points, "").markdown
    assert "Unreliable, and not counted below: batch 16." in said and "**batch 8**, 10" in said
    bars = figures.points_bars(points)
    labels = list(bars.layout.yaxis.ticktext)
    assert labels[:2] == ["batch 8 (use with care)", "batch 16 (unreliable)"]
    assert bars.data[0].marker.color[1].startswith("rgba")


def test_laws_are_fitted_to_reliable_points_only(tmp_path: Path) -> None:
    grid = {"training.batch_size": [8, 16, 32, 64]}
    sweep = Sweep.begin(tmp_path, parameters(grid), ["train"], {}, "dlrm run train -f small.yaml")

    def train(of: Parameters, place: Path, done: dict[str, Path]) -> None:
        size = of.training.batch_size
        times = 4 * ([10.0, 300.0, 40.0, 500.0] if size == 32 else [float(size)] * 4)
        place.mkdir(parents=True)
        result = {"ms_per_iteration": max(times), "iteration_ms": times}
        (place / "result.json").write_text(json.dumps(result))
        done["train"] = place

    assert sweep.run(train) == 0
    summary = SweepSummary(tmp_path)
    assert summary.points["quality"].tolist() == ["green", "green", "red", "green"]
    (curve,) = summary.curves["training.batch_size"]
    assert curve.x.tolist() == [8, 16, 64] and curve.law.slope == pytest.approx(1, abs=0.01)


def test_two_processes_do_not_run_one_sweep(tmp_path: Path) -> None:
    sweep = begin(tmp_path)
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another process"):
            sweep.run(Runner())
    assert sweep.run(Runner()) == 0


# ---- as one types it ------------------------------------------------------------


@pytest.mark.notebook
def test_a_sweep_that_is_killed_is_resumed_to_one_page(tmp_path, capfd) -> None:
    file = tmp_path / "small.yaml"
    points = [[8, 50], [8, 10**12], [16, 50]]
    sweep = {"training.batch_size, model.table_rows": points}
    file.write_text(yaml.safe_dump(TINY | {"sweep": sweep}, sort_keys=False))
    typed = ("run", "train", "-f", str(file), "--output-root", str(tmp_path / "out"))
    first = subprocess.Popen(
        [sys.executable, "-m", "dlrm_workbook", *typed],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    deadline = time.monotonic() + 200
    records: list[Path] = []
    while time.monotonic() < deadline:
        records = list(tmp_path.glob("out/*/*/sweep.json"))
        points = json.loads(records[0].read_text())["points"] if records else []
        # the second point will be refused for its memory: it runs for some seconds
        if [point["status"] for point in points[:2]] == ["finished", "running"]:
            break
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    capfd.readouterr()
    (record,) = records
    folder = record.parent
    assert json.loads(record.read_text())["status"] == "running"
    done = folder / json.loads(record.read_text())["points"][0]["folders"]["train"]
    before = (done / "run.json").stat().st_mtime_ns
    assert latest_run(tmp_path / "out", "train") is None, "a point is not the newest run"
    write_index(tmp_path / "out")
    for run_json in (tmp_path / "out").rglob("run.json"):
        finished = run_json.parent == done
        assert json.loads(run_json.read_text())["status"] == (
            "finished" if finished else "interrupted"
        )
    rows = Sweep.open(folder).rows
    assert "running" not in [row["status"] for row in rows]
    assert "was killed" in describe_failures(Sweep.open(folder))

    assert cli.main([*typed, "--resume", str(folder)]) == 1
    out, err = capfd.readouterr()
    assert out.splitlines()[-1] == str(folder)
    assert "1 of 3 points did not finish" in err and "memory" in err
    assert "finished before" in err
    assert (done / "run.json").stat().st_mtime_ns == before, "not run again"
    assert [row["status"] for row in json.loads(record.read_text())["points"]] == [
        "finished",
        "failed",
        "finished",
    ]
    assert json.loads((folder / "run.json").read_text())["status"] == "failed"
    page = (folder / "sweep.html").read_text()
    assert "2 of 3 points finished" in page
    assert newest_sweep(tmp_path / "out") == folder
    found = SweepSummary(folder)
    assert found.points["samples_per_second"].notna().tolist() == [True, False, True]
    assert found.curves == {}, "two points make no law"


def test_what_cannot_be_swept_is_refused_before_anything_runs(tmp_path, capsys) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(TINY | {"sweep": {"training.batch_size": [8, 0]}}))
    for more, message in (
        ((), "sweep point 2"),
        (
            ("-p", "sweep.training.batch_size=[8]", "--resume", str(tmp_path / "nowhere")),
            "is no sweep's folder",
        ),
    ):
        typed = ("run", "profile", "-f", str(file), "--output-root", str(tmp_path / "out"), *more)
        assert cli.main(typed) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="no sweep was found"):
        newest_sweep(tmp_path)
