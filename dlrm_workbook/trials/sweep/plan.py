"""Sweeps: one command, many runs. Which points a grid has, and running them to the end.

A parameters file may have a section ``sweep``: leaves, each with the values to try. Every
combination is a point. A key may name several leaves that change together. All points are
validated before the first runs; each has a folder of its own inside the sweep's; what is
finished is in ``sweep.json`` and is not run again when the sweep is resumed.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json, write_json
from dlrm_core.base.settings import shown
from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_workbook.analysis.changes import apply_change, change_text, flat_change
from dlrm_workbook.analysis.ensemble import SWEEP
from dlrm_workbook.ground.ledger import read_document, require_same
from dlrm_workbook.ground.machine import versions
from dlrm_workbook.ground.processes import only_process
from dlrm_workbook.ground.runs import GONE, RunError, mark_interrupted

SWEEP_VERSION = 1
MOST_POINTS = 10_000

RunPoint = Callable[[Parameters, Path, dict[str, Path]], None]
"""Runs the notebooks of one point that are not done yet: its parameters, its folder, and where to
note each that is done, name to run folder. Raises RunError; after a signal the sweep stops."""


@dataclass(frozen=True)
class Point:
    """One combination of the grid."""

    number: int
    change: dict[str, Any]
    parameters: Parameters

    @property
    def name(self) -> str:
        """Of its folder: the number and what is set, such as ``02-batch_size=1024``."""
        words = [f"{leaf.rpartition('.')[2]}={_word(v)}" for leaf, v in self.change.items()]
        text = re.sub(r"[^A-Za-z0-9._=+-]+", "_", ",".join(words).replace(",", "+"))
        return f"{self.number:02d}-{text[:80]}".rstrip("-")

    @property
    def label(self) -> str:
        return change_text(self.change)


def _word(value: Any) -> str:
    if isinstance(value, list | tuple):
        same = len(value) > 2 and all(item == value[0] for item in value)
        return f"{len(value)}x{value[0]}" if same else "-".join(map(str, value))
    return str(value)


def sweep_points(parameters: Parameters) -> list[Point]:
    """Every combination of the ``sweep`` section, the last leaf changing fastest.

    Raises:
        InputError: the section cannot be read, or a point cannot work; the message
            names the point and the field.
    """
    axes = [_axis(str(key), values) for key, values in parameters.sweep.items()]
    count = math.prod(len(values) for _, values in axes)
    if count > MOST_POINTS:
        raise InputError(f"sweep has {count:,} points, expected at most {MOST_POINTS:,}")
    leaves = [leaf for axis in axes for leaf in axis[0]]
    twice = sorted({leaf for leaf in leaves if leaves.count(leaf) > 1})
    if twice:
        raise InputError(f"sweep names {', '.join(twice)} in two keys; expected one")
    points = []
    for number, choice in enumerate(itertools.product(*(values for _, values in axes)), 1):
        change = {
            leaf: value
            for (names, _), values in zip(axes, choice, strict=True)
            for leaf, value in zip(names, values, strict=True)
        }
        where = f"sweep point {number} ({change_text(change)})"
        points.append(Point(number, change, apply_change(parameters, change, where)))
    return points


def _axis(key: str, values: Any) -> tuple[list[str], list[list[Any]]]:
    """(leaves, their values in turn) of one key of the section."""
    leaves = [name.strip() for name in key.split(",")]
    flat_change(dict.fromkeys(leaves), f"sweep: {key}")
    if not isinstance(values, list | tuple) or not values:
        raise InputError(f"sweep: {shown(key)} is {shown(values)}, expected a list of values")
    if len(values) > MOST_POINTS:
        raise InputError(f"sweep: {key} has {len(values):,} values, at most {MOST_POINTS:,}")
    if len(leaves) == 1:
        rows = [[value] for value in values]
    else:
        rows = []
        for number, value in enumerate(values, 1):
            if not isinstance(value, list | tuple) or len(value) != len(leaves):
                raise InputError(
                    f"sweep: value {number} of {key} is {shown(value)}, expected a list of "
                    f"{len(leaves)} values, one for each of {', '.join(leaves)}"
                )
            rows.append(list(value))
    for number, row in enumerate(rows):
        if row in rows[:number]:
            twice = shown(row if len(row) > 1 else row[0])
            raise InputError(f"sweep: {key} has the value {twice} twice")
    return leaves, rows


@dataclass
class Sweep:
    """A sweep's folder and its ``sweep.json``."""

    folder: Path
    record: dict[str, Any]
    points: list[Point] = field(default_factory=list)

    @classmethod
    def begin(
        cls,
        folder: Path,
        parameters: Parameters,
        notebooks: Sequence[str],
        own: Mapping[str, str],
        command: str,
    ) -> Sweep:
        """Write the record of a new sweep, every point waiting; ``own`` are the notebooks' own
        parameters as they were typed, name to text."""
        points = sweep_points(parameters)
        record = {
            "format_version": SWEEP_VERSION,
            "status": "running",
            "preset": parameters.preset,
            "notebooks": list(notebooks),
            "sweep": dict(parameters.sweep),
            "parameters": parameters.to_sections(),
            "own": dict(own),
            "command": command,
            "points": [
                {"number": p.number, "name": p.name, "change": p.change}
                | {"status": "waiting", "folders": {}}
                for p in points
            ],
        }
        sweep = cls(folder, record, points)
        sweep.save()
        return sweep

    @classmethod
    def open(cls, folder: Path) -> Sweep:
        """A sweep that was begun before; what ran when it was killed is ``interrupted``.

        Raises:
            InputError: the folder holds no sweep, or one of another version.
        """
        folder = Path(folder).expanduser().absolute()
        if not (folder / SWEEP).is_file():
            raise InputError(f"{folder} is no sweep's folder (it has no {SWEEP})")
        record = read_document(folder / SWEEP, "sweep", format_version=SWEEP_VERSION)
        run_json = folder / "run.json"
        if run_json.is_file():
            status = mark_interrupted(run_json, read_json(run_json)).get("status")
            for row in record["points"] if status != "running" else ():
                if row["status"] == "running":
                    row |= {"status": "interrupted", "error": GONE}
        base = parameters_from_sections(record["parameters"] | {"sweep": record["sweep"]})
        return cls(folder, record, sweep_points(base))

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.record["points"]
        return rows

    def save(self) -> None:
        write_json(self.folder / SWEEP, self.record)

    def require_same(
        self, parameters: Parameters, notebooks: Sequence[str], own: Mapping[str, str]
    ) -> None:
        """Refuse to go on with other parameters or notebooks than the sweep began with.

        Raises:
            InputError: naming what differs.
        """
        now = {
            "notebooks": list(notebooks),
            "own": dict(own),
            "sweep": dict(parameters.sweep),
            **parameters.to_sections(),
        }
        begun = {name: self.record[name] for name in ("notebooks", "own", "sweep")}
        begun |= self.record["parameters"]
        advice = "a sweep is resumed with the parameters it began with"
        require_same(str(self.folder), begun, now, advice)

    def run(self, run_point: RunPoint) -> int:
        """Run every point that is not finished; a failing one does not stop the others.

        Returns:
            0 if every point finished, 1 if not, 128 + signal after an interruption.
        """
        code = 0
        with only_process(self.folder):
            self.record["status"] = "running"
            for point, row in zip(self.points, self.rows, strict=True):
                place = f"sweep: point {point.number} of {len(self.points)}, {point.label}"
                if row["status"] == "finished":
                    print(f"{place}: finished before", file=sys.stderr, flush=True)
                    continue
                print(place, file=sys.stderr, flush=True)
                code = self._run_point(run_point, point, row)
                if "error" in row:
                    print(f"{place}: {row['error']}", file=sys.stderr, flush=True)
                if code >= 128:
                    break
        left = describe_failures(self)
        self.record["status"] = "interrupted" if code >= 128 else "failed" if left else "finished"
        self.save()
        return code if code >= 128 else 1 if left else 0

    def _run_point(self, run_point: RunPoint, point: Point, row: dict[str, Any]) -> int:
        """Run a point and keep in its row what came of it; the exit code of its failure, or 0."""
        row |= {"status": "running", "versions": versions()}
        row.pop("error", None)
        self.save()
        started = time.monotonic()
        code, done = 0, dict[str, Path]()
        try:
            run_point(point.parameters, self.folder / point.name, done)
            row["status"] = "finished"
        except RunError as failure:
            code = failure.code
            row["status"] = "interrupted" if code >= 128 else "failed"
            row["error"] = str(failure)
        # relative, so that the folder can be moved
        row["folders"] = {name: str(path.relative_to(self.folder)) for name, path in done.items()}
        row["seconds"] = round(time.monotonic() - started, 3)
        self.save()
        return code


def describe_failures(sweep: Sweep) -> str:
    """Which points did not finish and why; empty if all did."""
    lines = [
        f"  point {row['number']} ({row['name']}): {row.get('error', row['status'])}"
        for row in sweep.rows
        if row["status"] != "finished"
    ]
    heading = f"{len(lines)} of {len(sweep.rows)} points did not finish:"
    return "\n".join([heading, *lines]) if lines else ""
