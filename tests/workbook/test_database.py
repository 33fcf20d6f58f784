"""The database reader against stored figures and against the writer."""

import json
import math
import shutil
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from databases import NAMES, assert_same, expected_of, folder_of, written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_core.base.text import visible
from dlrm_workbook.analysis.gpu import kernel_table
from dlrm_workbook.analysis.inspect import inspect_profile
from dlrm_workbook.recordings.foreign import START_UP
from dlrm_workbook.recordings.hpctoolkit import to_profile
from dlrm_workbook.recordings.hpctoolkit.database import Database, read_database
from dlrm_workbook.recordings.hpctoolkit.format import DatabaseError
from dlrm_workbook.recordings.hpctoolkit.metrics import additive
from dlrm_workbook.recordings.hpctoolkit.to_profile import profile_from_database
from dlrm_workbook.recordings.hpctoolkit.views import (
    database_facts,
    database_summary,
    functions_table,
)
from tests.gpu_database import made as gpu_database
from tests.hpctoolkit_tree import FUNCTION, LINE, random_tree, tree_of
from tests.hpctoolkit_writer import Measured, write_database


def assert_self_adds_up(database: Database) -> None:
    """Self values over the tree are the root's value: per thread, in sum, never negative."""
    for profile in database.profiles:
        index, _, own = database.self_of_sparse(*database.inclusive_values(profile.number))
        sums = np.bincount(index, own, minlength=len(database.metrics))
        root = database.root(profile.number)
        for total, metric in zip(sums, database.metrics, strict=True):
            if additive(metric.name):
                expected = root.get(metric.name, 0.0)
                assert math.isclose(total, expected, rel_tol=1e-9, abs_tol=1e-9), metric.name
                whole = database.self_column(metric.name, profile.number)
                assert math.isclose(whole.sum(), expected, rel_tol=1e-9, abs_tol=1e-9)
                assert whole.min() >= -1e-9 * max(abs(expected), 1)


