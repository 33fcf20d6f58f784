"""N seeds: fresh processes, resumed, summed up, drawn."""

import json
import math
import statistics
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_training import parameters_with

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json, write_json
from dlrm_studies.runs import section_from
from dlrm_studies.stability import show as stability_figures
from dlrm_studies.stability.measure import (
    SeedRun,
    Series,
    Stability,
    measure_stability,
    precision_table,
    read_stability,
    spread,
    stability_table,
    summarise,
    trained_or_read,
    with_seed,
)
from dlrm_workbook import cli
from dlrm_workbook.show.tables import show

SECTIONS = {
    "title": "Tiny",
    "model": {"bottom_mlp": "4-2", "top_mlp": 1, "embedding_dim": 2, "table_rows": [5, 7]},
    "data": {"generator": "uniform", "indices_per_lookup": 2, "round_targets": True},
    "training": {
        "batch_size": 16,
        "batches": 3,
        "device": "cpu",
        "threads": 1,
        "eval_batches": 4,
        "learning_rate": 1e-05,
    },
}


parameters = partial(parameters_with, SECTIONS)


def seed_run(seed: int, auc: float | None, status: str = "finished", **more) -> SeedRun:
    fields = {
        "seed": seed,
        "status": status,
        "error": "",
        "iterations": 3,
        "auc": auc,
        "best_auc": auc,
        "loss": 0.5 + seed / 100,
        "samples_per_second": 1000.0 + seed,
        "elapsed_s": 1.0,
        "peak_memory_by_device": {"host": 1 << 30, "gpu": 2 << 30},
        "power_w": 100.0,
        "samples_per_joule": 10.0,
        "not_measured": {},
        "device": "cpu",
    }
    return fields | more


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory) -> tuple[Path, Stability]:
    folder = tmp_path_factory.mktemp("stability") / "runs"
    return folder, measure_stability(parameters(), [3, 4], folder)


def test_every_seed_trains_in_its_own_process_and_is_evaluated(two_runs):
    folder, found = two_runs
    assert [run["status"] for run in found.runs] == ["finished", "finished"]
    assert found.metric == "auc" and len(found.values) == 2
    results = [read_json(folder / f"seed-0000{seed}" / "result.json") for seed in (3, 4)]
    assert [result["auc"] for result in results] == found.values
    assert results[0]["losses"] != results[1]["losses"]
    assert found.spreads["loss"]["mean"] == pytest.approx(
        statistics.fmean(result["loss"] for result in results)
    )
    assert found.spreads["peak_memory_bytes_host"]["most"] > 10e6


def test_the_result_is_read_as_it_was_written(two_runs):
    folder, found = two_runs
    assert read_stability(folder) == found
    (folder.parent / "other.json").write_text('{"title": 1}')
    with pytest.raises(InputError, match=r"other\.json.*no result of dlrm stability"):
        read_stability(folder.parent / "other.json")


def test_runs_that_finished_are_kept_and_others_run_again(two_runs):
    folder, found = two_runs
    kept = folder / "seed-00003" / "result.json"
    before = kept.stat().st_mtime_ns
    # killed while it ran: no result
    (folder / "seed-00004" / "result.json").unlink()
    again = measure_stability(parameters(), [3, 4], folder)
    assert kept.stat().st_mtime_ns == before and again.runs[0] == found.runs[0]
    assert again.runs[1]["auc"] == found.runs[1]["auc"] and again.runs[1]["status"] == "finished"
    with pytest.raises(InputError, match=r"training\.batches 3, but now it is 9"):
        measure_stability(parameters(batches=9), [3], folder)


def test_a_run_that_fails_is_listed_with_what_it_said(tmp_path):
    found = measure_stability(parameters(embedding_backend="fbgemm"), [1], tmp_path / "x")
    assert [run["status"] for run in found.runs] == ["failed"]
    assert "training.embedding_backend" in found.runs[0]["error"]
    assert found.spreads == {} and found.values == []
    assert stability_table({"x": found})["seeds"][0] == "0 of 1"


def test_one_run_has_its_own_seed_and_folder():
    given = parameters(checkpoint_folder="shared", checkpoint_every=2, seed=9)
    one = with_seed(given, 77)
    assert one.training.seed == 77 and one.training.checkpoint_folder == ""
    assert one.training.eval_every is not None
    assert with_seed(parameters(eval_every=2), 1).training.eval_every == 2


def test_without_auc_everywhere_the_loss_is_the_metric_of_runs_that_did_not_diverge():
    assert summarise(parameters(), [seed_run(0, 0.7), seed_run(1, 0.8)]).metric == "auc"
    mixed = summarise(parameters(), [seed_run(0, 0.7), seed_run(1, None)])
    assert mixed.metric == "loss" and mixed.values == [0.5, 0.51]
    # runs that diverged do not count
    found = summarise(parameters(), [seed_run(0, 0.7), seed_run(1, 0.1, "diverged")])
    assert found.spreads["auc"]["count"] == 1 and found.spreads["auc"]["sd"] is None


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40))
def test_a_spread_holds_its_values_and_every_value_has_a_bin(values):
    found = spread(values)
    assert found["least"] <= found["mean"] + 1e-9 and found["mean"] <= found["most"] + 1e-9
    if len(values) > 1:
        deviation = math.sqrt(sum((v - found["mean"]) ** 2 for v in values) / (len(values) - 1))
        assert found["sd"] == pytest.approx(deviation, abs=1e-9)
    edges = stability_figures.bins(values)
    assert (edges[1:] > edges[:-1]).all()
    assert edges[0] < min(values) and max(values) < edges[-1]


