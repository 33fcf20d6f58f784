"""Measures a run with whichever profiler is there, and keeps it as one Profile."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from dlrm_core.config import Parameters, ProfilingConfig
from dlrm_core.errors import InputError, MissingToolError
from dlrm_core.files import write_text
from dlrm_workbook.processes import ProgressCallback, python_module, run_child
from dlrm_workbook.recordings.hpctoolkit.passes import workload_environment
from dlrm_workbook.recordings.hpctoolkit.tools import find_tools
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch.chrome_trace import load_json
from dlrm_workbook.recordings.torch.trace import read_recording

EVIDENCE = ("ceilings", "part_probes", "data_statistics")
"""What is found out about machine and workload beside the times, under these keys."""

TORCH_FOLDER = "profile_torch"
"""Of a run folder: the Profile of the second engine, where ``profiling.engine`` is both."""


def choose_engine(config: ProfilingConfig) -> tuple[str, str]:
    """The engine that ``profiling.engine`` means on this machine, and why.

    Raises:
        MissingToolError: HPCToolkit is asked for and not there.
    """
    if config.engine == "torch":
        return "torch", "torch.profiler, as profiling.engine asks"
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


def measure(
    parameters: Parameters, folder: Path | str, progress: ProgressCallback | None = None
) -> Profile:
    """Run the workload under a profiler, in a process of its own.

    Args:
        folder: gets the raw recording, the logs, and ``profile/``, the saved
            Profile. Nothing in it is overwritten. Where both engines measure, ``profile/``
            is HPCToolkit's and ``profile_torch/`` torch.profiler's.
        progress: called a few times a second with the stage and the iteration.

    Raises:
        InputError: the run or its measurement cannot be made; the message says why.
    """
    folder = Path(folder).absolute()
    engine, why = choose_engine(parameters.profiling)
    file = folder / "workload.yaml"
    parameters, chosen = _resolve(parameters, folder, progress)
    write_text(file, yaml.safe_dump(parameters.to_sections(), sort_keys=False))
    if engine == "torch":
        profile = _with_torch(parameters, folder, file, progress)
    else:
        profile = _with_hpctoolkit(parameters, folder, file, progress)
    if engine == "both":
        second = _second(parameters, folder, profile, progress)
        second.meta["engine_choice"] = why
        second.save(folder / TORCH_FOLDER)
        profile.meta["second_profile"] = TORCH_FOLDER
    profile.meta["engine_choice"] = why
    profile.meta["notices"] = chosen + profile.meta.get("notices", [])
    profile.save(folder / "profile")
    return profile


def _second(
    parameters: Parameters, folder: Path, first: Profile, progress: ProgressCallback | None
) -> Profile:
    """torch's profile of a workload whose machine has been looked at for the first one."""
    file = folder / "workload-torch.yaml"
    profiling = replace(parameters.profiling, probes=False)
    unprobed = replace(parameters, profiling=profiling)
    write_text(file, yaml.safe_dump(unprobed.to_sections(), sort_keys=False))
    second = _with_torch(unprobed, folder, file, progress)
    second.meta["parameters"] = parameters.to_sections()
    reasons = second.not_measured
    for name in EVIDENCE:
        reasons.pop(name, None)
        if name in first.meta:
            second.meta[name] = first.meta[name]
        elif name in first.not_measured:
            reasons[name] = first.not_measured[name]
    second.meta["not_measured"] = reasons
    return second


def _resolve(
    parameters: Parameters, folder: Path, progress: ProgressCallback | None
) -> tuple[Parameters, list[str]]:
    """One back end for all processes of a measurement, where ``auto`` is to choose it."""
    from dlrm_kernels.embeddings.choose import with_backend

    if parameters.training.embedding_backend != "auto":
        return parameters, []
    file, output = folder / "logs" / "auto.yaml", folder / "logs" / "auto.json"
    write_text(file, yaml.safe_dump(parameters.to_sections(), sort_keys=False))
    environment, _ = workload_environment(os.environ)
    done = run_child(
        python_module("dlrm_kernels.embeddings.choose", file, output),
        stage="choosing the embedding back end",
        logs=folder / "logs",
        environment=environment,
        timeout_s=float(parameters.profiling.timeout_s),
        progress=progress,
    )
    done.require_success("choosing training.embedding_backend")
    found = load_json(output)
    return with_backend(parameters, found["embedding_backend"]), found["notices"]


def _with_torch(
    parameters: Parameters, folder: Path, file: Path, progress: ProgressCallback | None
) -> Profile:
    recording = folder / "recording"
    done = run_child(
        python_module("dlrm_core", "record", "-f", file, "--output", recording),
        stage="torch.profiler",
        logs=folder / "logs",
        timeout_s=float(parameters.profiling.timeout_s),
        progress=progress,
    )
    done.require_success("the recorded run")
    return read_recording(recording)


