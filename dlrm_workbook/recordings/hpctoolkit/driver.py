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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dlrm_core.base.errors import InputError
from dlrm_workbook.ground.machine import usable_cores
from dlrm_workbook.ground.processes import MeasurementError, ProgressCallback, fresh_path, run_child
from dlrm_workbook.ground.profiling import ProfilingConfig
from dlrm_workbook.recordings.hpctoolkit.build import (
    build_database,
    name_unnamed_modules,
    recover_structure,
)
from dlrm_workbook.recordings.hpctoolkit.failures import (
    DILATION_LIMIT,
    LOST_LIMIT,
    Failed,
    dilation_notice,
    lost_notice,
    lost_samples,
    no_space,
    require_profiles,
)
from dlrm_workbook.recordings.hpctoolkit.passes import (
    Pass,
    make_safe,
    plan_passes,
    workload_environment,
)
from dlrm_workbook.recordings.hpctoolkit.tools import (
    CPU_EVENT,
    PC_SAMPLING,
    Capabilities,
    Tools,
    find_tools,
    probe,
    python_of,
)


@dataclass(frozen=True)
class PassResult:
    """One profiled run and its database.

    Attributes:
        name: ``times`` or ``stalls``.
        ms_per_iteration: median that the workload reported while profiled.
        dilation: that divided by the unprofiled median; None if either is unknown.
        lost_samples: share of samples, and hence of time, that hpcrun dropped, 0 to 1;
            None if it did not say.
        measurements, database: directories of hpcrun and hpcprof.
        result: the workload's final JSON object while profiled.
    """

    name: str
    command: tuple[str, ...]
    events: tuple[str, ...]
    python_frames: bool
    ms_per_iteration: float | None
    dilation: float | None
    lost_samples: float | None
    measurements: Path
    database: Path
    result: dict[str, Any]
    notices: tuple[str, ...]


@dataclass(frozen=True)
class Measurement:
    """Everything that one call of :func:`measure_program` found.

    Attributes:
        unprofiled: the workload's final JSON object without HPCToolkit.
        passes: the profiled runs that succeeded; ``times`` always, first.
        not_measured: name of a measurement to the reason why it was not made.
        notices: about the whole measurement.
    """

    unprofiled: dict[str, Any]
    passes: tuple[PassResult, ...]
    not_measured: dict[str, str]
    notices: tuple[str, ...]
    version: str


def measure_program(
    command: Sequence[str],
    folder: Path | str,
    *,
    device: str = "cpu",
    config: ProfilingConfig | None = None,
    progress: ProgressCallback | None = None,
    tools: Tools | None = None,
    capabilities: Capabilities | None = None,
    environment: Mapping[str, str] | None = None,
) -> Measurement:
    """Measure a program: first alone, then once per pass under hpcrun.

    The program may print JSON objects, one a line: ``iteration`` in them drives
    progress, and the last one with ``ms_per_iteration`` gives the dilation.

    Args:
        folder: where measurements, databases and ``logs/`` go; made if need be.
            Nothing in it is overwritten.
        device: ``cpu`` or ``cuda``: what the program computes on.
        progress: called a few times a second with the stage and where it stands.
        tools, capabilities: already found and probed, to save doing it again.
        environment: of the program; None: this process's.

    Raises:
        MissingToolError: HPCToolkit is not installed.
        MeasurementError: the program fails by itself, or the pass for times
            cannot be made. Why another pass failed stands in ``not_measured``.
    """
    if not command:
        raise InputError("nothing to measure: the command is empty")
    config = config or ProfilingConfig()
    tools = tools or find_tools(config.hpctoolkit_home)
    capabilities = capabilities or probe(tools, python_version=python_of(command))
    passes = plan_passes(
        capabilities,
        device,
        python=config.python_frames,
        pc_sampling=config.pc_sampling,
        single=config.single_pass,
    )
    base = os.environ if environment is None else environment
    session = _Session(tuple(command), Path(folder).absolute(), config, tools, progress, base)
    session.notices += capabilities.notices
    session.not_measured |= _reasons(capabilities, device, config)
    return session.measure(passes)


def _reasons(capabilities: Capabilities, device: str, config: ProfilingConfig) -> dict[str, str]:
    """Why something is not measured here, including what the user chose."""
    missing = dict(capabilities.not_measured)
    if device == "cpu":
        for name in ("GPU times", "stall reasons"):
            missing[name] = "the program computes on the CPU"
    elif not config.pc_sampling:
        missing.setdefault("stall reasons", "profiling.pc_sampling is false")
    if not config.python_frames:
        missing.setdefault("Python frames", "profiling.python_frames is false")
    elif not config.single_pass:
        why = "-p profiling.single_pass=true has them in call paths; it takes up to 12x as long"
        missing.setdefault("Python frames", why)
    if not config.structure:
        missing.setdefault("loops and inlined functions", "profiling.structure is false")
    return missing


