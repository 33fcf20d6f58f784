"""``dlrm bench``: its logic, on small models and the CPU."""

import functools
import itertools
import json
import math
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from commands import run_python
from small_training import THREE_TABLES

from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_core.config import load_parameters, parameters_from_sections
from dlrm_core.data.loader import make_generator
from dlrm_studies.bench import command, measure
from dlrm_studies.bench.bare import (
    ROWS,
    bare_times,
    cautions,
    describe_bare,
    judge_bare,
    rounded_fp32,
)
from dlrm_studies.bench.cases import (
    BASE_POINT,
    GOALS,
    GROWTH,
    SHAPES,
    TOGETHER,
    Case,
    ablated,
    growth_cases,
    of_case,
    plain_of,
    shape_cases,
    speed_leaves,
    steps_of,
    tuned_contestants,
    tuned_of,
    why_no_bf16x2,
)
from dlrm_studies.bench.command import exit_status
from dlrm_studies.bench.measure import BenchEffort, BenchPlan, Others, run_plan
from dlrm_studies.bench.rows import cache_flush, row_access_ms, why_no_accesses
from dlrm_workbook.cli import main
from dlrm_workbook.evidence.contestants import WARMUP, Run, compare, cores_of, describe
from dlrm_workbook.evidence.dependence import NEUTRAL, changed_leaves, changed_parameters
from dlrm_workbook.evidence.probes import model_for

SMALL = {
    "model": THREE_TABLES,
    "data": {"indices_per_lookup": 10, "generator": "facebook_loop"},
    "training": {"batch_size": 64, "device": "cpu"},
}
PEER = """
import sys, time
arguments = dict(a.lstrip("-").split("=") for a in sys.argv[1:] if "=" in a)
assert arguments["arch-embedding-size"] == "1000-50-3" and arguments["arch-mlp-bot"] == "16-32-8"
for i in range(int(arguments["num-batches"])):
    time.sleep(0.02)
    print(f"Finished training it {i + 1}/9 of epoch 0, 5.00 ms/it, loss 9.0")
"""


def both():
    fast = SMALL | {"data": SMALL["data"] | {"generator": "facebook"}}
    return {"plain": parameters_from_sections(SMALL), "tuned": parameters_from_sections(fast)}


def made(times, losses=lambda name: [0.5]):
    """Stands in for a process: contestant to its times, one a call, in ms."""
    clocks = {name: iter(each) for name, each in times.items()}

    def run(parameters, iterations, threads):
        name = "tuned" if parameters.data.generator == "facebook" else "plain"
        time = next(clocks[name])
        return Run(time, time, losses(name) * (iterations + WARMUP))

    return run


def test_contestants_take_turns_at_being_first():
    order = []
    run = made({"plain": [1.0] * 3, "tuned": [1.0] * 3})
    compare(
        both(),
        peer=None,
        rounds=3,
        iterations=1,
        threads=1,
        run=run,
        on_run=lambda row: order.append((row["round"], row["contestant"])),
    )
    names = ["plain", "tuned", "tuned", "plain", "plain", "tuned"]
    assert order == list(zip([0, 0, 1, 1, 2, 2], names, strict=True))


@pytest.mark.parametrize(
    ("loss", "said"), [(0.5 + 2e-5, "NOT the same training"), (math.nan, "not a number")]
)
def test_another_training_is_told_apart(loss, said):
    run = made({"plain": [1.0], "tuned": [1.0]}, lambda n: [loss if n == "tuned" else 0.5])
    results = compare(both(), peer=None, rounds=1, iterations=3, threads=1, run=run)
    assert results["losses_agree"] is False and said in describe(results)


