"""The embedding benchmark's JSON (``dlrm bench --embeddings``) as table and figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dlrm_core.errors import InputError
from dlrm_core.files import read_json
from dlrm_core.machine import REPOSITORY
from dlrm_core.units import NOTHING, counted, milliseconds, percent, speedup
from dlrm_workbook.show.tables import Table, Text, aligned
from dlrm_workbook.show.theme import (
    add_ends,
    add_headings,
    figure,
    in_groups,
    label_rows,
    mark_one,
    marker,
    rows_of,
)

DEFAULT = REPOSITORY / "benchmarks" / "results" / "embeddings.json"

SCHEMA = "dlrm bench --embeddings", 1
"""``kind`` and ``schema`` of the documents that are read here."""

PHASES = ("forward", "backward", "update")
UPDATES = ("naive", "atomic", "locked", "race_free")
MEMORY = "memory"

LABELS = {
    "facebook": "facebookresearch/dlrm",
    "torch": "torch",
    "fbgemm": "FBGEMM",
    "fused": "ours, fused",
    MEMORY: "bare row accesses",
    "race_free": "race-free",
}


def read_embeddings(text: str = "") -> dict[str, Any] | None:
    """The document in a file; without a name that in benchmarks/results, None if there is none.

    Raises:
        InputError: the file is missing, or no embedding benchmark of this version.
    """
    if not text and not DEFAULT.is_file():
        return None
    file = Path(text).expanduser() if text else DEFAULT
    found = read_json(file)
    if not isinstance(found, dict) or (found.get("kind"), found.get("schema")) != SCHEMA:
        raise InputError(f"{file}: is no embedding benchmark of this version (schema {SCHEMA[1]})")
    return found


def times(document: Mapping[str, Any]) -> pd.DataFrame:
    """Medians of every contestant in every case.

    Returns:
        ``case``, ``meaning``, ``threads``, ``contestant``, ``study`` (whether it is one of
        contention), ``forward_ms``, ``backward_ms``, ``update_ms``, ``total_ms``.
    """
    rows = [
        {
            **{name: case[name] for name in ("case", "meaning", "threads")},
            "contestant": name,
            "study": name in UPDATES,
            **{f"{phase}_ms": found[f"{phase}_ms"] for phase in (*PHASES, "total")},
        }
        for case in document["cases"]
        for name, found in (case.get("contestants") or {}).items()
    ]
    columns = ["case", "meaning", "threads", "contestant", "study"]
    return pd.DataFrame(rows, columns=[*columns, *(f"{p}_ms" for p in (*PHASES, "total"))])


def bars(document: Mapping[str, Any], study: bool = False) -> go.Figure:
    """Forward, backward and update of each contestant, as multiples of ours in the same case.

    Args:
        study: the cases of the contention study, with the most threads that were measured,
            instead of the back ends with the fewest.
    """
    table = times(document)
    table = table[table["study"] == study].reset_index(drop=True)
    threads = table["threads"].max() if study else table["threads"].min()
    table = table[table["threads"] == threads].reset_index(drop=True)
    ours = table[table["contestant"].isin(["fused", "race_free"])]
    of = {(row.case, row.threads): row.total_ms for row in rows_of(ours)}
    base = [of.get((row.case, row.threads), float("nan")) for row in rows_of(table)]
    name = "race-free updates" if study else "our fused back end"
    title = "Ways to share an update between threads" if study else "Embeddings by back end"
    places, headings = in_groups(
        f"{row.case}, {counted(row.threads, 'thread')}" for row in rows_of(table)
    )
    result = figure(title, 150 + 27 * (len(table) + len(headings)), legend=True)
    for phase in PHASES:
        result.add_trace(
            go.Bar(
                x=table[f"{phase}_ms"] / base,
                y=places,
                orientation="h",
                name=phase,
                marker=marker("embedding", phase),
                customdata=table[f"{phase}_ms"],
                hovertemplate=f"{phase} %{{customdata:,.2f}} ms<extra></extra>",
            )
        )
    ends = table["total_ms"] / base
    add_ends(result, ends, places, list(map(milliseconds, table["total_ms"])))
    add_headings(result, headings)
    longest = float(ends.max()) if len(table) else 1.0
    mark_one(result, 1.0, headings, max(places, default=0.0))
    result.update_layout(barmode="stack", bargap=0.25)
    result.update_xaxes(title=f"time, {name} of the same case is 1", range=[0, 1.35 * longest])
    label_rows(result, [label(name) for name in table["contestant"]], places)
    return result


def label(name: str) -> str:
    """A contestant as a reader calls it."""
    return LABELS.get(name, name)


def table(document: Mapping[str, Any]) -> Table:
    """Times, how many times as fast ours is, and the goals."""
    found = times(document)
    cells = aligned(*(found[f"{phase}_ms"] for phase in (*PHASES, "total")))
    cases = {(case["case"], case["threads"]): case for case in document["cases"]}
    rows = []
    for number, row in enumerate(rows_of(found)):
        case = cases[row.case, row.threads]
        best = "race_free" if row.study else "fused"
        gain = (case.get("ratios") or {}).get(best, {}).get(row.contestant)
        goal = next(
            (t["wanted"] for t in case.get("targets") or [] if t["against"] == row.contestant), None
        )
        rows.append(
            (
                row.meaning,
                str(row.threads),
                label(row.contestant),
                *(column[number] for column in cells),
                _gain(gain) if gain else NOTHING,
                f"{goal:g}×" if goal else NOTHING,
            )
        )
    columns = ["case", "threads", "contestant", *(f"{phase} (ms)" for phase in PHASES)]
    return Table([*columns, "all (ms)", "ours is as fast (rounds)", "goal"], rows)


def _gain(ratio: Mapping[str, float]) -> str:
    """Times as fast, with the rounds' range; one round has none."""
    low, mid, high = (ratio[name] for name in ("low", "median", "high"))
    return speedup(mid, low, high) if low < high else f"{mid:.2f}× (one round)"


def sentences(document: Mapping[str, Any], study: bool = False) -> Text:
    """Goals, the pace of bare accesses, whether all computed the same, who did not run.

    Args:
        study: of the contention study's cases only.
    """
    lines = []
    for case in document["cases"]:
        if study and not set(case.get("contestants") or ()) & set(UPDATES):
            continue
        where = f"{case['meaning']}, {counted(case['threads'], 'thread')}"
        for target in case.get("targets") or []:
            reached = target["reached"]
            said = "not measured" if reached is None else f"{reached:.2f}×"
            lines.append(
                f"- {where}: ours against {label(target['against'])} {said}, "
                f"goal {target['wanted']:g}×."
            )
        if share := case.get("share_of_row_accesses"):
            lines.append(
                f"- {where}: {percent(share['total_ms']['median'])} of the pace of bare accesses "
                "to the same rows, which no back end can exceed by much."
            )
        if case.get("agree") is False:
            lines.append(f"- **{where}: not all contestants computed the same.**")
        for name, why in (case.get("failures") or {}).items():
            lines.append(f"- {where}: {label(name)} did not run: {why}.")
    commands = [line for line in document["commands"] if not study or "contention" in line]
    lines.append(
        f"- Measured on {document['date']}, {document['machine'].get('cpu', '')}, with "
        f"`{'`, `'.join(commands)}`."
    )
    return Text("\n".join(dict.fromkeys(lines)))
