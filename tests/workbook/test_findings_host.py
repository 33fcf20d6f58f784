"""Rules on the system's counters: each fires on its cause, names it, and is silent else."""

from pathlib import Path
from typing import Any

import gpu_trace
import numpy as np
import pytest
from finding_profiles import counters, found, listed, made, ordered
from hypothesis import given
from hypothesis import strategies as st

from dlrm_workbook.analysis.findings import cautions
from dlrm_workbook.analysis.findings.finding import LIMITS
from dlrm_workbook.analysis.findings.host import growth
from dlrm_workbook.recordings.profile import Profile

MACHINE = {"usable_cores": 2}
PARTS = {
    ("top_mlp", "forward", "aten::addmm"): 40.0,
    ("top_mlp", "backward", "aten::mm"): 50.0,
    ("top_mlp", "backward", ""): 0.5,
    ("bottom_mlp", "forward", "aten::addmm"): 9.0,
    ("loss", "forward", ""): 0.5,
}
ALONE = {
    "top_mlp": {"forward": 39.0, "backward": 48.0},
    "bottom_mlp": {"forward": 8.5},
    "loss": {"forward": 0.4},
}


def step(counted: dict[str, Any] | None = None, **more: Any) -> Profile:
    """100 ms an iteration, a little slower than alone, on two threads of two cores."""
    given = {
        "machine": MACHINE,
        "threads": 2,
        "part_probes": {"base": ALONE, "changes": []},
        "counters": counters(**(counted or {"blocked_ms": 0.1, "run_queue_ms": 0.5})),
        **more,
    }
    parts = given.pop("parts", PARTS)
    return made(parts, **given)


def slowed(factor: float) -> dict[tuple[str, str, str], float | tuple[float, float]]:
    return {part: factor * value for part, value in PARTS.items()}


def test_without_a_cause_there_is_no_finding() -> None:
    small = step({"other_processes_cpu_ms": 8.0, "run_queue_ms": 2.0, "gc_ms": 0.5})
    # a quiet run, one without counters and probes, and waiting of an operator's threads
    for profile in (step(), made(PARTS), small, step({"blocked_ms": 15.0})):
        assert listed(profile) == []


CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "other processes": (
        {"other_processes_cpu_ms": 90.0, "run_queue_ms": 30.0, "involuntary_switches": 20.0},
        "other_processes",
        "0.90 cores of 2",
    ),
    "busy thread": (
        {"other_threads_cpu_ms": 80.0, "run_queue_ms": 10.0, "blocked_ms": 20.0},
        "other_threads",
        "80.0 ms",
    ),
    "affinity": ({"run_queue_ms": 40.0}, "waiting_for_cores", "no core in 40%"),
    "collector": ({"gc_ms": 12.0}, "garbage_collection", "12.0 ms"),
    "page faults": ({"minor_faults": 60_000.0}, "page_faults", "60,000 page faults"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_cause_in_the_counters_is_named_first(case: tuple[dict[str, Any], str, str]) -> None:
    counted, name, said = case
    first = listed(step(counted))[0]
    assert first.id == name
    assert said in first.evidence
    assert first.limit in LIMITS
    assert ordered(first.predicted_speedup)


def test_a_lost_core_shows_as_parts_that_take_longer_than_alone() -> None:
    counted = {"other_processes_cpu_ms": 95.0, "run_queue_ms": 1.0}
    first = listed(step(counted, parts=slowed(1.9)))
    assert [finding.id for finding in first] == ["other_processes"]  # and not every part again
    assert first[0].share_of_step == pytest.approx(0.475, abs=0.03)


def test_operators_of_one_kind_count_together(tmp_path: Path) -> None:
    names = {"ConvolutionBackward0": 300, "aten::conv2d": 200, "aten::add_": 240, "aten::relu": 90}
    at, events = 0.0, []
    for name, us in names.items():
        events.append(gpu_trace.operator(name, at, at + us))
        at += us
    (first,) = listed(gpu_trace.read(tmp_path, events))
    assert first.title == "Convolutions take 60% of the recording"
    assert "ConvolutionBackward0 0.300 ms, aten::conv2d 0.200 ms" in first.evidence


def test_the_thread_that_makes_batches_may_compute() -> None:
    threads = [{"name": "dlrm-prefetch", "kind": "python", "cpu_ms_per_iteration": 60.0}]
    assert listed(step({"other_threads_cpu_ms": 60.0}, threads_cpu=threads)) == []
    threads[0]["name"] = "metrics"
    assert listed(step({"other_threads_cpu_ms": 60.0}, threads_cpu=threads))[0].id == (
        "other_threads"
    )


def test_a_sleep_is_placed_in_its_part() -> None:
    parts = {**PARTS, ("loss", "forward", ""): 30.0}
    first = listed(step({"wall_ms": 129.0, "blocked_ms": 29.0}, parts=parts))[0]
    assert (first.id, first.component) == ("waiting", "loss")
    assert first.share_of_step == pytest.approx(29 / 129, abs=0.01)
    assert "outside every operator" in first.evidence


def test_waiting_beside_writing_is_storage() -> None:
    parts = {**PARTS, ("top_mlp", "backward", ""): 25.0}
    counted = {"blocked_ms": 24.0, "written_bytes": 65536.0}
    first = listed(step(counted, parts=parts))
    assert [finding.id for finding in first] == ["storage_in_loop"]
    assert first[0].component == "top_mlp"


def test_too_few_and_too_many_threads() -> None:
    few = found(step({"process_cpu_ms": 99.0}, threads=1))["too_few_threads"]
    assert few.change == {"training.threads": 2}
    assert "too_few_threads" not in found(step({"process_cpu_ms": 195.0}, threads=1))
    many = found(step({"run_queue_ms": 35.0}, threads=8))["too_many_threads"]
    assert many.change == {"training.threads": 2}
    assert ordered(many.predicted_speedup) and ordered(few.predicted_speedup)


def test_what_no_rule_explains_is_still_reported() -> None:
    parts = {**PARTS, ("top_mlp", "forward", "aten::mystery"): 90.0}
    first = listed(step(parts=parts))[0]
    assert (first.id, first.component) == ("slower_than_alone", "top_mlp")
    assert "aten::mystery" in first.evidence
    everywhere = {name: 2.5 * value for name, value in PARTS.items()}
    everywhere |= {("interaction", "forward", "aten::bmm"): 60.0}
    alone = {**ALONE, "interaction": {"forward": 20.0}}
    first = listed(step(parts=everywhere, part_probes={"base": alone}))[0]
    assert first.id == "slower_than_alone" and first.share_of_step > 0.4


def test_time_outside_the_model() -> None:
    parts = {**PARTS, ("other", "", "aten::item"): 12.0}
    first = listed(step(parts=parts))[0]
    assert (first.id, first.component) == ("around_model", "other")
    assert "aten::item 12.0 ms" in first.evidence


# ---- memory -----------------------------------------------------------------------


def test_a_leak_fails_before_anything_slows() -> None:
    levels = [1e9 + 2e6 * i for i in range(12)]
    counted = {"rss_bytes": levels, "gc_ms": 30.0}
    first = listed(step(counted, memory_limit_bytes=1.2e9))
    assert [finding.id for finding in first] == ["leak", "garbage_collection"]
    assert first[0].severity == "fails" and first[0].limit == "memory capacity"
    assert "2.00 MB per iteration" in first[0].evidence
    assert "after about 101 iterations" in first[0].evidence


def test_settling_buffers_and_the_profilers_memory_are_no_leak() -> None:
    settled = [1.00e9, 1.05e9, 1.08e9, *[1.09e9] * 5, *[1.3e9] * 4]
    assert "leak" not in found(step({"rss_bytes": settled}))
    profiled = [1e9] * 6 + [1e9 + 5e7 * i for i in range(1, 7)]
    counted = counters(rss_bytes=profiled) | {"profiled": [False] * 6 + [True] * 6}
    assert "leak" not in found(made(PARTS, counters=counted))


@given(st.floats(1e5, 1e8), st.lists(st.floats(-0.2, 0.2), min_size=6, max_size=40))
def test_growth_is_told_from_its_scatter(size: float, scatter: list[float]) -> None:
    grows = size * (1 + np.array(scatter))
    slope, steady = growth(grows)
    assert steady and slope == pytest.approx(size, rel=0.21)
    few = np.where(np.arange(len(grows)) % 3 == 0, grows, 0.0)
    assert len(few) >= 40 or not growth(few)[1], "two of three iterations do not grow"


def test_nearly_full_memory() -> None:
    counted = {"rss_bytes": 0.95e9}
    first = listed(step(counted, memory_limit_bytes=1e9))[0]
    assert (first.id, first.severity) == ("memory_nearly_full", "fails")
    assert listed(step({"rss_bytes": 0.5e9}, memory_limit_bytes=1e9)) == []


def test_faults_that_the_profiler_adds_are_a_caution_of_another_program() -> None:
    def said(plain: float, recorded: float, **meta: Any) -> list[str]:
        columns = counters(minor_faults=[plain] * 6 + [recorded] * 6)
        columns["profiled"] = [False] * 6 + [True] * 6
        return cautions(made(PARTS, **({"counters": columns, "parameters": None} | meta)))

    (sentence,) = said(3000.0, 19000.0)
    assert "19,000 page faults" in sentence and "without the profiler 3,000" in sentence
    # about as many, too few to matter in 100 ms, and a run whose parts are timed without a profiler
    assert said(16000.0, 19000.0) == said(0.0, 900.0) == []
    assert said(3000.0, 19000.0, parameters={"model": {}}) == []
    assert said(3000.0, 19000.0, laps_ms={"between": ["head begins"]}) == []
