"""Remedies that were tried in turns on the program itself, after it was recorded.

What :mod:`dlrm_workbook.recordings.torch.trials` leaves in a recording is ``meta["trials"]``.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from dlrm_workbook.analysis.context_tree import unmeasured
from dlrm_workbook.ground.units import faster
from dlrm_workbook.recordings.profile import Profile

NUMBERS = ("off_ms", "on_ms", "turns", "iterations", "memory_bytes", "compile_s")
TEXTS = ("id", "remedy", "status", "place", "code", "reason")
RANGE = ("speedup_low", "speedup_mid", "speedup_high")
NUMERICS = ("outputs", "loss")
COLUMNS = [*TEXTS[:3], *RANGE, *NUMBERS, *NUMERICS, "note", *TEXTS[3:]]

NOT_ASKED = (
    "no remedy was tried on this program: `dlrm run all -- COMMAND` tries some, for as many "
    "seconds as profiling.trials says"
)


def tried(profile: Profile) -> pd.DataFrame:
    """Every remedy that was tried, those that paid most first; *together* is last.

    Returns:
        ``id``, ``remedy``; ``status`` (paid, no difference, slower, unclear, failed);
        ``speedup_low``, ``speedup_mid``, ``speedup_high`` (the time of an iteration without it
        over that with it, and a range that holds nine of ten); ``off_ms`` and ``on_ms`` of an
        iteration; ``turns`` and ``iterations`` that were timed; ``memory_bytes`` (peak with it
        minus without it), ``compile_s``; ``outputs`` and ``loss`` (largest relative difference
        on one batch), ``note`` on them; ``place`` (FILE:LINE) and ``code`` to write; ``reason``.
        NaN is not measured. Empty, with the reason, where nothing was tried.
    """
    document = profile.meta.get("trials") or {}
    rows = [_flat(row) for row in _list(document.get("rows")) if isinstance(row, dict)]
    if not rows:
        reason = profile.not_measured.get("trials") or document.get("not_measured")
        nothing = "no remedy was plausible, or none could be tried in its budget"
        return unmeasured(COLUMNS, str(reason or (nothing if document else NOT_ASKED)))
    table = pd.DataFrame(rows, columns=COLUMNS)
    table[list(TEXTS)] = table[list(TEXTS)].fillna("").astype(str)
    for name in (*RANGE, *NUMBERS, *NUMERICS):
        table[name] = pd.to_numeric(table[name], errors="coerce")
    table["combined"] = table["id"].eq("together")
    ordered = table.sort_values(["combined", "speedup_mid"], ascending=[True, False])
    return ordered.reset_index(drop=True)[COLUMNS]


def tried_sentence(profile: Profile) -> str:
    """``Tried on this program: 2 threads instead of 1: 1.9x faster (1.8x to 2x); ...``; else ''."""
    table = tried(profile)
    if table.empty:
        return ""
    paid = table[table["status"].eq("paid")]
    combined = paid["id"].eq("together")
    named = [_gain(row) for _, row in paid[~combined].head(3).iterrows()]
    if not named:
        clear = table["status"].isin(["no difference", "slower"])
        failed = int(table["status"].eq("failed").sum())
        which = "none made it faster" if clear.all() else "none is sure to make it faster"
        failing = f" ({failed} failed)" if failed else ""
        many = "1 remedy" if len(table) == 1 else f"{len(table)} remedies"
        return f"Tried on this program: {many}{failing}, {which}."
    for _, row in paid[combined].iterrows():
        # the best of them alone may be the faster one
        if row["speedup_mid"] > paid[~combined]["speedup_mid"].max():
            every = all(name in row["remedy"] for name in paid[~combined]["remedy"])
            both = "both" if len(named) == 2 else "all that paid together"
            named.append(_gain({**row, "remedy": both} if every else row))
    return f"Tried on this program: {'; '.join(named)}."


def not_tried(profile: Profile) -> pd.DataFrame:
    """``remedy`` and ``reason`` of those that were not tried."""
    document = profile.meta.get("trials") or {}
    left_out = [row for row in _list(document.get("not_tried")) if isinstance(row, dict)]
    return pd.DataFrame(left_out, columns=["remedy", "reason"]).astype(str)


def _gain(row: Any) -> str:
    ends = (row["speedup_mid"], row["speedup_low"], row["speedup_high"])
    return f"{row['remedy']}: {faster(*ends, figures=2)}"


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    gain, numerics = row.get("speedup"), row.get("numerics")
    ends = gain if isinstance(gain, dict) else {}
    numbers = numerics if isinstance(numerics, dict) else {}
    return (
        {name: row.get(name) for name in (*TEXTS, *NUMBERS)}
        | {name: ends.get(name.removeprefix("speedup_")) for name in RANGE}
        | {name: numbers.get(name) for name in NUMERICS}
        | {"note": str(numbers.get("note") or "")}
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
