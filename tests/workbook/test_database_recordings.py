"""The databases of facebookresearch/dlrm on an H100: parts, iterations and what to doubt."""

import math
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from profile_rows import profile_of_rows

from dlrm_core.parts import ITERATION_SPAN
from dlrm_workbook.analysis.attribution import attribute, coverage, step_contexts
from dlrm_workbook.analysis.findings.evidence import Evidence
from dlrm_workbook.analysis.gpu import copy_table
from dlrm_workbook.analysis.reference import other_times
from dlrm_workbook.analysis.views import flat
from dlrm_workbook.ground.marks import GROUP_PREFIX
from dlrm_workbook.recordings.hpctoolkit.database import read_database
from dlrm_workbook.recordings.hpctoolkit.format import DatabaseError
from dlrm_workbook.recordings.hpctoolkit.parts import iteration_functions
from dlrm_workbook.recordings.hpctoolkit.stacks import _groups, _with_parts, with_stacks
from dlrm_workbook.recordings.hpctoolkit.to_profile import profile_from_database
from dlrm_workbook.recordings.hpctoolkit.views import database_facts
from dlrm_workbook.recordings.profile import Profile

RECORDINGS = Path(__file__).parents[2] / ".." / "shared" / "recordings"


def folder(name: str) -> Path:
    if not (RECORDINGS / name).is_dir():
        pytest.skip(f"{RECORDINGS / name} is not there: it holds recordings of other people")
    return RECORDINGS / name


@cache
def profile(name: str) -> Profile:
    return profile_from_database(read_database(folder(name)))


def by_part(name: str, metric: str) -> dict[tuple[str, str], float]:
    run = profile(name)
    keys = [run.contexts["component"], run.contexts["phase"]]
    return run.value_table(metric).groupby(keys).sum().to_dict()


@pytest.mark.parametrize("name", ["dlrm-cpu-native.d", "loops-cputime-t.d"])
def test_a_sleeping_thread_is_not_drawn_as_running(name: str) -> None:
    """A pool's thread has 13 samples in 16 s; its last one is not drawn to the end."""
    place = RECORDINGS.parent / "hpctoolkit-databases" / name
    if not place.is_dir():
        pytest.skip(f"{place} is not there: it holds recordings of other people")
    run = profile_from_database(read_database(place))
    own = run.values[(run.values["metric"] == "cpu_time_ms") & (run.values["scope"] == "exclusive")]
    taken = own.groupby("profile")["value"].sum()
    lasted = (run.trace["end_ns"] - run.trace["start_ns"]) / 1e6
    drawn = lasted.groupby(run.trace["profile"]).sum().reindex(taken.index)
    assert len(taken) >= 4 and (taken > 50).all()
    assert ((drawn / taken).between(0.9, 1.1)).all(), (drawn, taken)


def test_device_time_of_each_part() -> None:
    # by hand from the call paths, see ../shared/FACTS.md 9
    expected = {
        ("transfer", "forward"): 71.6,
        ("bottom_mlp", "forward"): 0.79,
        ("top_mlp", "forward"): 3.32,
        ("embedding", "forward"): 1.74,
        ("interaction", "forward"): 2.60,
        ("loss", "forward"): 0.94,
        ("embedding", "backward"): 1.73,
        ("optimizer", "update"): 4.85,
        ("embedding", "update"): 3.42,
    }
    found = by_part("dlrm-h100-pc.d", "gpu_time_ms")
    for part, value in expected.items():
        assert found[part] == pytest.approx(value, rel=0.01), part
    # Addmm, Relu, Sigmoid and the sums of their bias gradients
    mlps = found["top_mlp", "backward"] + found["bottom_mlp", "backward"]
    assert mlps == pytest.approx(30.53 + 4.05 + 0.34 + 6.42, rel=0.005)
    # Index, Slice, and the sum of the two gradients of the bottom MLP's output
    assert found["interaction", "backward"] == pytest.approx(3.32 + 0.61 + 0.975, rel=0.005)
    # MseLoss, and the gradient that the backward pass begins with
    assert found["loss", "backward"] == pytest.approx(0.71 + 0.31, rel=0.01)
    assert sum(found.values()) == pytest.approx(139.808821, rel=1e-9)
    assert found["other", ""] / 139.808821 < 0.01


