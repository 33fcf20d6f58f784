"""Comparisons: changes as people write them, runs in turns, parts, trees, verdicts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_core import (
    compare_figures,
    compare_presentation,
    comparison,
    sweep_figures,
    sweep_presentation,
)
from dlrm_core.analysis.compare import (
    circumstances,
    compare_parts,
    differing,
    mixed_causes,
    part_estimates,
    ratio_interval,
    step_estimate,
)
from dlrm_core.analysis.difference_tree import difference_tree, largest_changes
from dlrm_core.analysis.ensemble import Ensemble, part_table
from dlrm_core.analysis.rounds import compare_losses, compare_settings, round_table, speedup
from dlrm_core.change_options import apply_change, change_steps, change_text, difference
from dlrm_core.compare_runs import TimedRun, part_times, read_rounds, run_in_turns
from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.errors import InputError
from dlrm_core.figure_axes import log_ticks
from dlrm_core.figure_theme import FASTER, SLOWER
from dlrm_core.notebook_parameters import split_overrides
from dlrm_core.page_tables import aligned, signed
from dlrm_core.profiling.profile import Profile

TINY: dict[str, Any] = {
    "model": {
        "bottom_mlp": [8, 16, 8],
        "top_mlp": [16, 1],
        "embedding_dim": 8,
        "tables": 2,
        "table_rows": 50,
    },
    "data": {"generator": "uniform", "indices_per_lookup": 3},
    "training": {"batch_size": 16, "batches": 4, "device": "cpu", "threads": 1},
    "profiling": {"engine": "torch", "warmup": 1, "iterations": 4, "probes": False},
}
PARTS = (("data", "forward"), ("top_mlp", "forward"), ("top_mlp", "backward"))


def tiny() -> Parameters:
    return parameters_from_sections(TINY)


def make_profile(times: dict[tuple[str, str], np.ndarray], meta: Any = None) -> Profile:
    """A traced profile: iterations one after the other, parts in each, an operator in a part."""
    count = len(next(iter(times.values())))
    contexts = [
        (0, -1, "thread", "main", "other", ""),
        (1, 0, "annotation", "dlrm::iteration", "other", ""),
    ]
    trace, own = [], {}
    for component, phase in times:
        part = len(contexts)
        contexts.append((part, 1, "annotation", f"dlrm::{component}::{phase}", component, phase))
        contexts.append(
            (part + 1, part, "operator", f"aten::{component}_{phase}", component, phase)
        )
    now, iterations = 0, []
    for number in range(count):
        start = now
        for place, each in enumerate(times.values()):
            part = 2 + 2 * place
            end = now + round(each[number] * 1e6)
            trace += [(0, now, end, part, 1), (0, now, end, part + 1, 2)]
            own[part + 1] = own.get(part + 1, 0.0) + (end - now) / 1e6
            now = end
        trace.append((0, start, now, 1, 0))
        iterations.append((number, start, now))
    above = {row[0]: row[1] for row in contexts}
    total = {row[0]: 0.0 for row in contexts}
    for context, value in own.items():
        at = context
        while at >= 0:
            total[at] += value
            at = above[at]
    values = [(0, c, "cpu_time_ms", "exclusive", v) for c, v in own.items()]
    values += [(0, c, "cpu_time_ms", "inclusive", v) for c, v in total.items()]
    return Profile.build(
        contexts=[
            {
                "context": c,
                "parent": p,
                "kind": k,
                "name": n,
                "shapes": "",
                "file": "",
                "line": 0,
                "module": "",
                "component": comp,
                "phase": ph,
            }
            for c, p, k, n, comp, ph in contexts
        ],
        metrics=[{"metric": "cpu_time_ms", "unit": "ms", "meaning": "", "source": ""}],
        values=pd.DataFrame(values, columns=["profile", "context", "metric", "scope", "value"]),
        threads=[{"profile": 0, "kind": "cpu_thread", "name": "main", "rank": 0, "thread": 0}],
        trace=pd.DataFrame(trace, columns=["profile", "start_ns", "end_ns", "context", "depth"]),
        iterations=pd.DataFrame(iterations, columns=["iteration", "start_ns", "end_ns"]),
        meta={
            "engine": "torch",
            "device": "cpu",
            "parameters": tiny().to_sections(),
            "versions": {"torch": "2"},
            "machine": {"cpu": "a"},
        }
        | (meta or {}),
    )


def noisy(
    seed: int, scale: dict[tuple[str, str], float] | None = None, meta: Any = None
) -> Profile:
    rng = np.random.default_rng(seed)
    means = {PARTS[0]: 4.0, PARTS[1]: 2.0, PARTS[2]: 3.0}
    return make_profile(
        {p: m * (scale or {}).get(p, 1.0) * rng.lognormal(0, 0.03, 20) for p, m in means.items()},
        meta,
    )


def made_runs(rounds: int, ratio: float, seed: int = 0) -> list[TimedRun]:
    """Rounds of a drifting machine in which only the data part is ``ratio`` times as long."""
    rng = np.random.default_rng(seed)
    runs = []
    for number in range(rounds):
        mood = 1.0 + 0.5 * number
        for place, (name, factor) in enumerate((("baseline", 1.0), ("change", ratio))):
            parts = {
                ("data", "forward"): list(mood * factor * 4 * rng.lognormal(0, 0.02, 10)),
                ("top_mlp", "forward"): list(mood * 6 * rng.lognormal(0, 0.02, 10)),
            }
            whole = [sum(each) for each in zip(*parts.values(), strict=True)]
            runs.append(TimedRun(name, number, place, whole, parts, [0.5, 0.25], 100))
    return runs


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
    times = part_times(spans[::-1], warmup)
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
    times = part_times(spans, 0)
    assert times == {
        ("top_mlp", "forward"): [5.0],
        ("data", "forward"): [3.0],
        ("other", ""): [2.0],
    }


def test_rounds_take_the_drift_out() -> None:
    table = round_table(made_runs(8, 2.0))
    found = speedup(table, "baseline", "change")
    assert found.contains(10 / 14) and found.high - found.low < 0.06
    assert found.confidence >= 0.95
    twice = speedup(table, "baseline", "change", samples=2.0)
    assert twice.mid == pytest.approx(2 * found.mid)


def test_only_the_changed_part_is_told() -> None:
    parts = compare_settings(round_table(made_runs(8, 0.5)), "baseline", "change")
    told = dict(zip(parts["component"], parts["verdict"], strict=True))
    assert told == {"data": "faster", "top_mlp": "no difference shown"}
    row = parts[parts["component"] == "data"].iloc[0]
    assert row["low_ms"] < row["difference_ms"] < row["high_ms"] < 0
    one = compare_settings(round_table(made_runs(1, 0.5)), "baseline", "change")
    assert set(one["verdict"]) == {"not known"}, "one round has no scatter to judge by"


def test_an_unfinished_round_does_not_count() -> None:
    runs = made_runs(3, 2.0)[:-1]
    table = round_table(runs)
    assert speedup(table, "baseline", "change").confidence == pytest.approx(0.5)


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
    assert read_rounds(tmp_path) == runs
    # killed while a line was written: what was whole is kept, what was cut is run again
    lines = (tmp_path / "rounds.jsonl").read_text()
    (tmp_path / "rounds.jsonl").write_text(lines[:-40])
    assert read_rounds(tmp_path) == runs[:1]
    again = run_in_turns(settings, tmp_path, rounds=1)
    assert again[0] == runs[0] and again[1] != runs[1] and len(again) == 2
    assert read_rounds(tmp_path) == again


def test_a_setting_that_fails_is_named(tmp_path: Path) -> None:
    huge = apply_change(tiny(), {"model.table_rows": 10**12})
    with pytest.raises(InputError, match=r"round 1 of 1: baseline: .*memory"):
        run_in_turns({"baseline": huge}, tmp_path, rounds=1)
    with pytest.raises(InputError, match="rounds is 0"):
        run_in_turns({"baseline": tiny()}, tmp_path, rounds=0)


# ---- finished runs --------------------------------------------------------------


def test_a_planted_difference_is_found_and_nothing_else() -> None:
    wrong = missed = 0
    for seed in range(20):
        before, after = noisy(seed), noisy(seed + 100, {PARTS[1]: 1.2})
        parts = compare_parts(part_estimates(before), part_estimates(after))
        told = {(r.component, r.phase): r.verdict for r in parts.itertuples()}
        missed += told["top_mlp", "forward"] != "slower"
        wrong += any(told[part] != "no difference shown" for part in (PARTS[0], PARTS[2]))
    assert missed <= 1 and wrong <= 2


def test_interval_of_the_whole_step_holds_the_truth() -> None:
    inside = 0
    for seed in range(30):
        before, after = noisy(seed), noisy(seed + 50, {PARTS[0]: 0.5})
        inside += ratio_interval(step_estimate(before), step_estimate(after)).contains(9 / 7)
    assert inside >= 26


def test_sampled_parts_have_the_error_of_counting() -> None:
    whole = noisy(0)
    profile = Profile.build(
        contexts=whole.contexts,
        metrics=whole.metrics,
        values=whole.values.assign(
            value=whole.values["value"].where(whole.values["context"] != 3, 5.0)
        ),
        threads=whole.threads,
        meta=whole.meta | {"passes": [{"iterations": 20}]},
    )
    table = part_estimates(profile)
    assert set(table["of"]) == {"samples"} and np.isinf(table["degrees"]).all()
    relative = table["se_ms"] / table["time_ms"]
    assert relative.to_numpy() == pytest.approx(1 / np.sqrt(table["observations"].to_numpy()))
    assert (table["observations"] >= 0.99).all()


def test_only_what_differs_is_listed() -> None:
    same = differing([circumstances(noisy(0)), circumstances(noisy(1))])
    assert same.empty and mixed_causes(same) == ""
    sections = tiny().to_sections()
    sections["training"]["batch_size"] = 32
    other = noisy(1, meta={"parameters": sections, "versions": {"torch": "3"}})
    found = differing([circumstances(noisy(0)), circumstances(other)])
    assert found["name"].tolist() == ["training.batch_size", "torch"]
    assert found["values"].tolist() == [[16, 32], ["2", "3"]]
    said = mixed_causes(found)
    assert "mixes causes" in said and "torch" in said and "1 parameter" in said
    assert mixed_causes(found[found["kind"] == "parameters"]) == ""


def test_trees_lie_over_each_other() -> None:
    before, after = noisy(0), noisy(1, {PARTS[1]: 2.0})
    tree = difference_tree(before, after)
    root = tree[tree["parent"] == ""]
    assert len(root) == 1
    assert root["before_ms"].iloc[0] == pytest.approx(step_all(before))
    assert root["after_ms"].iloc[0] == pytest.approx(step_all(after))
    assert tree["self_after_ms"].sum() == pytest.approx(step_all(after))
    seen = {""}
    for row in tree.itertuples():
        assert row.parent in seen
        seen.add(row.id)
    changes = largest_changes(tree)
    assert changes["label"].iloc[0] == "aten::top_mlp_forward"
    assert changes["path"].iloc[0] == ["dlrm::top_mlp::forward", "aten::top_mlp_forward"]
    assert largest_changes(difference_tree(before, before)).empty


def step_all(profile: Profile) -> float:
    return float((profile.iterations["end_ns"] - profile.iterations["start_ns"]).mean() / 1e6)


def test_nodes_of_one_run_only_are_new_or_gone() -> None:
    before = make_profile({PARTS[0]: np.full(4, 5.0), PARTS[1]: np.full(4, 1.0)})
    after = make_profile({PARTS[1]: np.full(4, 1.0), PARTS[2]: np.full(4, 2.0)})
    state = largest_changes(difference_tree(before, after)).set_index("label")["state"]
    assert state["aten::data_forward"] == "gone" and state["aten::top_mlp_backward"] == "new"


def test_trees_of_two_profilers_meet_in_the_parts() -> None:
    other = noisy(1, meta={"engine": "hpctoolkit"})
    tree = difference_tree(noisy(0), other)
    assert tree["label"].tolist()[0] == "step"
    assert set(tree["label"][1:]) == {"data forward", "top_mlp forward", "top_mlp backward"}


# ---- the notebook's object ------------------------------------------------------


def saved(folder: Path, profile: Profile) -> str:
    profile.save(folder / "profile")
    return str(folder)


def test_finished_runs_make_a_whole_document(tmp_path: Path) -> None:
    places = [saved(tmp_path / "a", noisy(0)), saved(tmp_path / "b", noisy(1, {PARTS[0]: 2.0}))]
    places.append(saved(tmp_path / "c", noisy(2, meta={"versions": {"torch": "3"}})))
    compared = comparison.start(tiny(), tmp_path, change={}, runs=places)
    document = json.loads(compared.finish().read_text())
    assert document["kind"] == "runs" and document["status"] == "finished"
    first = document["outcomes"][0]
    assert (first["before"], first["after"]) == ("a", "b")
    assert first["measured"]["speedup"]["mid"] == pytest.approx(9 / 13, rel=0.05)
    assert {"component": "data", "verdict": "slower"}.items() <= first["parts"][0].items()
    assert "mixes causes" in document["mixed_causes"]
    said = compare_presentation.verdict(compared).markdown
    assert "0.6" in said and "mixes causes" in said
    assert len(compare_presentation.outcomes_table(compared).rows) == 2
    rows = compare_presentation.differences_table(compared.differences, ["a", "b", "c"]).rows  # type: ignore[union-attr]
    assert rows == [["versions", "torch", "2", "2", "3"]]


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    place = saved(tmp_path / "a", noisy(0))
    with pytest.raises(InputError, match="give one of them"):
        comparison.start(tiny(), tmp_path, change={"training.seed": 1}, runs=[place])
    with pytest.raises(InputError, match="expected at least two"):
        comparison.start(tiny(), tmp_path, change={}, runs=[place])
    with pytest.raises(InputError, match="is what the parameters say already"):
        comparison.start(tiny(), tmp_path, change={"training.batch_size": 16})
    other = apply_change(tiny(), {"training.batch_size": 64})
    with pytest.raises(InputError, match=r"measured with training.batch_size 16, but .* say 64"):
        comparison.start(other, tmp_path, change={"data.generator": "zipf"}, profile_run=place)
    with pytest.raises(InputError, match="rounds is 0"):
        comparison.start(tiny(), tmp_path, change={"data.generator": "zipf"}, rounds=0)


def change_comparison(tmp_path: Path) -> comparison.ChangeComparison:
    """A change that was run in three rounds, without having run anything."""
    place = saved(tmp_path / "a", noisy(0))
    change = {"data.generator": "zipf", "training.batch_size": 32}
    compared = comparison.start(
        tiny(), tmp_path, change=change, profile_run=place, steps=True, rounds=3
    )
    assert isinstance(compared, comparison.ChangeComparison)
    names = [outcome.after for outcome in compared.outcomes]
    assert names == ["step-1", "step-2"]
    runs = made_runs(3, 0.5)
    runs = [run for run in runs if run.setting == "baseline"] + [
        TimedRun(name, r.round, r.place, r.iteration_ms, r.parts, r.losses)
        for name in names
        for r in runs
        if r.setting == "change"
    ]
    compared.predict()
    compared._judge(runs)
    return compared


def test_a_change_is_judged_a_sample(tmp_path: Path) -> None:
    compared = change_comparison(tmp_path)
    document = json.loads((tmp_path / "compare.json").read_text())
    assert document["status"] == "running", "written after every round, before the end"
    assert len(document["rounds"]) == 9
    first, second = document["outcomes"]
    assert first["change"] == {"data.generator": "zipf"}
    same_size, twice = (o["measured"]["speedup"]["mid"] for o in (first, second))
    assert same_size == pytest.approx(10 / 8, rel=0.03)
    assert twice == pytest.approx(2 * same_size), "the batch is twice as large"
    for outcome in compared.outcomes:
        assert (outcome.predicted is None) == bool(outcome.reason)
        if outcome.predicted is not None:
            assert outcome.error is not None
    said = compare_presentation.verdict(compared).markdown
    assert "75.0% confidence" in said and "six rounds" in said


def test_figures_and_tables_draw_what_there_is(tmp_path: Path) -> None:
    compared = change_comparison(tmp_path)
    before, after = noisy(0), noisy(1, {PARTS[1]: 2.0})
    profiles = {str(n): noisy(n, {PARTS[0]: float(n)}, batch_meta(n)) for n in (1, 2, 4, 8)}
    times = part_table(profiles)
    ensemble = Ensemble.of(profiles)
    figures = [
        compare_figures.speedups(compared.outcomes),
        compare_figures.rounds(compared.times),
        compare_figures.waterfall(compared.outcomes),
        compare_figures.part_differences(compared.outcomes[0].parts),
        compare_figures.difference_icicle(difference_tree(before, after)),
        sweep_figures.scaling_curves(ensemble.curves["training.batch_size"], "training.batch_size"),
        sweep_figures.parts_by_point(times),
    ]
    for figure in figures:
        assert figure.data and figure.layout.title.text
        assert "nan" not in figure.to_json().lower()
    levels = figures[2].data[0]
    assert sum(levels.y[:-1]) == pytest.approx(levels.y[-1]), "steps lead from first to last"
    icicle = figures[4].data[0]
    hottest = dict(zip(icicle.ids, icicle.marker.colors, strict=True))
    tree = difference_tree(before, after)
    slower = tree[tree["label"] == "aten::top_mlp_forward"]["id"].iloc[0]
    assert hottest[slower] == compare_figures._difference_colour(
        math.log2(
            float(tree.set_index("id").loc[slower, "after_ms"])  # type: ignore[arg-type]
            / float(tree.set_index("id").loc[slower, "before_ms"])
        )  # type: ignore[arg-type]
    )
    assert compare_figures._difference_colour(1.0) == SLOWER
    assert compare_figures._difference_colour(-3.0) == FASTER
    laws = sweep_presentation.laws_table(ensemble.laws)
    assert any("linear in batch" in " ".join(row) for row in laws.rows)  # type: ignore[union-attr]
    shown = [
        compare_presentation.parts_table(compared.outcomes[0]),
        compare_presentation.rounds_table(compared),
        compare_presentation.changes_table(largest_changes(tree)),
        compare_presentation.predictions_table(compared),
    ]
    assert all(table.rows for table in shown)  # type: ignore[union-attr]


def batch_meta(number: int) -> dict[str, Any]:
    return {"parameters": apply_change(tiny(), {"training.batch_size": 16 * number}).to_sections()}


@pytest.mark.parametrize(
    ("low", "high", "least"), [(0.09, 0.12, 2), (1, 3.5, 3), (0.5, 5000, 3), (7, 7, 1)]
)
def test_logarithmic_axes_have_a_few_round_marks(low: float, high: float, least: int) -> None:
    marks = log_ticks([low, high])
    assert least <= len(marks) <= 8
    assert all(0.7 * low <= mark <= 1.3 * high for mark in marks)


def test_signs_and_decimals() -> None:
    assert signed([1.5, -0.25, 0.0]) == ["+1.500", "−0.250", "0.000"]
    assert signed([100.0, -0.01]) == ["+100.0", "0.0"]
    assert aligned([12.3], [0.456]) == [["12.30"], ["0.46"]]
