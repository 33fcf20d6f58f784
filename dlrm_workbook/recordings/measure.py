"""Measures a run with whichever profiler is there, and keeps it as one Profile."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_core.base.files import read_json, write_json, write_text
from dlrm_core.config import Parameters
from dlrm_workbook.ground.machine import machine_facts
from dlrm_workbook.ground.processes import (
    LineReader,
    MeasurementError,
    ProgressCallback,
    python_module,
    run_child,
)
from dlrm_workbook.ground.profiling import ProfilingConfig
from dlrm_workbook.recordings.command import TIMING_INTERVENTION, record_command
from dlrm_workbook.recordings.hpctoolkit.database import read_database
from dlrm_workbook.recordings.hpctoolkit.driver import Measurement, measure_program
from dlrm_workbook.recordings.hpctoolkit.passes import workload_environment
from dlrm_workbook.recordings.hpctoolkit.spans import with_spans
from dlrm_workbook.recordings.hpctoolkit.stacks import with_stacks
from dlrm_workbook.recordings.hpctoolkit.to_profile import profile_from_database
from dlrm_workbook.recordings.hpctoolkit.tools import find_tools
from dlrm_workbook.recordings.injected import recording_environment
from dlrm_workbook.recordings.open import open_recording
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch import RECORDED_KEY, UNKNOWN_MODEL
from dlrm_workbook.recordings.torch.trace import read_recording

EVIDENCE = ("ceilings", "part_probes", "data_statistics")
"""What is found out about machine and workload beside the times, under these keys."""

ALIGNED_ITERATIONS = 5
"""Iterations of the recording that GPU work without Python frames is aligned with."""

TORCH_FOLDER = "profile_torch"
"""Of a run folder: the Profile of the second engine, where ``profiling.engine`` is both."""


def choose_engine(config: ProfilingConfig) -> tuple[str, str]:
    """The engine that ``profiling.engine`` means on this machine, and why. A MissingToolError says
    that HPCToolkit is asked for and not there."""
    if config.engine == "torch":
        return "torch", "torch.profiler, as profiling.engine asks"
    if config.command and config.engine == "auto":
        return "torch", (
            "torch.profiler, which explains more of a program than HPCToolkit: shapes, memory and "
            "remedies too; profiling.engine=hpctoolkit or both measures with that"
        )
    try:
        tools = find_tools(config.hpctoolkit_home)
    except MissingToolError as error:
        if config.engine in ("hpctoolkit", "both"):
            raise
        return "torch", f"torch.profiler, since HPCToolkit was not found ({error})"
    if config.engine == "hpctoolkit":
        return "hpctoolkit", f"HPCToolkit {tools.version}, as profiling.engine asks"
    if config.engine == "both":
        return "both", f"HPCToolkit {tools.version} and then torch.profiler, side by side"
    return "hpctoolkit", f"HPCToolkit {tools.version}, found at {tools.hpcrun}"


Advise = Callable[[Profile], list[dict[str, Any]]]
"""The changes that a profile calls for, all up to each one; refuses with an InputError."""


def no_advice(profile: Profile) -> list[dict[str, Any]]:
    """Nothing is to be changed."""
    return []


def measure(
    parameters: Parameters,
    folder: Path | str,
    progress: ProgressCallback | None = None,
    advise: Advise = no_advice,
) -> Profile:
    """Run the workload under a profiler, in a process of its own.

    Args:
        folder: gets the raw recording, the logs, and ``profile/``, the saved
            Profile. Nothing in it is overwritten. Where both engines measure, ``profile/``
            is HPCToolkit's and ``profile_torch/`` torch.profiler's.
        progress: called a few times a second with the stage and the iteration.
        advise: asked for changes as soon as all is known; the process that recorded the run, or
            looked for evidence beside HPCToolkit's, then times whole steps under them
            (:mod:`dlrm_workbook.evidence.together`), which are ``meta["together"]``.

    Raises:
        InputError: the run or its measurement cannot be made; the message says why.
    """
    folder = Path(folder).absolute()
    engine, why = choose_engine(parameters.profiling)
    if command := parameters.profiling.command:
        return measure_command(command, parameters, folder, engine, why, progress)
    session = _Session(parameters, folder, progress)
    chosen = session.choose_back_end()
    profile = None
    if engine != "torch":
        try:
            profile = session.with_hpctoolkit(advise)
        except MeasurementError as error:
            if parameters.profiling.engine != "auto":
                raise
            why = f"torch.profiler, since HPCToolkit failed ({error})"
            chosen = [*chosen, f"measured with {why}"]
    if profile is None:
        profile = session.with_torch(session.parameters, advise=advise)
    if engine == "both":
        second = session.second(profile)
        second.meta["engine_choice"] = why
        second.save(folder / TORCH_FOLDER)
        profile.meta["second_profile"] = TORCH_FOLDER
    profile.meta["engine_choice"] = why
    profile.meta["notices"] = chosen + profile.meta.get("notices", [])
    profile.save(folder / "profile")
    return profile


def measure_command(
    command: Sequence[str],
    parameters: Parameters,
    folder: Path,
    engine: str,
    why: str,
    progress: ProgressCallback | None = None,
) -> Profile:
    """Measure a command in place of our own workload; see :func:`measure`. Of several ranks, the
    Profile is that of the one that limits the others; all of them are kept, in ``profile/rank0/``,
    ..."""
    if engine == "torch":
        return command_with_torch(command, parameters, folder / "profile", why, progress)
    profile = command_with_hpctoolkit(command, parameters, folder, progress)
    profile.meta["engine_choice"] = why
    if engine == "both":
        command_with_torch(command, parameters, folder / TORCH_FOLDER, why, progress)
        profile.meta["second_profile"] = TORCH_FOLDER
    profile.save(folder / "profile")
    return profile


def title_of(command: Sequence[str], parameters: Parameters) -> str:
    """The title that was given, else the command."""
    untitled = parameters.title == Parameters.title
    return shlex.join(command) if untitled else parameters.title


def command_with_torch(
    command: Sequence[str],
    parameters: Parameters,
    target: Path,
    why: str,
    progress: ProgressCallback | None,
) -> Profile:
    """As :func:`measure_command`, with torch.profiler inside; the profile is kept in ``target``."""
    folder = target.parent
    config = parameters.profiling
    notices = record_command(command, config, folder, progress)
    recording = open_recording(folder / "recording", config.parts)
    for profile in [recording.profile, *recording.ranks.values()]:
        profile.meta["title"] = title_of(command, parameters)
        profile.meta["engine_choice"] = why
        profile.meta["notices"] = notices + profile.meta.get("notices", [])
    for rank, profile in recording.ranks.items():
        profile.save(target / f"rank{rank}")
    if not recording.ranks:
        recording.profile.save(target)
    return recording.profile


def command_with_hpctoolkit(
    command: Sequence[str], parameters: Parameters, folder: Path, progress: ProgressCallback | None
) -> Profile:
    """As :func:`measure_command`, with HPCToolkit around the program.

    The program says when its iterations end and which Python lines and modules ran when; its
    parts are told by those names and the ones in call paths.
    """
    from dlrm_core.base.machine import resolve_device

    config = parameters.profiling
    device = resolve_device(parameters.training)
    iterations = config.warmup + config.iterations
    with tempfile.TemporaryDirectory(prefix="dlrm-processes-") as notes:
        asked = replace(config, iterations=iterations)
        measurement = measure_program(
            command,
            folder / "hpctoolkit",
            device=device.type,
            config=config,
            progress=progress,
            environment=recording_environment(os.environ, Path(notes), asked, times_only=True),
        )
        timed = measurement.passes[0]
        profile = profile_from_database(read_database(timed.database), config.parts)
        process = timed.result.get("process")
        # call paths that have Python frames need none beside
        sampled = isinstance(process, int) and not timed.python_frames
        place = Path(notes) / str(process) if sampled else None
        spans = timed.result.get("spans") or []
        profile = with_stacks(profile, spans, place, config.warmup, dict(config.parts))
    if "lines" in profile.meta:
        measurement.not_measured.pop("Python frames", None)
    profile.meta |= {"title": title_of(command, parameters), "machine": machine_facts()}
    missing = dict.fromkeys(EVIDENCE, UNKNOWN_MODEL)
    add_measurement(profile, measurement, folder, device.type, iterations, missing)
    profile.meta["notices"].insert(0, TIMING_INTERVENTION)
    return profile


class _Child(NamedTuple):
    """A process that a measurement needs."""

    what: str
    """The subject of the sentence if it fails."""
    stage: str
    command: list[str]
    like_measured: bool = False
    """Whether it has the environment of a run that HPCToolkit measures."""


class _Session:
    """One measurement: its parameters, where it goes, who watches."""

    def __init__(
        self, parameters: Parameters, folder: Path, progress: ProgressCallback | None
    ) -> None:
        self.parameters, self.folder, self.progress = parameters, folder, progress

    def written(self, name: str, parameters: Parameters) -> Path:
        """A parameters file for a child."""
        file = self.folder / name
        write_text(file, yaml.safe_dump(parameters.to_sections(), sort_keys=False))
        return file

    def run(self, child: _Child, on_line: LineReader | None = None) -> None:
        """Run a child to its end."""
        run_child(
            child.command,
            stage=child.stage,
            logs=self.folder / "logs",
            environment=workload_environment(os.environ)[0] if child.like_measured else None,
            timeout_s=self.parameters.profiling.timeout_s,
            progress=self.progress,
            on_line=on_line,
        ).require_success(child.what)

    def choose_back_end(self) -> list[str]:
        """Settle on the same back ends for all processes, where ``auto`` is to choose; says why."""
        training = self.parameters.training
        if "auto" not in (training.embedding_backend, training.dense_backend, training.fp32_matmul):
            return []
        file, output = self.written("logs/auto.yaml", self.parameters), "logs/auto.json"
        command = python_module("dlrm_kernels.embeddings.choose", file, self.folder / output)
        self.run(_Child("choosing back ends", "choosing back ends", command, like_measured=True))
        choice = read_json(self.folder / output)
        self.parameters = self.parameters.with_training(**choice["training"])
        return choice["notices"]

    def with_torch(
        self,
        parameters: Parameters,
        name: str = "workload.yaml",
        recorded: str = "recording",
        advise: Advise = no_advice,
    ) -> Profile:
        file, recording = self.written(name, parameters), self.folder / recorded
        words = ["record", "-f", str(file), "--output", str(recording)]
        child = _Child("the recorded run", "torch.profiler", python_module("dlrm_workbook", *words))
        return self.advised(child, lambda: read_recording(recording), advise)

    def advised(self, child: _Child, read: Callable[[], Profile], advise: Advise) -> Profile:
        """The profile that ``read`` makes of what a child leaves, which then times whole steps
        under the advised changes."""
        with tempfile.TemporaryDirectory(prefix="dlrm-changes-") as folder:
            asked, answer = Path(folder) / "asked.json", Path(folder) / "answer.json"
            dialogue = _Dialogue(read, asked, advise)
            child = child._replace(command=[*child.command, "--together", str(asked), str(answer)])
            try:
                self.run(child, dialogue)
            except InputError as error:
                if dialogue.profile is None and dialogue.error is None:
                    raise
                dialogue.reason = str(error)  # the profile is there; a side view must not cost it
            if dialogue.error is not None:
                raise dialogue.error
            profile = dialogue.profile
            assert profile is not None
            if reason := dialogue.reason:
                profile.meta["not_measured"] = profile.not_measured | {"together": reason}
            elif answer.is_file():
                profile.meta["together"] = read_json(answer)
            return profile

    def second(self, first: Profile) -> Profile:
        """torch's profile of a workload whose machine has been looked at for the first one."""
        profiling = replace(self.parameters.profiling, probes=False)
        parameters = replace(self.parameters, profiling=profiling)
        second = self.with_torch(parameters, "workload-torch.yaml")
        second.meta["parameters"] = self.parameters.to_sections()
        reasons = second.not_measured
        for name in EVIDENCE:
            reasons.pop(name, None)
            if name in first.meta:
                second.meta[name] = first.meta[name]
            elif name in first.not_measured:
                reasons[name] = first.not_measured[name]
        second.meta["not_measured"] = reasons
        return second

    def order_of_launches(self) -> Profile | str:
        """A short torch.profiler recording of the workload, for the parts of its GPU work; or why
        there is none."""
        profiling = replace(
            self.parameters.profiling,
            iterations=ALIGNED_ITERATIONS,
            probes=False,
            with_stack=False,
            record_shapes=False,
            profile_memory=False,
        )
        parameters = replace(self.parameters, profiling=profiling)
        try:
            return self.with_torch(parameters, "workload-order.yaml", "recording_order")
        except InputError as error:  # the times are there; their parts must not cost them
            return f"the torch.profiler recording that would tell it failed: {error}"

    def with_hpctoolkit(self, advise: Advise) -> Profile:
        from dlrm_core.base.machine import resolve_device
        from dlrm_workbook.recordings.torch.recorder import information

        parameters, config = self.parameters, self.parameters.profiling
        device = resolve_device(parameters.training)
        iterations = config.warmup + config.iterations
        file = self.written("workload.yaml", parameters)
        # Reading the loss drains a GPU's queue, and a step that is waited for is another step.
        # Iterations are told apart by the span log either way.
        log_every = 1 if device.type == "cpu" else iterations
        measurement = measure_program(
            python_module(
                *("dlrm_workbook", "train", "-f", file, "-p", f"training.batches={iterations}"),
                *("-p", f"training.log_every={log_every}", "--spans"),
            ),
            self.folder / "hpctoolkit",
            device=device.type,
            config=config,
            progress=self.progress,
        )
        timed = measurement.passes[0]
        profile = profile_from_database(read_database(timed.database))
        spans = timed.result.get("spans") or []
        on_gpu = device.type != "cpu" and spans and profile.has("gpu_time_ms")
        order = self.order_of_launches() if on_gpu else ""
        profile = with_spans(profile, spans, config.warmup, order)
        unprofiled, output = measurement.unprofiled, self.folder / "evidence.json"

        def told(evidence: dict[str, Any]) -> Profile:
            missing = evidence.pop("not_measured", {})
            said = information(parameters, device, profile.meta.get("notices", []))
            counted = ("counters", "threads_cpu", "counters_cost_ms")
            profile.meta |= said | evidence
            profile.meta |= {name: unprofiled[name] for name in counted if name in unprofiled}
            add_measurement(profile, measurement, self.folder, device.type, iterations, missing)
            return profile

        command = python_module("dlrm_workbook.recordings.torch.recorder", file, output)
        child = _Child("the search for evidence", "evidence", command, like_measured=True)
        try:
            return self.advised(child, lambda: told(read_json(output)), advise)
        except InputError as error:  # the times are there; what it would have found is not
            return told({"not_measured": dict.fromkeys(EVIDENCE, str(error))})