def test_overlong_intervals_do_not_enter_an_iteration() -> None:
    parts = attribute(profile("dlrm-h100-pc.d"))
    device = parts[parts["where"] == "device"].set_index(["component", "phase"])["time_ms"]
    for (component, phase), value in by_part("dlrm-h100-pc.d", "gpu_time_ms").items():
        if component != "other":
            assert device[component, phase] == pytest.approx(value / 100, rel=0.02)


def test_launches_are_told_apart_by_order() -> None:
    found = by_part("dlrm-h100-pc.d", "launches")
    assert sum(found.values()) == 7400
    # each layer of the bottom MLP: relu, product, its reduction, sum of the bias gradient
    assert found["bottom_mlp", "backward"] == pytest.approx(100 * 2 * 4)


def test_iterations_without_a_mark() -> None:
    run = profile("dlrm-h100-pc.d")
    assert len(run.iterations) == 100
    streams = run.threads.loc[run.threads["kind"] == "gpu_stream", "profile"]
    work = run.trace[run.trace["profile"].isin(streams)]
    kernel = run.contexts["kind"].eq("kernel").to_numpy()[work["context"]]
    at = np.searchsorted(run.iterations["start_ns"], work["start_ns"][kernel], side="right")
    assert at.min() == 1  # what ran before is the model's way to the GPU: copies only
    assert set(np.bincount(at)[1:].tolist()) == {73, 74, 75}
    assert np.bincount(at)[1:].sum() == 7400
    assert (run.iterations["start_ns"][1:].to_numpy() == run.iterations["end_ns"][:-1]).all()


def test_dividing_keeps_every_sum() -> None:
    database = read_database(folder("dlrm-h100-pc.d"))
    run = profile("dlrm-h100-pc.d")
    root = {name: value for name, value in database.root().items() if name.startswith(("GK", "GX"))}
    for name, value in root.items():
        if run.has(name):
            assert run.value_table(name).sum() == pytest.approx(value, rel=1e-9), name
            assert run.value_table(name, "inclusive")[0] == pytest.approx(value, rel=1e-9), name
            assert run.value_table(name).min() >= -1e-9 * abs(value)
    for metric in ("gpu_time_ms", "launches"):
        own = run.value_table(metric).to_numpy()
        inclusive = run.value_table(metric, "inclusive").to_numpy()
        below = np.bincount(run.contexts["parent"][1:], inclusive[1:], minlength=len(inclusive))
        assert np.allclose(inclusive - below, own, atol=1e-9)


def test_a_gpus_work_keeps_its_parts_below_the_programs_own_marks() -> None:
    run = profile("dlrm-h100-pc.d")
    spans = [(ITERATION_SPAN, *row) for row in run.iterations[["start_ns", "end_ns"]].to_numpy()]
    marked = with_stacks(run, spans, None, 3)
    keys = ["component", "phase", "where"]
    before, after = (attribute(one).set_index(keys)["time_ms"] for one in (run, marked))
    device = before.index.get_level_values("where") == "device"
    assert (after[before[device].index] / before[device]).between(0.99, 1.01).all()
    for metric in ("gpu_time_ms", "launches"):
        assert marked.value_table(metric).sum() == pytest.approx(run.value_table(metric).sum())
    assert len(marked.iterations) == 97


def test_copies_have_bytes_whoever_asks() -> None:
    run = profile("dlrm-h100-pc.d")
    assert run.value_table("copy_bytes").sum() == 441_944_740 + 819_600 + 13_107_200
    table = copy_table(run).set_index("direction")
    assert table.loc["host to device", "count"] == 1015
    assert table.loc["host to device", "gb_per_s"] == pytest.approx(6.036, abs=0.001)