def _with_hpctoolkit(
    parameters: Parameters, folder: Path, file: Path, progress: ProgressCallback | None
) -> Profile:
    from dlrm_core.machine import resolve_device
    from dlrm_workbook.recordings.hpctoolkit.database import read_database
    from dlrm_workbook.recordings.hpctoolkit.driver import measure as measure_program
    from dlrm_workbook.recordings.hpctoolkit.spans import with_spans
    from dlrm_workbook.recordings.hpctoolkit.to_profile import profile_from_database
    from dlrm_workbook.recordings.torch.recorder import information

    device = resolve_device(parameters.training)
    config = parameters.profiling
    measurement = measure_program(
        python_module(
            *("dlrm_core", "train", "-f", file),
            *("-p", f"training.batches={config.warmup + config.iterations}"),
            *("-p", "training.log_every=1", "--spans"),
        ),
        folder / "hpctoolkit",
        device=device.type,
        config=config,
        progress=progress,
    )
    times = measurement.database("times")
    assert times is not None
    profile = profile_from_database(read_database(times))
    if device.type == "cpu":
        spans = measurement.passes[0].result.get("spans") or []
        profile = with_spans(profile, spans, config.warmup)
    frames = measurement.database("frames")
    if frames is not None:
        try:
            profile_from_database(read_database(frames)).save(folder / "profile_python")
        except InputError as error:
            # the times are there; a side view must not cost them
            measurement.not_measured["Python frames"] = str(error)
    passes: list[dict[str, Any]] = [
        {
            "name": "unprofiled",
            "command": "",
            "ms_per_iteration": measurement.unprofiled.get("ms_per_iteration"),
            "dilation": 1.0,
        }
    ]
    for made in measurement.passes:
        passes.append(
            {
                "name": made.name,
                "command": " ".join(made.command),
                "iterations": config.warmup + config.iterations,
                "events": list(made.events),
                "python_frames": made.python_frames,
                "ms_per_iteration": made.ms_per_iteration,
                "dilation": made.dilation,
                "part_dilation": made.part_dilation,
                "lost_samples": made.lost_samples,
                # relative, so that a run folder can be moved or mailed
                "database": os.path.relpath(made.database, folder),
                "notices": list(made.notices),
            }
        )
    notices = list(measurement.notices)
    for made in measurement.passes:
        notices += [f"pass {made.name}: {notice}" for notice in made.notices]
    found = _evidence(parameters, folder, file, progress)
    counted = {
        name: measurement.unprofiled[name]
        for name in ("counters", "threads_cpu", "counters_cost_ms")
        if name in measurement.unprofiled
    }
    missing = found.pop("not_measured", {}) | measurement.unprofiled.get("not_measured", {})
    profile.meta |= information(parameters, device, notices) | found | counted
    profile.meta |= {
        "engine": "hpctoolkit",
        "device": device.type,
        "version": measurement.version,
        "passes": passes,
        "not_measured": missing | profile.not_measured | measurement.not_measured,
    }
    return profile


def _evidence(
    parameters: Parameters, folder: Path, file: Path, progress: ProgressCallback | None
) -> dict[str, Any]:
    """What a recording carries beside its times, found in a process like the measured one's.

    The times are measured already, so a failure here costs only what it would have found.
    """
    output = folder / "evidence.json"
    environment, _ = workload_environment(os.environ)
    done = run_child(
        python_module("dlrm_workbook.recordings.torch.recorder", file, output),
        stage="evidence",
        logs=folder / "logs",
        environment=environment,
        timeout_s=float(parameters.profiling.timeout_s),
        progress=progress,
    )
    try:
        done.require_success("the search for evidence")
    except InputError as error:
        return {"not_measured": dict.fromkeys(EVIDENCE, str(error))}
    found: dict[str, Any] = load_json(output)
    return found


def saved_profile(folder: Path | str) -> Profile:
    """The Profile of a run folder, a saved Profile, a recording, or an HPCToolkit database.

    Raises:
        InputError: the folder holds none of these.
    """
    folder = Path(folder)
    for place in (folder / "profile", folder):
        if (place / "profile.json").is_file():
            profile = Profile.load(place)
            for made in profile.meta.get("passes", []):
                if made.get("database"):
                    made["database"] = str(folder.absolute() / made["database"])
            return profile
    for place in (folder / "recording", folder):
        if (place / "recording.json").is_file():
            return read_recording(place)
    if (folder / "meta.db").is_file():
        from dlrm_workbook.recordings.hpctoolkit.database import read_database
        from dlrm_workbook.recordings.hpctoolkit.to_profile import profile_from_database

        return profile_from_database(read_database(folder))
    raise InputError(
        f"{folder}: holds no profile; expected a run folder of the profile notebook, a folder "
        "that dlrm record wrote, or an HPCToolkit database"
    )


def second_profile(folder: Path | str) -> Profile | None:
    """The second engine's Profile of a run folder; None where one engine measured."""
    place = Path(folder) / TORCH_FOLDER
    return Profile.load(place) if (place / "profile.json").is_file() else None
