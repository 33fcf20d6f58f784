"""Why a profiled run cannot be used or trusted, told from what it left behind.

hpcrun's exit code is the program's, and 0 also when nothing was measured, so
the profiles on disk, its messages and the program's own last line decide.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dlrm_core.profiling.hpctoolkit_passes import Pass
from dlrm_core.profiling.hpctoolkit_process import Completed
from dlrm_core.profiling.hpctoolkit_tools import GPU_EVENTS, PC_EVENTS

LOST_LIMIT = 0.05
"""A larger share of dropped samples gets a notice and an entry under "not measured"."""

_SAMPLES = re.compile(r"SUMMARY: samples: (\d+) \(recorded: (\d+),")


@dataclass(frozen=True)
class Failure:
    """Why an attempt gave no database.

    Attributes:
        kind: ``event`` (hpcrun refuses one), ``gpu`` (none can be measured),
            ``program`` (it fails under hpcrun), ``aborted`` (hpcprof dies) or
            ``other`` (trying again would not help).
        reason: one sentence.
    """

    kind: str
    reason: str


def explain(measured: Pass, run: Completed, measurements: Path) -> Failure | None:
    """Why hpcrun's run cannot be used, or None if it can."""
    see = f"see {run.stderr}"
    if run.timed_out:
        return Failure(
            "other",
            f"the program under hpcrun (pass {measured.name}) was still running after "
            f"{run.seconds:.0f} s, at iteration {run.iteration}; raise profiling.timeout_s",
        )
    text = run.stderr_text()
    measured_any = any(path.stat().st_size for path in measurements.glob("*.hpcrun"))
    if not measured_any:
        if "is unknown or unsupported" in text or "was not compiled with" in text:
            return Failure("event", f"hpcrun refuses an event: {_line(text)}")
        if run.exit_code == 0:
            return Failure(
                "other",
                "the program ran under hpcrun with exit code 0, but nothing was measured: "
                f"hpcrun's libraries could not be preloaded; {see}",
            )
        if run.exit_code == 255:
            return Failure("other", f"hpcrun could not create {measurements}; {see}")
        if run.result is None and any(event.startswith("gpu=") for event in measured.events):
            return Failure(
                "gpu",
                f"hpcrun ended with exit code {run.exit_code} before the program ran, as it does "
                f"where the GPU cannot be measured: {run.last_words()}; {see}",
            )
        return Failure(
            "program",
            f"hpcrun ended with exit code {run.exit_code} and measured nothing: "
            f"{run.last_words()}; {see}",
        )
    if run.exit_code != 0 and run.result is None:
        return Failure(
            "program",
            f"the program, which runs by itself, ended with exit code {run.exit_code} under hpcrun "
            f"(pass {measured.name}): {run.last_words()}; {see}",
        )
    return None


def _line(text: str) -> str:
    """The line of hpcrun's output that names the event."""
    for line in text.splitlines():
        if "unknown or unsupported" in line or "not compiled with" in line:
            return line.strip()[:200]
    return ""


def respelled(events: tuple[str, ...]) -> tuple[str, ...]:
    """The events in the other release's spelling."""
    old, new = GPU_EVENTS
    other = {old: new, new: old, PC_EVENTS[old]: PC_EVENTS[new], PC_EVENTS[new]: PC_EVENTS[old]}
    return tuple(other.get(event, event) for event in events)


def lost_samples(measurements: Path) -> float | None:
    """Share of the samples that hpcrun took and dropped, 0 to 1; None if its logs do not say.

    A sample that finds hpcrun in its own code is dropped, and its time with it.
    With Python frames a hook of hpcrun runs at every call in the main thread: a
    loop of small Python calls then spends most of its time in that hook, takes
    many times as long, and is nearly absent from the profile.
    """
    taken = recorded = 0
    for log in measurements.glob("*.log"):
        for match in _SAMPLES.finditer(log.read_text(encoding="utf-8", errors="replace")):
            taken += int(match.group(1))
            recorded += int(match.group(2))
    return 1 - recorded / taken if taken else None


def lost_notice(lost: float, python: bool) -> str:
    """The sentence about dropped samples for the reader of the figures."""
    text = f"HPCToolkit dropped {lost:.0%} of its samples, and their time with them"
    if python:
        text += (
            ": they fell into its own hook at Python calls (imports included), so parts of the "
            "main thread that make many small Python calls are too small here or missing"
        )
    return text
