"""Training to a target: what it took, MLPerf's log of it, and what is refused."""

import json
import math
import re

import pytest
from small_training import parameters_with

from dlrm_core.base.errors import InputError
from dlrm_studies.runs import section_from
from dlrm_studies.time_to_train.measure import (
    EVALUATIONS,
    Target,
    auc_by_time,
    reached_or_read,
    time_to_auc,
    to_target,
)
from dlrm_studies.time_to_train.show import auc_curve, target_sentence
from dlrm_workbook.cli import main

SECTIONS = {
    "title": "Teacher",
    "model": {
        **{"mlp_sizes": "nvidia", "dense_features": 6, "bottom_mlp": [16, 8], "top_mlp": [16, 1]},
        **{"embedding_dim": 8, "table_rows": [200, 20, 3], "loss": "bce"},
    },
    "data": {"generator": "teacher", "teacher_rows": 8, "teacher_strength": 3.0},
    "training": {
        **{"batch_size": 256, "batches": 200, "learning_rate": 0.5, "log_every": 40},
        **{"eval_batches": 8, "threads": 1, "device": "cpu"},
    },
}


def parameters(data=None, **training):
    return parameters_with(SECTIONS, data=data, **training)


def log_of(file) -> list[dict]:
    found = file.read_text().splitlines()
    assert all(line.startswith(":::MLLOG {") for line in found)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in found]


@pytest.fixture(scope="module")
def reached(tmp_path_factory):
    """A training that reaches its target, and its folder."""
    folder = tmp_path_factory.mktemp("reached")
    return reached_or_read(parameters(), folder, Target(0.75, 3.6, True)), folder


def test_the_time_to_a_target_is_that_of_all_until_the_evaluation_that_reached_it(reached):
    record, folder = reached
    (row,) = time_to_auc(record).itertuples()
    way = auc_by_time(record)
    # evaluated 20 times in 200 iterations, as MLPerf does where nobody says otherwise
    assert way["iteration"].tolist() == list(range(10, row.iterations + 1, 10))
    assert row.reached and row.auc == way["auc"].iloc[-1] >= 0.75 > way["auc"].iloc[:-1].max()
    assert row.samples == 256 * row.iterations
    assert way["time_s"].is_monotonic_increasing
    assert 0 < row.evaluation_s < way["time_s"].iloc[-1] <= row.time_s
    assert row.cost == pytest.approx(row.time_s * 3.6 / 3600)
    result = json.loads((folder / "time_to_train" / "result.json").read_text())
    energy = result["power"]["energy_j"]
    assert math.isnan(row.energy_j) if energy is None else row.energy_j == energy
    assert "AUC 0.75 was reached after" in target_sentence(record).markdown
    assert list(auc_curve(way).data[0].y) == way["auc"].tolist()
    # the record beside a finished benchmark is shown again
    finished = str(folder / "benchmark.json")
    assert reached_or_read(parameters(), folder, Target(), finished) == record


def test_mlperfs_log_has_the_order_that_its_rules_ask_for(reached):
    record, folder = reached
    lines = log_of(folder / "time_to_train" / "mllog.txt")
    keys = [line["key"] for line in lines]
    assert all(set(line["metadata"]) >= {"file", "lineno"} for line in lines)
    for before, after in (("init_start", "init_stop"), ("init_stop", "run_start")):
        assert keys.count(before) == 1 and keys.index(before) < keys.index(after)
    assert keys[-1] == "run_stop" and lines[-1]["metadata"]["status"] == "success"
    values = {line["key"]: line["value"] for line in lines}
    assert (values["global_batch_size"], values["eval_samples"]) == (256, 8 * 256)
    assert values["submission_benchmark"] == "dlrm" and "train_samples" not in values
    accuracy = [line["value"] for line in lines if line["key"] == "eval_accuracy"]
    assert accuracy == auc_by_time(record)["auc"].tolist()
    assert keys.count("eval_start") == keys.count("eval_stop") == len(accuracy)
    times = {key: line["time_ms"] for key, line in zip(keys, lines, strict=True)}
    seconds = (times["run_stop"] - times["run_start"]) / 1e3
    assert seconds == pytest.approx(record["result"]["elapsed_s"], abs=0.3)


def test_epochs_in_the_log_are_passes_over_the_data(tmp_path):
    sections = parameters({"samples": 1000, "drop_last": False}, epochs=3, evals_per_epoch=2)
    file = tmp_path / "given.json"
    file.write_text(json.dumps(sections.to_sections()))
    log = tmp_path / "log.txt"
    assert main(["train", "-f", str(file), "--mllog", str(log)]) == 0
    lines = log_of(log)
    assert next(line["value"] for line in lines if line["key"] == "train_samples") == 1000
    marks = [
        (line["key"], line["metadata"]["epoch_num"])
        for line in lines
        if line["key"] in ("epoch_start", "epoch_stop", "eval_start")
    ]
    expected = []
    for epoch in (1, 2, 3):
        middle, whole = ("eval_start", epoch - 0.5), ("eval_start", float(epoch))
        expected += [("epoch_start", epoch), middle, ("epoch_stop", epoch), whole]
    assert marks == expected
    times = [line["time_ms"] for line in lines if line["key"] != "eval_start"]
    assert times == sorted(times)
    assert lines[-1]["metadata"]["status"] == "aborted"  # there was no target to reach


def test_a_target_that_is_not_reached_is_said(tmp_path):
    record = reached_or_read(parameters(batches=5, eval_every=5), tmp_path, Target(1.0))
    (row,) = time_to_auc(record).itertuples()
    assert not row.reached and row.iterations == 5 and math.isnan(row.cost)
    said = target_sentence(record).markdown
    assert re.search(r"AUC 1 was not reached: the best AUC was 0\.\d{5} when training ended", said)
    assert "price_per_hour" in said


def test_it_is_evaluated_as_the_parameters_say_or_as_mlperf_does():
    assert to_target(parameters(), 0.8).training.eval_every == 200 // EVALUATIONS
    assert to_target(parameters(eval_every=7), 0.8).training.eval_every == 7
    ended = to_target(parameters({"samples": 4096}, epochs=1.0), 0.8).training
    assert (ended.eval_every, ended.evals_per_epoch) == (None, EVALUATIONS)
    assert ended.auc_target == 0.8


def test_what_cannot_be_is_refused_before_anything_runs(tmp_path):
    assert reached_or_read(parameters(), tmp_path, Target()) is None
    assert (
        target_sentence(None) is None and not len(time_to_auc(None)) and not len(auc_by_time(None))
    )
    for asked, words in (
        *(({"auc": auc}, r"time_to_train\.auc is .*, expected") for auc in (1.5, -0.1, math.nan)),
        ({"auc": 0.8, "price_per_hour": -1.0}, "price_per_hour is -1.0, expected at least 0"),
        ({"mllog": True}, r"time_to_train\.mllog is given, but time_to_train\.auc is 0"),
        ({"target": 0.8}, "time_to_train.target is unknown, expected auc or price_per_hour or"),
    ):
        with pytest.raises(InputError, match=words):
            section_from(Target, asked, "time_to_train")
    assert not list(tmp_path.iterdir())
