"""Benchmark protocols: what each counts, and how they are shown beside published figures."""

import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_core.base.errors import InputError
from dlrm_core.config import parameters_from_sections
from dlrm_studies.bench.analyse import times
from dlrm_studies.bench.show import best_speeds
from dlrm_studies.protocols import show as protocols
from dlrm_studies.protocols.measure import INFERENCE, TRAINING, measured_or_read, throughput
from dlrm_studies.published import published_runs
from dlrm_studies.stability.measure import Series, measure_stability, trained_or_read
from dlrm_workbook.cli import main
from dlrm_workbook.show.tables import show

SECTIONS = {
    "title": "small",
    "model": {
        "bottom_mlp": "8-16-8",
        "top_mlp": "8-1",
        "embedding_dim": 8,
        "table_rows": [40, 9],
        "loss": "bce",
    },
    "data": {"generator": "uniform", "indices_per_lookup": 3, "round_targets": True},
    "training": {"batch_size": 64, "batches": 6, "device": "cpu", "threads": 1},
}
PUBLISHED = tuple(published_runs().itertuples(index=False))
# nothing of a benchmark's contestants
NO_SPEEDS = best_speeds(times({"cases": []}))
POSITIVE = st.floats(1e-3, 1e3)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=2, max_size=450), st.integers(1, 5000))
def test_each_protocol_counts_what_its_publisher_counts(pairs, batch):
    data, compute = zip(*pairs, strict=True)
    timings = {"batch_size": batch, "data_ms": data, "compute_ms": compute}
    found = {name: throughput(timings, name) for name in TRAINING}
    half = len(pairs) // 2
    whole = [sum(pair) for pair in pairs]
    assert found["nvidia"]["samples_per_second"] == pytest.approx(
        1e3 * batch * (len(pairs) - half) / sum(whole[half:])
    )
    assert found["nvidia"]["left_out"] == half and found["nvidia"]["data_included"]
    assert found["facebook"]["ms_per_iteration"] == pytest.approx(statistics.fmean(compute))
    assert not found["facebook"]["data_included"] and found["facebook"]["left_out"] == 0
    # of a run shorter than one of its prints there is one figure, else one at each hundred
    ends = range(100, len(pairs) + 1, 100) or [len(pairs)]
    rates = [1e3 * batch * end / sum(compute[:end]) for end in ends]
    assert found["deepspark"]["samples_per_second"] == pytest.approx(statistics.fmean(rates))
    for one in found.values():
        assert one["iterations"] + one["left_out"] == len(pairs)
        assert one["ms_per_iteration"] * one["samples_per_second"] == pytest.approx(1e3 * batch)


def test_the_warm_up_is_found_in_the_times():
    slow, steady = [50.0] * 20, [5.0 + 0.1 * (i % 3) for i in range(180)]
    timings = {"batch_size": 10, "data_ms": [0.0] * 200, "compute_ms": slow + steady}
    found = throughput(timings, "steady")
    assert found["left_out"] == 20
    assert found["ms_per_iteration"] == pytest.approx(5.1, abs=0.01)


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(InputError, match="1 iterations were timed, expected at least 2"):
        throughput({"batch_size": 1, "data_ms": [1.0], "compute_ms": [1.0]}, "nvidia")
    with pytest.raises(InputError, match="expected one of steady, nvidia, facebook, deepspark"):
        throughput({"batch_size": 1, "data_ms": [1.0] * 2, "compute_ms": [1.0] * 2}, "mlperf")


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """As ``dlrm protocols`` writes it, measured by its command in this process."""
    folder = tmp_path_factory.mktemp("protocols")
    (folder / "p.json").write_text(json.dumps(SECTIONS))
    code = main(
        [
            *("protocols", "-f", str(folder / "p.json"), "--json", str(folder / "protocols.json")),
            *("--iterations", "6", "--batch-sizes", "1,2048", "--steps", "30", "--seconds", "2"),
        ]
    )
    assert code == 0
    file = folder / "protocols.json"
    return json.loads(file.read_text()) | {"file": file}


