"""Measures a program with HPCToolkit: unprofiled run, passes, structure, database.

Each stage is a separate program with a log; nothing is believed on its exit
code alone. What could not be measured is named with its reason, never shown as
zero. The commands and the behaviours guarded against were recorded with
HPCToolkit 2024.01.99 (develop of May 2025) on Linux x86-64.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dlrm_core.config import ProfilingConfig
from dlrm_core.errors import InputError
from dlrm_workbook.processes import (
    Completed,
    MeasurementError,
    ProgressCallback,
    fresh_path,
    run_child,
)
from dlrm_workbook.recordings.hpctoolkit.build import (
    DatabaseAborted,
    Stage,
    build_database,
    name_unnamed_modules,
    recover_structure,
)
from dlrm_workbook.recordings.hpctoolkit.passes import (
    Pass,
    default_jobs,
    hpcrun_command,
    make_safe,
    plan_passes,
    workload_environment,
)
from dlrm_workbook.recordings.hpctoolkit.tools import (
    CPU_EVENT,
    GPU_EVENTS,
    PC_EVENTS,
    Capabilities,
    Tools,
    find_tools,
    probe,
)

# What a measurement with HPCToolkit is told and what it returns.


@dataclass(frozen=True)
class HPCToolkitSettings:
    """How to measure.

    Attributes:
        home: installation folder; "" means HPCTOOLKIT_HOME, then PATH.
        python_frames: put Python functions into call paths where offered; on a CPU
            in a pass of their own, since they cost time at every Python call.
        pc_sampling: on a GPU, a second pass for stall reasons.
        structure: run hpcstruct.
        structure_limit_mb: hpcstruct skips binaries above this, in millions of bytes.
        structure_cache: folder of structure files kept between measurements, or
            None for one in the user's cache folder.
        timeout_s: seconds for each run of the program.
        structure_timeout_s, database_timeout_s: seconds for hpcstruct, hpcprof.
        jobs: threads of hpcstruct and hpcprof; None: every processor allowed.
    """

    home: str = ""
    python_frames: bool = True
    pc_sampling: bool = True
    structure: bool = True
    structure_limit_mb: int = 64
    structure_cache: Path | None = None
    timeout_s: float = 3600.0
    structure_timeout_s: float = 1800.0
    database_timeout_s: float = 1800.0
    jobs: int | None = None

    @classmethod
    def from_config(cls, config: ProfilingConfig) -> HPCToolkitSettings:
        """The settings that a parameters file's ``profiling`` section asks for."""
        return cls(
            home=config.hpctoolkit_home,
            python_frames=config.python_frames,
            pc_sampling=config.pc_sampling,
            structure=config.structure,
            structure_limit_mb=config.structure_limit_mb,
            timeout_s=float(config.timeout_s),
        )


@dataclass(frozen=True)
class PassResult:
    """One profiled run and its database.

    Attributes:
        name: ``times``, ``frames`` or ``stalls``.
        command: hpcrun's argument list.
        events: the events that were measured.
        python_frames: call paths hold Python functions.
        ms_per_iteration: median that the workload reported while profiled.
        dilation: that divided by the unprofiled median; None if either is unknown.
        part_dilation: the same for each ``NAME_ms_per_iteration`` that the workload
            reports besides, by NAME. Python frames slow parts unequally: a loop of
            many small Python calls ran 5.8x slower where tensor work ran 1.5x.
        lost_samples: share of samples, and hence of time, that hpcrun dropped, 0 to 1;
            None if it did not say.
        exit_code: hpcrun's, which is the program's.
        measurements: hpcrun's directory.
        database: hpcprof's directory.
        result: the workload's final JSON object while profiled.
        notices: what the reader of the figures should know.
    """

    name: str
    command: tuple[str, ...]
    events: tuple[str, ...]
    python_frames: bool
    ms_per_iteration: float | None
    dilation: float | None
    part_dilation: dict[str, float]
    lost_samples: float | None
    exit_code: int
    measurements: Path
    database: Path
    result: dict[str, Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """Everything that one call of ``measure`` found.

    Attributes:
        unprofiled: the workload's final JSON object without HPCToolkit.
        passes: the profiled runs that succeeded; ``times`` always, first.
        not_measured: name of a measurement to the reason why it was not made.
        notices: about the whole measurement.
        version: HPCToolkit's version.
        logs: folder with each stage's standard output and error.
    """

    unprofiled: dict[str, Any]
    passes: tuple[PassResult, ...]
    not_measured: dict[str, str]
    notices: tuple[str, ...]
    version: str
    logs: Path

    def database(self, name: str = "times") -> Path | None:
        """The database of a pass, or None if that pass was not made."""
        return next((p.database for p in self.passes if p.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; paths as text."""
        return _plain(asdict(self))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


# Why a profiled run cannot be used or trusted, told from what it left behind.

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
    see = f"see {run.log}"
    if run.timed_out:
        return Failure(
            "other",
            f"the program under hpcrun (pass {measured.name}) was still running after "
            f"{run.seconds:.0f} s, at iteration {run.iteration}; raise profiling.timeout_s",
        )
    text = run.stderr
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
        if _result(run) is None and any(event.startswith("gpu=") for event in measured.events):
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
    if run.exit_code != 0 and _result(run) is None:
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
            unprofiled=_result(unprofiled) or {},
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
                f"{completed.exit_code}: {completed.last_words()}; see {completed.log}"
            )
        if _result(completed) is None:
            self.notices.append("the program printed no ms_per_iteration: dilation is unknown")
        return completed

    def _run(self, command: Sequence[str], stage: str) -> Completed:
        return run_child(
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
                result=_result(run) or {},
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


def _result(run: Completed) -> dict[str, Any] | None:
    """The workload's last JSON object that has ``ms_per_iteration``."""
    return run.last_object("ms_per_iteration")


def _median_ms(run: Completed) -> float | None:
    return _number((_result(run) or {}).get("ms_per_iteration"))


def _ratio(profiled: float | None, unprofiled: float | None) -> float | None:
    return profiled / unprofiled if profiled and unprofiled else None


def _part_dilation(run: Completed, unprofiled: Completed) -> dict[str, float]:
    suffix = "_ms_per_iteration"
    before, after = _result(unprofiled) or {}, _result(run) or {}
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
