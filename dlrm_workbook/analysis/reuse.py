"""How often a run's batches use embedding rows again, and what a cache of rows would answer."""

from __future__ import annotations

import pandas as pd

from dlrm_workbook.analysis.context_tree import unmeasured
from dlrm_workbook.analysis.work import FLOAT_BYTES
from dlrm_workbook.recordings.profile import Profile

REUSE_COLUMNS = [
    *("table", "rows", "lookups", "rows_used", "lookups_per_row", "used_once_share"),
    *("used_once_lookups_share", "unique_share"),
]
HIT_COLUMNS = ["cache_bytes", "rows", "hit_share", "low", "high"]


def row_reuse(profile: Profile) -> pd.DataFrame:
    """How often rows come up again within the run's first batches, all of them together.

    ``attrs["batches"]``: how many batches. Empty, with the reason, if the recording has none of
    it.
    """
    statistics = profile.meta.get("data_statistics") or {}
    table = pd.DataFrame(statistics.get("tables") or [])
    if "rows_used" not in table:
        return _absent(profile, REUSE_COLUMNS)
    used = table["rows_used"].where(table["rows_used"] > 0)
    table["lookups_per_row"] = table["lookups"] / used
    table["used_once_share"] = table["rows_used_once"] / used
    table["used_once_lookups_share"] = table["rows_used_once"] / table["lookups"].where(used > 0)
    batch_lookups = table["lookups_per_batch"]
    table["unique_share"] = table["unique_rows_per_batch"] / batch_lookups.where(batch_lookups > 0)
    table = table[REUSE_COLUMNS]
    table.attrs["batches"] = statistics["batches"]
    return table


def cache_hit_shares(profile: Profile) -> pd.DataFrame:
    """Share of all tables' lookups that a least-recently-used cache of rows answers.

    ``low`` and ``high`` are 1.96 standard errors of the rows that were chosen to be followed away.
    Empty, with the reason, if the recording has none of it.
    """
    statistics = profile.meta.get("data_statistics") or {}
    table = pd.DataFrame(statistics.get("cache") or [])
    width = ((profile.meta.get("parameters") or {}).get("model") or {}).get("embedding_dim")
    if table.empty or not width:
        return _absent(profile, HIT_COLUMNS)
    table["cache_bytes"] = table["rows"] * int(width) * FLOAT_BYTES
    table["low"] = (table["hit_share"] - 1.96 * table["error"]).clip(lower=0.0)
    table["high"] = (table["hit_share"] + 1.96 * table["error"]).clip(upper=1.0)
    return table[HIT_COLUMNS]


def _absent(profile: Profile, columns: list[str]) -> pd.DataFrame:
    why = (
        "the recording does not say which rows its batches looked up; "
        "`dlrm run profile -f FILE` counts them"
    )
    return unmeasured(columns, why, profile, "data_statistics")
