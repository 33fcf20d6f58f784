"""Measures any command that trains with torch, without editing the program.

torch.profiler is started inside the program by a start-up file on its ``PYTHONPATH``
(:mod:`dlrm_workbook.recordings.torch.inject`), in every process that steps an optimizer: the
ranks that torchrun starts each leave a recording. What the program prints is kept.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json
from dlrm_core.base.settings import shown
from dlrm_workbook.ground.processes import Completed, MeasurementError, Progress, ProgressCallback
from dlrm_workbook.ground.profiling import ProfilingConfig
from dlrm_workbook.recordings.injected import run_injected
from dlrm_workbook.recordings.whole_runs import try_whole_runs

STAGE = "command"
"""Name of the logs of the program's own output: ``logs/command.out`` and ``logs/command.err``."""

INTERVENTION = (
    "The program was not edited. A start-up file on PYTHONPATH hooked the optimizers of torch: an "
    "iteration is what lies between the ends of two steps, so an accumulation of gradients is "
    "one iteration. While it was recorded, hooks around the forward of its modules named their "
    "work and the stack of its Python code was sampled. Shapes and memory, the stacks of its "
    "threads and how often its lines run were recorded in iterations of their own. It was ended "
    "once everything was recorded and remedies had been tried on it (`profiling.trials`)."
)

TIMING_INTERVENTION = (
    "The program was not edited. A start-up file on PYTHONPATH hooked the optimizers of torch to "
    "note when its iterations end, and ended it after the last one that was asked for. While "
    "hpcrun measured it, its Python stack was sampled and hooks noted when its modules ran."
)


def require_program(config: ProfilingConfig) -> None:
    """Refuse a ``profiling.command`` whose program or folder is not there, before anything runs;
    the InputError names the field and its value."""
    if not config.command:
        return
    folder, program = Path(config.command_folder or "."), config.command[0]
    if not folder.is_dir():
        raise InputError(
            f"profiling.command_folder is {shown(config.command_folder)}: there is no such folder"
        )
    # as execve does: a name with a slash is relative to the folder in which it runs
    if not shutil.which((folder / program).absolute() if os.sep in program else program):
        raise InputError(
            f"profiling.command: {shown(program)} cannot be started: there is no such program"
        )


def record_command(
    command: Sequence[str],
    config: ProfilingConfig,
    folder: Path,
    progress: ProgressCallback | None = None,
) -> list[str]:
    """Run a command with torch.profiler inside, and keep what it recorded.

    ``folder`` gets ``recording/`` (of several ranks ``recording/rank0/``, ...) and ``logs/``. The
    notices say what was done to the program and how it ended. An InputError says that the command
    cannot be started, failed, trained too little or took too long, and names the file of its
    output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
        notes = Path(place)
        said = progress and (lambda told: progress(with_phase(told, notes)))
        done = run_injected(command, config, notes, folder / "logs", STAGE, said)
        processes = [read_json(file) for file in sorted(notes.glob("*.json"))]
        recorded = [process for process in processes if process["state"] == "recorded"]
        if not recorded:
            raise MeasurementError(why_nothing(command, done, processes))
        keep(folder / "recording", notes, recorded)
    if config.trials:
        try_whole_runs(command, config, folder / "recording", progress)
    notices = [INTERVENTION]
    if done.exit_code:
        notices.append(f"The command {done.failure()} after it was recorded: {done.last_words()}")
    if len(recorded) < len(processes):
        notices.append(
            f"{len(processes)} processes trained; what {len(recorded)} of them did was recorded."
        )
    return notices


def with_phase(told: Progress, notes: Path) -> Progress:
    """Progress of a command, with what its processes say they do."""
    for file in notes.glob("*.json"):
        with contextlib.suppress(InputError, OSError):
            note = read_json(file)
            if isinstance(note, dict) and note.get("doing"):
                return replace(told, stage="your program", detail=str(note["doing"]))
    return replace(told, stage="your program", detail="until its optimizer steps")


def keep(target: Path, notes: Path, recorded: list[dict[str, Any]]) -> None:
    """Put the recording of one process, or of each rank, where readers look for it. An InputError
    refuses several processes that trained and are not ranks of one training."""
    if len(recorded) == 1 and recorded[0]["rank"] is None:
        (notes / str(recorded[0]["pid"])).rename(target)
        return
    ranks = [process["rank"] for process in recorded]
    if None in ranks or len(set(ranks)) < len(ranks):
        listed = "; ".join(
            f"process {process['pid']}: {shlex.join(process['argv'])}" for process in recorded
        )
        raise InputError(
            f"profiling.command trained in {len(recorded)} processes that are not ranks of one "
            f"training, and a page explains one: {listed}"
        )
    target.mkdir()
    for process in recorded:
        (notes / str(process["pid"])).rename(target / f"rank{process['rank']}")


def why_nothing(command: Sequence[str], done: Completed, processes: list[dict[str, Any]]) -> str:
    """The sentence about a command of which nothing was recorded."""
    subject = f"profiling.command, {shlex.join(command)},"
    output = f"; its output is in {done.log.parent if done.log else 'logs'}"
    refused = [process["reason"] for process in processes if process["state"] == "refused"]
    if done.timed_out:
        steps = max((process["steps"] for process in processes), default=0)
        seen = f"done {steps} steps" if processes else "not stepped any torch optimizer"
        hooked = "" if processes else " (python -I and -E ignore the start-up file that sees that)"
        return (
            f"{subject} was still going after {done.seconds:.0f} s (profiling.timeout_s) and had "
            f"{seen}{hooked}{output}"
        )
    if done.exit_code:
        return f"{subject} {done.failure()}: {done.last_words()}{output}"
    if refused:
        return f"{subject} was not recorded: {refused[0]}{output}"
    if not processes:
        return (
            f"{subject} ended after {done.seconds:.1f} s without a step of any torch optimizer "
            "(torch.optim.Optimizer.step), so there is no iteration to measure (what it leaves to "
            f"processes in the background is ended with it){output}"
        )
    if training := [process for process in processes if process["state"] == "training"]:
        return (
            f"{subject} ended while process {training[0]['pid']} was still training: it left by "
            "os._exit, or was running in the background and was ended with the command; start the "
            f"training itself, in the foreground, and let it return{output}"
        )
    return (
        f"{subject} stepped its optimizer once only, so there is no iteration between two steps to "
        f"measure{output}"
    )
