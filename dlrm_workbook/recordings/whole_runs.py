"""Remedies that need a new process, tried on a command in short whole runs, in turns.

What may help is in ``trials.json`` of a recording (``whole_runs``), from the process that was
measured. The command runs as it is and with the remedy, first one and then the other first, until
the range is narrow or the budget ends; its iterations are timed without a profiler. Each remedy is
a row of ``trials.json`` like the others.
"""

from __future__ import annotations

import functools
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json, write_json
from dlrm_workbook.ground.processes import MeasurementError, Progress, ProgressCallback
from dlrm_workbook.ground.profiling import ProfilingConfig
from dlrm_workbook.ground.speed_range import FEWEST, FILE, NARROW, speed_range, status_of
from dlrm_workbook.recordings.injected import run_injected

FEWEST_ITERATIONS, TIMED_S = 10, 2.0
"""A run times so many iterations at least, and for about so many seconds."""

MOST_TURNS = 6
"""Turns of a remedy; a turn is a run without it and one with it."""

WARM_UP = 0.2
"""Share of a run's iterations, the first ones, that are not counted."""


def try_whole_runs(
    command: Sequence[str],
    config: ProfilingConfig,
    recording: Path,
    progress: ProgressCallback | None = None,
) -> None:
    """Try the remedies that need a new process with what is left of ``profiling.trials``."""
    file = recording / FILE
    if not file.is_file():
        return
    document = read_json(file)
    asked = [one for one in document.get("whole_runs") or [] if isinstance(one, dict)]
    ms = read_json(recording / "recording.json").get("unprofiled_iteration_ms") or []
    if not asked or not ms:
        return
    count = max(FEWEST_ITERATIONS, math.ceil(TIMED_S / (statistics.median(ms) / 1e3)))
    until = time.monotonic() + config.trials - float(document.get("spent_s") or 0.0)
    for one in asked:
        detail = f"short whole runs with and without {one['remedy']}"
        told = progress and functools.partial(_tell, progress, detail)
        row, why = _tried(command, replace(config, iterations=count), one, until, told)
        if why:
            document["not_tried"].append({"remedy": one["remedy"], "reason": why})
        else:
            document["rows"].append(row)
        write_json(file, document)


def _tried(
    command: Sequence[str],
    config: ProfilingConfig,
    asked: Mapping[str, Any],
    until: float,
    progress: ProgressCallback | None,
) -> tuple[dict[str, Any], str]:
    """The row of one remedy, or why it was not tried."""
    changes = {"environment": asked["environment"], "options": asked["options"]}
    row = {name: value for name, value in asked.items() if name not in changes}
    times: dict[bool, list[float]] = {False: [], True: []}
    logs: list[float] = []
    began, order = time.monotonic(), [False, True]
    while len(logs) < MOST_TURNS:
        each_s = (time.monotonic() - began) / max(len(times[False]) + len(times[True]), 1)
        need_s = each_s * 2 * (FEWEST - len(logs) if len(logs) < FEWEST else 1)
        left_s = until - time.monotonic()
        if left_s < max(need_s, 1.0):
            break
        for is_on in order:
            try:
                run_ms = timed_run_ms(command, config, changes if is_on else {}, progress)
            except InputError as error:
                if is_on:
                    return row | {"status": "failed", "reason": str(error).splitlines()[0]}, ""
                return row, f"the program failed in a run without it: {error}"
            times[is_on].append(run_ms)
        order.reverse()
        logs.append(math.log(times[False][-1] / times[True][-1]))
        if len(logs) >= FEWEST:
            low, _, high = speed_range(logs)
            if high / low < NARROW:
                break
    if len(logs) < 2:
        return row, (
            f"two turns of whole runs take about {4 * each_s:.0f} s, and {max(left_s, 0):.0f} of "
            f"{config.trials} s are left"
        )
    low, mid, high = speed_range(logs)
    return row | {
        "status": status_of(low, high),
        "speedup": {"low": low, "mid": mid, "high": high},
        "off_ms": statistics.median(times[False]),
        "on_ms": statistics.median(times[True]),
        "turns": len(logs),
        "iterations": 2 * len(logs) * config.iterations,
    }, ""


def _tell(progress: ProgressCallback, detail: str, told: Progress) -> None:
    progress(replace(told, stage="your program", detail=detail))


def timed_run_ms(
    command: Sequence[str],
    config: ProfilingConfig,
    changes: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> float:
    """Milliseconds of a mean iteration of one short run of a command, by a stopwatch. An InputError
    says that the command failed, or trained too little."""
    with tempfile.TemporaryDirectory() as place:
        notes, logs = Path(place) / "processes", Path(place) / "logs"
        notes.mkdir()
        done = run_injected(command, config, notes, logs, "timed", progress, changes, True)
    times = done.last_object("ms_per_iteration")
    if done.exit_code or times is None:
        said = done.last_words() if done.exit_code else "it timed no iteration"
        raise MeasurementError(f"a short run of the program {done.failure()}: {said}")
    spans = times["spans"][int(WARM_UP * len(times["spans"])) :]
    return statistics.fmean((end - begin) / 1e6 for _, begin, end in spans)
