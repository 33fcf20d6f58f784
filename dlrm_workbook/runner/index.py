"""The list of all runs of an output root: ``index.html``, made of the run folders alone.

Nothing is remembered between two lists, so that folders can be moved, deleted and added by hand.
What is no run folder, or has no readable ``run.json``, is left out and counted.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import write_text
from dlrm_workbook.ground.runs import RunFolder, mark_interrupted
from dlrm_workbook.ground.units import duration
from dlrm_workbook.runner.templating import filled, template_text
from dlrm_workbook.show.tables import QUALITY_LEVELS

DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
FIRST = 50
"""Rows that a reader sees at first."""


def write_index(root: Path) -> Path:
    """Write ``index.html`` beside the dated folders of an output root, newest run first.

    Runs whose process is gone are marked as interrupted on the way.

    Raises:
        InputError: it cannot be written there.
    """
    folders = sorted(
        (folder for day in _folders(root) if DAY.fullmatch(day.name) for folder in _folders(day)),
        key=lambda folder: (folder.parent.name, folder.name),
        reverse=True,
    )
    rows = [row for folder in folders if (row := _row(folder)) is not None]
    page = filled(
        "index.html.j2",
        rows=rows,
        first=FIRST,
        levels=QUALITY_LEVELS,
        left_out=len(folders) - len(rows),
        style=Markup(template_text("page.css")),
        script=Markup(template_text("tables.js")),
    )
    write_text(root / "index.html", page)
    return root / "index.html"


def list_runs(folder: RunFolder) -> None:
    """Write the list again after a run in a dated folder began or ended.

    A list that cannot be written is no reason to lose the run.
    """
    if DAY.fullmatch(folder.path.parent.name):
        with contextlib.suppress(InputError, OSError):
            write_index(folder.path.parents[1])


def _folders(place: Path) -> list[Path]:
    try:
        return [entry for entry in place.iterdir() if entry.is_dir()]
    except OSError:
        return []


def _row(folder: Path) -> dict[str, Any] | None:
    """What the list says of a run; None where there is no readable run.json."""
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        notebook = str(record["notebook"])
        record = mark_interrupted(folder / "run.json", record)
        there = {entry.name for entry in folder.iterdir()}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    names = {
        "page": f"{notebook}.html",
        "notebook": f"{notebook}.ipynb",
        "run.json": "run.json",
        "verdict.md": "verdict.md",
    }
    address = quote(f"{folder.parent.name}/{folder.name}")
    parameters = record.get("parameters")
    title = parameters.get("title") if isinstance(parameters, dict) else ""
    said = record.get("headline") or record.get("error") or title
    seconds: Any = record.get("seconds")
    quality = record.get("quality")
    # a foreign file may say anything
    timed = isinstance(seconds, int | float) and 0 <= seconds < 1e9
    return {
        "when": f"{folder.parent.name} {_clock(folder.name)}",
        "notebook": notebook,
        "preset": str(record.get("preset", "")),
        "status": str(record.get("status", "")),
        "level": str(quality.get("level", "")) if isinstance(quality, dict) else "",
        "headline": str(said or "")[:400],
        "seconds": seconds if timed else "",
        "took": duration(seconds) if timed else "",
        "links": {
            name: f"{address}/{quote(file)}" for name, file in names.items() if file in there
        },
    }


def _clock(name: str) -> str:
    """Time of day from a folder's name; empty where it does not begin with one."""
    time_of_day = re.match(r"(\d\d)(\d\d)(\d\d)-", name)
    return ":".join(time_of_day.groups()) if time_of_day else ""
