"""Going on with a comparison that was stopped or killed.

A comparison is expensive because its rounds are. Each finished run of a round is on disk
before the next starts, the prediction before the first, and profiles are whole or not
there; so ``dlrm run compare --resume FOLDER``, with the command it began with, runs the
notebook again in its folder, and :mod:`dlrm_core.comparison_earlier` finds there what
needs no second time.
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

NOTEBOOK = "compare"


def command_resume(arguments: Any) -> int:
    """``dlrm run compare --resume FOLDER``: exit code 0 only if the comparison finished.

    Raises:
        InputError: the folder holds no unfinished comparison of these parameters; nothing
            has been run then.
    """
    for_sections, own = split_overrides(arguments.parameter)
    parameters = load_parameters(arguments.file, for_sections)
    plan = Plan.of([NOTEBOOK], own)
    plan.check(parameters)
    given = plan.given(NOTEBOOK, parameters, {})
    place = Path(arguments.resume).expanduser().absolute()
    record = unfinished_record(place, given)
    with only_process(place / "rounds"):
        pass  # nobody measures here: the process that began is gone, and its kernel too
    with only_process(place):
        folder = RunFolder(place, record)
        write_json(place / "run.json", record)
        try:
            plan.execute(NOTEBOOK, folder, given, arguments.cell_timeout)
        except RunError as error:
            print(f"dlrm run: {error}", file=sys.stderr)
            print(error.folder.path, flush=True)
            return error.code
    print(place, flush=True)
    return 0


def unfinished_record(folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The ``run.json`` of a comparison that is to go on, as one that is running.

    Args:
        given: the notebook's parameters, as typed this time.

    Raises:
        InputError: there is no comparison, it has finished, or it began otherwise.
    """
    if not (folder / "run.json").is_file():
        raise InputError(f"{folder}: is no run folder (it has no run.json)")
    record = read_json(folder / "run.json")
    if not isinstance(record, dict) or record.get("notebook") != NOTEBOOK:
        raise InputError(f"{folder}: is no run of {NOTEBOOK}, which alone can be resumed so")
    if record.get("status") == "finished":
        raise InputError(f"{folder}: this comparison has finished; start another")
    before = record.get("parameters") or {}
    # as run.json has it: tuples are lists there
    for name, value in _leaves(given).items():
        kept = _leaves(before).get(name)
        if kept != value:
            raise InputError(
                f"{folder}: began with {name} {kept!r}, now it is {value!r}; a comparison is "
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