def test_a_ratio_is_the_median_of_the_rounds_own_ratios():
    # a machine that drifts between rounds: their ratios are 2, 30 and 2
    run = made({"plain": [10.0, 30.0, 8.0], "tuned": [5.0, 1.0, 4.0]})
    ratio = compare(both(), peer=None, rounds=3, iterations=1, threads=1, run=run)["ratios"]
    found = ratio["tuned"]["end_to_end_ms"]
    assert (found["low"], found["mid"], found["high"]) == (2.0, 2.0, 30.0)
    # three values enclose the median unless all lie on one side of it: 1 - 2 / 2^3
    assert found["confidence"] == 0.75 and found["rounds"] == 3


def test_one_that_fails_does_not_lose_the_others_results():
    def run(parameters, iterations, threads):
        if parameters.data.generator == "facebook":
            raise InputError("out of luck")
        return Run(1.0, 2.0, [0.5])

    results = compare(both(), peer=None, rounds=3, iterations=1, threads=1, run=run)
    assert results["failures"] == {"tuned": "out of luck"}
    assert results["contestants"] == {"plain": {"step_ms": 1.0, "end_to_end_ms": 2.0}}
    assert results["ratios"] == {} and results["losses_agree"] is None
    assert "tuned FAILED: out of luck" in describe(results)


def test_a_peer_runs_in_its_own_process_and_leaves_its_checkout_alone(tmp_path):
    (tmp_path / "dlrm_s_pytorch.py").write_text(PEER)
    run = made({"plain": [1.0], "tuned": [1.0]})
    results = compare(both(), peer=tmp_path, rounds=1, iterations=3, threads=1, run=run)
    peer = results["contestants"]["facebook"]
    assert peer["step_ms"] == 5.0
    assert peer["end_to_end_ms"] > peer["step_ms"]
    assert results["against"] == "facebook" and results["losses_agree"] is False
    assert [file.name for file in tmp_path.iterdir()] == ["dlrm_s_pytorch.py"]


