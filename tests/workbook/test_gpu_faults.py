"""Faults planted in real recordings of GPUs: edits are sound, and some trials of the campaign.

All of it is ``tests/campaigns/gpu_faults.py``, whose results are in ``benchmarks/results``.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import gpu_faults
import gpu_set_d
import gpu_set_f
import gpu_set_g
import gpu_set_h
import numpy as np
import pytest
from gpu_kinds import kernels
from recordings import recording
from trace_edits import Insertion, Trace

from dlrm_workbook.recordings.hpctoolkit.database import read_database


@pytest.fixture(autouse=True)
def _real_recordings() -> None:
    recording("traces")


def _correlations(trace: Trace) -> list[int]:
    args = [trace.events[row]["args"] for row in trace.runtime]
    return [each["correlation"] for each in args if "correlation" in each]


@pytest.mark.parametrize("name", ["bert", "rank0", "graphs", "rank5*3"])
def test_replay_of_no_edit_is_the_recording(name: str) -> None:
    trace = gpu_faults.recording(name)
    again = trace.replay()
    assert np.abs(again.start - trace.start).max() < 0.01
    assert np.abs(again.length - trace.length).max() < 0.01
    assert [event["name"] for event in again.events] == [event["name"] for event in trace.events]


def test_pause_moves_what_follows_and_shortens_waits_for_the_gpu() -> None:
    trace = gpu_faults.recording("rank0")
    at = trace.points(0)[50]
    trace.insert(Insertion(at, 500.0))
    later = trace.replay()
    moved = later.start - trace.start
    assert np.all(moved[trace.start < at] == 0)
    assert 0 < moved.max() <= 500.001 and later.problems() == []
    kernels = [row for row in trace.device if trace.launch(row) > at]
    assert all(later.start[row] >= later.launch(row) for row in kernels)
    # a stretched kernel is waited for: the host goes on when it is done
    slow = gpu_faults.recording("rank0")
    waited_for = next(iter(_waits(slow).values()))
    slow.length[waited_for] += 3000.0
    assert gpu_faults.span(slow.replay()) == pytest.approx(gpu_faults.span(trace) + 3000.0, abs=50)


def _waits(trace: Trace) -> dict[int, int]:
    from trace_edits import _Replay

    replay = _Replay(trace)
    replay._learn()
    return {call: row for call, (_, row) in replay.waits.items()}


def test_repeated_recording_numbers_its_steps_and_launches() -> None:
    once, thrice = gpu_faults.recording("rank5"), gpu_faults.recording("rank5*3")
    assert len(thrice.steps) == 3 * len(once.steps) and len(thrice.device) == 3 * len(once.device)
    assert len(set(_correlations(thrice))) == 3 * len(set(_correlations(once)))
    assert thrice.problems() == []


def _short(kind: str) -> str:
    """The shortest recording of a kind whose work follows on itself; "" if it has none."""
    own = gpu_faults.FAULTS[kind].recordings
    return next((name for name in ("rank0", "bert*8") if name in own), "")


@pytest.mark.parametrize("kind", [kind for kind in gpu_faults.FAULTS if _short(kind)])
def test_edited_recordings_are_sound(kind: str) -> None:
    name = _short(kind)
    draw = gpu_faults.Draw(kind)
    try:
        trace, _, share = gpu_faults.planted(kind, name, draw, 1.3)
    except gpu_faults.Hidden:  # work at the end of a step delays only a following one
        trace, _, share = gpu_faults.planted(kind, "rank5*8", draw, 1.3)
    assert trace.problems() == []
    numbers = _correlations(trace)
    assert len(set(numbers)) == len(numbers)
    assert 0.5 < share < 0.85


def _busy_us(trace: Trace) -> float:
    """Time in which the GPU does anything."""
    spans = sorted((trace.start[row], trace.start[row] + trace.length[row]) for row in trace.device)
    busy, until = 0.0, -np.inf
    for start, end in spans:
        busy += max(end - max(start, until), 0.0)
        until = max(until, end)
    return busy


WITH_IDLE = (
    *("optimizer_on_host", "pinned_anew", "polling", "lookups_on_host", "table_by_table"),
    *("slow_host", "logger_thread", "metrics_on_host", "launches_that_wait", "small_copies"),
    *("python_backward", "pinned_checks", "unused_search", "modules_loaded", "double_batches"),
    *("bucketized_on_host", "hashing_on_host", "ipc_handles", "views", "conditions"),
)
WITH_WORK = (
    *("zeroed_gradients", "casts", "sorted_indices", "copies_in_line"),
    *("transposed_anew", "unfused_features", "barrier", "slow_exchange", "far_tables"),
    *("single_block_scan", "sampled_on_gpu", "weight_norm", "renormed_tables", "gathered_weights"),
    *("permuted_features", "table_penalty", "hard_negatives", "dropout", "reduced_tables"),
)


@pytest.mark.parametrize("kind", WITH_IDLE + WITH_WORK)
def test_a_plant_leaves_the_gpu_idle_or_busy_as_it_claims(kind: str) -> None:
    plain = gpu_faults.recording("rank0")
    trace, _, _ = gpu_faults.planted(kind, "rank0", gpu_faults.Draw(kind), 1.3)
    longer, work = (
        gpu_faults.span(trace) - gpu_faults.span(plain),
        _busy_us(trace) - _busy_us(plain),
    )
    assert longer > 1.1 * plain.step_us
    assert work > 0.9 * longer if kind in WITH_WORK else work < 0.4 * longer


def test_other_process_leaves_gaps_in_all_streams() -> None:
    trace = gpu_faults.recording("rank5*3")
    told = gpu_faults.FAULTS["time_sliced"].plant(trace, gpu_faults.Draw(1), 2000.0)
    assert trace.pauses is not None and "after each" in told
    (period, length), edited = trace.pauses, trace.replay()
    begins = np.array([edited.start[row] for row in edited.device if edited.launch(row) > -1e11])
    rounded = 0.3  # times since 1970 are kept to a quarter of a microsecond
    assert np.all((begins + rounded) % period <= period - length + 2 * rounded)
    assert edited.problems() == []
    assert gpu_faults.span(edited) > gpu_faults.span(trace)
    assert _busy_us(edited) < 1.1 * _busy_us(trace)


def test_throttled_kernels_are_slower_from_one_step_on() -> None:
    plain, trace = gpu_faults.recording("rank5*8"), gpu_faults.recording("rank5*8")
    gpu_faults.FAULTS["throttled"].plant(trace, gpu_faults.Draw(1), 500.0)
    rows = [row for row in kernels(trace, "^(?!nccl)") if plain.length[row] > 0]
    factors = np.array([trace.length[row] / plain.length[row] for row in rows])
    later = np.array([trace.launch(row) >= trace.steps[4][0] for row in rows])
    assert np.all(factors[~later] == 1.0)
    assert np.all((factors[later] == 1.0) | np.isclose(factors[later], factors.max()))
    added = sum(trace.length[row] - plain.length[row] for row in rows)
    assert added == pytest.approx(8 * 500.0)


def test_ranks_wait_for_lookups_of_one() -> None:
    delay = gpu_faults.FAULTS["uneven_lookups"].delay
    assert delay is not None
    ranks, _, share, late = gpu_faults.straggling(gpu_faults.Draw(2), 1.5, delay)
    work = {
        rank: sum(float(trace.length[row]) for row in kernels(trace, "^(?!nccl)"))
        for rank, trace in ranks.items()
    }
    assert share > 0.5 and max(work, key=lambda rank: work[rank]) == late
    assert all(trace.problems() == [] for trace in ranks.values())


@pytest.mark.parametrize(
    "kind", ["longer_kernel", "slow_samples", "larger_copies", "slow_update", "slow_interaction"]
)
def test_edited_databases_are_read_as_longer_ones(kind: str, tmp_path: Path) -> None:
    name = gpu_faults.FAULTS[kind].recordings[0]
    edited, _, share = gpu_faults.planted(kind, name, gpu_faults.Draw(kind), 1.5)
    plain, again = edited.database, read_database(edited.save(tmp_path))
    loss = edited.step_us / 1e6 - gpu_faults.recording(name).step_us / 1e6
    assert share == pytest.approx(0.6)
    for profile in (0, *(each.number for each in plain.profiles if each.count and each.number)):
        before, after = (
            database.column(edited.time, profile=profile)[0] for database in (plain, again)
        )
        part = plain.column(edited.time, profile=profile)
        own = sum(float(part[list(each.rows)].sum()) for each in edited.stretches)
        whole = sum(edited.seconds(each.rows) for each in edited.stretches)
        assert after - before == pytest.approx(loss * own / whole)
        assert again.self_column(edited.time, profile).min() > -1e-9 * after
    longest = [
        max(int(np.ptp(line.time_ns)) for line in database.traces if len(line.time_ns))
        for database in (plain, again)
    ]
    assert (longest[1] - longest[0]) / 1e9 == pytest.approx(loss, rel=1e-6)
    if kind == "larger_copies":
        grown = again.measured()["GXCOPY:H2D (B)"] / plain.measured()["GXCOPY:H2D (B)"]
        assert grown > 100.0


def test_sets_have_kinds_of_their_own() -> None:
    sets = gpu_faults.SETS
    assert len(gpu_faults.FAULTS) == sum(len(faults) for faults in sets.values())
    assert all(fault.held_out for name in "BCDFGH" for fault in sets[name].values())


def test_ranks_wait_for_the_straggler() -> None:
    ranks, _, share, late = gpu_faults.straggling(gpu_faults.Draw(1), 1.5)
    assert len(ranks) == 8 and share > 0.5
    spent = {
        rank: sum(float(trace.length[row]) for row in kernels(trace, "nccl"))
        for rank, trace in ranks.items()
    }
    assert min(spent, key=lambda rank: spent[rank]) == late


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("pageable_copies", "rank0"), ("readbacks", "rank0"), ("small_optimizer", "rank0")),
        *(("slow_interaction", "cpu-python"), ("linear_backward", "cpu-python")),
        *(("slow_interaction", "h100-host"), ("linear_backward", "h100-host")),
    ],
)
def test_planted_fault_is_named_first(kind: str, name: str) -> None:
    row = gpu_faults.trial(kind, name, 0, large=True)
    assert row["good"], row
    if name == "h100-host":  # its libraries have no lines: functions are named
        assert "Most of it: [" not in row["first_evidence"]
        assert re.search(r"at::TensorIteratorBase|mkl_blas_avx512_sgemm", row["first_evidence"])


@pytest.mark.parametrize("kind", list(gpu_faults.CLEAN))
def test_what_changes_nothing_raises_no_finding(kind: str) -> None:
    for name in ("bert", "rank0"):
        row = gpu_faults.clean_trial(kind, name, 0)
        assert row["good"], row


@pytest.mark.parametrize("kind", [kind for own in gpu_faults.CLEAN_OF.values() for kind in own])
def test_harmless_edits_of_a_sealed_set_keep_the_work(kind: str) -> None:
    plain = gpu_faults.recording("rank0")
    edited = gpu_faults.HARMLESS[kind](gpu_faults.recording("rank0"), gpu_faults.Draw(3))
    times = len(edited.steps) // len(plain.steps)
    assert times == 1 or kind == "more_steps"
    assert edited.problems() == [] and len(edited.device) == times * len(plain.device)
    within = 0.11 if kind == "scaled" else 0.002
    assert _busy_us(edited) == pytest.approx(times * _busy_us(plain), rel=within)
    assert edited.step_us == pytest.approx(plain.step_us, rel=within)
    assert any(
        event != before for event, before in zip_longest(edited.events, plain.events, fillvalue={})
    )


def test_small_plants_of_set_d_take_a_tenth_of_the_step() -> None:
    for kind, fault in gpu_set_d.FAULTS.items():
        assert fault.listed and fault.small == (0.055, 0.11), kind
    for kind in ("barrier", "backward_hooks"):
        _, _, share = gpu_faults.planted(kind, "rank0", gpu_faults.Draw(5), 0.1)
        assert 0.05 < share < 0.12


@pytest.mark.parametrize(
    "kind",
    [kind for kind in (*gpu_set_f.FAULTS, *gpu_set_g.FAULTS, *gpu_set_h.FAULTS) if _short(kind)],
)
def test_planted_work_has_one_launch_each(kind: str) -> None:
    name = _short(kind)
    plain, trace = gpu_faults.recording(name), gpu_faults.recording(name)
    gpu_faults.FAULTS[kind].plant(trace, gpu_faults.Draw(kind), trace.step_us)
    edited = trace.replay()
    work = Counter(edited.events[row]["args"]["correlation"] for row in edited.device)
    known = Counter(plain.events[row]["args"]["correlation"] for row in plain.device)
    calls = Counter(_correlations(edited))
    assert all(work[number] == 1 and calls[number] == 1 for number in set(work) - set(known))
    assert edited.length.min() >= 0.0 and edited.problems() == []


def test_hooks_lengthen_the_nodes_that_they_run_in() -> None:
    plain, trace = gpu_faults.recording("rank0"), gpu_faults.recording("rank0")
    gpu_set_f.backward_hooks(trace, gpu_faults.Draw(1), 8000.0)
    edited = trace.replay()
    spent = [
        sum(
            each.length[row]
            for row in each.operators
            if each.events[row]["name"] == gpu_set_f.ACCUMULATES
        )
        for each in (plain, edited)
    ]
    assert spent[1] - spent[0] == pytest.approx(8000.0, rel=0.01)
    assert len(edited.events) == len(plain.events)


def test_work_of_set_g_is_where_its_place_says() -> None:
    trace = gpu_faults.recording("rank0")
    own = trace.thread
    gpu_set_g.weight_norm(trace, gpu_faults.Draw(1), trace.step_us)
    assert trace.thread == own
    edited = trace.replay()
    threads = {
        event["name"]: (event["pid"], event["tid"])
        for event in edited.events
        if "weight_norm_interface" in event["name"]
    }
    assert threads["aten::_weight_norm_interface"] == own
    assert threads["aten::_weight_norm_interface_backward"] != own
    nodes = [event for event in edited.events if event["name"] == "AddmmBackward0"]
    where = threads["aten::_weight_norm_interface_backward"]
    assert where in {(event["pid"], event["tid"]) for event in nodes}
    scan = gpu_faults.recording("rank0")
    gpu_set_g.single_block_scan(scan, gpu_faults.Draw(1), scan.step_us)
    edited = scan.replay()
    args = edited.events[kernels(edited, "scan_innermost")[0]]["args"]
    assert args["grid"] == [1, 1, 1] and args["blocks per SM"] < 0.02


def test_host_functions_hold_their_stream_and_not_the_host() -> None:
    trace = gpu_faults.recording("rank0")
    gpu_set_f.host_functions(trace, gpu_faults.Draw(1), trace.step_us)
    edited, plain = trace.replay(), gpu_faults.recording("rank0")
    calls = [row for row in edited.runtime if edited.events[row]["name"] == "cudaLaunchHostFunc"]
    assert calls and edited.length[calls].max() < 10.0
    assert len(edited.device) == len(plain.device)
    assert gpu_faults.span(edited) > 1.5 * gpu_faults.span(plain)
    assert _busy_us(edited) == pytest.approx(_busy_us(plain), rel=0.01)


def test_processor_stops_once_per_period() -> None:
    trace = gpu_faults.recording("rank5*3")
    told = gpu_faults.FAULTS["cpu_quota"].plant(trace, gpu_faults.Draw(1), trace.step_us)
    stops = trace.insertions
    assert told.startswith(f"{len(stops)} stops") and len(stops) >= 4
    assert len({stop.length for stop in stops}) == 1
    period = 2.0 * stops[0].length  # as long running as stopped
    again = np.diff([stop.at for stop in stops]) + stops[0].length
    assert np.mean(again) == pytest.approx(period, rel=0.1)
    assert np.all(np.abs(again - period) < 0.5 * period)
    assert trace.replay().problems() == []


def test_advice_names_no_fault_of_the_sealed_set() -> None:
    finding = {
        "id": "gpu_idle",
        "title": "The GPU is idle 60% of the step",
        "evidence": "The host runs aten::copy_.",
        "advice": "Fuse embeddings.",
        "component": "other",
    }
    fault = gpu_faults.FAULTS["lookups_on_host"]
    assert not gpu_faults.names(fault, finding)
    assert gpu_faults.names(fault, finding | {"evidence": "The host runs aten::embedding_bag."})
