"""Faults planted in real recordings of GPUs: edits are sound, and some trials of the campaign.

All of it is ``tests/campaigns/gpu_faults.py``, whose results are in ``benchmarks/results``.
"""

from __future__ import annotations

import gpu_faults
import numpy as np
import pytest
from recordings import recording
from trace_edits import Insertion, Trace


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


@pytest.mark.parametrize("kind", [kind for kind in gpu_faults.FAULTS if kind != "straggler"])
def test_edited_recordings_are_sound(kind: str) -> None:
    name = "rank0" if "rank0" in gpu_faults.FAULTS[kind].recordings else "bert*8"
    draw = gpu_faults.Draw(kind)
    try:
        trace, _, share = gpu_faults.planted(kind, name, draw, 1.3)
    except gpu_faults.Hidden:  # work at the end of a step delays only a following one
        trace, _, share = gpu_faults.planted(kind, "rank5*8", draw, 1.3)
    assert trace.problems() == []
    numbers = _correlations(trace)
    assert len(set(numbers)) == len(numbers)
    assert 0.5 < share < 0.85


def test_ranks_wait_for_the_straggler() -> None:
    ranks, _, share, late = gpu_faults.straggling(gpu_faults.Draw(1), 1.5)
    assert len(ranks) == 8 and share > 0.5
    spent = {
        rank: sum(float(trace.length[row]) for row in gpu_faults._kernels(trace, "nccl"))
        for rank, trace in ranks.items()
    }
    assert min(spent, key=lambda rank: spent[rank]) == late


@pytest.mark.parametrize(
    ("kind", "name"),
    [("pageable_copies", "rank0"), ("readbacks", "rank0"), ("small_optimizer", "rank0")],
)
def test_planted_fault_is_named_first(kind: str, name: str) -> None:
    row = gpu_faults.trial(kind, name, 0, large=True)
    assert row["good"], row


@pytest.mark.parametrize("kind", list(gpu_faults.CLEAN))
def test_what_changes_nothing_raises_no_finding(kind: str) -> None:
    for name in ("bert", "rank0"):
        row = gpu_faults.clean_trial(kind, name, 0)
        assert row["good"], row
