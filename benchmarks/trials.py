"""Compares remedies that were tried on a running program with the same changes in its source.

    python benchmarks/trials.py CASES.json [--rounds 5] [--trials 2] [--iterations 60] [--out FILE]

``CASES.json`` is a list of cases: ``program`` (a file), ``arguments``, ``remedy`` (its id, as in
``trials.json``), ``edits`` (pairs of a text of the program and what takes its place) and
``environment``. Of each case the program and its edited copy run in turns, and a stopwatch between
its optimizer's steps gives the mean time of an iteration after the first tenth of them. The
speed-up of a case is the median of its rounds. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_core.base.files import write_json
from dlrm_workbook.ground.machine import machine_facts
from dlrm_workbook.ground.profiling import ProfilingConfig
from dlrm_workbook.recordings.command import record_command, recording_environment

RESULTS = Path(__file__).parent / "results" / "trials.json"


def iteration_ms(
    program: Path, words: Sequence[str], iterations: int, env: Mapping[str, str]
) -> float:
    """Milliseconds of an iteration of a program, by a stopwatch."""
    with tempfile.TemporaryDirectory() as notes:
        config = ProfilingConfig(iterations=iterations)
        base = os.environ | dict(env)
        done = subprocess.run(
            [sys.executable, str(program), *words],
            env=recording_environment(base, Path(notes), config, times_only=True),
            cwd=program.parent,
            capture_output=True,
            text=True,
            check=True,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"ms_per_iteration"')]
    spans = json.loads(lines[-1])["spans"][iterations // 10 :]
    return statistics.fmean((end - begin) / 1e6 for _, begin, end in spans)


def trial_rows(program: Path, words: Sequence[str], seconds: int) -> dict[str, Any]:
    """Rows of what was tried on a program, by the remedy's id."""
    with tempfile.TemporaryDirectory() as folder:
        config = ProfilingConfig(trials=seconds, command_folder=str(program.parent), probes=False)
        record_command([sys.executable, str(program), *words], config, Path(folder))
        document = json.loads((Path(folder) / "recording" / "trials.json").read_text())
    return {row["id"]: row for row in document["rows"]}


def edited(program: Path, edits: Sequence[Sequence[str]]) -> Path:
    """A copy of a program beside it, with texts replaced; each must be there."""
    text = program.read_text()
    for old, new in edits:
        if old not in text:
            raise SystemExit(f"{program} does not contain {old!r}")
        text = text.replace(old, new)
    copy = program.with_name(f".edited-{program.name}")
    copy.write_text(text)
    return copy


def compared(case: Mapping[str, Any], tried: Sequence[Mapping[str, Any]], options: Any) -> Any:
    """A case with the speed-up of its edited copy beside that of the trial."""
    program, words = Path(case["program"]).absolute(), case.get("arguments", [])
    copy, environment = edited(program, case.get("edits", [])), case.get("environment", {})
    rounds = []
    try:
        for number in range(options.rounds):
            pair = [(program, {}), (copy, environment)]
            times = {
                one: iteration_ms(one, words, options.iterations, env)
                for one, env in (pair if number % 2 else reversed(pair))
            }
            rounds.append(times[program] / times[copy])
    finally:
        copy.unlink()
    truth = statistics.median(rounds)
    rows = [each[case["remedy"]] for each in tried if case["remedy"] in each]
    ranges = [row["speedup"] for row in rows if row["speedup"]]
    result = {
        "program": program.name,
        "remedy": case["remedy"],
        "stopwatch": {"low": min(rounds), "mid": truth, "high": max(rounds)},
        "trials": ranges,
        "off_by": [one["mid"] / truth - 1 for one in ranges],
        "held": [one["low"] <= truth <= one["high"] for one in ranges],
    }
    print(json.dumps(result), flush=True)
    return result


def main() -> None:
    """Compare every case, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", type=Path)
    parser.add_argument("--rounds", type=int, default=5, help="of each case, by the stopwatch")
    parser.add_argument("--trials", type=int, default=2, help="runs with trials of each program")
    parser.add_argument("--iterations", type=int, default=60, help="timed in each run")
    parser.add_argument("--seconds", type=int, default=60, help="budget of the trials of one run")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    cases = json.loads(options.cases.read_text())
    tried: dict[Any, list[dict[str, Any]]] = {}
    results = []
    for case in cases:
        key = (case["program"], *case.get("arguments", []))
        if key not in tried:
            program = Path(case["program"]).absolute()
            tried[key] = [
                trial_rows(program, case.get("arguments", []), options.seconds)
                for _ in range(options.trials)
            ]
        results.append(compared(case, tried[key], options))
    off_by = [abs(one) for result in results for one in result["off_by"]]
    held = [one for result in results for one in result["held"]]
    summary = {
        "within_5_percent": f"{sum(one <= 0.05 for one in off_by)} of {len(off_by)}",
        "ranges_that_hold": f"{sum(held)} of {len(held)}",
    }
    print(summary)
    options.out.parent.mkdir(exist_ok=True)
    command = " ".join(["python", *sys.orig_argv[1:]])
    write_json(
        options.out,
        {"command": command, "machine": machine_facts(), **summary, "cases": results},
    )


if __name__ == "__main__":
    main()
