"""The benchmark notebook: tables from a document, figures, and the page."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from browser import check_page, require_browser
from hypothesis import given
from hypothesis import strategies as st
from test_bench import SMALL, bare_round, both
from test_notebooks import QUICK, run_cells

from dlrm_core.base.errors import InputError
from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_kernels.tiles.machine import why_no_tiles
from dlrm_studies.bench import analyse as analysis
from dlrm_studies.bench import embeddings_show as embedding_results
from dlrm_studies.bench import notebook as benchmark
from dlrm_studies.bench import show as benchmark_figures
from dlrm_studies.bench.bare import judge_bare
from dlrm_studies.bench.cases import GROWTH, growth_cases, shape_cases
from dlrm_studies.bench.embeddings import (
    CASE_GROUPS,
    KIND,
    SCHEMA,
    open_embedding_ledger,
    run_group,
)
from dlrm_studies.bench.measure import BenchEffort, BenchPlan, Others, run_plan
from dlrm_workbook.evidence.contestants import WARMUP, Run, round_ratio, run_ours
from dlrm_workbook.runner.run import run_notebooks
from dlrm_workbook.show.tables import Text, TextTable, show

CONTESTANTS = ["plain", "fp32"] + ([] if why_no_tiles() else ["fp32 by bf16x2"])
"""Without options; the last where the processor has matrix tiles."""

PEER = """
import sys
arguments = dict(a.lstrip("-").split("=") for a in sys.argv[1:] if "=" in a)
count = int(arguments["num-batches"])
for i in range(count):
    print(f"Finished training it {i + 1}/{count} of epoch 0, 90.00 ms/it, loss 0.5")
"""


def timed(parameters: Parameters, iterations: int, threads: int) -> Run:
    """Stands in for a process: times follow from the parameters, so that ratios are known."""
    training, data = parameters.training, parameters.data
    step = 30.0 * training.batch_size / 64 / threads
    if training.precision == "bf16":
        step /= 2
    if training.fused_optimizer:
        step /= 1.25
    wait = {"facebook_loop": 60.0, "facebook": 6.0}[data.generator] if step else 0.0
    return Run(step, step + wait, [0.5] * (iterations + WARMUP))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A whole benchmark: a peer, two shapes, growth, options; tuned has two options."""
    tmp_path = tmp_path_factory.mktemp("peer")
    (tmp_path / "dlrm_s_pytorch.py").write_text(PEER)
    plain = both()["plain"]
    tuned = parameters_from_sections(
        SMALL
        | {
            "data": {"indices_per_lookup": 10, "generator": "facebook"},
            "training": {**SMALL["training"], "fused_optimizer": True},
        }
    )
    cases = [*shape_cases("8x1M-10,26x100k-10"), *growth_cases("batch,pooling")]
    plan = BenchPlan(
        plain,
        tuned,
        Others(["bf16"], tmp_path),
        cases,
        BenchEffort(rounds=2, iterations=2, ablation=True, threads=[1, 2]),
    )
    found = run_plan(plan, command="dlrm bench", run=timed)
    return json.dumps(found)


@pytest.fixture
def document(measured: str, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "b.json").write_text(measured)
    return json.loads(measured)


def test_ratios_and_goals_are_of_the_shapes(document: dict[str, Any]) -> None:
    table = analysis.ratios(document).set_index(["case", "threads", "contestant", "figure"])
    assert set(table["against"]) == {"facebook"}
    # the peer prints 90 ms; ours take 30, 24 and 12 a step with one thread, half with two
    step = table["mid"].xs("step_ms", level="figure")
    assert step["8x1M-10", 1, "plain"] == pytest.approx(3.0)
    assert step["8x1M-10", 1, "fp32"] == pytest.approx(3.75)
    assert step["8x1M-10", 2, "bf16"] == pytest.approx(15.0)
    goals = table["goal"]
    assert goals["26x100k-10", 1, "bf16", "end_to_end_ms"] == 9.0
    assert math.isnan(goals["26x100k-10", 2, "bf16", "end_to_end_ms"]), "set for 1 thread"
    assert math.isnan(goals["8x1M-10", 1, "plain", "step_ms"])


def test_options_are_told_by_what_they_bring(document: dict[str, Any]) -> None:
    table = analysis.without(document).set_index(["leaf", "figure"])
    added = table["time_ms"]
    assert added["data.generator", "end_to_end_ms"] == pytest.approx(36)
    assert added["training.precision", "end_to_end_ms"] == pytest.approx(18)
    mid = table["mid"]
    assert mid["training.precision", "step_ms"] == pytest.approx(2.0)
    assert mid["training.fused_optimizer", "step_ms"] == pytest.approx(1.25)
    assert mid["data.generator", "step_ms"] == pytest.approx(1.0)
    assert mid["data.generator", "end_to_end_ms"] == pytest.approx((12 + 60) / (12 + 6))