def test_what_to_doubt_is_said() -> None:
    run = profile("dlrm-h100-pc.d")
    said = " ".join(run.meta["cautions"])
    assert run.meta["serialised"] is True
    assert "serialised" in run.meta["cautions"][0]
    assert "disagree by 47%: 65.9 ms by the metric (GKER), 96.6 ms by the trace" in said
    # by hand: all other intervals add up to the metric's times, kernel by kernel
    assert "7 of 7,400 intervals of the trace are too long (up to 13.8 ms; by 30.7 ms" in said
    assert "6.04 GB/s" in said and "pageable" in said
    assert "bottom MLP (0 forward, 200 backward)" in said
    for metric in ("GKER:BLKS_ACUMU", "GKER:LMEM_ACUMU (B)"):
        assert not run.has(metric) and run.not_measured[metric]
    assert run.meta["pc_sampling"] == {
        "taken": 2_460_687,
        "expected": 3_687_156,
        "dropped": "not measured: the database has no value of GSAMP:DRP",
        "period_cycles": 4096,
        "utilisation_percent": pytest.approx(66.74, abs=0.005),
    }
    assert "CPUTIME" in run.not_measured["cpu_time_ms"]


def test_host_time_of_the_twin_recording() -> None:
    found = by_part("dlrm-h100-host.d", "cpu_time_ms")
    assert math.isclose(sum(found.values()), 500_218.829, rel_tol=1e-9)
    # dlrm_s_pytorch.py:1021, the loop over the data loader: 10.00 s
    assert found["data", "forward"] == pytest.approx(10_007.6, abs=0.1)
    assert "no GPU operation" in profile("dlrm-h100-host.d").not_measured["gpu_time_ms"]


def test_setting_up_the_gpu_is_no_part_of_the_backward_pass() -> None:
    run = profile("dlrm-h100-host.d")
    rows = run.contexts["name"].str.startswith("cudaGetDeviceCount").to_numpy()
    assert run.value_table("cpu_time_ms", "inclusive")[rows].max() > 28_000
    assert (run.contexts["component"][rows] == "other").all()
    assert (run.contexts["phase"][rows] == "start-up").all()


def test_shares_of_the_host_are_of_the_main_thread_after_start_up() -> None:
    # 500 s over 222 threads, of which the main thread has 45.3 s, 28.9 s of it CUDA's set-up
    parts = attribute(profile("dlrm-h100-host.d"))
    assert 10_000 < parts["time_ms"].sum() < 45_298 - 28_940
    assert coverage(parts) > 0.75
    data = parts.set_index("component").loc["data"]
    assert data["where"] == "host" and data["share"] == pytest.approx(0.69, abs=0.01)


def test_a_recording_without_steps_names_the_times_that_its_tables_add_up_to() -> None:
    run = profile("dlrm-h100-host.d")
    times = other_times(run)
    parts, functions, every = times["time_ms"]
    assert parts == pytest.approx(attribute(run)["time_ms"].sum())
    inside = step_contexts(run)
    assert functions == pytest.approx(flat(run, "cpu_time_ms", within=inside)["exclusive"].sum())
    # 500 s over all threads, by the independent reader too
    assert every == pytest.approx(run.value_table("cpu_time_ms").sum()) and 499e3 < every < 501e3
    assert parts < functions < every
    assert times["times_the_step"].iloc[0] == 1 and times["iterations"].isna().all()


@pytest.mark.parametrize("name", ["dlrm-h100-pc.d", "dlrm-h100-host.d"])
def test_facts_equal_those_of_an_independent_reader(name: str) -> None:
    import json

    from databases import assert_same

    expected = json.loads(
        (folder(name).parent / "expected" / f"{name.removesuffix('.d')}.json").read_text()
    )
    assert_same(database_facts(read_database(folder(name))), expected)


def mixed(tmp_path: Path, file: str, other: str) -> Path:
    """The H100's database with one file of another run."""
    made = tmp_path / "mixed.d"
    made.mkdir()
    for name in ("meta.db", "profile.db", "trace.db"):
        source = folder(other if name == file else "dlrm-h100-pc.d")
        (made / name).symlink_to(source.resolve() / name)
    return made