def test_the_histogram_counts_every_seed():
    runs = [seed_run(n, 0.8 + n / 1e4) for n in range(16)]
    found = {name: summarise(parameters(), runs) for name in ("fp32", "bf16")}
    figure = stability_figures.histogram(found)
    assert [sum(trace.y) for trace in figure.data] == [16, 16]
    assert [trace.name for trace in figure.data] == ["fp32 (16 seeds)", "bf16 (16 seeds)"]
    assert sum("0.80075" in note.text for note in figure.layout.annotations) == 2
    other = summarise(parameters(), [seed_run(0, None)])
    with pytest.raises(ValueError, match="auc and loss"):
        stability_figures.histogram({"a": found["fp32"], "b": other})


def test_the_table_has_power_memory_and_stability():
    runs = [seed_run(n, 0.8, power_w=None, samples_per_joule=None) for n in range(3)]
    frame = stability_table({"fp32": summarise(parameters(), runs)})
    table = show(frame, stability_figures.stability_columns(frame))
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["seeds"] == "3 of 3" and row["samples/s"] == "1,001"
    assert row["power (W)"] == "not measured" and row["samples/J"] == "not measured"
    assert row["peak memory, host"] == "1.00 GiB" and row["peak memory, gpu"] == "2.00 GiB"
    assert row["mean"] == "0.800000" and row["standard deviation"] == "0.000000"


def test_the_command_prints_spreads(two_runs, tmp_path, capsys):
    folder, found = two_runs
    file = tmp_path / "tiny.yaml"
    write_json(file, SECTIONS)
    given = ["stability", "-f", str(file), "--seeds", "2", "--first-seed", "3"]
    assert cli.main([*given, "--output", str(folder)]) == 0
    printed = capsys.readouterr()
    last = json.loads(printed.out.splitlines()[-1])
    assert last["metric"] == "auc" and last["finished"] == 2
    assert last["spreads"]["auc"]["mean"] == pytest.approx(found.spreads["auc"]["mean"])
    assert "seed 3 (1 of 2): finished, AUC" in printed.err
    assert cli.main(["stability", "-f", str(file), "--seeds", "0", "--output", str(folder)]) == 2


def series(precision: str, values: list[float | None]) -> Stability:
    runs = [seed_run(seed, auc) for seed, auc in enumerate(values)]
    return summarise(parameters(precision=precision), runs)


def test_precisions_are_compared_seed_by_seed():
    base = [0.80, 0.82, 0.79, 0.81, 0.805]
    found = {
        "fp32": series("fp32", base),
        # every seed a little worse: far below the spread of the seeds, and yet shown
        "bf16": series("bf16", [auc - 0.001 + 0.0001 * (i % 2) for i, auc in enumerate(base)]),
        "fp16": series("fp16", [auc + 0.002 * (-1) ** i for i, auc in enumerate(base)]),
    }
    table = precision_table(found)
    low, same = table.itertuples()
    differences = [-0.001, -0.0009, -0.001, -0.0009, -0.001]
    error = statistics.stdev(differences) / math.sqrt(5)
    assert low.difference == pytest.approx(statistics.fmean(differences))
    # 2.776445: the quantile of Student's t with 4 degrees of freedom
    assert low.difference_high - low.difference == pytest.approx(2.776445 * error, rel=1e-5)
    # t = -39.2 with 4 degrees: p = 2.53e-6, twice that for two series
    assert low.p_value == pytest.approx(5.1e-6, rel=0.02) and same.p_value > 0.5
    assert (low.seeds, low.reference, low.metric) == (5, "fp32", "AUC")
    said = stability_figures.significance_sentence(table).markdown
    assert "bf16 and fp32: AUC differs by -0.000960" in said
    assert "fp16 and fp32: no difference in AUC was shown" in said
    assert "-0.000960" in show(table, stability_figures.COLUMNS["significance"])._repr_html_()


def test_a_test_needs_two_seeds_and_two_series():
    assert precision_table({"fp32": series("fp32", [0.8, 0.7])}).empty
    found = {"fp32": series("fp32", [0.8, 0.7]), "bf16": series("bf16", [0.8])}
    table = precision_table(found)
    assert math.isnan(table["p_value"][0]) and table["seeds"][0] == 1
    said = stability_figures.significance_sentence(table).markdown
    assert "two seeds in both are needed" in said
    assert "nan" not in show(table, stability_figures.COLUMNS["significance"])._repr_html_()


def test_precisions_that_cannot_be_are_refused_before_anything_runs(tmp_path):
    for asked, words in (
        ({"precisions": ["bf16"]}, "stability.precisions is given, but stability.seeds is 0"),
        ({"seeds": 2, "precisions": ["fp64"]}, r"stability.precisions is 'fp64', expected one of"),
        ({"seeds": -1}, "stability.seeds is -1, expected at least 0"),
        ({"seed": 2}, "stability.seed is unknown, expected seeds or precisions or folder"),
        ({"folder": str(tmp_path)}, "which holds no stability.json of dlrm stability"),
        ({"folder": str(tmp_path), "seeds": 2}, "give one of the two"),
        (10, "stability is 10, expected names with values"),
    ):
        with pytest.raises(InputError, match=words):
            section_from(Series, asked, "stability")
    with pytest.raises(InputError, match="'tf32', which is a GPU's"):
        trained_or_read(parameters(), tmp_path, Series(2, ("fp32", "tf32")))
    assert not list(tmp_path.iterdir())