@dataclass
class _Session:
    command: tuple[str, ...]
    folder: Path
    config: ProfilingConfig
    tools: Tools
    progress: ProgressCallback | None
    base: Mapping[str, str]
    notices: list[str] = field(default_factory=list)
    not_measured: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        environment, notices = workload_environment(self.base)
        self.notices += notices
        self.run = partial(
            run_child,
            logs=self.folder / "logs",
            environment=environment,
            folder=(self.config.command_folder or None) if self.config.command else None,
            progress=self.progress,
        )

    def measure(self, passes: Sequence[Pass]) -> Measurement:
        self.folder.mkdir(parents=True, exist_ok=True)
        load, processors = os.getloadavg()[0], usable_cores()
        if load > 0.5 * processors:
            self.notices.append(
                f"other programs were running (load {load:.1f} on {processors} processors) when "
                "the measurement began: times and dilation are less certain"
            )
        unprofiled = self.unprofiled()
        results = []
        for planned in passes:
            try:
                results.append(self.made(planned, unprofiled))
            except MeasurementError as error:
                if planned.name == "times":
                    raise
                self.not_measured["stall reasons"] = str(error)
        notices, version = tuple(self.notices), self.tools.version
        return Measurement(unprofiled, tuple(results), self.not_measured, notices, version)

    def unprofiled(self) -> dict[str, Any]:
        """The result of the program alone, which proves that it works and is compared with."""
        done = self.run(self.command, stage="unprofiled", timeout_s=self.config.timeout_s)
        if done.timed_out:
            raise MeasurementError(
                f"the program without HPCToolkit was still running after "
                f"{self.config.timeout_s} s; measure fewer iterations or raise profiling.timeout_s"
            )
        if done.exit_code != 0:
            raise MeasurementError(
                f"the program fails without HPCToolkit already: it {done.failure()}: "
                f"{done.last_words()}{done.see_log()}"
            )
        result = done.last_object("ms_per_iteration")
        if result is None:
            self.notices.append("the program printed no ms_per_iteration: dilation is unknown")
        return result or {}

    def made(self, measured: Pass, unprofiled: dict[str, Any]) -> PassResult:
        """Make one pass, falling back step by step; each fall-back is tried once."""
        notices: list[str] = []
        while True:
            try:
                return self.attempt(measured, unprofiled, notices)
            except Failed as failure:
                kind, reason = failure.kind, str(failure)
                if kind in ("event", "gpu") and len(measured.events) > 1:
                    if measured.events[-1].endswith(PC_SAMPLING):
                        lost, event = "stall reasons", measured.events[-1].removesuffix(PC_SAMPLING)
                        measured = replace(measured, events=(CPU_EVENT, event))
                    else:
                        lost, measured = "GPU times", replace(measured, events=(CPU_EVENT,))
                    self.not_measured[lost] = reason
                elif kind in ("aborted", "program") and measured.python:
                    # Python frames are highly experimental in HPCToolkit
                    notices.append(f"measured without Python frames, because {reason}")
                    self.not_measured["Python frames"] = reason
                    measured = replace(measured, python=False)
                else:
                    raise

    def attempt(
        self, measured: Pass, unprofiled: dict[str, Any], notices: Sequence[str]
    ) -> PassResult:
        """hpcrun, hpcstruct, hpcprof, once."""
        final = fresh_path(self.folder / f"{measured.name}.measurements")
        # hpcstruct breaks on a space in a path, so such folders get a stand-in
        with tempfile.TemporaryDirectory(prefix="dlrm-hpctoolkit-") as scratch:
            measurements = final if make_safe(final) else Path(scratch) / final.name
            try:
                result = self.attempt_in(measurements, measured, unprofiled, notices)
            finally:
                if measurements != final and measurements.exists():
                    shutil.move(measurements, final)
        return replace(result, measurements=final)

    def attempt_in(
        self, measurements: Path, measured: Pass, unprofiled: dict[str, Any], earlier: Sequence[str]
    ) -> PassResult:
        command = [str(self.tools.hpcrun), "-o", str(measurements)]
        for event in measured.events:  # each has its own -e: lists are refused
            command += ["-e", event]
        command += ["-t"] if measured.trace else []
        command += ["-a", "python"] if measured.python else []
        run = self.run(
            [*command, "--", *self.command],
            stage=f"{measured.name}: hpcrun",
            timeout_s=self.config.timeout_s,
        )
        notices = list(earlier)
        try:
            require_profiles(measured, run, measurements)
            if run.exit_code != 0:
                notices.append(f"the program did all its iterations but {run.failure()}")
            if measured.python and not any(measurements.glob("logical/*")):
                reason = "HPCToolkit recorded none (is it built for another Python version?)"
                self.not_measured["Python frames"] = reason
                measured = replace(measured, python=False)
            database, of_build = self.built(measured, measurements)
        except MeasurementError as failure:
            if full := no_space(measurements, f"{failure}{run.stderr}{run.stdout}"):
                raise MeasurementError(full) from None
            raise
        notices += of_build
        result = run.last_object("ms_per_iteration") or {}
        time_ms, alone_ms = (_number(one.get("ms_per_iteration")) for one in (result, unprofiled))
        dilation = time_ms / alone_ms if time_ms and alone_ms else None
        if dilation is not None and dilation > DILATION_LIMIT:
            notices.append(dilation_notice(dilation, measured))
        lost = lost_samples(measurements)
        if lost is not None and lost > LOST_LIMIT:
            notices.append(lost_notice(lost, measured))
            if measured.name == "times":
                self.not_measured["all CPU time"] = notices[-1]
        return PassResult(
            name=measured.name,
            command=run.command,
            events=measured.events,
            python_frames=measured.python,
            ms_per_iteration=time_ms,
            dilation=dilation,
            lost_samples=lost,
            measurements=measurements,
            database=database,
            result=result,
            notices=tuple(notices),
        )

    def built(self, measured: Pass, measurements: Path) -> tuple[Path, list[str]]:
        """The database of these measurements, and notices about it."""
        notices = []
        if self.config.structure:
            notices += recover_structure(
                self.tools, self.run, measured.name, measurements, self.config
            )
        if named := name_unnamed_modules(measurements):
            notices.append(
                f"{named} Python module(s) without a name were named, because hpcprof aborts "
                "on such records"
            )
        wanted = self.folder / f"{measured.name}.database"
        database = build_database(self.tools, self.run, measured.name, measurements, wanted)
        return database, notices


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
