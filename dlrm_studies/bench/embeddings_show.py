"""The embedding benchmark's JSON (``dlrm bench --embeddings``) as table and figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dlrm_core.base.text import counted
from dlrm_studies.bench import embeddings
from dlrm_studies.columns import columns_of
from dlrm_workbook.analysis.sentences import FENCE, in_markdown
from dlrm_workbook.ground.ledger import read_document
from dlrm_workbook.ground.machine import RESULTS
from dlrm_workbook.ground.units import NOTHING, milliseconds, percent, ratio, speedup
from dlrm_workbook.show import theme
from dlrm_workbook.show.tables import Text, each_row

DEFAULT = RESULTS / "embeddings.json"

LABELS = {
    "facebook": "facebookresearch/dlrm",
    "torch": "torch",
    "fbgemm": "FBGEMM",
    "fused": "ours, fused",
    embeddings.FUSED_BF16: "ours, rows in bf16",
    embeddings.MEMORY_BF16: "bare row accesses, bf16",
    embeddings.MEMORY: "bare row accesses",
}


def read_embeddings(text: str = "") -> dict[str, Any] | None:
    """The document in a file; without a name that in benchmarks/results, None if there is none.

    Raises:
        InputError: the file is missing, or no embedding benchmark of this version.
    """
    if not text and not DEFAULT.is_file():
        return None
    file = Path(text).expanduser() if text else DEFAULT
    return read_document(
        file, "embedding benchmark", kind=embeddings.KIND, schema=embeddings.SCHEMA
    )


def embedding_times(document: Mapping[str, Any]) -> pd.DataFrame:
    """Medians of every contestant in every case.

    Returns:
        Columns as in ``dlrm help columns embedding_times``.
    """
    rows = []
    for case in document["cases"]:
        goals = {target["against"]: target["wanted"] for target in case.get("targets") or []}
        for name, figures in (case.get("contestants") or {}).items():
            ours = (case.get("ratios") or {}).get(case.get("ours", embeddings.FUSED), {})
            gain = ours.get(name) or dict.fromkeys(("median", "low", "high"), math.nan)
            rows.append(
                (
                    *(case["case"], case["meaning"], case["threads"], name),
                    *(figures[f"{phase}_ms"] for phase in (*embeddings.PHASES, "total")),
                    *(gain["median"], gain["low"], gain["high"], goals.get(name, math.nan)),
                )
            )
    columns = ["case", "meaning", "threads", "contestant"]
    columns += [f"{phase}_ms" for phase in (*embeddings.PHASES, "total")]
    return pd.DataFrame(rows, columns=[*columns, "mid", "low", "high", "goal"])


def back_end_label(name: str) -> str:
    """A contestant as a reader calls it."""
    return LABELS.get(name, name)


def _gain(mid: float, low: float, high: float) -> str:
    """Times as fast, with the rounds' range; one round has none."""
    if math.isnan(mid):
        return NOTHING
    return speedup(mid, low, high) if low < high else f"{ratio(mid)} (one round)"


COLUMNS = columns_of(
    "embeddings",
    {"back_end": each_row(back_end_label, words=True), "gain": each_row(_gain)},
)


def bars(document: Mapping[str, Any]) -> go.Figure:
    """Forward, backward and update of each contestant, as multiples of ours in the same case.

    The cases with the fewest threads that were measured are shown.
    """
    table = embedding_times(document)
    table = table[table["threads"] == table["threads"].min()].reset_index(drop=True)
    ours = table[table["contestant"] == "fused"]
    # one count of threads is left
    base = table["case"].map(ours.set_index("case")["total_ms"])
    places, headings = theme.in_groups(
        f"{row.case}, {counted(row.threads, 'thread')}" for row in theme.rows_of(table)
    )
    result = theme.figure(
        "Embeddings by back end", 150 + 27 * (len(table) + len(headings)), legend=True
    )
    labels = [back_end_label(name) for name in table["contestant"]]
    for phase in embeddings.PHASES:
        theme.add_bars(
            result,
            table[f"{phase}_ms"] / base,
            places,
            phase,
            theme.marker("embedding", phase),
            f"%{{customdata[1]}}<br>{phase} %{{customdata[0]:,.2f}} of %{{customdata[2]:,.2f}} ms",
            customdata=list(zip(table[f"{phase}_ms"], labels, table["total_ms"], strict=True)),
        )
    ends = table["total_ms"] / base
    # behind the dotted line, which would cross them
    label_places = ends.clip(lower=1.0)
    texts = list(map(milliseconds, table["total_ms"]))
    theme.add_ends(result, label_places, places, texts)
    theme.add_headings(result, headings)
    theme.mark_one(result, 1.0, headings, max(places, default=0.0))
    result.update_layout(barmode="stack", bargap=0.25)
    result.update_xaxes(
        title="time, our fused back end of the same case is 1",
        range=theme.with_room(label_places, texts),
    )
    theme.label_rows(result, labels, places)
    return result


def sentences(document: Mapping[str, Any]) -> Text:
    """The pace of bare accesses, whether all computed the same, who did not run."""
    lines, paces = [], []
    for case in document["cases"]:
        where = f"{case['meaning']}, {counted(case['threads'], 'thread')}"
        if share := case.get("share_of_row_accesses"):
            words = f"{case['case']}, {counted(case['threads'], 'thread')}"
            paces.append((share["total_ms"]["median"], words))
        if case.get("agree") is False:
            lines.append(f"- **{where}: not all contestants computed the same.**")
        for name, why in (case.get("failures") or {}).items():
            lines.append(f"- {where}: {back_end_label(name)} did not run: {in_markdown(why)}.")
    if paces:
        ends = dict.fromkeys((min(paces), max(paces)))
        lines.append(
            "- No back end can exceed the pace of bare accesses to the same rows by much; ours "
            f"reaches {' to '.join(f'{percent(pace)} ({where})' for pace, where in ends)} of it."
        )
    measured = f"- Measured on {document['date']}, {document['machine'].get('cpu', '')}, with:"
    return Text(
        "\n".join([*dict.fromkeys(lines), measured, "", FENCE, *document["commands"], FENCE])
    )
