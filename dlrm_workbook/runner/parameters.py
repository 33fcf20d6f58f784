"""Parameters of notebooks: what a notebook takes, what it is given, how a page shows them.

The sections (model, data, training, profiling) are :mod:`dlrm_core.config`'s and
validated there; this is about the cell tagged ``parameters`` and the values that
belong to one notebook only, such as which run it is to explain.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import logging
import re
import shlex
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json, write_text
from dlrm_core.base.settings import option_text, read_yaml
from dlrm_core.config import SECTIONS
from dlrm_workbook.analysis.changes import LEAVES, read_change
from dlrm_workbook.analysis.ensemble import SWEEP
from dlrm_workbook.ground.options import parameters_file
from dlrm_workbook.ground.units import value_text

SHOWN = {"results": "benchmark", "record": "measurement", "runs": "runs"}
"""Parameters that name what is measured already, which their notebooks only show then."""

WITH_SHOWN = frozenset({"profile_run", "inside", "between", "ranks_per_node", "gpu"}) | {
    *("memory_gb", "jitter", "hiccups", "stability", "output_root", *SHOWN)
}
"""Parameters that a notebook takes beside those of :data:`SHOWN`: what is predicted or read."""

LENGTHS = ("training.batches", "training.log_every", "profiling.", "title", "sweep")
"""Leaves and sections that no comparison is about."""

SET_BY_RUNNER = ("output_folder",)
"""Notebook parameters that only the runner gives a value."""


def find_notebook(name: str, notebooks: Path) -> Path:
    """Path of a notebook by name.

    Raises:
        InputError: there is none of that name; the message lists those there are.
    """
    path = notebooks / f"{name}.ipynb"
    names = sorted(p.stem for p in notebooks.glob("*.ipynb"))
    if name not in names:
        raise InputError(f"no notebook {name!r} in {notebooks}; known: {', '.join(names)}, all")
    return path


def read_notebook(path: Path) -> Any:
    """A notebook as nbformat's node, of format 4.

    Raises:
        InputError: the file cannot be read, or is no notebook.
    """
    import nbformat  # only here: it takes a second of every page that only needs the names

    try:
        return nbformat.read(path, as_version=4)
    except (OSError, ValueError, nbformat.ValidationError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{path} is not a notebook: {reason}") from None


def write_notebook(notebook: Any, path: Path) -> None:
    """Write an executed notebook as nbformat does, but the data of each figure in one line.

    nbformat gives every number of a figure a line of its own, and the spaces before them make a
    fifth of the file. What papermill notes of a cell is one line too.

    Raises:
        InputError: the file cannot be written.
    """
    import nbformat

    notebook = copy.deepcopy(notebook)
    mark, compact = uuid.uuid4().hex, []
    for cell in notebook.cells:
        data = [output.get("data", {}) for output in cell.get("outputs", [])]
        held = [(each, kind) for each in data for kind in each if kind.endswith("+json")]
        held += [(cell.metadata, "papermill")] if "papermill" in cell.metadata else []
        for holder, name in held:
            compact.append(json.dumps(holder[name], ensure_ascii=False, separators=(",", ":")))
            holder[name] = f"{mark} {len(compact) - 1}"
    text = nbformat.writes(notebook, version=4)
    write_text(path, re.sub(rf'"{mark} (\d+)"', lambda found: compact[int(found[1])], text) + "\n")


def declared_parameters(notebook: Path) -> dict[str, dict[str, Any]]:
    """Name, type and default of each parameter in the cell tagged ``parameters``.

    Raises:
        InputError: the notebook cannot be read, or has no such cell (papermill
            would only warn, and the notebook's own values would win).
    """
    import papermill

    node = read_notebook(notebook)
    if not any("parameters" in cell.metadata.get("tags", []) for cell in node.cells):
        raise InputError(f"{notebook} has no cell tagged 'parameters', so it takes none")
    with quiet_papermill():
        declared: dict[str, dict[str, Any]] = papermill.inspect_notebook(str(notebook))
    return declared


def split_overrides(overrides: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Overrides of the sections (``a.b=c``, ``title=...``, and ``try=c``, which is short for
    ``profiling.remedies``), and the notebooks' own (``name=c``).

    Raises:
        InputError: not NAME=VALUE, or a name that only the runner sets.
    """
    sections: list[str] = []
    own: dict[str, str] = {}
    changes: list[str] = []
    for override in overrides:
        name, equals, value = override.partition("=")
        name = name.strip()
        if not equals or not name:
            raise InputError(f"{option_text(override)}: expected NAME=VALUE")
        if name == "change" or name.startswith("change."):
            changes.append(override)
        elif "." in name or name in ("title", "sweep"):
            sections.append(override)
        elif name == "try":
            sections.append(f"profiling.remedies={value}")
        elif name in SECTIONS:
            why = f"{name} is a section; set one of its values, {name}.…"
            raise InputError(f"{option_text(override)}: {why}")
        elif name in SET_BY_RUNNER:
            why = f"{name} is set by dlrm run; see --output-root"
            raise InputError(f"{option_text(override)}: {why}")
        else:
            own[name] = value
    if changes:
        own["change"] = json.dumps(read_change(changes))
    return sections, own


def require_use(names: Iterable[str], sections: Iterable[str], own: Mapping[str, str]) -> None:
    """Refuse options of :func:`split_overrides` that would do nothing in these notebooks.

    Raises:
        InputError: beside a finished measurement something is given that is only measured, or a
            comparison is given another baseline where a change was meant.
    """
    shown = next((name for name in SHOWN if own.get(name)), None)
    if shown and (idle := [name for name in own if name not in WITH_SHOWN]):
        raise InputError(
            f"-p {shown}= shows a finished {SHOWN[shown]}, so nothing is measured and "
            f"{', '.join(idle)} would do nothing; leave one of them out"
        )
    changed = [option for option in sections if not option.strip().startswith(LENGTHS)]
    if "compare" in names and changed and not own.keys() & {"change", "against", "runs"}:
        options = " ".join(option_text(f"change.{option}") for option in changed)
        raise InputError(
            f"{option_text(changed[0])} sets the baseline too, so there is nothing to compare; "
            f"the change is spelt {options} (-p change={{}} takes what the first finding advises)"
        )


def typed_options(folder: Path) -> list[str]:
    """Options that give a run's parameters to another command, as they were typed for the run.

    Returns:
        ``-f FILE`` or ``--like COMMAND``, then ``-p`` of each override of a section; empty where
        the command names no parameters file, or one of a sweep, of which the run is a point.
    """
    file = folder / "run.json"
    if not file.is_file() or any((parent / SWEEP).is_file() for parent in folder.parents):
        return []
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parameters_file(parser, required=False)
    try:
        typed, _ = parser.parse_known_args(shlex.split(str(read_json(file).get("command", ""))))
        sections, _ = split_overrides(typed.parameter)
    except (InputError, ValueError, AttributeError, argparse.ArgumentError):
        return []  # the folder may be anybody's
    if not (typed.file or typed.like):
        return []
    given = ["-f", typed.file] if typed.file else ["--like", typed.like]
    return [*given, *(word for override in sections for word in ("-p", override))]


def kept_options(folder: Path) -> list[str]:
    """What :func:`typed_options` gives, else ``-f`` and the file that the run kept of its
    parameters; empty where it kept none, as a recording of another program."""
    kept = folder / "workload.yaml"
    return typed_options(folder) or (["-f", str(kept)] if kept.is_file() else [])


UNKNOWN_FILE = "-f FILE"
"""Options in a notebook's sentences that stand for those of the run; its page names these."""


def explained_options(run: Mapping[str, Any], folder: Path) -> list[str]:
    """What :func:`kept_options` gives of the recording that a run's page explains (``profile_run``
    of its run.json), or of the run where it explains none."""
    explained = (run.get("parameters") or {}).get("profile_run", folder)
    return kept_options(Path(str(explained))) if explained else []


def own_parameters(
    own: Mapping[str, str], declared: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """For each notebook the values of its own parameters, typed as it declares them."""
    values: dict[str, dict[str, Any]] = {name: {} for name in declared}
    for key, text in own.items():
        takers = [name for name in declared if key in declared[name]]
        if not takers:
            known = sorted(
                {p for d in declared.values() for p in d} - {"title", *SECTIONS, *SET_BY_RUNNER}
            )
            elsewhere = [leaf for leaf in LEAVES if leaf.endswith(f".{key}")]
            hint = f"did you mean {elsewhere[0]}? Known: " if elsewhere else "known: "
            raise InputError(
                f"{option_text(f'{key}={text}')}: unknown parameter of {', '.join(declared)}; "
                f"{hint}{', '.join([*known, 'title', *(f'{s}.…' for s in SECTIONS)])}"
            )
        for name in takers:
            values[name][key] = _typed(key, text, declared[name][key])
    return values


def _typed(key: str, text: str, declaration: Mapping[str, Any]) -> Any:
    """The value of ``-p key=text``, of the type of the annotation (or else of the default)."""
    kind = str(declaration.get("inferred_type_name") or "None")
    if kind == "None":
        try:
            kind = type(ast.literal_eval(str(declaration.get("default")))).__name__
        except (ValueError, SyntaxError):
            kind = "str"
    if kind == "str":
        return text
    try:
        value = read_yaml(text)
    except InputError as error:
        raise InputError(f"{option_text(f'{key}={text}')}: {error}") from None
    if kind == "float" and type(value) is int:
        value = float(value)
    expected = {"int": int, "float": float, "bool": bool, "list": list, "dict": dict}
    wanted = expected.get(kind.partition("[")[0])
    # type() and not isinstance: true is an int in Python
    if wanted is not None and type(value) is not wanted:
        raise InputError(f"{option_text(f'{key}={text}')}: expected {wanted.__name__}")
    return value


def assigned_values(source: str) -> dict[str, Any]:
    """Names that a parameters cell assigns literals to, in order; other lines are passed over."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return {}
    values: dict[str, Any] = {}
    for statement in body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case _:
                continue
        try:
            values[name] = ast.literal_eval(value)
        except (ValueError, TypeError):
            values[name] = ast.unparse(value)
    return values


def parameter_tables(
    values: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[tuple[str, list[dict[str, Any]]]]:
    """One table a section, and first one of the values that stand alone.

    Returns:
        Of each row ``name``, ``value``, ``meaning``, and ``changed``: whether it differs from the
        notebook's own value, where it has one.
    """
    alone: list[dict[str, Any]] = []
    tables = [("run", alone)]
    for name, value in values.items():
        before = defaults.get(name, value)
        if not isinstance(value, Mapping):
            row = {"name": name, "value": value_text(value), "meaning": ""}
            alone.append(row | {"changed": before != value})
            continue
        before = before if isinstance(before, Mapping) else {}
        fields = getattr(SECTIONS.get(name), "__dataclass_fields__", {})
        rows = []
        for leaf, content in value.items():
            meaning = fields[leaf].metadata.get("meaning", "") if leaf in fields else ""
            changed = leaf in before and before[leaf] != content
            row = {"name": leaf, "value": value_text(content), "meaning": meaning}
            rows.append(row | {"changed": changed})
        tables.append((name, rows))
    return [(name, rows) for name, rows in tables if rows]


@contextmanager
def quiet_papermill() -> Iterator[None]:
    """Silence what papermill and its parts say about things we check ourselves."""
    log = logging.getLogger("papermill")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
