"""Faults planted in real recordings of GPUs: edits are sound, and some trials of the campaign.

All of it is ``tests/campaigns/gpu_faults.py``, whose results are in ``benchmarks/results``.
"""

import re
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import gpu_faults
import gpu_set_g
import numpy as np
import pytest
from gpu_kinds import Fault, kernels, slower
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


def _busy_us(trace: Trace) -> float:
    """Time in which the GPU does anything."""
    spans = sorted((trace.start[row], trace.start[row] + trace.length[row]) for row in trace.device)
    busy, until = 0.0, -np.inf
    for start, end in spans:
        busy += max(end - max(start, until), 0.0)
        until = max(until, end)
    return busy


WITH_IDLE = (
    *("python_backward", "pinned_checks", "unused_search", "modules_loaded", "double_batches"),
    *("bucketized_on_host", "hashing_on_host", "ipc_handles", "views", "conditions"),
)
WITH_WORK = (
    *("single_block_scan", "sampled_on_gpu", "weight_norm", "renormed_tables", "gathered_weights"),
    *("permuted_features", "table_penalty", "hard_negatives", "dropout", "reduced_tables"),
)


def _short(kind: str) -> str:
    """The shortest recording of a kind whose work follows on itself; "" if it has none."""
    own = ("rank0",) if kind in WITH_IDLE + WITH_WORK else gpu_faults.FAULTS[kind].recordings
    return next((name for name in ("rank0", "bert*8") if name in own), "")


@pytest.mark.parametrize("kind", [kind for kind in gpu_faults.FAULTS if _short(kind)])
def test_edited_recordings_are_sound_and_keep_the_gpu_as_busy_as_they_claim(kind: str) -> None:
    name, draw = _short(kind), gpu_faults.Draw(kind)
    try:
        trace, _, share = gpu_faults.planted(kind, name, draw, 1.3)
    except gpu_faults.Hidden:  # work at the end of a step delays only a following one
        assert kind not in WITH_IDLE + WITH_WORK
        name = "rank5*8"
        trace, _, share = gpu_faults.planted(kind, name, draw, 1.3)
    plain = gpu_faults.recording(name)
    assert trace.problems() == [] and trace.length.min() >= 0.0
    assert 0.5 < share < 0.85
    numbers = Counter(_correlations(trace))
    assert set(numbers.values()) == {1}
    work, known = (
        Counter(each.events[row]["args"]["correlation"] for row in each.device)
        for each in (trace, plain)
    )
    assert all(work[number] == numbers[number] == 1 for number in set(work) - set(known))
    if kind in WITH_IDLE + WITH_WORK:
        longer = gpu_faults.span(trace) - gpu_faults.span(plain)
        worked = _busy_us(trace) - _busy_us(plain)
        assert longer > 1.1 * plain.step_us
        assert worked > 0.9 * longer if kind in WITH_WORK else worked < 0.4 * longer


@pytest.mark.parametrize(
    ("kind", "name"),
    [("slow_mlp", "h100-pc"), ("slow_mlp", "cpu-python"), ("converted_batches", "h100-host")],
)
def test_edited_databases_are_read_as_longer_ones(kind: str, name: str, tmp_path: Path) -> None:
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


def test_sets_have_kinds_of_their_own() -> None:
    sets = gpu_faults.SETS
    assert len(gpu_faults.FAULTS) == sum(len(faults) for faults in sets.values())
    assert all(fault.held_out for name in "GH" for fault in sets[name].values())


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
        *(("slow_mlp", "cpu-python"), ("converted_batches", "h100-host")),
    ],
)
def test_planted_fault_is_named_first(kind: str, name: str) -> None:
    row = gpu_faults.trial(kind, name, 0, large=True)
    assert row["good"], row


@pytest.mark.parametrize("name", ["cpu-python", "h100-host"])
def test_slow_function_of_a_database_is_named_first(name, monkeypatch) -> None:
    fault = Fault(slower("interact_features"), (name,), (("interact", ""),))
    monkeypatch.setitem(gpu_faults.FAULTS, "slow_interaction", fault)
    row = gpu_faults.trial("slow_interaction", name, 0, large=True)
    assert row["good"], row
    if name == "h100-host":  # its libraries have no lines: functions are named
        assert "Most of it: [" not in row["first_evidence"]
        assert re.search(r"at::TensorIteratorBase", row["first_evidence"])


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


def test_advice_names_no_fault_of_the_sealed_set() -> None:
    finding = {
        "id": "gpu_idle",
        "title": "The GPU is idle 60% of the step",
        "evidence": "The host runs aten::copy_.",
        "advice": "Hash on the GPU.",
        "component": "other",
    }
    fault = gpu_faults.FAULTS["hashing_on_host"]
    assert not gpu_faults.names(fault, finding)
    assert gpu_faults.names(fault, finding | {"evidence": "The host runs aten::remainder."})