@pytest.mark.parametrize(
    "program, said",
    [
        ("raise SystemExit('no such option')", "no such option"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import no_such_package_of_anyone", "pip install no_such_package_of_anyone"),
        ("print('Finished training it 1/9 of epoch 0, 5.00 ms/it, loss 9.0')", "failed"),
    ],
)
def test_a_peer_that_fails_says_why(tmp_path, program, said):
    (tmp_path / "dlrm_s_pytorch.py").write_text(program)
    run = made({"plain": [1.0], "tuned": [1.0]})
    results = compare(both(), peer=tmp_path, rounds=1, iterations=3, threads=1, run=run)
    assert said in results["failures"]["facebook"]
    assert results["against"] == "plain" and set(results["ratios"]) == {"tuned"}


def test_a_peer_that_is_none_and_counts_that_measure_nothing_are_refused(tmp_path):
    for peer, rounds, iterations, said in (
        (tmp_path, 1, 3, r"no dlrm_s_pytorch\.py"),
        (None, 0, 3, "not 0 and 3"),
        (None, 2, 0, "not 2 and 0"),
    ):
        with pytest.raises(InputError, match=said):
            compare(both(), peer=peer, rounds=rounds, iterations=iterations, threads=1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bare_accesses_to_rows_change_no_weight(precision):
    sections = SMALL | {"model": SMALL["model"] | {"embedding_dim": 32, "bottom_mlp": "16-32-32"}}
    sections["model"]["embedding_precision"] = precision
    given = parameters_from_sections(sections)
    assert why_no_accesses(given) == ""
    tables = model_for(given.model, None, huge_pages=True).embeddings
    before = [weight.clone() for weight in tables.weights]
    flush = cache_flush(sum(weight.nbytes for weight in tables.weights))
    batch = make_generator(given, torch.device("cpu")).next_batch()
    read, changed = row_access_ms(tables, batch, flush)
    assert read > 0 and changed > 0
    for weight, known in zip(tables.weights, before, strict=True):
        assert torch.equal(weight.view(torch.uint8), known.view(torch.uint8))


# ---- cases ----------------------------------------------------------------------


def test_cases_are_valid_parameters_and_grow_in_one_thing():
    seed = load_parameters("parameters/seed.yaml")
    for case in shape_cases("all")[1:]:
        assert changed_parameters(seed, case.change)[0] != seed
    shared, *_ = growth_cases(",".join(GROWTH))
    assert shared.points == {name: float(value) for name, value in BASE_POINT.items()}
    for name in GROWTH:
        sizes = {}
        for case in growth_cases(name):
            given = changed_parameters(seed, case.change)[0]
            sizes[case.points[name]] = (
                given.training.batch_size
                * len(given.model.table_rows)
                * given.model.embedding_dim
                * given.data.indices_per_lookup
            )
        assert set(sizes) == set(GROWTH[name]) and len(set(sizes.values())) == len(sizes)
        base = sizes[BASE_POINT[name]]
        assert all(base * value == sizes[value] * BASE_POINT[name] for value in sizes)
    with pytest.raises(InputError, match="expected all or some of batch"):
        growth_cases("width")
    with pytest.raises(InputError, match="'9x9'"):
        shape_cases("8x1M-10, 9x9")


@pytest.fixture
def with_tiles(monkeypatch):
    """A machine with matrix tiles, as far as names of contestants go."""
    monkeypatch.setattr("dlrm_studies.bench.cases.why_not_fused", lambda *asked: "")


def test_goals_are_of_shapes_and_contestants_that_exist(with_tiles):
    seed = load_parameters("parameters/seed.yaml")
    names = set(BenchPlan(seed, tuned_of(seed), Others(["bf16"])).contestants)
    for shape, goals in GOALS.items():
        assert shape in SHAPES and set(goals) <= names


def test_the_presets_are_each_others_plain_and_tuned():
    seed, tuned = (load_parameters(f"parameters/{name}.yaml") for name in ("seed", "tuned"))
    assert changed_leaves(plain_of(tuned), seed) == []
    assert changed_leaves(tuned_of(seed), tuned) == []
    assert tuned_of(tuned) is tuned
    # every option that tuned.yaml sets is known to be one for speed, or the data's
    assert set(changed_leaves(seed, tuned)) <= {*speed_leaves(), "data.generator"}
    # tuning keeps the law of the data
    uniform = parameters_from_sections(SMALL | {"data": {"generator": "uniform"}})
    assert tuned_of(uniform).data.generator == plain_of(uniform).data.generator == "uniform"


def test_an_option_of_a_shape_is_for_the_tuned_ones_alone():
    (case,) = shape_cases("8x1M-10-b16384")
    seed = load_parameters("parameters/seed.yaml")
    found = {
        n: of_case(n, p, case)
        for n, p in BenchPlan(seed, seed, Others(["bf16"])).contestants.items()
    }
    assert {n: p.training.micro_batch for n, p in found.items()} == {
        "plain": None,
        "fp32": 4096,
        "bf16": 4096,
    }
    assert {p.training.batch_size for p in found.values()} == {16384}


def test_every_option_is_switched_off_once_and_the_ladder_leads_to_tuned():
    seed = load_parameters("parameters/seed.yaml")
    tuned = BenchPlan(seed, tuned_of(seed), Others(["bf16"])).contestants["bf16"]
    leaves = [leaf for leaf in changed_leaves(seed, tuned) if leaf not in NEUTRAL]
    variants = ablated(seed, tuned, "bf16")
    # the fused dense part's products and itself are one step
    steps = steps_of(seed, tuned)
    assert steps.count(TOGETHER) == 1 and len(steps) == len(leaves) - 1
    assert {leaf for step in steps for leaf in step} == {*leaves}
    off = [(facts, p) for facts, p in variants if facts["kind"] == "without"]
    assert [facts["leaf"] for facts, _ in off] == [step[0] for step in steps]
    for facts, without in off:
        assert set(changed_leaves(without, tuned)) == {facts["leaf"], *facts["also"]}
        assert len(facts["also"]) <= len(TOGETHER)
    ladder = [(facts, p) for facts, p in variants if facts["kind"] == "ladder"]
    assert ladder[-1][1] == tuned and ladder[-1][0]["name"] == "bf16"
    added = [changed_leaves(a, b) for a, b in itertools.pairwise([seed, *(p for _, p in ladder)])]
    assert added == [list(step) for step in steps]
    assert [(facts["leaf"], *facts["also"]) for facts, _ in ladder] == steps
    with pytest.raises(InputError, match="differ from the plain ones in nothing"):
        steps_of(seed, seed)


# ---- plans, and their file -------------------------------------------------------


def plan(**changes):
    given = {"rounds": 2, "iterations": 2, "plain": both()["plain"], "tuned": both()["tuned"]}
    given |= changes
    groups = {
        group: kind(**{name: given.pop(name) for name in vars(kind()) if name in given})
        for group, kind in (("others", Others), ("effort", BenchEffort))
    }
    return BenchPlan(**given, **groups)


def endless(count):
    """A stand-in that counts its calls and is interrupted at one of them."""
    calls = []

    def run(parameters, iterations, threads):
        calls.append(threads)
        if len(calls) == count:
            raise KeyboardInterrupt
        return Run(4.0, 8.0, [0.5] * (iterations + WARMUP))

    run.calls = calls
    return run


def test_a_benchmark_that_was_killed_keeps_its_runs_and_goes_on(tmp_path):
    file = tmp_path / "b.json"
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan(threads=[1, 2]), file, run=endless(6))
    kept = json.loads(file.read_text())
    # four of one thread, judged; one of two threads
    assert [(case["threads"], len(case["runs"])) for case in kept["cases"]] == [(1, 4), (2, 1)]
    assert kept["cases"][0]["ratios"]["fp32"]["step_ms"]["mid"] == 1.0
    rest = endless(0)
    done = run_plan(plan(threads=[1, 2]), file, resume=True, run=rest)
    assert rest.calls == [2, 2, 2], "what is there is not measured again"
    assert [len(case["runs"]) for case in done["cases"]] == [4, 4]
    assert json.loads(file.read_text()) == done
    # further rounds, and another case, join it
    more = endless(0)
    grown = plan(rounds=3, cases=growth_cases("pooling")[:1])
    done = run_plan(grown, file, resume=True, run=more)
    assert [case["case"] for case in done["cases"]] == ["given", "given", "base"]
    assert len(more.calls) == 6


def test_a_benchmark_of_other_settings_is_not_gone_on_with(tmp_path):
    file = tmp_path / "b.json"
    run_plan(plan(), file, run=endless(0))
    before = file.read_text()
    with pytest.raises(
        InputError,
        match=r"b\.json was begun with iterations 2, but now it is 3; leave --resume out",
    ):
        run_plan(plan(iterations=3), file, resume=True, run=endless(0))
    other = changed_parameters(both()["tuned"], {"training.fused_optimizer": True})[0]
    with pytest.raises(InputError, match=r"was begun without contestant\.fp32\.training\.fused"):
        run_plan(plan(tuned=other), file, resume=True, run=endless(0))
    document = json.loads(before)
    # a parameter that an earlier version did not have is at its default
    del document["settings"]["reference"]["training"]["rank_timeout_s"]
    file.write_text(json.dumps(document))
    run_plan(plan(), file, resume=True, run=endless(0))
    document["settings"]["reference"]["training"]["batch_size"] += 1
    file.write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"was begun with reference\.training\.batch_size 65"):
        run_plan(plan(), file, resume=True, run=endless(0))
    document = json.loads(before)
    document["cases"][0]["change"] = {"training.batch_size": 2}
    file.write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"given was begun with change\.training\.batch_size 2"):
        run_plan(plan(), file, resume=True, run=endless(0))
    file.write_text('{"kind": "something else"}')
    with pytest.raises(InputError, match="no document that can be gone on with"):
        run_plan(plan(), file, resume=True, run=endless(0))
    file.write_text(before)
    run_plan(plan(iterations=3), file, run=endless(0))
    assert json.loads(file.read_text())["settings"]["iterations"] == 3, "begun anew"


