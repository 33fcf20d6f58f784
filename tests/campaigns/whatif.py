"""Predicted against measured: what-if predictions, each change run for real afterwards.

For each change one process records a profile of the baseline and probes the change; it
never runs the changed step. Then baseline and change run by turns, some iterations each,
in fresh processes, two of each; the measured ratio is held against the predicted one.

    python tests/campaigns/whatif.py --json benchmarks/results/whatif.json
    python benchmarks/page.py       # its table in docs/results.md

The second set of changes was written after the model of time was finished: it is the
check on cases that the model has not been made with. The third holds whole steps that a profile
run times under changes put together, in several processes, against the same runs.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from whatif_cases import CHANGES, SHAPES, STACKS

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import write_json, write_text
from dlrm_core.config import Parameters, load_parameters, parameters_from_sections
from dlrm_workbook.analysis.changes import change_text
from dlrm_workbook.evidence.dependence import changed_parameters
from dlrm_workbook.ground.machine import machine_facts
from dlrm_workbook.ground.turns import take_turns, waited_ns

GOAL_MEAN, GOAL_WORST, GOAL_COVER = 0.05, 0.15, 0.8
WARMUP = 3
SECONDS = 9.0
"""Of probing a change."""
PAIRS = 2
"""Fresh processes of baseline and of change."""
TURN = 3
"""Iterations counted of a turn."""
TOGETHER = "together"
PROCESSES = 3
"""So many processes time whole steps under changes put together."""
ENDS = ("low", "mid", "high")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/whatif.json"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6, help="of baseline and change by turns")

    parser.add_argument("--set", choices=[*CHANGES, TOGETHER, "all"], default="all")
    parser.add_argument("--shape", type=int, choices=range(len(SHAPES)), default=None)
    parser.add_argument("--only", default="", help="changes whose text holds this")
    parser.add_argument("--launcher", default="", help="command put before each measuring process")
    parser.add_argument("--resume", action="store_true", help="keep the rows of --json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.resume and options.json.is_file():
        rows = json.loads(options.json.read_text(encoding="utf-8"))["cases"]
    done = {(row["set"], row["shape"], row["change"]) for row in rows}
    for number, (title, sections) in enumerate(SHAPES.items()):
        if options.shape not in (None, number):
            continue
        base = _parameters(title, sections, options.threads)
        for name, sets in CHANGES.items():
            if options.set not in (name, "all"):
                continue
            wanted = [
                change
                for change in sets[number]
                if options.only in (text := change_text(change)) and (name, title, text) not in done
            ]
            for row in validate(base, wanted, name, options):
                rows.append(row)
                write_json(options.json, _document(rows, options))
        more, changes = STACKS[number]
        if options.set in (TOGETHER, "all") and (TOGETHER, title) not in {d[:2] for d in done}:
            base = _parameters(title, sections | more, options.threads)
            rows += validate_together(base, changes, options)
            write_json(options.json, _document(rows, options))
    if not rows:
        sys.exit("no change was asked for")
    document = _document(rows, options)
    print(json.dumps(document["summary"], indent=1))


def _document(rows: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "machine": machine_facts(),
        "versions": _versions(),
        "threads": options.threads,
        "rounds": options.rounds,
        "iterations_a_turn": TURN,
        "cases": rows,
        "summary": summaries(rows),
    }


def validate(
    base: Parameters, changes: list[dict[str, Any]], name: str, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Predict each change from a profile of the baseline, then run it; a row each."""
    for change in changes:
        try:
            changed_parameters(base, change)
        except InputError as error:
            print(f"left out: {change_text(change)}: {error}", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = _write(base, Path(folder) / "base.yaml")
            arguments = ["case", file, json.dumps(change), str(options.rounds)]
            row = {"set": name} | _child(arguments, options.launcher)
        print(
            f"{base.title[:14]:14s} {row['change']:52s} {row['baseline_ms']:7.1f} ms: predicted "
            f"{row['predicted_ms']:7.1f} [{row['low_ms']:.1f}, {row['high_ms']:.1f}], measured "
            f"{row['measured_ms']:7.1f} ({row['error']:+.1%}) "
            + f"+- {row['measured_error']:.1%}, waited {row['waited']:.0%}",
            file=sys.stderr,
            flush=True,
        )
        yield row


def validate_together(
    base: Parameters, changes: list[dict[str, Any]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Time whole steps under the changes put together, then run each; a row for each time."""
    with tempfile.TemporaryDirectory() as folder:
        file = _write(base, Path(folder) / "base.yaml")
        arguments = ["together", file, json.dumps(changes), str(options.rounds)]
        rows: list[dict[str, Any]] = _child(arguments, options.launcher)["rows"]
    for row in rows:
        print(
            f"{base.title[:14]:14s} {row['change']:90s} timed {row['predicted_ms']:7.1f} "
            f"[{row['low_ms']:.1f}, {row['high_ms']:.1f}], measured {row['measured_ms']:7.1f} "
            f"({row['error']:+.1%}) +- {row['measured_error']:.1%}",
            file=sys.stderr,
            flush=True,
        )
    return rows


def summaries(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per set: number of cases, geometric mean and largest error, share in its range."""
    found = {}
    for name in dict.fromkeys(row["set"] for row in rows):
        some = [row for row in rows if row["set"] == name]
        logs = [abs(math.log(row["predicted_ms"] / row["measured_ms"])) for row in some]
        found[name] = {
            "cases": len(some),
            "geomean_error": math.exp(statistics.fmean(logs)) - 1,
            "worst_error": max(abs(row["error"]) for row in some),
            "covered": statistics.fmean(row["covered"] for row in some),
        }
    return found


# ---- processes ------------------------------------------------------------------


def child_case(file: str, change: str, rounds: str) -> dict[str, Any]:
    """One row of the table: a prediction in one process, then baseline and change by turns."""
    base = load_parameters(file)
    changed, _ = changed_parameters(base, json.loads(change))
    changed_file = _write(changed, Path(file).with_name("changed.yaml"))
    found = _child(["predict", file, change])
    predicted = found["prediction"]
    before: list[dict[str, Any]] = []
    after: list[dict[str, Any]] = []
    for _ in range(PAIRS):
        # where a process's pages lie in memory is luck, so there is more than one of each
        turns = _by_turns([file, changed_file], max(1, int(rounds) // PAIRS))
        before += turns[0]
        after += turns[1]
    ends = {end: predicted[f"{end}_ms"] / predicted["now_ms"] for end in ENDS}
    head = _held_against(ends, before, after)
    # what is predicted is a ratio: the profile and the baseline ran some seconds apart
    scale = head["baseline_ms"] / predicted["now_ms"]
    return {
        "shape": base.title,
        "change": change_text(json.loads(change)),
        **head,
        "profile_now_ms": predicted["now_ms"],
        "probe_seconds": found["seconds"],
        "probe": found["probe"],
        "by_work_ms": found["by_work_ms"] and found["by_work_ms"] * scale,
        "parts": predicted["parts"],
        "baseline_parts": _medians(before),
        "measured_parts": _medians(after),
        "waited": statistics.fmean(turn["waited"] for turn in (*before, *after)),
    }


def _held_against(
    predicted: dict[str, float], before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> dict[str, Any]:
    """A predicted ratio of times (``low``, ``mid``, ``high``) beside that of the turns."""
    ratios = [b["ms"] / a["ms"] for a, b in zip(before, after, strict=True)]
    baseline = statistics.median(turn["ms"] for turn in before)
    ratio = statistics.median(ratios)
    low_quartile, _, high_quartile = statistics.quantiles(ratios, n=4)
    return {
        "baseline_ms": baseline,
        **{f"{'predicted' if end == 'mid' else end}_ms": baseline * predicted[end] for end in ENDS},
        "measured_ms": baseline * ratio,
        "measured_error": 0.93 * (high_quartile - low_quartile) / math.sqrt(len(ratios)) / ratio,
        "error": predicted["mid"] / ratio - 1,
        "covered": predicted["low"] <= ratio <= predicted["high"],
        "round_ratios": ratios,
    }


def child_together(file: str, changes: str, rounds: str) -> dict[str, Any]:
    """Whole steps under changes put together, timed by some processes, then all by turns."""
    from dlrm_workbook.analysis.verdict import whole_step_gain

    base, folder = load_parameters(file), Path(file).parent
    stacks: list[dict[str, Any]] = []
    for change in json.loads(changes):
        stacks.append({**(stacks[-1] if stacks else {}), **change})
    files = [file]
    for number, stack in enumerate(stacks):
        changed, _ = changed_parameters(base, stack)
        files.append(_write(changed, folder / f"changed-{number}.yaml"))
    timed = [_child(["steps", file, json.dumps(stacks)]) for _ in range(PROCESSES)]
    turns: list[list[dict[str, Any]]] = [[] for _ in files]
    for _ in range(PAIRS):
        for kept, found in zip(turns, _by_turns(files, max(1, int(rounds) // PAIRS)), strict=True):
            kept += found
    rows = []
    for number, stack in enumerate(stacks):
        for document in timed:
            base_ms, then_ms = document["base_ms"], document["stages"][number]["ms"]
            gain = whole_step_gain(base_ms, then_ms)
            times = {"low": 1 / gain["high"], "mid": 1 / gain["mid"], "high": 1 / gain["low"]}
            row = {"set": TOGETHER, "shape": base.title, "change": change_text(stack)}
            row |= _held_against(times, turns[0], turns[number + 1])
            rows.append(row | {"timed_base_ms": base_ms, "timed_ms": then_ms})
    return {"rows": rows}


def child_steps(file: str, stacks: str) -> dict[str, Any]:
    """Whole steps as they are and under changes, timed in this process."""
    from dlrm_workbook.evidence.together import time_together

    return time_together(load_parameters(file), json.loads(stacks))


def child_predict(file: str, change: str) -> dict[str, Any]:
    """Record the baseline, probe the change, predict: all in this process."""
    from dlrm_workbook.analysis.whatif import predict_change, prediction
    from dlrm_workbook.recordings.torch.recorder import record_workload
    from dlrm_workbook.recordings.torch.trace import read_recording

    parameters = load_parameters(file)
    with tempfile.TemporaryDirectory() as folder:
        profile = read_recording(record_workload(parameters, Path(folder) / "recording"))
    started = time.perf_counter()
    predicted = predict_change(parameters, profile, json.loads(change), SECONDS)
    seconds = time.perf_counter() - started
    try:
        by_work = prediction(profile, json.loads(change)).mid_ms
    except InputError:
        by_work = None
    return {
        "prediction": predicted.to_dict(),
        "probe": predicted.probe,
        "seconds": seconds,
        "by_work_ms": by_work,
    }


def child_serve(file: str) -> None:
    """A plain run that does so many iterations as it is told, and says how long they took."""
    from dlrm_core.parts import log_spans
    from dlrm_core.train import Trainer

    trainer = Trainer(load_parameters(file))
    try:
        for _ in range(WARMUP):
            trainer.iterate()
        print("ready", flush=True)
        for line in sys.stdin:
            each: list[float] = []
            parts: dict[str, list[float]] = {}
            waited, wall = waited_ns() or 0, time.perf_counter()
            for number in range(int(line) + 1):
                with log_spans() as rows:
                    started = time.perf_counter()
                    trainer.iterate()
                    ended = time.perf_counter()
                if number == 0:
                    continue  # it finds the other process's data in the caches
                each.append(1e3 * (ended - started))
                sums: dict[str, float] = {}
                for name, start, end in rows:
                    sums[name] = sums.get(name, 0.0) + (end - start) / 1e6
                for name, ms in sums.items():
                    parts.setdefault(name.removeprefix("dlrm::"), []).append(ms)
            turn = {
                "ms": statistics.median(each),
                "parts": {name: statistics.median(times) for name, times in parts.items()},
                "waited": ((waited_ns() or 0) - waited) / 1e9 / (time.perf_counter() - wall),
            }
            print(json.dumps(turn), flush=True)
    finally:
        trainer.close()


def _by_turns(files: list[str], rounds: int) -> list[list[dict[str, Any]]]:
    """Each file's run in a fresh process, some iterations of one, then of the other, ..."""
    processes = []
    with contextlib.ExitStack() as stack:
        for file in files:
            process = subprocess.Popen(
                [sys.executable, __file__, "child", "serve", file],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.wait)
            assert process.stdin is not None
            stack.callback(process.stdin.close)
            processes.append(process)
        turns: list[list[dict[str, Any]]] = [[] for _ in files]
        for process in processes:
            if _answer(process) != "ready":
                sys.exit("a run did not start")
        for _, both in take_turns(list(zip(processes, turns, strict=True)), rounds):
            for process, kept in both:
                assert process.stdin is not None
                print(TURN, file=process.stdin, flush=True)
                kept.append(json.loads(_answer(process)))
    return turns


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit("a run ended early")
    return line.strip()


def _medians(turns: list[dict[str, Any]]) -> dict[str, float]:
    names = turns[0]["parts"]
    return {
        name: statistics.median(turn["parts"].get(name, 0.0) for turn in turns) for name in names
    }


def _child(arguments: list[str], launcher: str = "") -> dict[str, Any]:
    command = [*shlex.split(launcher), sys.executable, __file__, "child", *arguments]
    done = subprocess.run(
        command, env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}, capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(f"{shlex.join(arguments)} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _parameters(title: str, sections: dict[str, Any], threads: int) -> Parameters:
    return parameters_from_sections(
        {
            "title": title,
            **sections,
            "training": {**sections["training"], "device": "cpu", "threads": threads},
            "profiling": {"iterations": 10, "probes": False},
        }
    )


def _write(parameters: Parameters, file: Path) -> str:
    sections = parameters.to_sections()
    write_text(file, yaml.safe_dump(sections))
    return str(file)


def _versions() -> dict[str, str]:
    import platform

    import numpy
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


CHILDREN = {"case": child_case, "predict": child_predict}
CHILDREN |= {"steps": child_steps, TOGETHER: child_together}

if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        kind, *given = sys.argv[2:]
        if kind == "serve":
            child_serve(*given)
        else:
            print(json.dumps(CHILDREN[kind](*given)))
    else:
        main()
