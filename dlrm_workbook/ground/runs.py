"""Dated run folders: one for each executed notebook, explaining itself by its run.json.

``OUTPUT_ROOT/YYYY-MM-DD/HHMMSS-NOTEBOOK-PRESET/`` is claimed by ``mkdir``, so two
runs of the same second get two folders and no earlier run is ever written into.
``run.json`` is replaced whole (temporary file, then rename), so a reader sees
either the old state or the new one. While a run goes on its process holds a lock on
the folder, which ends with the process however that ends: a run that was killed
outright says ``running``, and the next command says ``interrupted`` in its stead.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import (
    lock_or_refuse,
    make_folder,
    read_json,
    sync_folder,
    sync_tree,
    whole_folder,
    write_json,
)
from dlrm_core.config import PRESETS
from dlrm_workbook.ground.machine import machine_facts, versions

SHIPPED = (Path(__file__).parents[1] / "notebooks").resolve()
"""Folder of the notebooks that come with the package; in a checkout its ``notebooks/``."""


def workbook_folder() -> Path | None:
    """The folder whose ``notebooks/`` and ``parameters/`` are edited and run, if there is one.

    It is the current folder if ``dlrm new`` made it (from JupyterLab: the one above, since a
    notebook runs in its own folder), else the checkout that this package lies in. Folders
    further up are not looked at: what lies there may be somebody else's, and would be run.
    """
    here = Path.cwd()
    for place in (here, here.parent if here.name == "notebooks" else here, SHIPPED.parent):
        if (place / "notebooks" / "bottlenecks.ipynb").is_file() and (
            place / "parameters"
        ).is_dir():
            return place
    return None


_FOLDER = workbook_folder()
NOTEBOOKS = _FOLDER / "notebooks" if _FOLDER else SHIPPED
"""Folder of the notebooks of ``dlrm run``: those to edit, else those of the package."""
DEFAULT_OUTPUT_ROOT = (_FOLDER or Path.cwd()) / "outputs"

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
            this one), ``headline`` and ``quality`` where the notebook says them, ``notices`` of
            the training or profile where there are some, and ``error`` (and ``failing_cell``)
            of a run that failed. A status is ``running``, ``finished``, ``failed`` or
            ``interrupted``.
    """

    path: Path
    record: dict[str, Any]
    _clock: float = field(default_factory=time.monotonic, repr=False)
    _lock: int | None = field(default=None, repr=False)

    @property
    def notebook(self) -> str:
        return str(self.record["notebook"])

    @property
    def ipynb(self) -> Path:
        return self.path / f"{self.notebook}.ipynb"

    @property
    def html(self) -> Path:
        return self.path / f"{self.notebook}.html"

    @classmethod
    def reopen(cls, path: Path, record: Mapping[str, Any]) -> RunFolder:
        """A folder whose run goes on: its run.json says ``running`` again, and no error. An
        InputError says that another process is running it."""
        kept = {k: v for k, v in record.items() if k not in ("error", "failing_cell")}
        folder = cls(path, kept | {"status": "running"})
        folder.hold()
        write_json(path / "run.json", folder.record)
        return folder

    def hold(self) -> None:
        """Lock the folder until :meth:`close`, or until this process ends; an InputError says that
        another process has it."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            lock_or_refuse(handle, f"{self.path} is being run by another process")
        except InputError:
            os.close(handle)
            raise
        self._lock = handle

    def elapsed(self) -> float:
        """Seconds since the folder was claimed."""
        return round(time.monotonic() - self._clock, 3)

    def record_parameters(self, sections: Mapping[str, Any], recording: Mapping[str, Any]) -> None:
        """Put parameters into run.json beside those that the run was given, and of the recording
        that is explained, which another machine may have made, its ``device`` and ``machine``."""
        self.record["parameters"] = {**self.record["parameters"], **sections}
        self.record["recording"] = dict(recording)
        write_json(self.path / "run.json", self.record)

    def take_recorded_parameters(self) -> None:
        """Take over the parameters, and whose they are, that the notebook put into run.json."""
        with contextlib.suppress(InputError, KeyError, TypeError):
            written = read_json(self.path / "run.json")
            self.record["parameters"] = dict(written["parameters"])
            self.record["recording"] = dict(written["recording"])

    def close(self, status: str, **fields: Any) -> None:
        """Write the final state: status, seconds since the claim, and what lies in the folder.

        What run.json speaks of is on the disk before it says so, whoever wrote it.
        """
        self.record.update(fields)
        self.record["status"] = status
        self.record["seconds"] = self.elapsed()
        self.record["artifacts"] = sorted(
            entry.name + ("/" if entry.is_dir() else "")
            for entry in self.path.iterdir()
            if not entry.name.startswith(".")
        )
        sync_tree(self.path)
        write_json(self.path / "run.json", self.record)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class RunError(RuntimeError):
    """A notebook did not finish. The message names the cell and what it said.

    Attributes:
        folder: the run folder, with the partial notebook.
        code: exit code for a command line: 1, 2 if a cell refused its input, or
            128 + signal after an interruption.
    """

    def __init__(self, message: str, folder: RunFolder, code: int = 1) -> None:
        super().__init__(message)
        self.folder = folder
        self.code = code


GONE = "its process was killed, or the machine went down"


def mark_interrupted(run_json: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Mark a run as interrupted that is ``running`` without a process; return its record.

    Its ``run.json`` is written anew then, where that is possible, and so are those of the points
    of a sweep, whose folders are inside.
    """
    if record.get("status") != "running":
        return record
    with contextlib.suppress(OSError):
        handle = os.open(run_json.parent, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # it may have ended since it was read
            record = json.loads(run_json.read_text(encoding="utf-8"))
            if record["status"] == "running":
                record |= {"status": "interrupted", "error": f"{record['notebook']}: {GONE}"}
                write_json(run_json, record)
                for point in run_json.parent.glob("*/*/run.json"):
                    mark_interrupted(point, read_json(point))
        except (BlockingIOError, InputError, ValueError, KeyError, TypeError):
            pass  # it goes on, or the folder is not ours to write
        finally:
            os.close(handle)
    return record


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
    """Create the folder of a new run, with a run.json that says ``running``: ``place`` (numbered on
    if it is there), or a dated one in ``output_root``. An InputError says that nothing can be
    created or written under that."""
    now = (now or datetime.now()).astimezone()
    root = Path(output_root).expanduser().absolute()
    stem = f"{now:%H%M%S}-{notebook}-{re.sub(r'[^A-Za-z0-9._+-]+', '_', preset)}"
    path = None
    try:
        day = place.parent if place else root / f"{now:%Y-%m-%d}"
        stem = place.name if place else stem
        make_folder(day)
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
        folder.hold()
        sync_folder(day)
        write_json(path / "run.json", record)
    except (OSError, InputError) as error:
        with contextlib.suppress(OSError):  # no empty folders stay, where they are ours
            if path is not None:
                path.rmdir()
            if place is None:
                day.rmdir()
        reason = str(error)
        if isinstance(error, OSError):
            reason = f"{error.strerror or error}: {error.filename or root}"
        raise InputError(
            f"{output_root}: no run folder can be made in this output root ({reason}); "
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
    """What a user named as a run folder or recording; ``latest`` is the newest run of a notebook
    that has ``finished``, or has not. An InputError says that there is no such run in
    ``output_root``."""
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


def command_new(arguments: Any) -> int:
    """``dlrm new DIR``: the notebooks and parameters that came with the package, to edit. An
    InputError says that the folder holds something already, or cannot be written."""
    target = Path(arguments.folder).expanduser().absolute()
    if target.exists() and not target.is_dir():
        raise InputError(f"{target} is no folder")
    if target.is_dir() and any(target.iterdir()):
        raise InputError(f"{target} is not empty; dlrm new writes only into a new folder")
    for source, suffix in ((PRESETS, ".yaml"), (SHIPPED, ".ipynb")):
        name = "parameters" if source == PRESETS else "notebooks"
        with whole_folder(target / name, "folder") as part:
            for file in sorted(source.glob(f"*{suffix}")):
                (part / file.name).write_bytes(file.read_bytes())
    print(
        f"Next: cd {shlex.quote(str(target))}; dlrm run all -f parameters/seed.yaml, "
        "or jupyter lab notebooks",
        file=sys.stderr,
    )
    print(target)
    return 0
