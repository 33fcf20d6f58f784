"""``dlrm run``: notebooks, a sweep of them, or one that was stopped and goes on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrm_core.config import load_parameters
from dlrm_core.errors import InputError
from dlrm_core.files import only_process, read_json, write_json
from dlrm_core.ledger import require_same
from dlrm_workbook.runner.parameters import split_overrides
from dlrm_workbook.runner.run import CHAIN, Plan, RunError, run_notebooks
from dlrm_workbook.runner.sweep import command_sweep
from dlrm_workbook.runs import RunFolder


def command_run(arguments: Any) -> int:
    """``dlrm run``: exit code 0 only if every notebook finished."""
    names = CHAIN if arguments.notebook == "all" else [arguments.notebook]
    sections, _ = split_overrides(arguments.parameter)
    swept = bool(load_parameters(arguments.file, sections).sweep) and arguments.notebook != "sweep"
    if arguments.resume and not swept and arguments.notebook in RESUMABLE:
        return command_resume(arguments)
    if swept or arguments.resume:
        return command_sweep(arguments, names)
    try:
        folder = run_notebooks(
            names,
            arguments.file,
            arguments.parameter,
            arguments.output_root,
            cell_timeout=arguments.cell_timeout,
            command=arguments.argv,
        )
    except RunError as error:
        print(f"dlrm run: {error}", file=sys.stderr)
        print(error.folder.path, flush=True)
        return error.code
    print(folder.path, flush=True)
    return 0


RESUMABLE = {"compare": "comparison", "scaling": "measurement"}
"""Notebook to what it makes, where it finds its own rounds in its folder."""


def command_resume(arguments: Any) -> int:
    """``dlrm run NOTEBOOK --resume FOLDER``: exit code 0 only if the notebook finished.

    Raises:
        InputError: the folder holds no unfinished run of it with these parameters; nothing
            has been run then.
    """
    name = arguments.notebook
    for_sections, own = split_overrides(arguments.parameter)
    parameters = load_parameters(arguments.file, for_sections)
    plan = Plan.of([name], own)
    plan.check(parameters)
    given = plan.given(name, parameters, {})
    place = Path(arguments.resume).expanduser().absolute()
    record = unfinished_record(place, name, given)
    with only_process(place / "rounds"):
        pass  # nobody measures here: the process that began is gone, and its kernel too
    with only_process(place):
        folder = RunFolder(place, record)
        write_json(place / "run.json", record)
        try:
            plan.execute(name, folder, given, arguments.cell_timeout)
        except RunError as error:
            print(f"dlrm run: {error}", file=sys.stderr)
            print(error.folder.path, flush=True)
            return error.code
    print(place, flush=True)
    return 0


def unfinished_record(folder: Path, notebook: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The ``run.json`` of a run that is to go on, as one that is running.

    Args:
        notebook: one of ``RESUMABLE``.
        given: the notebook's parameters, as typed this time.

    Raises:
        InputError: there is no such run, it has finished, or it began otherwise.
    """
    made = RESUMABLE[notebook]
    if not (folder / "run.json").is_file():
        raise InputError(f"{folder}: is no run folder (it has no run.json)")
    record = read_json(folder / "run.json")
    if not isinstance(record, dict) or record.get("notebook") != notebook:
        raise InputError(f"{folder}: is no run of {notebook}")
    if record.get("status") == "finished":
        raise InputError(f"{folder}: this {made} has finished; start another")
    advice = f"a {made} is resumed with the parameters it began with"
    require_same(str(folder), record.get("parameters") or {}, given, advice)
    record = {**record, "status": "running"}
    record.pop("error", None)
    record.pop("failing_cell", None)
    return record
