"""Changes as people write them, and runs in turns."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from compare_profiles import PARTS, made_runs, tiny
from hypothesis import given
from hypothesis import strategies as st

from dlrm_core.base.errors import InputError
from dlrm_workbook.analysis.changes import apply_change, change_steps, change_text, difference
from dlrm_workbook.evidence.training import iteration_part_times
from dlrm_workbook.runner.parameters import split_overrides
from dlrm_workbook.trials.compare.analyse import (
    NOT_A_PART,
    REST,
    compare_losses,
    compare_settings,
    gain,
    pair_of_times_ms,
    round_table,
)
from dlrm_workbook.trials.compare.comparison import Comparison
from dlrm_workbook.trials.compare.measure import TimedRun, run_in_turns

# ---- changes --------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ["change={training.batch_size: 4096, data.generator: facebook}"],
        ["change={training: {batch_size: 4096}, data: {generator: facebook}}"],
        ["change.training.batch_size=4096", "change.data.generator=facebook"],
        ["change=training.batch_size=4096", "change=data.generator=facebook"],
    ],
)
def test_a_change_is_read_however_it_is_written(options: list[str]) -> None:
    sections, own = split_overrides([*options, "training.seed=1"])
    assert sections == ["training.seed=1"]
    assert json.loads(own["change"]) == {"training.batch_size": 4096, "data.generator": "facebook"}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("change={training.batchsize: 3}", "did you mean training.batch_size"),
        ("change.data.generater=facebook", "did you mean data.generator"),
        ("change=facebook", "expected parameters with their new values"),
        ("change={training: [", "not valid YAML"),
    ],
)
def test_a_change_that_cannot_be_read_is_refused(option: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        split_overrides([option])


def test_a_change_is_validated_and_can_be_found_again() -> None:
    changed = apply_change(tiny(), {"training.batch_size": 32, "data.generator": "zipf"})
    assert difference(tiny(), changed) == {"data.generator": "zipf", "training.batch_size": 32}
    with pytest.raises(InputError, match=r"change: .*batch_size is 0, expected at least 1"):
        apply_change(tiny(), {"training.batch_size": 0})
    assert change_text({"model.table_rows": [7] * 3, "training.batch_size": 2}) == (
        "model.table_rows = 3 × 7, training.batch_size = 2"
    )


def test_steps_are_cumulative_and_can_each_run() -> None:
    change = {"model.bottom_mlp": [8, 4], "model.embedding_dim": 4, "training.batch_size": 32}
    steps = change_steps(tiny(), change)
    assert [len(step) for step in steps] == [2, 3], "the first leaf alone cannot work"
    assert steps[-1] == change


# ---- in turns -------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(0, 1000), min_size=3, max_size=3), min_size=1, max_size=5),
    st.integers(0, 2),
)
def test_parts_and_the_rest_add_up_to_the_iteration(lengths: list[list[int]], warmup: int) -> None:
    spans: list[tuple[str, int, int]] = []
    now = 0
    for each in lengths:
        start = now
        for (component, phase), length in zip(PARTS, each, strict=True):
            spans.append((f"dlrm::{component}::{phase}", now, now + 1000 * length))
            now += 1000 * length
        now += 500
        spans.append(("dlrm::iteration", start, now))
    times = iteration_part_times(spans[::-1], warmup)
    left = lengths[warmup:]
    assert bool(times) == bool(left)
    for number, each in enumerate(left):
        assert sum(part[number] for part in times.values()) == pytest.approx(sum(each) / 1e3 + 5e-4)
        assert times["other", ""][number] == pytest.approx(5e-4)


def test_a_part_inside_another_counts_to_itself() -> None:
    spans = [
        ("dlrm::iteration", 0, 10_000_000),
        ("dlrm::top_mlp::forward", 0, 8_000_000),
        ("dlrm::data::forward", 2_000_000, 5_000_000),
    ]
    times = iteration_part_times(spans, 0)
    assert times == {
        ("top_mlp", "forward"): [5.0],
        ("data", "forward"): [3.0],
        ("other", ""): [2.0],
    }


def test_rounds_take_the_drift_out() -> None:
    table = round_table(made_runs(8, 2.0))
    found = gain(table, "baseline", "change")
    assert found.contains(10 / 14) and found.high - found.low < 0.06
    assert found.confidence >= 0.95
    twice = gain(table, "baseline", "change", samples=2.0)
    assert twice.mid == pytest.approx(2 * found.mid)


def test_only_the_changed_part_is_told() -> None:
    parts = compare_settings(round_table(made_runs(8, 0.5)), "baseline", "change")
    told = dict(zip(parts["component"], parts["verdict"], strict=True))
    assert told == {"data": "faster", "top_mlp": "no difference shown", REST: NOT_A_PART}
    row = parts[parts["component"] == "data"].iloc[0]
    assert row["low_ms"] < row["difference_ms"] < row["high_ms"] < 0
    one = compare_settings(round_table(made_runs(1, 0.5)), "baseline", "change")
    assert set(one["verdict"]) == {"not known"}, "one round has no scatter to judge by"


@given(st.lists(st.tuples(*[st.floats(0.1, 1e3)] * 6), min_size=1, max_size=7))
def test_parts_add_up_to_the_pair_of_times_whose_ratio_is_the_speedup(rounds) -> None:
    names = ["round", "setting", "component", "phase", "time_ms"]
    rows: list[tuple[int, str, str, str, float]] = []
    for number, times in enumerate(rounds):
        # the third time lies outside the parts
        for setting, each in (("baseline", times[:3]), ("change", times[3:])):
            rows.append((number, setting, "", "", sum(each)))
            for component, time_ms in zip(("data", "loss"), each[:2], strict=True):
                rows.append((number, setting, component, "forward", time_ms))
    table = pd.DataFrame(rows, columns=names)
    before_ms, after_ms = pair_of_times_ms(table, "baseline", "change")
    assert before_ms / after_ms == pytest.approx(gain(table, "baseline", "change").mid)
    parts = compare_settings(table, "baseline", "change")
    assert parts["before_ms"].sum() == pytest.approx(before_ms)
    assert parts["after_ms"].sum() == pytest.approx(after_ms)
    assert parts["difference_ms"].sum() == pytest.approx(after_ms - before_ms)


def test_an_unfinished_round_does_not_count() -> None:
    runs = made_runs(3, 2.0)[:-1]
    table = round_table(runs)
    assert gain(table, "baseline", "change").confidence == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("rounds", "words"),
    [(2, "2 rounds, of 6"), (6, "Times, shares and gains can be used as they stand: 6 rounds")],
)
def test_the_quality_of_rounds_is_a_sentence(tmp_path: Path, rounds: int, words: str) -> None:
    compared = Comparison(tmp_path)
    compared.runs = made_runs(rounds, 1.0)
    compared._judge_runs()
    assert compared.qualities["the rounds in turns"]["sentence"].startswith(words)
    assert "not quiet" not in compared.qualities["the rounds in turns"]["sentence"]
    compared.qualities["change"] = {"level": "red", "sentence": "Do not use its parts."}
    assert compared.quality["level"] == "amber"  # the speed-up does not rest on profiles
    assert "the prediction: 1 of 1 run is in doubt. change: do not" in compared.quality["sentence"]
    slow = next(run for run in compared.runs if run.setting == "change")
    slow.iteration_ms[:] = [3 * time for time in slow.iteration_ms]
    compared._judge_runs()
    said = compared.qualities["the rounds in turns"]
    assert said["level"] == "amber" and "the time of baseline, in another 3.02x" in said["sentence"]


def test_losses_are_compared_bit_for_bit() -> None:
    runs = made_runs(2, 1.0)
    same = compare_losses(runs, "baseline", "change")
    assert same["equal"] and same["repeatable"] == {"baseline": True, "change": True}
    other = [TimedRun("change", 2, 1, [1.0], {}, [0.5, 0.2500001])]
    baseline = [run for run in runs if run.setting == "baseline"]
    found = compare_losses([*baseline, *other], "baseline", "change")
    assert not found["equal"] and found["first_difference"] == 1
    assert found["largest_difference"] == pytest.approx(1e-7)
    assert found["repeatable"]["change"] is None


def test_runs_in_turns_are_on_disk_and_not_made_again(tmp_path: Path) -> None:
    settings = {"baseline": tiny(), "change": apply_change(tiny(), {"training.batch_size": 8})}
    seen: list[int] = []
    runs = run_in_turns(settings, tmp_path, rounds=1, after_round=lambda r: seen.append(len(r)))
    assert [run.setting for run in runs] == ["baseline", "change"] and seen == [2]
    assert all(len(run.iteration_ms) == 4 and len(run.losses) == 5 for run in runs)
    for run in runs:
        whole = np.sum(list(run.parts.values()), axis=0)
        # what lies between the parts is microseconds, or a process that was made to wait there
        assert (whole > 0).all() and (whole <= np.multiply(run.iteration_ms, 1.01)).all()
    assert run_in_turns(settings, tmp_path, rounds=1) == runs
    with pytest.raises(InputError, match=r"rounds.json was begun with change.training.batch_size"):
        run_in_turns(settings | {"change": tiny()}, tmp_path, rounds=1)


def test_a_setting_that_fails_is_named(tmp_path: Path) -> None:
    huge = apply_change(tiny(), {"model.table_rows": 10**12})
    with pytest.raises(InputError, match=r"round 1 of 1: baseline: .*memory"):
        run_in_turns({"baseline": huge}, tmp_path, rounds=1)
    with pytest.raises(InputError, match="rounds is 0"):
        run_in_turns({"baseline": tiny()}, tmp_path, rounds=0)