def test_the_ladder_leads_from_plain_to_tuned(document: dict[str, Any]) -> None:
    table = analysis.ladder(document)
    rungs = table[table["figure"] == "end_to_end_ms"]
    leaves = ["", "data.generator", "training.fused_optimizer", "training.precision"]
    assert rungs["leaf"].tolist() == leaves
    assert rungs["time_ms"].tolist() == pytest.approx([90, 36, 30, 18])
    assert rungs["mid"].iloc[-1] == pytest.approx(90 / 18)


def test_growth_has_its_shared_point_in_every_curve(document: dict[str, Any]) -> None:
    table = analysis.growth(document)
    one = table[(table["threads"] == 1) & (table["contestant"] == "plain")]
    for quantity in ("batch", "pooling"):
        curve = one[(one["quantity"] == quantity) & (one["figure"] == "step_ms")]
        assert curve["value"].tolist() == [float(value) for value in GROWTH[quantity]]
    slopes = analysis.slopes(table).set_index(["quantity", "threads", "contestant", "figure"])
    assert slopes["slope"]["batch", 1, "plain", "step_ms"] == pytest.approx(1.0)
    assert slopes["slope"]["pooling", 2, "fp32", "step_ms"] == pytest.approx(0.0)


@given(
    st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=1, max_size=9),
    st.floats(0.5, 20),
)
def test_a_machine_that_drifts_between_rounds_does_not_change_a_ratio(rounds, truth) -> None:
    """Whatever each round's speed, contestants whose times keep a ratio are told by it."""
    rows = [
        {"contestant": name, "round": number, "step_ms": speed * (truth if name == "a" else 1.0)}
        for number, (speed, _) in enumerate(rounds)
        for name in "ab"
    ]
    found = round_ratio(rows, "a", "b", "step_ms")
    assert found is not None
    assert found.low == pytest.approx(truth) and found.high == pytest.approx(truth)
    inverse = round_ratio(rows, "b", "a", "step_ms")
    assert inverse is not None and inverse.mid == pytest.approx(1 / truth)


def test_the_verdict_says_how_much_faster_than_whom(document: dict[str, Any]) -> None:
    text = benchmark_figures.verdict(document).markdown
    first = text.split("\n\n")[0]
    assert "Its tables, up to 10 indices, 1 thread: ours, bf16 is" in first
    assert "than facebookresearch/dlrm end to end" in first and "7.50x faster" in first
    assert "goals against facebookresearch/dlrm reached" in text
    assert "to the same losses" in text and "matrix unit" not in text
    (case,) = [one for one in document["cases"] if (one["case"], one["threads"]) == ("8x1M-10", 1)]
    rounds = [bare_round(number, 40.0, 12.0, 4.0) for number in range(2)]
    case["bare"] = judge_bare(rounds, case["runs"], {"facebook": "fp32", "bf16": "bf16"})
    warned = benchmark_figures.verdict(document).markdown
    assert "\n\nThe matrix unit gave 33.3% of its best" in warned
    (fp32, bf16, *_) = cells(analysis.bare(document), benchmark_figures.COLUMNS["bare"])
    assert (fp32["of its best pace"], bf16["of its best pace"]) == ("100.0%", "33.3%")
    theirs, ours = cells(analysis.reached(document), benchmark_figures.COLUMNS["reached"])
    # facebook's step takes 90 ms, the one in bf16 12 ms; rows take 5 ms
    assert theirs["bare work of the step"] == "50.0%" and ours["bare work of the step"] == "141.7%"
    document["cases"][0]["losses_agree"] = False
    assert "not all contestants train the same" in benchmark_figures.verdict(document).markdown


def test_one_round_has_no_interval_and_equal_losses_differ_by_0(document: dict[str, Any]) -> None:
    times, ratios = analysis.times(document), analysis.ratios(document)
    step, whole = times["step_ms"], times["end_to_end_ms"]
    once = times.assign(
        **{"step_low_ms": step, "step_high_ms": step, "confidence": 0.0},
        **{"end_to_end_low_ms": whole, "end_to_end_high_ms": whole},
    )
    for row in cells(once, benchmark_figures.COLUMNS["times"]):
        assert row["from to"] == row["from to "] == "one round" and float(row["step (ms)"]) > 0
    single = ratios.assign(low=ratios["mid"], high=ratios["mid"], confidence=0.0)
    for row in cells(single, benchmark_figures.COLUMNS["ratios"]):
        assert row["interval"] == "one round" and row["speed-up"].endswith("x")
        assert "confidence" not in row
    for drawn in (benchmark_figures.times_bars(once), benchmark_figures.ratio_dots(single)):
        hover = [text for trace in drawn.data for text in trace.hovertext or ()]
        assert hover and all("(one round)" in text and " to 0" not in text for text in hover)
    assert " to " in cells(times, benchmark_figures.COLUMNS["times"])[0]["from to"]
    losses = analysis.losses(document).assign(difference=0.0)
    rows = cells(losses, benchmark_figures.COLUMNS["losses"])
    assert rows and all(row["largest difference"] == "0" for row in rows)


