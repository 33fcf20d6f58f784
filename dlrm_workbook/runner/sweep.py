"""``dlrm run`` with a sweep: every point's notebooks, then one page over all of them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_core.config import Parameters, load_parameters
from dlrm_core.errors import InputError
from dlrm_core.files import read_json, write_json
from dlrm_workbook.runner.parameters import split_overrides
from dlrm_workbook.runner.run import Plan, RunError
from dlrm_workbook.runs import DEFAULT_OUTPUT_ROOT, RunFolder, claim_run_folder
from dlrm_workbook.studies.sweep.plan import (
    PointFailed,
    Sweep,
    describe_failures,
    sweep_points,
)

SUMMARY = "sweep"
"""Name of the notebook of the summary page."""


def command_sweep(arguments: Any, names: Sequence[str]) -> int:
    """``dlrm run`` of a parameters file with a sweep.

    Returns:
        0 only if every point and the summary page finished; 128 + signal after an
        interruption. The sweep's folder is the last line on standard output.

    Raises:
        InputError: a point cannot work, or ``--resume`` names another sweep; nothing has
            been run then.
    """
    for_sections, own = split_overrides(arguments.parameter)
    parameters = load_parameters(arguments.file, for_sections)
    if not parameters.sweep:
        raise InputError(f"--resume: {arguments.file} has no sweep section")
    if list(names) == ["bottlenecks"]:
        raise InputError("a sweep of bottlenecks has nothing to explain; sweep all, or profile")
    points = sweep_points(parameters)
    plan = Plan.of(names, own)
    for point in points:
        try:
            plan.check(point.parameters)
        except InputError as error:
            raise InputError(f"sweep point {point.number} ({point.label}): {error}") from None
    summary = Plan.of([SUMMARY], {})
    typed = shlex.join(arguments.argv)
    folder, sweep = _folder(arguments, parameters, names, own, typed)

    def run_one(of: Parameters, place: Path) -> Mapping[str, Path]:
        return run_point(plan, of, place, parameters.preset, arguments.cell_timeout, typed)

    code = sweep.run(run_one)
    left = describe_failures(sweep)
    if code >= 128:
        folder.close("interrupted", error=left)
        again = shlex.join(_resumed(arguments.argv, folder.path))
        print(f"dlrm run: the sweep was interrupted; go on with: {again}", file=sys.stderr)
    else:
        code = _summarise(summary, folder, parameters, left) or code
    if left:
        print(f"dlrm run: {left}", file=sys.stderr)
    print(folder.path, flush=True)
    return code


def run_point(
    plan: Plan,
    parameters: Parameters,
    place: Path,
    preset: str,
    cell_timeout: float | None,
    command: str,
) -> dict[str, Path]:
    """Run a point's notebooks that have not finished there, each in a folder of its name.

    Raises:
        PointFailed: one did not finish; later ones were not started.
    """
    done: dict[str, Path] = {}
    for name in plan.paths:
        finished = _finished(place, name)
        if finished is None:
            given = plan.given(name, parameters, done)
            folder = claim_run_folder(
                place, name, preset, parameters=given, command=command, place=place / name
            )
            try:
                plan.execute(name, folder, given, cell_timeout)
            except RunError as error:
                raise PointFailed(str(error), error.code, done) from None
            finished = folder.path
        done[name] = finished
    return done


def _finished(place: Path, notebook: str) -> Path | None:
    """The run of a notebook that finished in a point's folder; None if there is none."""
    for folder in sorted(place.glob(f"{notebook}*")):
        run_json = folder / "run.json"
        # a run that was killed stays 'running', and has a folder of the same name
        if run_json.is_file() and read_json(run_json).get("status") == "finished":
            return folder
    return None


def _folder(
    arguments: Any,
    parameters: Parameters,
    names: Sequence[str],
    own: Mapping[str, str],
    typed: str,
) -> tuple[RunFolder, Sweep]:
    """The sweep's run folder: a new one, or the one that is to be gone on with."""
    if arguments.resume:
        sweep = Sweep.open(Path(arguments.resume))
        sweep.require_same(parameters, names, own)
        record = read_json(sweep.folder / "run.json") | {"status": "running"}
        record.pop("error", None)
        write_json(sweep.folder / "run.json", record)
        return RunFolder(sweep.folder, record), sweep
    root = Path(DEFAULT_OUTPUT_ROOT if arguments.output_root is None else arguments.output_root)
    sections = parameters.to_sections() | {"sweep": dict(parameters.sweep)}
    folder = claim_run_folder(root, SUMMARY, parameters.preset, parameters=sections, command=typed)
    return folder, Sweep.begin(folder.path, parameters, names, own, typed)


def _summarise(summary: Plan, folder: RunFolder, parameters: Parameters, left: str) -> int:
    """Make the sweep's page; an exit code."""
    given = summary.given(SUMMARY, parameters, {})
    given["sweep_folder"] = str(folder.path)
    try:
        summary.execute(SUMMARY, folder, given, None)
    except RunError as error:
        print(f"dlrm run: {error}", file=sys.stderr)
        return error.code
    if left:
        # the page is there, but the folder must not pass for that of a whole sweep
        folder.close("failed", error=left)
    return 0


def _resumed(argv: Sequence[str], folder: Path) -> list[str]:
    """What was typed, with ``--resume``."""
    return [*argv, *([] if "--resume" in argv else ["--resume", str(folder)])]