# ---- real databases ---------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_facts_equal_those_of_an_independent_reader(name: str) -> None:
    assert_same(database_facts(read_database(folder_of(name))), expected_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_self_values_add_up_on_real_databases(name: str) -> None:
    assert_self_adds_up(read_database(folder_of(name)))


@pytest.mark.parametrize("name", NAMES)
def test_profile_of_a_real_database_adds_up(name: str) -> None:
    database = read_database(folder_of(name))
    profile = profile_from_database(database)
    for metric in profile.metrics["metric"]:
        own = profile.value_table(metric).sum()
        assert math.isclose(own, profile.value_table(metric, "inclusive")[0], rel_tol=1e-9)
    idle = sum(line.idle_ns for line in database.traces)
    whole = sum(int(t.time_ns[-1] - t.time_ns[0]) for t in database.traces if len(t.time_ns))
    drawn = (profile.trace["end_ns"] - profile.trace["start_ns"]).sum()
    # threads whose processor time was sampled also sleep where no mark says so
    sampled = "cpu_time_ms" in set(profile.values["metric"])
    assert drawn <= whole - idle if sampled else drawn == whole - idle


def test_pc_sampling_figures() -> None:
    database = read_database(folder_of("loops-cuda-nvidiapc-t"))
    root = database.root()
    assert root["GSAMP:TOT"] * root["GSAMP:PER (cyc)"] == root["GINS"] == 2_691_465_216
    derived = database.derived()
    assert derived["utilization_percent"] == pytest.approx(92.2, abs=0.05)
    assert derived["stalled_percent"] == pytest.approx(76.4, abs=0.05)
    assert derived["stall_idep_percent"] == pytest.approx(91.5, abs=0.05)
    assert derived["occupancy_percent"] == 12.5
    assert derived["copy_gb_per_s"] == "not measured: no values of GXCOPY (sec)"
    kernel = kernel_table(profile_from_database(database)).iloc[0]
    assert (kernel["kernel"], kernel["launches"], kernel["registers"]) == ("kernmain()", 100, 32)
    assert kernel["time_ms"] == pytest.approx(19.386251)
    text = database_summary(database)
    assert "kernmain()" in text and "HPCToolkit lists it but does not collect it" in text


def test_python_frames_and_traces() -> None:
    database = read_database(folder_of("dlrm-cpu-python"))
    profile = profile_from_database(database)
    python = profile.contexts[profile.contexts["kind"] == "python"]
    assert "dlrm_wrap" in set(python["name"])
    # what makes the tables is no embedding forward: 9.6 s of 26.6
    assert python.loc[python["name"].eq("create_emb"), "phase"].eq(START_UP).all()
    by_part = profile.value_table("cpu_time_ms").groupby(profile.contexts["component"]).sum()
    assert by_part["embedding"] < 1500 and by_part.sum() == pytest.approx(
        1e3 * database.root()["CPUTIME (sec)"]
    )
    assert python["file"].str.contains(r"\.py$|^$|^<").all()
    assert profile.not_measured["gpu_time_ms"].startswith("no GPU operation")
    assert profile.not_measured["occupancy_percent"].startswith("no GPU metrics")
    # facebookresearch/dlrm's own functions, not ours
    assert {"data", "embedding", "interaction", "top_mlp", "other"} <= set(
        profile.contexts["component"]
    )
    top = functions_table(database, "CPUTIME (sec)")
    assert top["value"].sum() == pytest.approx(database.root()["CPUTIME (sec)"])
    assert top["share_percent"].sum() == pytest.approx(100)
    frame = profile.to_hatchet()
    assert "cpu_time_ms" in frame.dataframe.columns
    assert len(frame.dataframe) == len(profile.contexts) >= len(database.tree)


# ---- written databases ------------------------------------------------------------

KINDS_OF_IDS = ("NODE", "RANK", "THREAD")


def test_values_are_the_same_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    database = read_database(folder_of("dlrm-cpu-python"))
    whole = database_facts(database), database.column("CPUTIME (sec)")
    monkeypatch.setattr("dlrm_workbook.recordings.hpctoolkit.values.VALUES_AT_ONCE", 97)
    assert_same(database_facts(database), whole[0])
    np.testing.assert_array_equal(database.column("CPUTIME (sec)"), whole[1])


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "seed": draw(st.integers(0, 2**32)),
        "nodes": draw(st.integers(1, 120)),
        "shape": draw(st.sampled_from(["random", "deep", "wide"])),
        "entries": draw(st.integers(1, 3)),
        "metrics": draw(
            st.lists(
                st.sampled_from(["CPUTIME (sec)", "GPUOP (sec)", "GKER:COUNT", "perf::cycles"]),
                min_size=1,
                unique=True,
            )
        ),
        "threads": draw(st.integers(0, 4)),
        "density": draw(st.sampled_from([0.0, 0.2, 1.0])),
        "padding": draw(st.sampled_from([0, 8, 24])),
        "names": draw(
            st.lists(
                st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
                min_size=1,
                max_size=5,
            )
        ),
    }


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shapes())
def test_what_is_written_is_read(made: dict[str, Any]) -> None:
    rng = np.random.default_rng(made["seed"])
    entries = made["entries"] if made["shape"] == "random" else 1
    tree = random_tree(
        rng, made["nodes"], made["shape"], entries, functions=[*made["names"], "f<(g)>@h [i]"]
    )
    threads = []
    for i in range(made["threads"]):
        values = {
            name: rng.random(len(tree)) * (rng.random(len(tree)) < made["density"])
            for name in made["metrics"]
        }
        trace = np.sort(rng.integers(0, 1000, 7)), rng.integers(0, len(tree) + 1, 7)
        ids = [(kind, i // 2, 10 + i) for kind in KINDS_OF_IDS]
        threads.append(Measured(values, ids, trace))
    with tempfile.TemporaryDirectory() as scratch:
        written = write_database(
            Path(scratch) / "made.d",
            tree,
            threads,
            metrics=made["metrics"],
            padding=made["padding"],
            minor=made["padding"],
        )
        database = read_database(Path(scratch) / "made.d")
        assert [f.name for f in database.meta.functions] == list(map(visible, tree.functions))
        assert len(database.tree) == tree.first + (~tree.hidden).sum()
        parents = tree.all_parents()[database.tree.context]
        assert (database.tree.context[database.tree.parent[1:]] == parents[1:]).all()
        for number, block in enumerate(written.execution, 1):
            for metric, expected in zip(made["metrics"], block, strict=True):
                found = database.column(metric, profile=number)
                np.testing.assert_array_equal(found, expected[database.tree.context])
        for thread, measured, line in zip(database.threads, threads, database.traces, strict=True):
            identity = database.profiles[thread.profile].identifiers
            assert [(i.kind, i.logical, i.physical) for i in identity] == list(measured.ids)
            assert measured.trace is not None
            np.testing.assert_array_equal(line.time_ns, measured.trace[0])
            np.testing.assert_array_equal(line.context, measured.trace[1])
        assert len({thread.name for thread in database.threads}) == len(threads)
        assert_self_adds_up(database)
        json.dumps(database_facts(database))
        assert database_summary(database)
        if threads:
            profile_from_database(database).validate()


def test_contexts_of_one_name_and_parent_stay_apart(tmp_path: Path) -> None:
    database = read_database(written(tmp_path))
    assert len(set(database.tree.context.tolist())) == len(database.tree)
    assert [t.name for t in database.threads] == ["thread 0", "thread 0 (profile 2)"]


def test_deep_trees_work_everywhere(tmp_path: Path) -> None:
    nodes = 1300
    tree = random_tree(np.random.default_rng(0), nodes, "deep", hidden=0)
    tree.kind[:] = FUNCTION
    tree.call[:] = True
    write_database(tmp_path / "d", tree, [Measured({"CPUTIME (sec)": np.ones(nodes)})], cct=False)
    database = read_database(tmp_path / "d")
    assert database.tree.depth.max() == nodes
    profile = profile_from_database(database)
    frame = profile.to_hatchet()
    assert frame.tree(metric_column="cpu_time_ms").count("main") > 0
    found = frame.filter(["*", {"name": "main"}], squash=False)
    assert len(found.dataframe) > 0
    assert profile.value_table("cpu_time_ms").sum() == 1e3 * nodes


def many_threads(folder: Path, count: int, few: bool = True) -> Path:
    """A database whose threads have values in some contexts; written as such, or as all."""
    rng = np.random.default_rng(0)
    tree = random_tree(rng, 3000, hidden=0)
    threads = []
    for number in range(count):
        nodes = tree.and_above(rng.integers(0, len(tree), 400))
        trace = np.arange(2000), rng.choice(nodes, 2000) + tree.first
        values, ids = rng.random(len(nodes)), (("NODE", 0, 1), ("THREAD", number, number))
        if not few:
            values, nodes = np.bincount(nodes, values, len(tree)), None
        threads.append(Measured({"CPUTIME (sec)": values}, ids, trace, nodes))
    write_database(folder, tree, threads, scopes=("point", "execution"), cct=False, keep=False)
    return folder


def test_threads_with_few_contexts_are_written_as_others_are(tmp_path: Path) -> None:
    few, all_of_them = many_threads(tmp_path / "a", 3), many_threads(tmp_path / "b", 3, few=False)
    for name in ("profile.db", "meta.db", "trace.db"):
        assert (few / name).read_bytes() == (all_of_them / name).read_bytes(), name


def test_memory_is_that_of_the_contexts_and_not_of_the_threads(tmp_path: Path) -> None:
    peaks = {}
    for count in (20, 220):
        folder = many_threads(tmp_path / str(count), count)
        database_facts(read_database(folder))  # what is imported or cached at the first time
        tracemalloc.start()
        database_facts(read_database(folder))
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # the index and the trace of a thread are 12 bytes for each of about 1,000 and 2,000
    assert (peaks[220] - peaks[20]) / 200 < 4_000


def test_of_more_threads_than_a_page_has_room_for_the_others_are_one(tmp_path, monkeypatch) -> None:
    database = read_database(many_threads(tmp_path / "d", 12))
    every = profile_from_database(database)
    assert "left_out" not in every.meta and len(every.threads) == 12
    monkeypatch.setattr(to_profile, "MOST_THREADS", 5)
    some = profile_from_database(database)
    some.validate()
    assert some.threads["name"].iloc[-1] == "7 other threads" and len(some.threads) == 6
    assert some.meta["left_out"] == {"cpu_thread": 7, "gpu_stream": 0}
    assert any("The others (7 threads) stand here as one" in each for each in some.meta["cautions"])
    assert inspect_profile(some)["threads"] == 12
    # the first of the file, and those with the most time
    whole = every.values[every.rows("cpu_time_ms", "inclusive") & every.values["context"].eq(0)]
    time = whole.set_index("profile")["value"]
    held = [database.threads[0].profile, *time.iloc[1:].nlargest(4).index]
    assert set(some.threads["profile"].iloc[:5]) == set(held) == set(some.trace["profile"])
    assert some.meta["main_thread"] == time[held].idxmax()
    for scope in ("exclusive", "inclusive"):
        expected = every.value_table("cpu_time_ms", scope)
        np.testing.assert_allclose(some.value_table("cpu_time_ms", scope), expected, rtol=1e-9)
        alike = [
            profile.values[
                profile.rows("cpu_time_ms", scope) & profile.values["profile"].isin(held)
            ].reset_index(drop=True)
            for profile in (some, every)
        ]
        pd.testing.assert_frame_equal(*alike)


def test_many_values_leave_room_for_fewer_threads(tmp_path, monkeypatch) -> None:
    database = read_database(many_threads(tmp_path / "d", 12))
    rows = [database.profiles[t.profile].count + 2000 for t in database.threads]
    for most, threads in ((sum(rows), 12), (sum(rows) - 1, 11), (3 * max(rows), 3), (1, 1)):
        monkeypatch.setattr(to_profile, "MOST_ROWS", most)
        assert len(to_profile.held_threads(database)) == threads


def test_streams_with_the_least_work_are_left_out_of_the_timeline(tmp_path, monkeypatch) -> None:
    every = gpu_database(tmp_path / "d")
    monkeypatch.setattr(to_profile, "MOST_THREADS", 1)
    some = profile_from_database(read_database(tmp_path / "d"))
    # stream 7 works 30 microseconds and stream 9 works 15; the second CPU thread has no values
    assert some.threads["name"].tolist() == ["thread 0", "GPU 0 stream 7", "1 other thread"]
    assert any("1 of 2 GPU streams" in caution for caution in some.meta["cautions"])
    for metric in every.metrics["metric"]:
        pd.testing.assert_series_equal(some.value_table(metric), every.value_table(metric))


def test_parts_are_found_by_python_functions_only(tmp_path: Path) -> None:
    rows = [("main", -1, 1), ("top_mlp_forward", 0, 1), ("gemm", 1, 1)]
    rows += [("bottom_mlp_backward", 2, 1), ("gemm", 3, 1), ("loss_forward", 0, 1)]
    python = {"main", "top_mlp_forward", "bottom_mlp_backward"}  # loss_forward is C++ here
    tree = tree_of(rows, python.__contains__, threads=1)
    write_database(tmp_path / "d", tree, [Measured({"CPUTIME (sec)": np.ones(6)})])
    contexts = profile_from_database(read_database(tmp_path / "d")).contexts
    found = {
        (row.name, row.component, row.phase)
        for row in contexts.drop(columns="context").rename_axis("row").itertuples(index=False)
    }
    assert ("top_mlp_forward", "top_mlp", "forward") in found
    assert ("gemm", "top_mlp", "forward") in found
    assert ("gemm", "bottom_mlp", "backward") in found
    assert ("bottom_mlp_backward", "bottom_mlp", "backward") in found
    assert ("loss_forward", "other", "") in found
    assert ("main", "other", "") in found


def test_other_generations_names(tmp_path: Path) -> None:
    names = ["GCYCLES", "GCYCLES:STL", "GCYCLES:STL:GMEM", "GKER (s)", "GXCOPY:H2D (b)"]
    tree = random_tree(np.random.default_rng(0), 5, hidden=0)
    values = {name: np.full(5, 2.0 + i) for i, name in enumerate(names)}
    values["GXCOPY (s)"] = np.full(5, 1e-9)
    write_database(tmp_path / "d", tree, [Measured(values)])
    database = read_database(tmp_path / "d")
    assert database.metric("GINS:STL_GMEM").name == "GCYCLES:STL:GMEM"
    assert (database.column("GKER (sec)") == database.column("GKER (s)")).all()
    derived = database.derived()
    assert derived["stalled_percent"] == pytest.approx(150)
    assert derived["stall_gmem_percent"] == pytest.approx(100 * 4 / 3)
    assert derived["copy_gb_per_s"] == pytest.approx(6)
    assert derived["stall_idep_percent"] == "not measured: there is no metric GINS:STL_IDEP"
    with pytest.raises(DatabaseError, match=r"no metric 'cycles'; it has GCYCLES"):
        database.column("cycles")


def test_line_contexts_keep_file_and_line(tmp_path: Path) -> None:
    database = read_database(written(tmp_path))
    contexts = profile_from_database(database).contexts
    lines = contexts[contexts["kind"] == "line"]
    assert len(lines) and (lines["file"] == "src/main.c").all()
    assert (lines["name"] == "main.c:" + lines["line"].astype(str)).all()
    assert (database.tree.lexical_type == LINE).sum() == len(lines)


def test_a_copied_database_reads_the_same(tmp_path: Path) -> None:
    source = folder_of("dlrm-cpu-python")
    shutil.copytree(source, tmp_path / source.name)
    assert database_facts(read_database(tmp_path / source.name)) == database_facts(
        read_database(source)
    )
