"""What a profiled run left behind says: why it cannot be used, or how far it can be trusted."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from dlrm_workbook.ground.processes import Completed, MeasurementError
from dlrm_workbook.recordings.hpctoolkit.passes import Pass

LOST_LIMIT = 0.05
"""A larger share of dropped samples gets a notice and an entry under "not measured"."""

DILATION_LIMIT = 1.2
"""A pass slower than this, relative to the unprofiled run, gets a notice."""

LEAST_FREE_BYTES = 1 << 20
"""HPCToolkit's programs end in many ways where they cannot write; less room than this is none."""

_NO_SPACE = re.compile(r".*(?:No space left on device|Disk quota exceeded)")
_SAMPLES = re.compile(r"SUMMARY: samples: (\d+) \(recorded: (\d+),")
_REFUSED = re.compile(r"^.*(?:is unknown or unsupported|was not compiled with).*$", re.MULTILINE)


class Failed(MeasurementError):
    """An attempt gave no database, and another way of measuring may.

    Attributes:
        kind: ``event`` (hpcrun refuses one), ``gpu`` (none can be measured), ``program`` (it fails
            under hpcrun) or ``aborted`` (hpcprof dies).
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def require_profiles(measured: Pass, run: Completed, measurements: Path) -> None:
    """Refuse a run of hpcrun that cannot be used: by Failed where it may be measured in another
    way, by a MeasurementError where trying again would not help. hpcrun's exit code is the
    program's, so what counts are the profiles that it wrote."""
    if run.timed_out:
        raise MeasurementError(
            f"the program under hpcrun (pass {measured.name}) was still running after "
            f"{run.seconds:.0f} s, at iteration {run.iteration}; raise profiling.timeout_s"
        )
    finished = run.last_object("ms_per_iteration") is not None
    ending = f"{run.last_words()}{run.see_log()}"
    if any(path.stat().st_size for path in measurements.glob("*.hpcrun")):
        if run.exit_code == 0 or finished:
            return
        raise Failed(
            "program",
            f"the program, which runs by itself, {run.failure()} under hpcrun (pass "
            f"{measured.name}): {ending}",
        )
    if refused := _REFUSED.search(run.stderr):
        raise Failed("event", f"hpcrun refuses an event: {refused.group().strip()[:200]}")
    if run.exit_code == 0:
        raise MeasurementError(
            "the program ran under hpcrun with exit code 0, but nothing was measured: "
            f"hpcrun's libraries could not be preloaded{run.see_log()}"
        )
    if run.exit_code == 255:
        raise MeasurementError(f"hpcrun could not create {measurements}{run.see_log()}")
    if not finished and any(event.startswith("gpu=") for event in measured.events):
        raise Failed(
            "gpu",
            f"hpcrun {run.failure()} before the program ran, as it does where the GPU cannot "
            f"be measured: {ending}",
        )
    raise Failed("program", f"hpcrun {run.failure()} and measured nothing: {ending}")


def no_space(measurements: Path, printed: str) -> str:
    """Say in a sentence that there was no room for a measurement, by what the tool printed; "" if
    there was. Measuring again would only fill the disk again."""
    free = shutil.disk_usage(measurements.parent).free
    if free < LEAST_FREE_BYTES:
        return (
            f"the disk of {measurements.parent} is full: make room, or choose another one with "
            "--output-root"
        )
    match = _NO_SPACE.search(printed)
    if match is None:
        return ""
    words = match[0].strip()
    words = words if len(words) <= 250 else f"...{words[-247:]}"  # the end says why
    return f"a disk that the program or HPCToolkit writes to is full: {words}"


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


def lost_notice(lost: float, measured: Pass) -> str:
    text = f"HPCToolkit dropped {lost:.0%} of its samples, and their time with them"
    if measured.python:
        text += (
            ": they fell into its own hook at Python calls (imports included), so parts of the "
            "main thread that make many small Python calls are too small here or missing"
        )
    return text


def dilation_notice(dilation: float, measured: Pass) -> str:
    text = f"the program ran {dilation:.2f}x as long under hpcrun as without it"
    if measured.python:
        text += ": Python frames cost time at every Python call, so this pass shows who called what"
        if measured.name != "times":
            text += "; times come from the other pass, made without Python frames"
    return text
