"""Contestants in turns, and what their rounds say: medians, ratios with intervals, losses.

A machine's speed drifts, so figures of different minutes are not compared: every round
runs all contestants one after the other, whoever was first moves to the end in the next,
and a ratio is the median of the rounds' own ratios. Its interval is made of two of those
ratios (order statistics, :func:`dlrm_workbook.turns.median_interval`) and states
how sure it is: six rounds or more give 95 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_core.config import Parameters
from dlrm_core.errors import InputError, MissingToolError
from dlrm_workbook.studies.bench.cases import FIGURES, PEER
from dlrm_workbook.studies.bench.runs import Run, require_peer, run_facebook, run_ours
from dlrm_workbook.turns import Interval, median_interval

LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 5e-3}
"""Largest difference of a loss from the reference's that is still the same training."""

Row = dict[str, Any]
"""One run: ``contestant``, ``round``, ``place``, and the fields of :class:`Run`."""


def run_in_turns(
    runs: Mapping[str, Callable[[], Run]],
    rounds: int,
    rows: list[Row],
    failures: dict[str, str],
    on_run: Callable[[Row], object] = lambda row: None,
    on_failure: Callable[[str, InputError], object] = lambda name, error: None,
) -> None:
    """Run every contestant once a round.

    Args:
        runs: name to what runs it once.
        rows: the runs so far, to which each new one is added; what is there is not run again.
        failures: contestant to reason; whoever fails is added, and does not run any more.
        on_run: called with each new row.
        on_failure: called with each new failure.
    """
    have = {(row["contestant"], row["round"]) for row in rows}
    for number in range(rounds):
        names = list(runs)
        names = names[number % len(names) :] + names[: number % len(names)]
        for place, name in enumerate(names):
            if name in failures or (name, number) in have:
                continue
            try:
                run = runs[name]()
            except InputError as error:
                failures[name] = str(error)
                on_failure(name, error)
                continue
            row = {"contestant": name, "round": number, "place": place} | run.to_dict()
            rows.append(row)
            on_run(row)


