"""Measures a program with HPCToolkit: unprofiled run, passes, structure, database.

Each stage is a separate program with a log; nothing is believed on its exit
code alone. What could not be measured is named with its reason, never shown as
zero. The commands and the behaviours guarded against were recorded with
HPCToolkit 2024.01.99 (develop of May 2025) on Linux x86-64.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dlrm_core.errors import InputError
from dlrm_core.profiling.hpctoolkit_database import (
    DatabaseAborted,
    Stage,
    build_database,
    recover_structure,
)
from dlrm_core.profiling.hpctoolkit_failures import (
    LOST_LIMIT,
    Failure,
    explain,
    lost_notice,
    lost_samples,
    respelled,
)
from dlrm_core.profiling.hpctoolkit_logical import name_unnamed_modules
from dlrm_core.profiling.hpctoolkit_passes import (
    Pass,
    default_jobs,
    hpcrun_command,
    make_safe,
    plan_passes,
    workload_environment,
)
from dlrm_core.profiling.hpctoolkit_process import (
    Completed,
    MeasurementError,
    Progress,
    ProgressCallback,
    fresh_path,
    run_stage,
)
from dlrm_core.profiling.hpctoolkit_records import HPCToolkitSettings, Measurement, PassResult
from dlrm_core.profiling.hpctoolkit_tools import (
    CPU_EVENT,
    Capabilities,
    Tools,
    find_tools,
    probe,
)

__all__ = [
    "Capabilities",
    "HPCToolkitSettings",
    "Measurement",
    "MeasurementError",
    "Pass",
    "PassResult",
    "Progress",
    "Tools",
    "find_tools",
    "measure",
    "plan_passes",
    "probe",
]


DILATION_LIMIT = 1.2
"""A pass slower than this, relative to the unprofiled run, gets a notice."""


def measure(
    command: Sequence[str],
    folder: Path | str,
    *,
    device: str = "cpu",
    settings: HPCToolkitSettings | None = None,
    progress: ProgressCallback | None = None,
    tools: Tools | None = None,
    capabilities: Capabilities | None = None,
) -> Measurement:
    """Measure a program: first alone, then once per pass under hpcrun.

    The program may print JSON objects, one a line: ``iteration`` in them drives
    progress, and the last one with ``ms_per_iteration`` gives the dilation.

    Args:
        command: argument list of the program.
        folder: where measurements, databases and ``logs/`` go; made if need be.
            Nothing in it is overwritten.
        device: ``cpu`` or ``cuda``: what the program computes on.
        settings: how to measure.
        progress: called a few times a second with the stage and where it stands.
        tools, capabilities: already found and probed, to save doing it again.

    Raises:
        MissingToolError: HPCToolkit is not installed.
        MeasurementError: the program fails by itself, or the pass for times
            cannot be made. Why another pass failed stands in ``not_measured``.
    """
    if not command:
        raise InputError("nothing to measure: the command is empty")
    settings = settings or HPCToolkitSettings()
    tools = tools or find_tools(settings.home)
    capabilities = capabilities or probe(tools)
    passes = plan_passes(
        capabilities, device, python=settings.python_frames, pc_sampling=settings.pc_sampling
    )
    session = _Session(tuple(command), Path(folder).absolute(), settings, tools, progress)
    session.notices += capabilities.notices
    session.not_measured.update(_relevant(capabilities, device, settings))
    return session.measure(passes)


@dataclass
class _Session:
    """The state of one ``measure``."""

    command: tuple[str, ...]
    folder: Path
    settings: HPCToolkitSettings
    tools: Tools
    progress: ProgressCallback | None
    notices: list[str] = field(default_factory=list)
    not_measured: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.logs = self.folder / "logs"
        self.environment, notices = workload_environment(os.environ)
        self.notices += notices
        self.cache = self.settings.structure_cache or _user_cache() / "hpcstruct"

    def measure(self, passes: Sequence[Pass]) -> Measurement:
        self.folder.mkdir(parents=True, exist_ok=True)
        if busy := _busy():
            self.notices.append(busy)
        unprofiled = self._unprofiled()
        results = []
        for planned in passes:
            try:
                results.append(self._pass(planned, unprofiled))
            except MeasurementError as error:
                if planned.name == "times":
                    raise
                what = "stall reasons" if planned.name == "stalls" else "Python frames"
                self.not_measured[what] = str(error)
        return Measurement(
            unprofiled=unprofiled.result or {},
            passes=tuple(results),
            not_measured=self.not_measured,
            notices=tuple(self.notices),
            version=self.tools.version,
            logs=self.logs,
        )

    def _unprofiled(self) -> Completed:
        """The program alone: proves that it works and gives the time to compare with."""
        completed = self._run(self.command, "unprofiled")
        if completed.timed_out:
            raise MeasurementError(
                f"the program without HPCToolkit was still running after "
                f"{self.settings.timeout_s:.0f} s; measure fewer iterations or raise "
                "profiling.timeout_s"
            )
        if completed.exit_code != 0:
            raise MeasurementError(
                f"the program fails without HPCToolkit already, with exit code "
                f"{completed.exit_code}: {completed.last_words()}; see {completed.stderr}"
            )
        if completed.result is None:
            self.notices.append("the program printed no ms_per_iteration: dilation is unknown")
        return completed

    def _run(self, command: Sequence[str], stage: str) -> Completed:
        return run_stage(
            command,
            stage=stage,
            logs=self.logs,
            environment=self.environment,
            timeout_s=self.settings.timeout_s,
            progress=self.progress,
        )

    def _pass(self, measured: Pass, unprofiled: Completed) -> PassResult:
        """Make one pass, falling back step by step; each fall-back is tried once.

        Raises:
            MeasurementError: nothing is left to fall back to.
        """
        notices: list[str] = []
        measured_again = False
        spelled = {measured.events}
        while True:
            outcome = self._attempt(measured, unprofiled, notices)
            if isinstance(outcome, PassResult):
                return outcome
            other = replace(measured, events=respelled(measured.events))
            if outcome.kind == "event" and other.events not in spelled:
                spelled.add(other.events)
                notices.append(f"{outcome.reason}; measured with {', '.join(other.events)}")
                measured = other
            elif outcome.kind in ("event", "gpu") and len(measured.events) > 1:
                self.not_measured["GPU times"] = outcome.reason
                measured = replace(measured, events=(CPU_EVENT,))
            elif outcome.kind == "aborted" and measured.python and not measured_again:
                measured_again = True
                notices.append(f"measured once more, because {outcome.reason}")
            elif (
                outcome.kind in ("aborted", "program")
                and measured.python
                and measured.name != "frames"
            ):
                # Python frames are highly experimental in HPCToolkit; the pass for
                # times is worth having without them, the pass for frames is not
                notices.append(f"measured without Python frames, because {outcome.reason}")
                self.not_measured["Python frames"] = outcome.reason
                measured = replace(measured, python=False)
            elif measured.name == "frames" and measured_again:
                raise MeasurementError(f"given up after measuring twice: {outcome.reason}")
            else:
                raise MeasurementError(outcome.reason)

    def _attempt(
        self, measured: Pass, unprofiled: Completed, earlier: Sequence[str]
    ) -> PassResult | Failure:
        """hpcrun, hpcstruct, hpcprof, once."""
        notices = list(earlier)
        final = fresh_path(self.folder / f"{measured.name}.measurements")
        # hpcstruct breaks on a space in a path, so such folders get a stand-in
        scratch = None if make_safe(final) else Path(tempfile.mkdtemp(prefix="dlrm-hpctoolkit-"))
        measurements = scratch / final.name if scratch else final
        try:
            run = self._run(
                hpcrun_command(self.tools, measured, measurements, self.command),
                f"{measured.name}: hpcrun",
            )
            if failure := explain(measured, run, measurements):
                return failure
            if run.exit_code != 0:
                notices.append(
                    f"the program did all its iterations but ended with exit code {run.exit_code}"
                )
            if measured.python and not any(measurements.glob("logical/*")):
                reason = "HPCToolkit recorded none (is it built for another Python version?)"
                if measured.name == "frames":
                    return Failure("other", reason)
                self.not_measured["Python frames"] = reason
                measured = replace(measured, python=False)
            stage = Stage(
                self.tools,
                self.logs,
                self.environment,
                self.settings.jobs or default_jobs(),
                self.progress,
            )
            if self.settings.structure:
                notices += recover_structure(
                    stage,
                    measured.name,
                    measurements,
                    cache=self.cache,
                    limit_mb=self.settings.structure_limit_mb,
                    timeout_s=self.settings.structure_timeout_s,
                )
            if named := name_unnamed_modules(measurements):
                notices.append(
                    f"{named} Python module(s) without a name were named, because hpcprof aborts "
                    "on such records"
                )
            try:
                database, more = build_database(
                    stage,
                    measured.name,
                    measurements,
                    self.folder / f"{measured.name}.database",
                    timeout_s=self.settings.database_timeout_s,
                )
            except MeasurementError as error:
                kind = "aborted" if isinstance(error, DatabaseAborted) else "other"
                return Failure(kind, str(error))
            dilation = _ratio(_median_ms(run), _median_ms(unprofiled))
            if dilation is not None and dilation > DILATION_LIMIT:
                notices.append(_slowed(dilation, measured))
            lost = lost_samples(measurements)
            if lost is not None and lost > LOST_LIMIT:
                notices.append(lost_notice(lost, measured.python))
                if measured.name == "times":
                    self.not_measured["all CPU time"] = notices[-1]
            return PassResult(
                name=measured.name,
                command=run.command,
                events=measured.events,
                python_frames=measured.python,
                ms_per_iteration=_median_ms(run),
                dilation=dilation,
                part_dilation=_part_dilation(run, unprofiled),
                lost_samples=lost,
                exit_code=run.exit_code,
                measurements=final,
                database=database,
                result=run.result or {},
                notices=tuple(notices + more),
            )
        finally:
            if scratch is not None:
                if measurements.exists():
                    shutil.move(measurements, final)
                shutil.rmtree(scratch, ignore_errors=True)


def _relevant(
    capabilities: Capabilities, device: str, settings: HPCToolkitSettings
) -> dict[str, str]:
    """Reasons that matter to this measurement, with those that the user chose."""
    missing = dict(capabilities.not_measured)
    if device == "cpu":
        for name in ("GPU times", "stall reasons"):
            missing[name] = "the program computes on the CPU"
    elif not settings.pc_sampling:
        missing.setdefault("stall reasons", "profiling.pc_sampling is false")
    if not settings.python_frames:
        missing.setdefault("Python frames", "profiling.python_frames is false")
    if not settings.structure:
        missing.setdefault("loops and inlined functions", "profiling.structure is false")
    return missing


def _median_ms(run: Completed) -> float | None:
    return _number((run.result or {}).get("ms_per_iteration"))


def _ratio(profiled: float | None, unprofiled: float | None) -> float | None:
    return profiled / unprofiled if profiled and unprofiled else None


def _part_dilation(run: Completed, unprofiled: Completed) -> dict[str, float]:
    suffix = "_ms_per_iteration"
    before, after = unprofiled.result or {}, run.result or {}
    ratios = {
        name.removesuffix(suffix): _ratio(_number(after[name]), _number(before.get(name)))
        for name in after
        if name.endswith(suffix)
    }
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _slowed(dilation: float, measured: Pass) -> str:
    text = f"the program ran {dilation:.2f}x as long under hpcrun as without it"
    if measured.name == "frames":
        text += (
            ": Python frames cost time at every Python call, so this pass tells who called what; "
            "how long it takes is told by the pass for times, made without Python frames"
        )
    elif measured.python:
        text += (
            ": Python frames cost time at every Python call, so parts that make many small calls "
            "look larger than they are (profiling.python_frames: false measures without them)"
        )
    return text


def _busy() -> str:
    """A notice if other programs keep this machine busy, "" if not."""
    load, processors = os.getloadavg()[0], default_jobs()
    if load <= 0.5 * processors:
        return ""
    return (
        f"other programs were running (load {load:.1f} on {processors} processors) when the "
        "measurement began: times and dilation are less certain"
    )


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base).absolute() / "dlrm-workbook"
