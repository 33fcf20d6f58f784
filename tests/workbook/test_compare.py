"""Comparisons of finished runs and of a change: parts, trees, verdicts, what is drawn."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from compare_profiles import PARTS, made_runs, make_profile, noisy, saved, tiny

from dlrm_core.base.errors import InputError
from dlrm_workbook.analysis.attribution import attribute
from dlrm_workbook.analysis.changes import apply_change
from dlrm_workbook.analysis.compare import (
    circumstances,
    compare_parts,
    differing,
    mixed_causes,
    part_estimates,
    ratio_interval,
    steady_rows,
    step_estimate,
)
from dlrm_workbook.analysis.difference_tree import difference_tree, largest_changes
from dlrm_workbook.analysis.ensemble import curves_of_runs, law_table, part_table
from dlrm_workbook.analysis.whatif import Prediction
from dlrm_workbook.ground.intervals import Interval
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.show.tables import TABLES, show
from dlrm_workbook.show.theme import FASTER, SLOWER, difference_colour
from dlrm_workbook.trials.compare import comparison
from dlrm_workbook.trials.compare import measure as compare_measure
from dlrm_workbook.trials.compare import show as compare_figures
from dlrm_workbook.trials.compare.measure import TimedRun
from dlrm_workbook.trials.sweep import show as sweep_figures

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


def test_nodes_of_one_run_only_are_new_or_gone_or_without_samples() -> None:
    before = make_profile({PARTS[0]: np.full(4, 5.0), PARTS[1]: np.full(4, 1.0)})
    after = make_profile({PARTS[1]: np.full(4, 1.0), PARTS[2]: np.full(4, 2.0)})
    state = largest_changes(difference_tree(before, after)).set_index("label")["state"]
    assert state["aten::data_forward"] == "gone" and state["aten::top_mlp_backward"] == "new"
    # a call without samples is not gone
    for profile in (before, after):
        profile.meta["engine"] = "hpctoolkit"
    changes = largest_changes(difference_tree(before, after))
    lines = changes.set_index("label")
    gone, new = lines.loc["aten::data_forward"], lines.loc["aten::top_mlp_backward"]
    assert gone["state"] == "no samples after" and np.isnan(gone["after_ms"])
    assert new["state"] == "no samples before" and np.isnan(new["before_ms"])
    rows = show(changes, "compared_calls").rows
    assert ["5.000", "–", "no samples after"] in [row[3:] for row in rows]


def test_a_call_that_moved_is_not_gone() -> None:
    before, after = noisy(0), noisy(0)
    names = after.contexts["name"].replace("dlrm::data::forward", "dlrm::loading")
    after = dataclasses.replace(after, contexts=after.contexts.assign(name=names))
    state = largest_changes(difference_tree(before, after))
    told = state[state["label"] == "aten::data_forward"]["state"]
    assert set(told) == {"other caller before", "other caller after"}


def test_trees_of_two_profilers_meet_in_the_parts() -> None:
    other = noisy(1, meta={"engine": "hpctoolkit"})
    parts = part_estimates(other).set_index(["component", "phase"])["time_ms"]
    whole = difference_tree(noisy(0), other)[1:].set_index(["component", "phase"])["after_ms"]
    assert whole.sort_index().to_numpy() == pytest.approx(parts.sort_index().to_numpy())
    tree = difference_tree(noisy(0), other)
    assert tree["label"].tolist()[0] == "step"
    assert set(tree["label"][1:]) == {"data forward", "top_mlp forward", "top_mlp backward"}


def test_finished_runs_make_a_whole_document(tmp_path: Path) -> None:
    places = [saved(tmp_path / "a", noisy(0)), saved(tmp_path / "b", noisy(1, {PARTS[0]: 2.0}))]
    places.append(saved(tmp_path / "c", noisy(2, meta={"versions": {"torch": "3"}})))
    compared = comparison.comparison_of(tiny(), tmp_path, change={}, runs=places)
    document = json.loads(compared.finish().read_text())
    assert document["kind"] == "runs" and document["status"] == "finished"
    first = document["outcomes"][0]
    assert (first["before"], first["after"]) == ("a", "b")
    assert first["measured"]["speedup"]["mid"] == pytest.approx(9 / 13, rel=0.05)
    assert {"component": "data", "verdict": "slower"}.items() <= first["parts"][0].items()
    assert "mixes causes" in document["mixed_causes"]
    said = compare_figures.outcome_text(compared).markdown
    assert "1.44x slower (1.4" in said and "mixes causes" in said
    assert len(compared.outcome_table()) == 2
    differing = compared.difference_table()
    rows = show(differing, compare_figures.difference_columns(differing)).rows
    assert rows == [["versions", "torch", "2", "2", "3"]]


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (1.9, 2.3, "is inside that range;"),
        (2.2, 2.5, "is outside that range, but the two ranges overlap: more rounds can settle it;"),
        (2.3, 2.5, "is outside that range; the predicted time is 16.7% too short."),
    ],
)
def test_a_measured_gain_is_held_against_the_predicted_range(tmp_path, low, high, said) -> None:
    places = [saved(tmp_path / "a", noisy(0)), saved(tmp_path / "b", noisy(1))]
    compared = comparison.comparison_of(tiny(), tmp_path, change={}, runs=places)
    (outcome,) = compared.outcomes
    outcome.speedup = Interval(1.81, 2.0, 2.24, 0.95)
    now = 120.0
    outcome.predicted = Prediction({}, now, now / high, now / 2.4, now / low, pd.DataFrame(), "")
    assert said in compare_figures.outcome_text(compared).markdown


def test_finished_runs_are_compared_by_their_steps_without_a_profiler(tmp_path: Path) -> None:
    """The profiler slowed the first recording more; the programs took the same time."""
    alone = {"unprofiled_iteration_ms": [10.7] * 8}
    pairs = [("a", noisy(0, {PARTS[0]: 2.0}, meta=alone)), ("b", noisy(1, meta=alone))]
    places = [saved(tmp_path / name, profile) for name, profile in pairs]
    compared = comparison.comparison_of(tiny(), tmp_path, change={}, runs=places)
    outcome = compared.outcomes[0]
    assert (outcome.before_ms, outcome.after_ms) == pytest.approx((10.7, 10.7), rel=1e-3)
    text = compare_figures.outcome_text(compared).markdown
    assert "no difference shown**, the speed-up lies anywhere from" in text
    assert "faster" not in text and "slower" not in text
    outcome.speedup = Interval(0.3, 0.6, 1.6, 0.95)
    text = compare_figures.outcome_text(compared).markdown
    assert "1.67x slower, which scatter hides**, the speed-up lies anywhere from 0.30x" in text
    assert compared.sameness == "The same in all: parameters, versions, machine."
    for profile in compared.profiles.values():
        profile.meta = {"engine": "torch", "machine": {"cpu": "x"}}
    nothing = "Not recorded in all of them, so not compared: parameters, versions."
    assert compared.sameness == f"The same in all: machine. {nothing}"
    assert outcome.quality == compared.quality["level"] == "green"
    # a run whose own page says not to use it makes no result
    bad = saved(tmp_path / "d", noisy(0, meta={"unprofiled_iteration_ms": [2.0] * 8}))
    doubted = comparison.comparison_of(tiny(), tmp_path, change={}, runs=[bad, places[1]])
    text = compare_figures.outcome_text(doubted).markdown
    assert "Unreliable: d, so this is no result." in text and "faster" not in text
    assert doubted.outcome_table()["quality"].tolist() == ["red"]
    assert not doubted.outcomes[0].speedup
    assert (
        doubted.quality["level"] == "red"
        and "1 of 2 runs is in doubt. d: " in (doubted.quality["sentence"])
    )
    # without such a time on both sides, the recordings are all there is
    places[1] = saved(tmp_path / "c", noisy(1))
    compared = comparison.comparison_of(tiny(), tmp_path, change={}, runs=places)
    assert compared.outcomes[0].before_ms == pytest.approx(13, rel=0.05)


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    place = saved(tmp_path / "a", noisy(0))
    with pytest.raises(InputError, match="give one of them"):
        comparison.comparison_of(tiny(), tmp_path, change={"training.seed": 1}, runs=[place])
    with pytest.raises(InputError, match="expected at least two"):
        comparison.comparison_of(tiny(), tmp_path, change={}, runs=[place])
    with pytest.raises(InputError, match="is what the parameters say already"):
        comparison.comparison_of(tiny(), tmp_path, change={"training.batch_size": 16})
    other = apply_change(tiny(), {"training.batch_size": 64})
    with pytest.raises(InputError, match=r"measured with training.batch_size 16, but .* say 64"):
        comparison.comparison_of(
            other, tmp_path, change={"data.generator": "zipf"}, profile_run=place
        )
    with pytest.raises(InputError, match="rounds is 0"):
        comparison.comparison_of(tiny(), tmp_path, change={"data.generator": "zipf"}, rounds=0)


def change_comparison(tmp_path: Path) -> comparison.ChangeComparison:
    """A change that was run in three rounds, without having run anything."""
    place = saved(tmp_path / "a", noisy(0))
    change = {"data.generator": "zipf", "training.batch_size": 32}
    compared = comparison.comparison_of(
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


def test_a_comparison_names_every_time_of_an_iteration_once(tmp_path: Path) -> None:
    compared = change_comparison(tmp_path)
    step = compared.outcomes[0].before_ms
    times = compared.other_times()
    assert times["time_ms"][0] == step and times["times_the_step"][0] == 1
    assert times["iterations"][0] == sum(
        steady_rows(run.iteration_ms).sum() for run in compared.runs if run.setting == "baseline"
    )
    assert times["what"].is_unique and times["why"].ne("").all()
    profiled = times.set_index("what").loc["the step in baseline's profile", "time_ms"]
    parts = compared.profile_baseline()
    assert parts["time_ms"].sum() == pytest.approx(profiled)
    for made, row in zip(compared.outcomes, compared.outcome_table().itertuples(), strict=True):
        if made.predicted is not None:
            assert row.predicted_ms / step == pytest.approx(
                made.predicted.mid_ms / made.predicted.now_ms
            )
    assert not {"now_ms", "then_ms", "range"} & set(TABLES["predictions"]), "of another step"
    compared.per = "in the whole recording"
    assert compared.other_times().empty


def test_stages_give_frames_and_can_be_run_again(tmp_path, monkeypatch) -> None:
    place = saved(tmp_path / "a", noisy(0))
    profiled: list[str] = []
    ran: list[tuple[str, int]] = []

    def measured(parameters: Any, folder: Path, progress: Any) -> Profile:
        profiled.append(folder.name)
        saved(folder, noisy(1))
        return noisy(1)

    def timed(parameters: Any, file: Path, folder: Path, label: str, turn: Any, say: Any) -> Any:
        ran.append(turn[:2])
        (run,) = (r for r in made_runs(4, 0.5) if (r.setting, r.round) == turn[:2])
        return run

    monkeypatch.setattr(comparison, "measure", measured)
    monkeypatch.setattr(compare_measure, "_run", timed)
    change = {"data.generator": "zipf"}
    compared = comparison.comparison_of(
        tiny(), tmp_path, change=change, profile_run=place, rounds=2
    )
    assert compared.profile_baseline().equals(attribute(compared.profiles["baseline"]))
    predictions = compared.predict()
    at = json.loads((tmp_path / "compare.json").read_text())["predicted_at"]
    assert compared.measure()["round"].tolist() == [1, 2]
    parts = compared.profile_changed()
    assert {"component", "phase", "predicted_ms"} <= set(parts) and len(ran) == 4
    # once more, with two rounds more: nothing that was measured is measured again
    assert compared.profile_baseline() is not None and compared.predict().equals(predictions)
    compared.rounds = 4
    assert compared.measure()["round"].tolist() == [1, 2, 3, 4]
    assert len(ran) == 8 and len(set(ran)) == 8
    compared.profile_changed()
    assert profiled == ["changed"]
    assert json.loads((tmp_path / "compare.json").read_text())["predicted_at"] == at
    assert len(compared.notices) == len(set(compared.notices))


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
    said = compare_figures.outcome_text(compared).markdown
    assert "75.0% confidence" in said and "six rounds" in said


def test_figures_and_tables_draw_what_there_is(tmp_path: Path) -> None:
    compared = change_comparison(tmp_path)
    before, after = noisy(0), noisy(1, {PARTS[1]: 2.0})
    profiles = {str(n): noisy(n, {PARTS[0]: float(n)}, batch_meta(n)) for n in (1, 2, 4, 8)}
    times = part_table(profiles)
    curves = curves_of_runs(profiles)
    figures = [
        compare_figures.speedups(compared.rated),
        compare_figures.rounds(compared.times),
        compare_figures.waterfall(compared.steps),
        compare_figures.part_differences(compared.outcomes[0].parts),
        compare_figures.difference_icicle(difference_tree(before, after)),
        sweep_figures.scaling_curves(curves["training.batch_size"], "training.batch_size"),
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
    assert hottest[slower] == difference_colour(
        math.log2(
            float(tree.set_index("id").loc[slower, "after_ms"])  # type: ignore[arg-type]
            / float(tree.set_index("id").loc[slower, "before_ms"])
        )  # type: ignore[arg-type]
    )
    assert difference_colour(1.0) == SLOWER
    assert difference_colour(-3.0) == FASTER
    laws = show(law_table(curves), "laws")
    assert any("linear in batch" in " ".join(row) for row in laws.rows)  # type: ignore[union-attr]
    shown = [
        show(compared.outcomes[0].part_table(), "compared_parts"),
        show(compared.ratio_table()),
        show(largest_changes(tree), "compared_calls"),
        show(compared.prediction_table(), "predictions"),
        show(compared.outcome_table(), "outcomes"),
    ]
    assert all(table.rows for table in shown)


def batch_meta(number: int) -> dict[str, Any]:
    return {"parameters": apply_change(tiny(), {"training.batch_size": 16 * number}).to_sections()}
