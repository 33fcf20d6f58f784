"""The environment of a program that measures itself from inside, and lives no longer than we do."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_workbook.ground.processes import Completed, ProgressCallback, run_child
from dlrm_workbook.ground.profiling import ProfilingConfig
from dlrm_workbook.recordings.torch.inject import STARTUP, VARIABLE


@contextlib.contextmanager
def living_pipe() -> Iterator[str]:
    """A named pipe that is open for writing as long as this process lives, however it ends."""
    with tempfile.TemporaryDirectory(prefix="dlrm-alive-") as folder:
        pipe = str(Path(folder) / "pipe")
        os.mkfifo(pipe)
        writer = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        try:
            yield pipe
        finally:
            os.close(writer)


def recording_environment(
    base: Mapping[str, str],
    notes: Path,
    config: ProfilingConfig,
    times_only: bool = False,
    alive: str = "",
    options: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """The environment in which a program records itself, or says when its iterations end; it ends
    with the pipe of :func:`living_pipe` where ``alive`` names one. Of ``options``, ``num_workers``
    is that of DataLoaders that have no workers."""
    asked = {
        "command": shlex.join(config.command or ()),
        "alive": alive,
        "holder": os.getpid(),
        "folder": str(notes),
        "times_only": times_only,
        "options": options or {},
        "trials": 0 if times_only else config.trials,
        "try": config.remedies and list(config.remedies),
        "lengths": {
            "profiled": config.iterations,
            "warmup": config.warmup,
            "unprofiled": config.iterations,
            "sampled": config.iterations,
        },
        "detail": {
            "with_stack": config.with_stack,
            "record_shapes": config.record_shapes,
            "profile_memory": config.profile_memory,
            "ceilings": config.probes,
        },
    }
    places = [str(STARTUP), *filter(None, [base.get("PYTHONPATH")])]
    crash = {"PYTHONFAULTHANDLER": "1"}  # where a program crashes is in its log
    return crash | {**base, "PYTHONPATH": os.pathsep.join(places), VARIABLE: json.dumps(asked)}


def run_injected(
    command: Sequence[str],
    config: ProfilingConfig,
    notes: Path,
    logs: Path,
    stage: str,
    progress: ProgressCallback | None,
    changes: Mapping[str, Any] | None = None,
    times_only: bool = False,
) -> Completed:
    """Run a command to its end in that environment; its processes write into ``notes``. Of
    ``changes``, the variables of ``environment`` are set, and the start-up file makes ``options``
    in the program."""
    changes = changes or {}
    base = os.environ | dict(changes.get("environment") or {})
    options = changes.get("options")
    with living_pipe() as alive:
        return run_child(
            command,
            stage=stage,
            logs=logs,
            environment=recording_environment(base, notes, config, times_only, alive, options),
            folder=config.command_folder or None,
            timeout_s=config.timeout_s,
            progress=progress,
        )