def judge(
    rows: Sequence[Row],
    reference: str,
    precisions: Mapping[str, str],
    failures: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What the rounds say.

    Args:
        reference: contestant whose losses the others are held against.
        precisions: contestant to its precision, which decides what is still the same
            training; fp32 where it is not named.
        failures: contestant to why it did not run (to its end).

    Returns:
        ``against`` (whom the ratios compare with: facebook where it ran, else the
        reference), ``contestants`` (name to medians), ``ratios`` (name to figure to how
        many times as fast: ``low``, ``mid``, ``high``, ``confidence``, ``rounds``),
        ``loss_difference`` (name to the largest), ``losses_agree`` (None where nothing could
        be compared), ``notices`` (name to sentences).
    """
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    of = {name: [row for row in rows if row["contestant"] == name] for name in names}
    against = PEER if PEER in of else reference if reference in of else (names or [""])[0]
    oracle = reference if reference in of else against
    difference = {
        name: largest_difference(of[name], of[oracle]) for name in names if name != oracle
    }
    tolerance = {name: LOSS_TOLERANCE[precisions.get(name, "fp32")] for name in names}
    ratios: dict[str, dict[str, Any]] = {}
    for name in names:
        if name == against:
            continue
        found = {kind: ratio(rows, against, name, kind) for kind in FIGURES}
        if all(found.values()):
            ratios[name] = {
                kind: interval.to_dict() | {"rounds": shared_rounds(rows, against, name)}
                for kind, interval in found.items()
                if interval is not None
            }
    return {
        "against": against,
        "loss_reference": oracle,
        "contestants": {
            name: {kind: statistics.median(row[kind] for row in of[name]) for kind in FIGURES}
            for name in names
        },
        "ratios": ratios,
        "loss_difference": difference,
        # NaN is never below a tolerance
        "losses_agree": all(value <= tolerance[name] for name, value in difference.items())
        if difference
        else None,
        "notices": {
            name: list(dict.fromkeys(notice for row in of[name] for notice in row["notices"]))
            for name in names
            if any(row["notices"] for row in of[name])
        },
        "failures": dict(failures or {}),
    }


def ratio(rows: Sequence[Row], base: str, name: str, kind: str) -> Interval | None:
    """How many times as fast ``name`` is as ``base``: the median of the rounds' own ratios.

    None where no round has both.
    """
    times = {(row["contestant"], row["round"]): float(row[kind]) for row in rows}
    each = [
        times[base, number] / times[name, number]
        for who, number in times
        if who == name and (base, number) in times
    ]
    return median_interval(each) if each else None


def shared_rounds(rows: Sequence[Row], base: str, name: str) -> int:
    """Rounds that both ran in."""
    of = {who: {row["round"] for row in rows if row["contestant"] == who} for who in (base, name)}
    return len(of[base] & of[name])


def largest_difference(mine: Sequence[Row], others: Sequence[Row]) -> float:
    """Largest difference of the losses, over all rounds and iterations; NaN if one is NaN.

    Every run begins from the same seed, so each is held against the reference's first.
    """
    wanted = np.array(_numbers(others[0]["losses"]))
    worst = 0.0
    for row in mine:
        losses = np.array(_numbers(row["losses"]))
        count = min(len(losses), len(wanted))
        gap = float(np.abs(losses[:count] - wanted[:count]).max()) if count else math.nan
        worst = gap if math.isnan(gap) else max(worst, gap)
        if math.isnan(worst):
            break
    return worst


def _numbers(losses: Sequence[float | None]) -> list[float]:
    return [math.nan if loss is None else loss for loss in losses]


def compare(
    contestants: Mapping[str, Parameters],
    *,
    peer: Path | None,
    rounds: int,
    iterations: int,
    threads: int,
    run: Callable[[Parameters, int, int], Run] = run_ours,
    extra: Mapping[str, Callable[[], Run]] | None = None,
    rows: list[Row] | None = None,
    failures: dict[str, str] | None = None,
    on_run: Callable[[Row], object] = lambda row: None,
    on_failure: Callable[[str, InputError], object] = lambda name, error: None,
) -> dict[str, Any]:
    """Run all contestants in turns and judge them.

    Args:
        contestants: name to parameters; the first is the reference for losses.
        peer: a facebookresearch/dlrm checkout, run with the reference's parameters.
        rounds: how often each runs.
        iterations: counted in each run.
        threads: CPU threads of each.
        extra: further contestants, name to what runs each once.
        rows, failures, on_run, on_failure: as :func:`run_in_turns`.

    Returns:
        what :func:`judge` does, and the ``runs``. A contestant that fails is in
        ``failures`` with the reason; the others' figures stand.

    Raises:
        InputError: a count is impossible, or the peer is no facebookresearch/dlrm checkout.
    """
    if rounds < 1 or iterations < 1:
        raise InputError(
            f"a benchmark needs rounds >= 1 and iterations >= 1, not {rounds} and {iterations}"
        )
    reference = next(iter(contestants))
    rows = [] if rows is None else rows
    failures = {} if failures is None else failures
    runs: dict[str, Callable[[], Run]] = {}
    if peer is not None:
        require_peer(peer)
        # first, so that a peer that lacks a package is known before minutes of work
        runs[PEER] = lambda: run_facebook(peer, contestants[reference], iterations, threads)
    for name, given in contestants.items():
        runs[name] = lambda given=given: run(given, iterations, threads)  # type: ignore[misc]
    runs |= extra or {}
    run_in_turns(runs, rounds, rows, failures, on_run, on_failure)
    precisions = {name: given.training.precision for name, given in contestants.items()}
    return judge(rows, reference, precisions, failures) | {"runs": rows}


def is_missing_tool(error: InputError) -> bool:
    """Whether a contestant failed for want of something that no other case will bring."""
    return isinstance(error, MissingToolError)