def test_the_command_measures_every_protocol(document):
    measured = document["measured"]
    assert [one["protocol"] for one in measured["training"]] == list(TRAINING)
    expected = [(size, name) for size in (1, 2048) for name in INFERENCE]
    assert [(o["batch_size"], o["protocol"]) for o in measured["inference"]] == expected
    for one in measured["inference"]:
        assert one["p50"] <= one["p90"] <= one["p95"] <= one["p99"]
        assert one["steps"] + one["warm_up_steps"] == 30
        assert one["warm_up_steps"] == 10 or one["protocol"] == "steady"
    assert len(measured["timings"]["data_ms"]) == 6
    assert measured["peak_memory_by_device"]["host"] > 0
    # a figure, or the reason that there is none
    assert measured["power_w"] is not None or measured["power"]["not_measured"]


def test_ours_stand_beside_published_figures_of_other_hardware(document, tmp_path):
    parameters = parameters_from_sections(SECTIONS)
    runs = measure_stability(parameters, [0], tmp_path)
    found = protocols.speeds(document, NO_SPEEDS, {"fp32": runs})
    ours, others = found[found["ours"]], found[~found["ours"]]
    assert set(ours["group"]) == set(protocols.GROUPS) - {"ours"}
    assert set(ours["auc"][ours["group"].str.startswith("training")]) == {runs.values[0]}
    assert len(others) == len(PUBLISHED) == len(published_runs().drop_duplicates())
    assert others["source"].str.contains("other hardware").all()
    rows = show(found, protocols.COLUMNS["speeds"]).rows
    assert len(rows) == len(found)
    # each group's rows stand together, ours first
    groups = [row[0] for row in rows]
    assert groups == sorted(groups, key=groups.index)
    for group in set(groups):
        assert rows[groups.index(group)][1] == "this run"
    figure = protocols.published_bars(found)
    assert sum(len(trace.x) for trace in figure.data) == len(found)
    assert len(figure.layout.annotations) == len(set(groups))


def test_a_run_has_deepsparks_eight_columns_or_the_reasons(document, tmp_path):
    parameters = parameters_from_sections(SECTIONS)
    runs = measure_stability(parameters, [0, 1], tmp_path / "same")
    others = {**SECTIONS, "training": {**SECTIONS["training"], "precision": "bf16"}}
    half = measure_stability(parameters_from_sections(others), [0], tmp_path / "bf16")
    half.runs.append({**half.runs[0], "seed": 1, "status": "diverged"})
    found = protocols.eight_columns(document, {"fp32": runs, "bf16": half})
    assert len(found) == 2 + sum(one.protocol == "deepspark" for one in PUBLISHED)
    ours, seeded, theirs = found.iloc[0], found.iloc[1], found.iloc[2:]
    speeds = {one["protocol"]: one for one in document["measured"]["training"]}
    assert ours["samples_per_second"] == speeds["deepspark"]["samples_per_second"]
    assert ours["auc"] == pytest.approx(statistics.fmean(runs.values)) and ours["stability"] == 1
    assert seeded["stability"] == 0.5 and seeded["auc"] == half.spreads["auc"]["mean"]
    assert "samples/s with data" in seeded["missing"]["samples_per_second"]
    # each figure is there, or the reason that it is not
    for row in found.to_dict("records"):
        unknown = {k for k, v in row.items() if isinstance(v, float) and math.isnan(v)}
        assert unknown == set(row["missing"]) and all(row["missing"].values())
    table = show(found, protocols.COLUMNS["eight"])
    assert {len(row) for row in table.rows} == {9}
    assert not any(cell in ("", "–", "nan") for row in table.rows for cell in row)
    # as on the page: no AUC of one card; 0.75, 0.97 and 60 W a card stand with 793,486
    one_card, _, last = theirs.to_dict("records")
    assert one_card["samples_per_second"] == 196_958 and "auc" in one_card["missing"]
    assert (last["samples_per_second"], last["auc"], last["power_w"]) == (793_486, 0.75, 480)
    # without seeds the reason is the parameter to give
    bare = protocols.eight_columns(document).iloc[0]
    assert bare["missing"]["auc"] == bare["missing"]["stability"] == protocols.NO_SEEDS
    assert len(protocols.eight_columns(None)) == len(theirs)


