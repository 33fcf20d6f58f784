"""The columns of the studies' tables, in the order shown: ``columns.csv``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from dlrm_workbook.show.tables import Column, Formatter


def columns_of(study: str, formats: Mapping[str, Formatter]) -> dict[str, dict[str, str | Column]]:
    """Each table of a study to its columns, as :func:`dlrm_workbook.show.tables.show` takes them.

    Args:
        formats: of this study alone, by their name in the file; any other name there is one of
            :data:`dlrm_workbook.show.tables.FORMATS`.
    """
    listed = pd.read_csv(Path(__file__).with_name("columns.csv"), keep_default_na=False)
    tables: dict[str, dict[str, str | Column]] = {}
    rows = listed[listed.pop("study").eq(study)]
    for table, name, label, format, needs, unit in rows.itertuples(index=False):
        look = Column(label, formats.get(format, format), tuple(needs.split()), unit)
        tables.setdefault(table, {})[name] = look if format else label
    return tables
