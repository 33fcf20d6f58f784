"""Going on with a comparison or a scaling measurement that was stopped or killed.

Both are expensive because their rounds are, and leave what they have measured in the run
folder: a comparison each finished run of a round before the next starts
(:mod:`dlrm_core.comparison_earlier`), the ranks each round
(:mod:`dlrm_core.distributed.scaling`). So ``dlrm run NOTEBOOK --resume FOLDER``, with the
command it began with, runs the notebook again in its folder, and what is there needs no second
time.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrm_core.config import load_parameters
from dlrm_core.errors import InputError
from dlrm_core.files import only_process, read_json, write_json
from dlrm_core.notebook_parameters import split_overrides
from dlrm_core.run_folder import RunFolder
from dlrm_core.workbook import Plan, RunError

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
    before = record.get("parameters") or {}
    # as run.json has it: tuples are lists there
    for name, value in _leaves(given).items():
        kept = _leaves(before).get(name)
        if kept != value:
            raise InputError(
                f"{folder}: began with {name} {kept!r}, now it is {value!r}; a {made} is "
                "resumed with the parameters it began with"
            )
    dropped = sorted(set(_leaves(before)) - set(_leaves(given)))
    if dropped:
        raise InputError(f"{folder}: began with {dropped[0]}, which is not given now")
    record = {**record, "status": "running"}
    record.pop("error", None)
    record.pop("failing_cell", None)
    return record


def _leaves(given: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted name to value; a ``change`` is one value, since its keys have dots."""
    leaves: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, Mapping) and name != "change":
            leaves |= {f"{name}.{key}": _listed(inner) for key, inner in value.items()}
        else:
            leaves[name] = _listed(value)
    return leaves


def _listed(value: Any) -> Any:
    """The value as JSON gives it back."""
    if isinstance(value, Mapping):
        return {str(key): _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value
