"""Dated run folders: one for each executed notebook, explaining itself by its run.json.

``OUTPUT_ROOT/YYYY-MM-DD/HHMMSS-NOTEBOOK-PRESET/`` is claimed by ``mkdir``, so two
runs of the same second get two folders and no earlier run is ever written into.
``run.json`` is replaced whole (temporary file, then rename), so a reader sees
either the old state or the new one. A run that was killed outright stays
``running`` and is never taken for a finished one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from dlrm_core.errors import InputError
from dlrm_core.files import read_json, write_json
from dlrm_workbook.machine import REPOSITORY, machine_facts, versions

NOTEBOOKS = REPOSITORY / "notebooks"
DEFAULT_OUTPUT_ROOT = REPOSITORY / "outputs"

LATEST = "latest"
"""What a user types for the newest run instead of its folder."""


@dataclass
class RunFolder:
    """A run folder and what its run.json says.

    Attributes:
        path: absolute path of the folder.
        record: content of run.json: ``notebook``, ``status``, ``parameters``,
            ``versions``, ``machine``, ``command``, ``started``, ``seconds``,
            ``artifacts``, ``chain`` (notebooks that ran together to their folders, seen from
            this one), ``headline`` and ``quality`` where the notebook says them, and ``error``
            (and ``failing_cell``) of a run that failed. A status
            is ``running``, ``finished``, ``failed`` or ``interrupted``.
    """

    path: Path
    record: dict[str, Any]
    _clock: float = field(default_factory=time.monotonic, repr=False)

    @property
    def notebook(self) -> str:
        """Name of the notebook, without suffix."""
        return str(self.record["notebook"])

    @property
    def ipynb(self) -> Path:
        """The executed notebook, whole or partial."""
        return self.path / f"{self.notebook}.ipynb"

    @property
    def html(self) -> Path:
        """The rendered page."""
        return self.path / f"{self.notebook}.html"

    @classmethod
    def reopen(cls, path: Path, record: Mapping[str, Any]) -> RunFolder:
        """A folder whose run goes on: its run.json says ``running`` again, and no error."""
        kept = {k: v for k, v in record.items() if k not in ("error", "failing_cell")}
        folder = cls(path, kept | {"status": "running"})
        write_json(path / "run.json", folder.record)
        return folder

    def elapsed(self) -> float:
        """Seconds since the folder was claimed."""
        return round(time.monotonic() - self._clock, 3)

    def record_parameters(self, sections: Mapping[str, Any]) -> None:
        """Put parameters into run.json beside those that the run was given."""
        self.record["parameters"] = {**self.record["parameters"], **sections}
        write_json(self.path / "run.json", self.record)

    def take_recorded_parameters(self) -> None:
        """Take over the parameters that the notebook itself put into run.json."""
        with contextlib.suppress(InputError, KeyError, TypeError):
            self.record["parameters"] = dict(read_json(self.path / "run.json")["parameters"])

    def close(self, status: str, **fields: Any) -> None:
        """Write the final state: status, seconds since the claim, and what lies in the folder."""
        self.record.update(fields)
        self.record["status"] = status
        self.record["seconds"] = self.elapsed()
        self.record["artifacts"] = sorted(
            entry.name + ("/" if entry.is_dir() else "")
            for entry in self.path.iterdir()
            if not entry.name.startswith(".")
        )
        write_json(self.path / "run.json", self.record)


def claim_run_folder(
    output_root: str | os.PathLike[str],
    notebook: str,
    preset: str,
    *,
    parameters: Mapping[str, Any],
    command: str,
    now: datetime | None = None,
    place: Path | None = None,
) -> RunFolder:
    """Create the folder of a new run, with a run.json that says ``running``.

    Args:
        place: the folder itself (numbered on if it is there); None: a dated one in
            ``output_root``.

    Raises:
        InputError: nothing can be created or written under ``output_root``.
    """
    now = (now or datetime.now()).astimezone()
    root = Path(output_root).expanduser().absolute()
    stem = f"{now:%H%M%S}-{notebook}-{re.sub(r'[^A-Za-z0-9._+-]+', '_', preset)}"
    try:
        day = place.parent if place else root / f"{now:%Y-%m-%d}"
        stem = place.name if place else stem
        day.mkdir(parents=True, exist_ok=True)
        path = _claim(day, stem)
        record = {
            "notebook": notebook,
            "preset": preset,
            "status": "running",
            "parameters": dict(parameters),
            "versions": versions(),
            "machine": machine_facts(),
            "command": command,
            "started": now.isoformat(),
            "seconds": None,
            "artifacts": ["run.json"],
        }
        folder = RunFolder(path, record)
        write_json(path / "run.json", record)
    except OSError as error:
        raise InputError(
            f"{output_root}: no run folder can be made in this output root "
            f"({error.strerror or error}: {error.filename or root}); "
            "choose another with --output-root"
        ) from None
    return folder


def _claim(day: Path, stem: str) -> Path:
    """Make ``day/stem``, or ``day/stem-2`` and so on if that name is taken."""
    number = 1
    while True:
        path = day / (stem if number == 1 else f"{stem}-{number}")
        try:
            # mkdir is atomic: of two processes that want a name, one gets it
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def named_run(
    place: str | os.PathLike[str],
    notebook: str,
    output_root: str | os.PathLike[str] = DEFAULT_OUTPUT_ROOT,
    *,
    finished: bool = True,
) -> Path:
    """What a user named as a run folder or recording; ``latest`` is the newest run of a notebook.

    Args:
        place: a path, or :data:`LATEST`.
        notebook: whose newest run is meant.
        finished: whether it must have finished, or must not.

    Raises:
        InputError: there is no such run in ``output_root``.
    """
    if str(place) != LATEST:
        return Path(place)
    run = latest_run(output_root, notebook, finished=finished)
    if run is None:
        state = "finished" if finished else "unfinished"
        raise InputError(f"{LATEST}: there is no {state} run of {notebook} in {output_root}")
    return run


def runs_of(
    output_root: str | os.PathLike[str], notebook: str, *, finished: bool = True
) -> list[Path]:
    """Folders of the runs of a notebook that have finished (or have not), the newest first.

    Only run.json counts: folders without a readable one are passed over.
    """
    found: list[tuple[datetime, Path]] = []
    for run_json in Path(output_root).expanduser().absolute().glob("*/*/run.json"):
        try:
            record = json.loads(run_json.read_text(encoding="utf-8"))
            if record["notebook"] != notebook or (record["status"] == "finished") != finished:
                continue
            started = datetime.fromisoformat(record["started"]).astimezone()
        except (OSError, ValueError, KeyError, TypeError):
            continue
        # of two runs that started at the same instant, the later name (-2) is newer
        found.append((started, run_json.parent))
    return [folder for _, folder in sorted(found, reverse=True)]


def latest_run(
    output_root: str | os.PathLike[str], notebook: str, *, finished: bool = True
) -> Path | None:
    """Folder of the newest run of a notebook that has finished (or has not), or None."""
    return next(iter(runs_of(output_root, notebook, finished=finished)), None)
