"""A shared machine's slow periods, left out of what is repeated by one rule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd


def undisturbed(table: pd.DataFrame, settings: Sequence[str], repetition: str) -> pd.DataFrame:
    """The rows of the faster half of the repetitions of each setting.

    Where other guests of a machine come and go, the same work takes up to twice as long for
    seconds (seen in a virtual machine that tells nothing of it: no stolen time, no process). A
    mean or a median then says which period a run fell into. What else runs only ever adds, so
    the slower half says more of that than of the program. The mean of the faster half is what
    we call a time: means of parts then add up to the mean of the whole.

    Args:
        settings: columns; what has the same values there is a repetition of the same thing.
        repetition: column that counts the repetitions. A repetition is as long as its rows'
            ``time_ms`` together. Where there is no such column, all rows are kept.
    """
    if table.empty or repetition not in table.columns:
        return table
    keys = [*settings, repetition]
    times = table.groupby(keys, sort=False)["time_ms"].sum()
    groups = times.groupby(level=list(range(len(settings))), sort=False)
    chosen = times.index[groups.rank(method="first") <= np.ceil(groups.transform("size") / 2)]
    return table[pd.MultiIndex.from_frame(table[keys]).isin(chosen)]
