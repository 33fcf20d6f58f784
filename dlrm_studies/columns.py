"""The columns of the studies' tables, in the order shown: ``columns.csv``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from dlrm_workbook.show import tables

columns_of = partial(tables.columns_of, Path(__file__).with_name("columns.csv"))
"""Tables of a study by their names, given the study's and the formats that are its own."""