def cells(frame: pd.DataFrame, columns: Any) -> list[dict[str, str]]:
    """Texts of a table's rows by its titles."""
    table = show(frame, columns)
    assert isinstance(table, TextTable)
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_what_was_cut_short_or_failed_is_said(document: dict[str, Any]) -> None:
    cut = document["cases"][1]
    for name in ("contestants", "ratios", "loss_difference", "losses_agree", "failures"):
        del cut[name]
    document["cases"][0]["failures"] = {"torchrec": "pip install torchrec"}
    said = benchmark_figures.notices(document).markdown
    assert "26x100k-10: cut short after 8 runs" in said
    assert "torchrec did not run (8x1M-10): pip install torchrec" in said
    cases = analysis.times(document)[["case", "threads"]].itertuples(index=False)
    assert set(map(tuple, cases)) == {("8x1M-10", 1), ("8x1M-10", 2), ("26x100k-10", 2)}
    benchmark_figures.verdict(document)


def shown_titles(values: list[Any]) -> list[str]:
    return [v.layout.title.text for v in values if hasattr(v, "layout")]


def test_the_notebook_shows_a_finished_benchmark(document: dict[str, Any], tmp_path: Path) -> None:
    results, out = str(tmp_path / "b.json"), str(tmp_path / "out")
    shown = run_cells("benchmark", results=results, output_folder=out)
    assert shown_titles(shown)[:5] == [
        "Time per iteration",
        "Speed-up over facebookresearch/dlrm",
        "What each option brings",
        "From plain to tuned, end to end",
        "Growth of the time per iteration, end to end",
    ]
    tables = [value for value in shown if isinstance(value, TextTable)]
    assert len(tables) >= 7
    for text in [*(t._repr_html_() for t in tables), *(f.to_json() for f in figures(shown))]:
        assert "nan" not in text.lower()
    texts = " ".join(value.markdown for value in shown if isinstance(value, Text))
    assert str(tmp_path / "b.json") in texts and "GPU: not measured" in texts


def figures(shown: list[Any]) -> list[Any]:
    return [value for value in shown if hasattr(value, "layout")]


def embeddings_of(scale: dict[str, float]) -> dict[str, Any]:
    """An embedding benchmark in which each contestant takes so many milliseconds a phase."""

    def run(name: str, group: Any, *others: Any) -> Any:
        if name not in scale:
            raise InputError("not installed")
        times = {key: [scale[name]] for key in ("forward", "backward", "update")}
        return {case.name: times for case in group}

    ledger = open_embedding_ledger(None, 1, False, "dlrm bench")
    run_group(ledger, CASE_GROUPS["sgd"], 1, 2, run=run)
    return ledger.document


def gain_of(document: dict[str, Any]) -> str:
    """The speed-up of ours over the first contestant of the first case."""
    rows = cells(embedding_results.embedding_times(document), embedding_results.COLUMNS["times"])
    return rows[0]["speed-up of ours"]


def test_embeddings_are_shown_as_multiples_of_ours(tmp_path: Path) -> None:
    document = embeddings_of({"facebook": 6.0, "torch": 9.0, "fused": 1.0, "memory": 0.5})
    backs = embedding_results.bars(document)
    assert sum(trace.x[0] for trace in backs.data) == pytest.approx(6.0)
    assert backs.layout.yaxis.ticktext[:2] == ("facebookresearch/dlrm", "torch")
    first = cells(embedding_results.embedding_times(document), embedding_results.COLUMNS["times"])[
        0
    ]
    assert first["contestant"] == "facebookresearch/dlrm" and first["goal"] == "5.00x"
    assert gain_of(document).startswith("6.00x")
    gain = document["cases"][0]["ratios"]["fused"]["facebook"]
    gain |= {"low": 6.0, "median": 6.0, "high": 6.0}
    assert gain_of(document) == "6.00x (one round)"
    gain |= {"low": 5.5}
    assert gain_of(document) == "6.00x (5.50x to 6.00x)"
    said = embedding_results.sentences(document).markdown
    assert "FBGEMM did not run: not installed" in said and "reaches 50.0% (sgd" in said
    file = tmp_path / "e.json"
    file.write_text(json.dumps(document))
    assert embedding_results.read_embeddings(str(file)) == document
    file.write_text(json.dumps(document | {"schema": 99}))
    with pytest.raises(InputError, match="no embedding benchmark of this version"):
        embedding_results.read_embeddings(str(file))