class _Dialogue:
    """Reads what a process makes as soon as that says that it is whole, and tells the process
    which changes to time."""

    def __init__(self, read: Callable[[], Profile], asked: Path, advise: Advise) -> None:
        self._read, self._asked, self._advise = read, asked, advise
        self.profile: Profile | None = None
        self.reason = ""
        """Why no change is timed."""
        self.error: Exception | None = None
        """Of reading or of the advice, to be raised where it can be caught."""

    def __call__(self, line: bytes) -> None:
        """Take in a line that the process printed."""
        if self.profile is not None or not line.startswith(f'{{"{RECORDED_KEY}"'.encode()):
            return
        changes: list[dict[str, Any]] = []
        try:
            self.profile = self._read()
            try:
                changes = self._advise(self.profile)
            except InputError as refusal:
                self.reason = str(refusal)
        except Exception as error:  # raised again by who waits for the process
            self.error = error
        finally:  # it waits for an answer, whatever happens
            write_json(self._asked, changes)


def add_measurement(
    profile: Profile,
    measurement: Measurement,
    folder: Path,
    device: str,
    iterations: int,
    missing: dict[str, str],
) -> None:
    """Add to a profile's ``meta`` what is known of the passes that HPCToolkit measured; ``missing``
    has what was not measured beside them, name to reason."""
    unprofiled, notices = measurement.unprofiled, list(measurement.notices)
    alone_ms = unprofiled.get("ms_per_iteration")
    passes: list[dict[str, Any]] = [
        {"name": "unprofiled", "command": "", "ms_per_iteration": alone_ms, "dilation": 1.0}
    ]
    kept = ("name", "python_frames", "ms_per_iteration", "dilation", "lost_samples")
    for measured in measurement.passes:
        passes.append(
            {
                **{name: getattr(measured, name) for name in kept},
                "command": " ".join(measured.command),
                "iterations": iterations,
                "events": list(measured.events),
                # relative, so that a run folder can be moved or mailed
                "database": os.path.relpath(measured.database, folder),
                "notices": list(measured.notices),
            }
        )
        notices += [f"pass {measured.name}: {notice}" for notice in measured.notices]
    missing = missing | unprofiled.get("not_measured", {})
    profile.meta |= {
        "engine": "hpctoolkit",
        "device": device,
        "version": measurement.version,
        "passes": passes,
        "notices": [*notices, *profile.meta.get("notices", [])],
        "not_measured": missing | profile.not_measured | measurement.not_measured,
    }


def second_profile(folder: Path | str) -> Profile | None:
    """The second engine's Profile of a run folder; None where one engine measured."""
    place = Path(folder) / TORCH_FOLDER
    return Profile.load(place) if (place / "profile.json").is_file() else None