def test_a_package_that_is_lacking_ends_a_benchmark_before_its_first_run(tmp_path, monkeypatch):
    (tmp_path / "dlrm_s_pytorch.py").write_text("import no_such_package_of_anyone")
    run = endless(0)
    with pytest.raises(MissingToolError, match="pip install no_such_package_of_anyone"):
        run_plan(plan(peer=tmp_path), run=run)
    monkeypatch.setitem(sys.modules, "torchrec", None)
    with pytest.raises(MissingToolError, match=r"--torchrec needs torchrec.*pip install"):
        run_plan(plan(torchrec=True), run=run)
    assert run.calls == [], "nothing was run"


def test_torchrec_gets_the_data_of_the_case(monkeypatch):
    given, run = [], endless(0)

    def torchrec(parameters, iterations, threads):
        given.append(parameters.data)
        return run(parameters, iterations, threads)

    monkeypatch.setattr(measure, "run_torchrec", torchrec)
    cases = growth_cases("pooling")[:3]
    run_plan(plan(rounds=1, torchrec=True, cases=cases), run=run)
    tuned = both()["tuned"]
    assert given == [of_case("tuned", tuned, case).data for case in cases]
    assert len({data.indices_per_lookup for data in given}) == 3


def test_a_case_that_was_cut_short_does_not_fail_another_call():
    cut = {"case": "given", "runs": []}
    good = {**cut, "failures": {}, "losses_agree": True}
    assert exit_status([cut, good]) == 0
    assert exit_status([cut, {**good, "losses_agree": False}]) == 1
    assert exit_status([good, {**good, "failures": {"fp32": "out of luck"}}]) == 1