def test_published_figures_agree_with_each_other():
    """What a source derives from its own figures follows from those we hold."""
    rows = {(p.hardware, p.model, p.mode, p.precision): p for p in PUBLISHED}
    cpu = next(p for p in PUBLISHED if p.times_cpu == 1)
    for one in PUBLISHED:
        if not math.isnan(one.times_cpu):
            ratio = one.samples_per_second / cpu.samples_per_second
            assert ratio == pytest.approx(one.times_cpu, abs=1)
        if not math.isnan(one.latency_ms):
            # throughput and latency were rounded to three digits, and averaged apart
            rate = 1e3 * one.batch_samples / one.latency_ms
            assert rate == pytest.approx(one.samples_per_second, rel=0.01)
        if not math.isnan(one.minutes_to_train):
            assert 0.8025 <= one.auc <= 0.8028 and one.precision
    # speed-ups by mixed precision that the page prints: of throughput, and of time to train
    printed = {
        ("1 × A100-80GB", "small"): (1.60, 1.64),
        ("8 × A100-80GB", "large"): (1.27, 1.33),
        ("8 × A100-80GB", "extra large"): (1.17, 1.15),
        ("1 × V100-32GB (DGX-1)", "small"): (3.37, 3.15),
        ("8 × V100-32GB (DGX-1)", "large"): (2.02, 1.89),
        ("1 × V100-32GB (DGX-2)", "small"): (3.49, 3.15),
        ("8 × V100-32GB (DGX-2)", "large"): (2.06, 1.86),
        ("16 × V100-32GB (DGX-2)", "large"): (1.64, 1.43),
    }
    for (hardware, model), (faster, sooner) in printed.items():
        full = "TF32" if "A100" in hardware else "FP32"
        plain, mixed = (rows[hardware, model, "training", p] for p in (full, "mixed"))
        speedup = mixed.samples_per_second / plain.samples_per_second
        assert speedup == pytest.approx(faster, abs=0.011)
        assert plain.minutes_to_train / mixed.minutes_to_train == pytest.approx(sooner, abs=0.011)


def test_nothing_measured_leaves_the_published_alone():
    found = protocols.speeds(None, NO_SPEEDS)
    assert len(found) == len(PUBLISHED) and not found["ours"].any()
    for nothing in (protocols.training(None), protocols.latencies(None)):
        assert "Not measured: `dlrm run benchmark" in repr(show(nothing))
    assert protocols.power_and_memory(None).empty


def test_what_the_page_shows(document):
    found = protocols.latencies(document)
    latency = protocols.latency_lines(found)
    assert list(latency.data[0].x) == [1, 2048]
    rows = show(found, protocols.COLUMNS["latencies"]).rows
    assert [row[:2] for row in rows[:2]] == [["1", "steady"], ["1", "nvidia"]]
    training = show(protocols.training(document), protocols.COLUMNS["training"])
    assert [row[0] for row in training.rows] == list(TRAINING)
    device = dict(protocols.power_and_memory(document).itertuples(index=False))
    assert device["command"].startswith("dlrm") and "peak memory, host" in device
    measured = document["measured"]
    if measured["samples_per_joule"] is None:
        assert device["samples/s per watt"] == "not measured"
        assert all(why in str(device) for why in measured["power"]["not_measured"].values())


def test_a_finished_benchmark_is_shown_with_the_record_beside_it(document, tmp_path):
    parameters = parameters_from_sections(SECTIONS)
    beside = str(document["file"].with_name("bench.json"))
    assert (
        measured_or_read(parameters, tmp_path, 60, [1], beside)["measured"] == document["measured"]
    )
    assert measured_or_read(parameters, tmp_path, 60, [1], str(tmp_path / "bench.json")) is None
    assert measured_or_read(parameters, tmp_path, 0, [1]) is None
    assert not list(tmp_path.iterdir())


def test_seeds_are_read_or_trained(tmp_path):
    parameters = parameters_from_sections(SECTIONS)
    assert trained_or_read(parameters, tmp_path, Series()) == {}
    made = trained_or_read(parameters, tmp_path, Series(seeds=1))
    assert list(made) == ["fp32"] and math.isfinite(made["fp32"].values[0])
    one, several = Series(folder=str(tmp_path / "stability")), Series(folder=str(tmp_path))
    assert trained_or_read(parameters, tmp_path, one) == made
    assert list(trained_or_read(parameters, tmp_path, several)) == ["stability"]


def test_a_file_that_is_no_record_is_refused(tmp_path):
    (tmp_path / "protocols.json").write_text('{"schema": 9}')
    with pytest.raises(InputError, match=r"is no record of dlrm protocols"):
        measured_or_read(parameters_from_sections(SECTIONS), tmp_path, 0, [], str(tmp_path / "b"))