def test_figures_of_next_to_nothing_can_be_drawn() -> None:
    plan = BenchPlan(both()["plain"], both()["tuned"], effort=BenchEffort(1, 1))
    found = run_plan(plan, run=timed)
    assert len(benchmark_figures.times_bars(analysis.times(found)).data) == 2
    assert benchmark_figures.ratio_dots(analysis.ratios(found)).data[0].x[0] == 1.0
    assert analysis.without(found).empty and analysis.ladder(found).empty
    for empty in (analysis.without(found), analysis.growth(found)):
        assert "dlrm bench --" in repr(show(empty))
    assert analysis.slopes(analysis.growth(found)).empty


def test_a_finished_benchmark_is_shown_with_the_embeddings_beside_it(tmp_path: Path) -> None:
    plan = BenchPlan(both()["plain"], both()["tuned"], effort=BenchEffort(1, 1))
    file = tmp_path / "step.json"
    run_plan(plan, file, run=timed)
    beside = {"kind": KIND, "schema": SCHEMA, "cases": [], "date": "now"}
    (tmp_path / "embeddings.json").write_text(json.dumps(beside))
    found = benchmark.start_benchmark(both()["plain"], tmp_path, results=str(file))
    assert found.embeddings == beside and found.plan is None
    assert found.document["cases"][0]["contestants"]


def test_a_file_that_is_no_benchmark_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text('{"schema": 1}')
    with pytest.raises(InputError, match="no benchmark of this version"):
        benchmark.start_benchmark(both()["plain"], tmp_path, results=str(file))
    with pytest.raises(InputError, match="no such file"):
        benchmark.start_benchmark(both()["plain"], tmp_path, results=str(tmp_path / "none.json"))
    with pytest.raises(InputError, match="no such file"):
        embedding_results.read_embeddings(str(tmp_path / "none.json"))


def test_a_benchmark_in_which_nothing_ran_is_no_benchmark(tmp_path, monkeypatch) -> None:
    huge = {**SMALL["model"], "table_rows": [10**13]}
    broken = parameters_from_sections(SMALL | {"model": huge})
    with pytest.raises(InputError) as refused:
        run_ours(broken, 1, 1)

    def refuse(*given: Any) -> Run:
        raise refused.value  # as another process would say again

    monkeypatch.setattr(benchmark, "run_plan", partial(run_plan, run=refuse))
    monkeypatch.setattr("dlrm_studies.bench.measure.time_round", refuse)
    found = benchmark.start_benchmark(broken, tmp_path, effort=BenchEffort(1, 1))
    assert found.plan is not None and found.plan.runs == len(CONTESTANTS)
    with pytest.raises(InputError, match=r"nothing was measured: dlrm train: .*memory"):
        found.measure()


@pytest.mark.notebook
@pytest.mark.browser
def test_the_page_of_a_small_benchmark(tmp_path: Path) -> None:
    """As a user runs it, without a peer; the page draws every figure and asks for nothing."""
    require_browser()
    own = ["rounds=1", "iterations=2", "protocols=4", "batch_sizes=[1, 8]"]
    run = run_notebooks(["benchmark"], QUICK, own, tmp_path)
    written = json.loads((run.path / "benchmark.json").read_text())
    (case,) = written["cases"]
    assert set(case["contestants"]) == set(CONTESTANTS)
    assert case["losses_agree"] and case["loss_difference"]["fp32"] < 1e-6
    ratio = case["ratios"]["fp32"]["end_to_end_ms"]
    assert 0 < ratio["low"] <= ratio["mid"] <= ratio["high"]
    bare = case["bare"]["bare"]
    for one in (bare["fp32"], bare["rows"]):
        assert 0 < one["best_ms"] <= one["mid"] and 0 < one["of_best"] <= 1
    floor = bare["fp32"]["mid"] + bare["rows"]["mid"]
    for name in ("plain", "fp32"):
        (timed_run,) = [row for row in case["runs"] if row["contestant"] == name]
        share = case["bare"]["contestants"][name]["share"]["mid"]
        assert share == pytest.approx(floor / timed_run["step_ms"])
    assert 0 < case["bare"]["errors"]["fp32"] < 1e-5
    timed = json.loads((run.path / "protocols.json").read_text())["measured"]
    assert [one["batch_size"] for one in timed["inference"]] == [1, 1, 8, 8]
    drawn = 5 if embedding_results.DEFAULT.is_file() else 4
    check_page(run.html, figures=drawn)