@pytest.mark.parametrize("file", ["profile.db", "meta.db"])
def test_files_of_different_runs_are_refused(file: str, tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=r"\.db"):
        profile_from_database(read_database(mixed(tmp_path, file, "dlrm-h100-host.d")))


def test_a_trace_of_another_run_is_named(tmp_path: Path) -> None:
    run = profile_from_database(read_database(mixed(tmp_path, "trace.db", "dlrm-h100-host.d")))
    assert any("where 7,400 were launched" in said for said in run.meta["cautions"])
    assert run.iterations.empty


def test_without_a_trace_parts_that_need_order_stay_unknown(tmp_path: Path) -> None:
    part = tmp_path / "part.d"
    part.mkdir()
    for name in ("meta.db", "profile.db"):
        (part / name).symlink_to(folder("dlrm-h100-pc.d").resolve() / name)
    run = profile_from_database(read_database(part))
    assert run.iterations.empty and "hpcrun -t" in run.not_measured["trace"]
    found = run.value_table("gpu_time_ms").groupby(run.contexts["component"]).sum()
    assert found.sum() == pytest.approx(139.808821)
    assert found["embedding"] == pytest.approx(1.742 + 1.725 + 3.423, rel=0.001)
    assert found["bottom_mlp"] == pytest.approx(0.788, abs=0.001)  # its forward pass only
    assert len(run.contexts) == len(read_database(part).tree)


def test_the_end_of_a_module_in_a_backward_pass_ends_no_other_one() -> None:
    """As hooks noted facebook's script: 24 % of its step, under a real hpcrun, was in no part."""
    words = "net begins, top begins, top ends, net ends, loss begins, loss ends, "
    words += "loss backward begins, top backward begins, net backward begins, loss backward ends, "
    words += "top backward ends, optimizer begins"
    noted = [(what, at) for at, what in enumerate(words.split(", "), 1)]
    _, opened, nodes = _groups(noted, np.array([0, 20]))
    names = [node.name.rpartition(" ")[2] for node in nodes] + [""]
    assert [names[number] for number in opened[8:14]] == [
        "loss",
        "top",
        "top",
        "top",
        "net",
        "update",
    ]


@pytest.mark.parametrize(("inside_ms", "known"), [(8.0, False), (400.0, True)])
def test_iterations_that_hold_least_of_the_parts_are_none(inside_ms: float, known: bool) -> None:
    """hpcrun lost the callers of a generator: "Data generation takes 100% of each step"."""
    contexts = pd.DataFrame({"parent": [-1, 0, 1, 0], "file": "dlrm_core/parts.py"})
    contexts["name"] = ["<root>", "dlrm_iteration", "next_batch", "embed"]
    contexts["component"] = ["other", "other", "data", "embedding"]
    values = pd.DataFrame({"context": [2, 3], "value": [inside_ms, 371.0]})
    values = values.assign(metric="cpu_time_ms", scope="exclusive")
    assert iteration_functions(contexts, values).tolist() == [False, known, False, False]


def test_what_no_name_tells_is_of_the_module_that_ran_it() -> None:
    names = ["<root>", "main", ITERATION_SPAN, "backward", "MseLossBackward0"]
    names += [f"{GROUP_PREFIX}mlp", "dgemm"]
    kinds = ["root", "thread", "annotation", "python", "function", "annotation", "function"]
    contexts = {"name": names, "parent": [-1, 0, 1, 2, 3, 3, 5], "kind": kinds}
    contexts |= {"file": ["", "", "", "torch/_tensor.py", "", "", ""]}
    trace = [(0, 0, 1_000_000, 4, 4), (0, 1_000_000, 10_000_000, 6, 5)]
    run = profile_of_rows(contexts, (), trace, [(0, 0, 10**7)], engine="hpctoolkit")
    placed = _with_parts(run, None)
    assert placed.contexts.loc[[4, 6], "component"].tolist() == ["loss", "mlp"]
    assert not Evidence(placed, attribute(placed)).is_ours, "its iterations are marked, no part is"
