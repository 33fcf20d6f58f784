"""Samples go to the part that the clock says, and nothing is lost on the way."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_training import parameters

from dlrm_core.parts import ITERATION_SPAN, log_spans, span_name
from dlrm_core.train import Trainer
from dlrm_workbook.analysis.attribution import attribute, coverage
from dlrm_workbook.recordings.hpctoolkit.spans import with_spans
from dlrm_workbook.recordings.open import open_recording
from dlrm_workbook.recordings.profile import Profile

MS = 1_000_000
DATA, TOP = span_name("data", "forward"), span_name("top_mlp", "backward")
# root > main thread > interpreter > C function > loop > line; and a second thread
NAMES = [
    ("root", "<root>", ""),
    ("thread", "<main thread>", ""),
    ("function", "_PyEval_EvalFrameDefault", "/usr/lib/libpython3.11.so.1.0"),
    ("function", "gemm", "/x/libtorch_cpu.so"),
    ("loop", "loop", ""),
    ("line", "gemm.cpp:7", ""),
    ("line", "gemm.cpp:7", ""),  # the same place as the timeline names it: without the loop
    ("function", "_PyEval_EvalFrameDefault", "/usr/lib/libpython3.11.so.1.0"),
    ("function", "gemm", "/x/libtorch_cpu.so"),  # another path to the same function
    ("thread", "<application thread>", ""),
    ("function", "worker", "/x/libgomp.so.1"),
]
PARENTS = [-1, 0, 1, 2, 3, 4, 3, 1, 7, 0, 9]
LOOP_LINE, TRACE_LINE, OTHER_GEMM, INTERPRETER, WORKER = 5, 6, 8, 2, 10


def profile(samples, values):
    """Samples are (thread, time in ms, context); a sample lasts until the next of its thread."""
    rows = []
    for thread in {sample[0] for sample in samples}:
        times = sorted((t, c) for p, t, c in samples if p == thread)
        ends = [t for t, _ in times[1:]] + [times[-1][0] + 1]
        rows += [(thread, t * MS, e * MS, c, 1) for (t, c), e in zip(times, ends, strict=True)]
    columns = ["profile", "start_ns", "end_ns", "context", "depth"]
    return Profile.build(
        contexts={
            "context": np.arange(len(NAMES)),
            "parent": PARENTS,
            "kind": [kind for kind, _, _ in NAMES],
            "name": [name for _, name, _ in NAMES],
            "shapes": "",
            "file": "",
            "line": 0,
            "module": [module for _, _, module in NAMES],
            "component": "other",
            "phase": "",
        },
        metrics={
            "metric": ["cpu_time_ms"],
            "unit": ["ms"],
            "meaning": ["time"],
            "source": ["test"],
        },
        values={
            "profile": [p for p, _, _ in values],
            "context": [c for _, c, _ in values],
            "metric": "cpu_time_ms",
            "scope": "exclusive",
            "value": [float(v) for _, _, v in values],
        },
        threads={
            "profile": [1, 2],
            "kind": "cpu_thread",
            "name": ["thread 0", "thread 1"],
            "rank": -1,
            "thread": [0, 1],
        },
        trace=[dict(zip(columns, row, strict=True)) for row in rows],
        meta={"not_measured": {"iterations": "HPCToolkit does not mark iterations"}},
    )


SPANS = [
    (DATA, 10 * MS, 20 * MS),
    (TOP, 20 * MS, 30 * MS),
    (ITERATION_SPAN, 10 * MS, 31 * MS),
    (DATA, 40 * MS, 50 * MS),
    (TOP, 50 * MS, 70 * MS),
    (ITERATION_SPAN, 40 * MS, 70 * MS),
]


def test_samples_and_their_values_go_to_the_part_of_their_time():
    samples = [
        *[(1, 5, INTERPRETER), (1, 12, INTERPRETER)],
        *[(1, 21, TRACE_LINE), (1, 25, TRACE_LINE), (1, 55, TRACE_LINE), (1, 45, TRACE_LINE)],
        (2, 26, WORKER),
    ]
    # the value lies on the line inside the loop, the samples on the line without it
    values = [(1, LOOP_LINE, 40.0), (1, INTERPRETER, 8.0), (2, WORKER, 3.0)]
    placed = with_spans(profile(samples, values), SPANS)
    contexts = placed.contexts
    by_part = placed.value_table("cpu_time_ms").groupby([contexts.component, contexts.phase]).sum()
    assert by_part["top_mlp", "backward"] == pytest.approx(30.0 + 3.0)
    assert by_part["data", "forward"] == pytest.approx(10.0 + 4.0)
    assert by_part["other", ""] == pytest.approx(4.0)
    assert "iterations" not in placed.not_measured
    top = contexts[contexts.name == TOP].index[0]
    inclusive = placed.value_table("cpu_time_ms", "inclusive")
    assert inclusive[top] == pytest.approx(33.0)
    assert inclusive[0] == pytest.approx(51.0)


def test_attribution_is_the_clocks_own():
    samples = [(1, 12, INTERPRETER), (1, 21, TRACE_LINE), (1, 29, TRACE_LINE), (1, 45, INTERPRETER)]
    placed = with_spans(profile(samples, [(1, LOOP_LINE, 1.0)]), SPANS)
    table = attribute(placed).set_index(["component", "phase"])["time_ms"]
    # two iterations of 21 and 30 ms
    assert table["data", "forward"] == pytest.approx(10.0)
    assert table["top_mlp", "backward"] == pytest.approx(15.0)
    assert table["other", ""] == pytest.approx(0.5)
    assert table.sum() == pytest.approx(25.5)
    assert coverage(attribute(placed)) == pytest.approx(25 / 25.5)


def test_the_interpreter_is_one_node_and_equal_siblings_are_merged():
    samples = [(1, 21, TRACE_LINE), (1, 25, OTHER_GEMM), (1, 27, INTERPRETER)]
    values = [(1, LOOP_LINE, 2.0), (1, OTHER_GEMM, 3.0), (1, INTERPRETER, 1.0)]
    placed = with_spans(profile(samples, values), SPANS)
    inside = placed.contexts[placed.contexts.component == "top_mlp"]
    assert list(inside[inside.kind == "python"].name) == ["Python interpreter"]
    assert (inside.name == "gemm").sum() == 1
    gemm = inside[inside.name == "gemm"].index[0]
    assert placed.value_table("cpu_time_ms", "inclusive")[gemm] == pytest.approx(5.0)
    assert not inside.name.str.startswith("_PyEval").any()


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 2]),
            st.integers(0, 90),
            st.sampled_from([INTERPRETER, TRACE_LINE, OTHER_GEMM, WORKER]),
        ),
        min_size=1,
        max_size=30,
        unique_by=lambda sample: sample[:2],
    ),
    st.lists(
        st.tuples(st.sampled_from([1, 2]), st.sampled_from(range(1, 11)), st.floats(0.001, 1e3)),
        min_size=1,
        max_size=12,
        unique_by=lambda value: value[:2],
    ),
)
def test_totals_of_every_thread_are_kept_and_time_is_never_negative(samples, values):
    before = profile(samples, values)
    placed = with_spans(before, SPANS)

    def of_thread(found: Profile, thread: int, scope: str, last: int) -> float:
        rows = found.values[found.rows("cpu_time_ms", scope)]
        rows = rows[rows["profile"].eq(thread) & rows["context"].between(0, last)]
        return float(rows["value"].sum())

    for thread in (1, 2):
        old = of_thread(before, thread, "exclusive", 10**6)
        assert of_thread(placed, thread, "exclusive", 10**6) == pytest.approx(old)
        assert of_thread(placed, thread, "inclusive", 0) == pytest.approx(old)
    table = attribute(placed)
    assert (table["time_ms"] >= 0).all()
    assert table["time_ms"].sum() == pytest.approx(25.5)


def test_warm_up_iterations_do_not_count():
    samples = [(1, 12, INTERPRETER), (1, 45, INTERPRETER), (1, 55, TRACE_LINE)]
    placed = with_spans(profile(samples, [(1, INTERPRETER, 4.0)]), SPANS, warmup=1)
    table = attribute(placed).set_index(["component", "phase"])["time_ms"]
    assert table["data", "forward"] == pytest.approx(10.0)
    assert table["top_mlp", "backward"] == pytest.approx(20.0)
    assert len(placed.iterations) == 1
    contexts = placed.contexts
    by_part = placed.value_table("cpu_time_ms").groupby(contexts.component).sum()
    assert by_part["data"] == by_part["other"] == pytest.approx(2.0)


def test_a_moved_run_folder_still_finds_the_databases_of_its_passes(tmp_path):
    measured = profile([(1, 5, INTERPRETER)], [(1, INTERPRETER, 1.0)])
    measured.meta["passes"] = [{"name": "stalls", "database": "hpctoolkit/stalls.database"}]
    measured.save(tmp_path / "run" / "profile")
    (tmp_path / "run").rename(tmp_path / "moved")
    (made,) = open_recording(tmp_path / "moved").profile.meta["passes"]
    assert made["database"] == str(tmp_path / "moved" / "hpctoolkit" / "stalls.database")


def test_without_timeline_or_spans_the_profile_stays_as_it_is():
    plain = profile([(1, 5, INTERPRETER)], [(1, INTERPRETER, 1.0)])
    assert with_spans(plain, []) is plain
    assert with_spans(plain, [SPANS[0]]) is plain


def test_the_workload_logs_every_part_once_an_iteration():
    trainer = Trainer(parameters(batches=3))
    trainer.iterate()
    with log_spans() as rows:
        trainer.train()
    trainer.iterate()
    loops = [row for row in rows if row[0] == ITERATION_SPAN]
    assert len(loops) == 3
    assert len(rows) == 3 * 16
    for _, start, end in loops:
        inside = [row for row in rows if start <= row[1] and row[2] <= end]
        assert len(inside) == 16


def test_values_of_inlined_functions_go_where_the_samples_around_them_are():
    # debug information knows an inlined function below gemm; the timeline names gemm only
    read = profile([(1, 21, TRACE_LINE), (1, 25, TRACE_LINE), (1, 45, INTERPRETER)], [])
    inlined = read.contexts.iloc[[OTHER_GEMM]].assign(
        context=len(NAMES), parent=TRACE_LINE, name="inlined"
    )
    read.contexts = pd.concat([read.contexts, inlined], ignore_index=True)
    row = {"profile": 1, "context": len(NAMES), "metric": "cpu_time_ms", "scope": "exclusive"}
    read.values = pd.DataFrame([{**row, "value": 16.0}])
    placed = with_spans(read, SPANS)
    contexts = placed.contexts
    by_part = placed.value_table("cpu_time_ms").groupby(contexts.component).sum()
    assert by_part["top_mlp"] == pytest.approx(16.0) and by_part["other"] == 0
    # a thread that was never sampled in the function or above it stays outside
    read.values = pd.DataFrame([{**row, "profile": 2, "value": 16.0}])
    outside = with_spans(read, SPANS)
    assert outside.value_table("cpu_time_ms").sum() == pytest.approx(16.0)