def test_without_the_plain_contestant_the_first_tuned_one_is_the_reference(tmp_path):
    (tmp_path / "dlrm_s_pytorch.py").write_text(PEER)
    given = plan(rounds=1, peer=tmp_path, run_plain=False, precisions=["bf16"])
    assert given.runs == 3
    (case,) = run_plan(given, run=endless(0))["cases"]
    assert list(case["contestants"]) == ["facebook", "fp32", "bf16"]
    assert (case["against"], case["loss_reference"]) == ("facebook", "fp32")
    assert set(case["loss_difference"]) == {"facebook", "bf16"}


def test_options_are_measured_one_by_one():
    done = run_plan(plan(ablation=True, cases=[]), run=endless(0))
    (case,) = done["cases"]
    assert case["kind"] == "ablation"
    kinds = [(v["kind"], v["leaf"]) for v in case["ablated"]["variants"]]
    assert kinds == [("without", "data.generator"), ("ladder", "data.generator")]
    assert case["ablated"]["variants"][-1]["name"] == case["ablated"]["all"] == "fp32"
    assert set(case["contestants"]) == {"plain", "fp32", "without generator"}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"rounds": 0}, "rounds >= 1"),
        ({"threads": [0]}, "from 1 to 1024"),
        ({"threads": []}, "from 1 to 1024"),
        ({"threads": [1, 100_000]}, "from 1 to 1024"),
        ({"precisions": ["fp8"]}, "fp8"),
        ({"peer": Path("/nowhere")}, "no facebookresearch/dlrm checkout"),
        ({"cases": [Case("x", "", {"model.embedding_dim": 7, "model.top_mlp": [3]})]}, "ends in 3"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_before_anything_runs(changes, said):
    with pytest.raises(InputError, match=said):
        plan(**changes)


def test_contestants_are_confined_to_the_cores_asked_for():
    before = os.sched_getaffinity(0)
    with cores_of(1) as count:
        assert count == 1 and len(os.sched_getaffinity(0)) == 1
        child = "import os; print(len(os.sched_getaffinity(0)))"
        assert run_python(child).strip() == "1"
    assert os.sched_getaffinity(0) == before
    with pytest.raises(InputError, match=f"expected 1 to {len(before)}"), cores_of(10_000):
        pass


def test_the_command_prints_what_was_measured_and_writes_json(tmp_path, capsys, monkeypatch):
    """Stand-ins replace the processes that train; test_benchmark.py measures with those."""

    def run(parameters, iterations, threads):
        step = 2.0 if parameters.data.generator == "facebook" else 4.0
        return Run(step, 2 * step, [0.5] * (iterations + WARMUP))

    monkeypatch.setattr(command, "run_plan", functools.partial(run_plan, run=run))
    bare = bare_round(0, 2.0, 1.0, 1.0)
    del bare["round"]
    monkeypatch.setattr(measure, "time_round", lambda *asked: bare)
    file, out = tmp_path / "p.yaml", tmp_path / "out" / "bench.json"
    file.write_text(json.dumps(SMALL))
    typed = ["bench", "--rounds=1", "--iterations=2", "-f", str(file), "--json", str(out)]
    assert main(typed) == 0
    said = capsys.readouterr().out
    written = json.loads(out.read_text())
    assert written["settings"]["environment"]["1"]["OMP_NUM_THREADS"] == "1"
    assert written["machine"] and written["settings"]["contestants"]["fp32"]
    (case,) = written["cases"]
    assert (case["case"], case["threads"], case["losses_agree"]) == ("given", 1, True)
    assert "than plain end to end and" in said and "as fast as" not in said
    assert re.search(r"^fp32 is [\d.,]+x (faster|slower) than", said, re.MULTILINE)
    assert "bare random rows" in said


def bare_round(number, fp32, bf16, best):
    """What a round of bare work finds."""
    times = {"fp32": fp32, "bf16": bf16, "rows": 5.0}
    least = {"fp32": fp32, "bf16": best, "rows": 5.0}
    errors = {"fp32": 2e-7, "fp32_bf16x2": 4e-6}
    found = {"ms": times, "best_ms": least, "errors": errors, "waited_share": 0.0, "reasons": {}}
    return {"round": number} | found


def test_shares_of_the_bare_work_are_the_rounds_own_and_a_slow_unit_is_said():
    rounds = [bare_round(0, 40.0, 12.0, 4.0), bare_round(1, 80.0, 10.0, 9.0)]
    steps = {"facebook": [90.0, 170.0], "bf16": [34.0, 60.0]}
    runs = [
        {"contestant": name, "round": number, "step_ms": ms}
        for name, times in steps.items()
        for number, ms in enumerate(times)
    ]
    found = judge_bare(rounds, runs, {"facebook": "fp32", "bf16": "bf16", "fp32": "fp32_bf16x3"})
    # (40 + 5) / 90 and (80 + 5) / 170 are equal, whatever the machine gave in between
    assert found["contestants"]["facebook"]["share"]["mid"] == pytest.approx(0.5)
    assert found["contestants"]["bf16"]["share"]["high"] == pytest.approx(17 / 34)
    assert "fp32" not in found["contestants"], "it did not run"
    assert found["bare"]["bf16"]["of_best"] == pytest.approx(4 / 11)
    assert found["errors"] == {"fp32": 2e-7, "fp32_bf16x2": 4e-6}
    (unit,) = cautions(found)
    assert "gave 36.4% of its best" in unit
    # a busy machine is said, and not taken for a slow unit
    rounds[1]["waited_share"] = 0.2
    (busy,) = cautions(judge_bare(rounds, runs, {}))
    assert "20.0% of its time" in busy
    quiet = [bare_round(number, 40.0, 4.2, 4.0) for number in range(2)]
    assert cautions(judge_bare(quiet, runs, {})) == []
    assert "bare bf16 products: 4.20 ms, 4.00 ms at best" in describe_bare(
        judge_bare(quiet, runs, {"facebook": "fp32"})
    )


@pytest.mark.parametrize("precision, share", [("fp32", 1), ("bf16", 2)])
def test_rows_that_fill_no_cache_line_are_not_accessed(precision, share):
    model = SMALL["model"] | {"bottom_mlp": "16-32-8", "embedding_precision": precision}
    given = parameters_from_sections(SMALL | {"model": model})
    found = bare_times(given, ["fp32"], 1)
    reason = f"a row has {32 // share} bytes, which 64 do not divide"
    assert found["reasons"][ROWS] == reason and ROWS not in found["ms"]
    assert found["ms"]["fp32"] >= found["best_ms"]["fp32"] > 0


def test_rounds_of_bare_work_are_kept_and_a_failure_of_theirs_costs_no_run(tmp_path, monkeypatch):
    calls = []

    def time_round(parameters, kinds, threads):
        calls.append((kinds, threads))
        if len(calls) == 2:
            raise InputError("out of memory")
        return {key: value for key, value in bare_round(0, 2.0, 1.0, 1.0).items() if key != "round"}

    monkeypatch.setattr(measure, "time_round", time_round)
    file = tmp_path / "b.json"
    run_plan(plan(bare=True), file, run=endless(0))
    assert calls == [(["fp32"], 1)] * 2
    (case,) = json.loads(file.read_text())["cases"]
    assert [one["round"] for one in case["bare_rounds"]] == [0, 1]
    assert case["bare"]["reasons"] == {"all": "out of memory"}
    # (2 + 5) / 4 in the round that has both
    assert case["bare"]["contestants"]["plain"]["share"]["mid"] == 1.75
    run_plan(plan(bare=True, rounds=3), file, resume=True, run=endless(0))
    assert len(calls) == 3, "what is there is not measured again"


def test_contestants_are_called_by_their_products(monkeypatch, with_tiles):
    tuned = load_parameters("parameters/tuned.yaml")
    found = tuned_contestants(tuned, ["bf16", "fp16"])
    assert list(found) == ["fp32", "fp32 by bf16x2", "bf16", "fp16"]
    assert found["fp32 by bf16x2"] == tuned
    assert changed_leaves(tuned, found["fp32"]) == ["training.fp32_matmul"]
    with pytest.raises(InputError, match="only GPUs have it"):
        tuned_contestants(tuned, ["tf32"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert tuned_contestants(tuned, ["tf32"])["tf32"].training.tf32
    monkeypatch.setattr("dlrm_studies.bench.cases.why_not_fused", lambda *asked: "no matrix tiles")
    assert tuned_contestants(tuned, []) == {"fp32": tuned}
    assert why_no_bf16x2(tuned) == "no matrix tiles"
    assert why_no_bf16x2(load_parameters("parameters/seed.yaml")) == ""


def test_fp32_that_rounds_more_than_fp32_fails_the_benchmark():
    good = {"case": "given", "runs": [], "failures": {}, "losses_agree": True}
    errors = {"fp32": 1e-7, "fp32_onednn": 1e-6}
    found = {"contestants": {"fp32": {"kind": "fp32_onednn"}}, "errors": errors}
    assert exit_status([good | {"bare": found}]) == 1
    assert "relative error of 1.0e-06, more than true fp32's 3.0e-07" in rounded_fp32(found)
    # the default library's own error is true fp32's
    found["errors"] = errors | {"fp32": 6e-7}
    assert exit_status([good | {"bare": found}]) == 0


def test_resume_without_a_file_is_refused(capsys):
    assert main(["bench", "--resume"]) == 2
    assert "--resume goes on with the benchmark in --json FILE" in capsys.readouterr().err
