"""Tables (CSV) that lie beside the modules that read them."""

from __future__ import annotations

import csv
from pathlib import Path


def rows_of(module: str, name: str) -> list[dict[str, str]]:
    """The rows of a table beside a module, whose ``__file__`` is given: column to text."""
    with Path(module).with_name(name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
