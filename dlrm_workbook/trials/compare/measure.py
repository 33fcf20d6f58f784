"""Runs settings against each other: in turns, each run in a fresh process.

Every round runs all settings one after the other, first to last and in the next round last to
first (A B, B A, A B, ...), so that a steady drift cancels, and what is compared is always
within a round. Each finished run is on disk before the next starts.

On a CPU each run also logs when its parts began and ended (``dlrm train --spans``, which
costs microseconds), so differences per part come from the same unprofiled iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json, write_text
from dlrm_core.config import Parameters
from dlrm_workbook.evidence.training import iteration_part_times
from dlrm_workbook.ground.ledger import Ledger
from dlrm_workbook.ground.processes import ProgressCallback, python_module, run_child
from dlrm_workbook.ground.turns import back_and_forth, take_turns

ROUNDS_FILE = "rounds.json"

ROUNDS = 6
"""The least number whose extremes enclose the median with 95 % confidence (1 − 2/2^6)."""


@dataclass(frozen=True)
class TimedRun:
    """One process: its iterations after warm-up, in milliseconds.

    Attributes:
        setting: name of what ran, such as ``baseline``.
        round: number of the round, from 0.
        place: which one of its round it was, from 0.
        iteration_ms: wall clock of each counted iteration, data included.
        parts: (component, phase) to its milliseconds in each counted iteration, times in
            inner parts taken off the outer ones; ``other`` is the rest. Empty on a GPU,
            whose work is not bound to the host's clock.
        losses: of every iteration, warm-up included.
        peak_memory_bytes: highest point of the process, or of torch's allocator on a GPU.
    """

    setting: str
    round: int
    place: int
    iteration_ms: list[float]
    parts: dict[tuple[str, str], list[float]]
    losses: list[float]
    peak_memory_bytes: int | None = None
    threads: int | None = None
    notices: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        parts = [[*part, times] for part, times in self.parts.items()]
        return {**asdict(self), "parts": parts}

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> TimedRun:
        parts = {(component, phase): times for component, phase, times in line["parts"]}
        return cls(**{**line, "parts": parts})


def run_in_turns(
    settings: Mapping[str, Parameters],
    folder: Path,
    *,
    rounds: int = ROUNDS,
    iterations: int | None = None,
    progress: ProgressCallback | None = None,
    after_round: Callable[[list[TimedRun]], object] | None = None,
) -> list[TimedRun]:
    """Run every setting once a round.

    Args:
        settings: name to parameters, the baseline first.
        folder: gets ``rounds.json`` (every run as soon as it ends), the settings' parameter
            files and the runs' logs. Runs that ``rounds.json`` has are not made again.
        iterations: counted iterations of a run, after ``profiling.warmup`` ones; None
            is ``profiling.iterations``.
        after_round: called with all runs so far after each round.

    Raises:
        InputError: a number is impossible, the folder has runs of other settings, or a run
            fails; what was measured is kept.
    """
    if rounds < 1 or (iterations is not None and iterations < 2):
        raise InputError(
            f"rounds is {rounds} and iterations {iterations}, expected at least 1 and 2"
        )
    given: dict[str, Any] = {}
    for name, p in settings.items():
        counted = iterations or max(p.profiling.iterations, 2)
        given[name] = p.with_training(batches=p.profiling.warmup + counted).to_sections()
    ledger = Ledger(
        folder / ROUNDS_FILE,
        {"settings": given, "runs": []},
        work=lambda document: document["settings"],
        entries="runs",
        key=("round", "setting"),
        advice="compare in another folder",
    )
    files = {name: folder / f"{name}.yaml" for name in settings}
    for name, file in files.items():
        write_text(file, yaml.safe_dump(given[name], sort_keys=False))
    done = [TimedRun.from_dict(entry) for entry in ledger.entries]
    for number, names in take_turns(list(settings), rounds, back_and_forth):
        for place, name in enumerate(names):
            if ledger.find(number, name) is None:
                label = f"round {number + 1} of {rounds}: {name}"
                turn = (name, number, place)
                run = _run(settings[name], files[name], folder, label, turn, progress)
                done.append(run)
                ledger.put(run.to_dict())
        if after_round is not None:
            after_round(done)
    return done


def _run(
    parameters: Parameters,
    file: Path,
    folder: Path,
    label: str,
    turn: tuple[str, int, int],
    progress: ProgressCallback | None,
) -> TimedRun:
    """Run a setting once; ``turn`` is its name, the round and its place in the round."""
    name, number, place = turn
    output = folder / "runs" / f"{number + 1}-{name}"
    spans = ["--spans"] if parameters.training.device != "cuda" else []
    done = run_child(
        python_module("dlrm_workbook", "train", "-f", file, "--output", output, *spans),
        stage=label,
        logs=folder / "logs",
        timeout_s=float(parameters.profiling.timeout_s),
        progress=progress,
    )
    done.require_success(label)
    result = read_json(output / "result.json")
    warmup = parameters.profiling.warmup
    on_gpu = str(result["device"]).startswith("cuda")
    recorded = [] if on_gpu else (done.last_object("spans") or {}).get("spans") or []
    return TimedRun(
        setting=name,
        round=number,
        place=place,
        iteration_ms=result["iteration_ms"][warmup:],
        parts=iteration_part_times(recorded, warmup),
        losses=result["losses"],
        peak_memory_bytes=result["peak_memory_bytes"],
        threads=result["threads"],
        notices=result["notices"],
    )
