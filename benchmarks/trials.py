"""Compares remedies that were tried on a running program with the same changes in its source.

    python benchmarks/trials.py [--rounds 8] [--trials 1] [--out FILE] [REMEDY ...]

The cases are in ``programs/tried.yaml``. Of each three processes of the program
and three of its changed copy train in turns (:mod:`stopwatch`), since processes of the very same
program differ by 5 %; the speed-up is the median of the turns. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from programs import BASES, edited
from stopwatch import Program, in_turns

from dlrm_core.base.files import write_json
from dlrm_workbook.ground.machine import machine_facts
from dlrm_workbook.ground.profiling import ProfilingConfig
from dlrm_workbook.recordings.command import record_command

Edits = Sequence[Mapping[str, str]]

RESULTS = Path(__file__).parent / "results" / "trials.json"


def trial_rows(program: Path, seconds: int) -> dict[str, Any]:
    """Rows of what was tried on a program, by the remedy's id."""
    with tempfile.TemporaryDirectory() as folder:
        config = ProfilingConfig(trials=seconds, command_folder=str(program.parent), probes=False)
        record_command([sys.executable, str(program)], config, Path(folder))
        document = json.loads((Path(folder) / "recording" / "trials.json").read_text())
    return {row["id"]: row for row in document["rows"]}


def written(folder: Path, base: str, planted: Edits, change: Edits = ()) -> Path:
    """A program in a folder: a base with edits, and with a remedy's change where one is given."""
    text = edited(base, planted)
    for edit in change:
        if text.count(edit["old"]) != 1:
            raise SystemExit(f"{base}: {text.count(edit['old'])} times {edit['old']!r}")
        text = text.replace(edit["old"], edit["new"])
    path = folder / f"{base}-{zlib.crc32(text.encode()):08x}.py"
    path.write_text(text, encoding="utf-8")
    return path


def compared(
    case: Mapping[str, Any], folder: Path, tried: Sequence[Mapping[str, Any]], options: Any
) -> Any:
    """A case with the speed-up of its changed copy beside that of the trial."""
    base, planted = case["base"], case.get("planted", [])
    program = written(folder, base, planted)
    changed = written(folder, base, planted, case.get("change", []))
    environment = case.get("environment", {})
    programs: list[Program] = [
        ([sys.executable, str(one)], folder, variables)
        for one, variables in ((program, {}), (changed, environment))
    ]
    times = in_turns(programs * options.copies, options.rounds, options.steps)
    off, on = (map(statistics.mean, zip(*times[first::2], strict=True)) for first in (0, 1))
    rounds = sorted(one / other for one, other in zip(off, on, strict=True))
    truth = statistics.median(rounds)
    rows = [each[case["remedy"]] for each in tried if case["remedy"] in each]
    ranges = [row["speedup"] for row in rows if row["speedup"]]
    result = {
        "program": base,
        "planted": bool(planted),
        "remedy": case["remedy"],
        "stopwatch": {"low": rounds[0], "mid": truth, "high": rounds[-1]},
        "trials": ranges,
        "off_by": [one["mid"] / truth - 1 for one in ranges],
        "held": [one["low"] <= truth <= one["high"] for one in ranges],
    }
    print(json.dumps(result), flush=True)
    return result


def main() -> None:
    """Compare every case, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("remedies", nargs="*", help="only these")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each program")
    parser.add_argument("--steps", type=int, default=20, help="of a program in its turn")
    parser.add_argument("--copies", type=int, default=3, help="processes of each program")
    parser.add_argument("--trials", type=int, default=1, help="runs with trials of each program")
    parser.add_argument("--seconds", type=int, default=60, help="budget of the trials of one run")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    cases = yaml.safe_load((BASES / "tried.yaml").read_text(encoding="utf-8"))
    tried: dict[Path, list[dict[str, Any]]] = {}
    results = []
    with tempfile.TemporaryDirectory() as name:
        for case in cases:
            if options.remedies and case["remedy"] not in options.remedies:
                continue
            program = written(Path(name), case["base"], case.get("planted", []))
            if program not in tried:
                tried[program] = [
                    trial_rows(program, options.seconds) for _ in range(options.trials)
                ]
            results.append(compared(case, Path(name), tried[program], options))
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
