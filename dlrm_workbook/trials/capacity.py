"""``dlrm capacity``: what a run would need, and where it would fit, without running it."""

from __future__ import annotations

import argparse
import json

import pandas as pd

from dlrm_core.base.files import plain
from dlrm_core.base.text import format_bytes
from dlrm_core.config import load_parameters
from dlrm_workbook.analysis.capacity import CUDA_CONTEXT_BYTES, Capacity, capacity_here
from dlrm_workbook.show.tables import Text, TextTable, show

LARGEST_SHOWN = 30
"""Lines of the forecast that are printed; smaller items are summed."""


def command_capacity(arguments: argparse.Namespace) -> int:
    """Print the forecast as tables or as one JSON object. Exit code 0, fits or not."""
    found = capacity_here(load_parameters(arguments.file, arguments.parameter))
    if arguments.json:
        print(json.dumps(plain(found.to_json()), indent=2, ensure_ascii=False))
        return 0
    print(show(found.weights()), end="\n\n")
    print(items_table(found), end="\n\n")
    print(show(found.table(), most=len(found.verdicts)), end="\n\n")
    print(sources(found))
    return 0


def items_table(found: Capacity) -> TextTable | Text:
    """The largest items, each with where it lies and when it is alive."""
    items = pd.DataFrame([vars(item) for item in found.items])
    items = items.sort_values("bytes", ascending=False, kind="stable")
    rest = items[LARGEST_SHOWN:]
    if len(rest):
        smaller = {"name": f"{len(rest)} smaller items", "bytes": rest["bytes"].sum()}
        items = pd.concat([items[:LARGEST_SHOWN], pd.DataFrame([smaller])])
    items = items.rename(columns={"name": "what"})
    columns = {"what": "", "shape": "", "bytes": "size", "place": "where", "when": ""}
    return show(items, columns, most=LARGEST_SHOWN)


def sources(found: Capacity) -> str:
    """What the figures of GPUs that are not here rest on."""
    lines = [
        "GPUs by their data sheets, less "
        f"{format_bytes(CUDA_CONTEXT_BYTES)} assumed for the CUDA context:"
    ]
    targets: dict[str, list[str]] = {}
    for verdict in found.verdicts:
        targets.setdefault(verdict.source, []).append(verdict.target)
    lines += [f"  {', '.join(names)}: {sheet}" for sheet, names in targets.items() if sheet]
    return "\n".join(lines)
