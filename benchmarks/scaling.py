"""Iterations on 2 and 4 ranks of this machine against their predictions, for many configurations.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json

Each configuration is predicted from the link probe and from its parts without other ranks,
and measured on 1, 2 and 4 gloo ranks, all in turns, round by round. ``--cases a,b`` measures
some of them and keeps the others' results; what was measured lies in ``--folder`` and is not
measured again. Of what is repeated the faster half counts, in runs and in what they are
predicted from alike (:mod:`dlrm_workbook.intervals`), as on the scaling page.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.files import plain, read_json, write_json
from dlrm_workbook.analysis.ranks.record import (
    exposed_shares,
    imbalance,
    predicted_and_measured,
    record_of,
    typical_error,
)
from dlrm_workbook.changes import apply_change
from dlrm_workbook.machine import versions
from dlrm_workbook.studies.scaling.measure import Effort, measure_scaling

BASE: dict[str, Any] = {
    "title": "Kalamkar's Small with tables of 100,000 rows",
    "model": {
        "bottom_mlp": [512, 512, 64],
        "top_mlp": [1024, 1024, 1024, 1],
        "embedding_dim": 64,
        "tables": 8,
        "table_rows": 100_000,
        "loss": "bce",
        "init": "torch",
    },
    "data": {"generator": "uniform", "indices_per_lookup": 50, "fixed_pooling": True},
    "training": {"batch_size": 2048, "sharding": "table_wise", "threads": 1, "device": "cpu"},
}

CHANGES: dict[str, dict[str, Any]] = {
    "base": {},
    "batch 512": {"training.batch_size": 512},
    "batch 4096": {"training.batch_size": 4096},
    "dim 16": {"model.embedding_dim": 16, "model.bottom_mlp": [512, 512, 16]},
    "dim 128": {"model.embedding_dim": 128, "model.bottom_mlp": [512, 512, 128]},
    "pooling 1": {"data.indices_per_lookup": 1},
    "26 one-hot tables": {
        "model.tables": 26,
        "model.table_rows": 50_000,
        "model.bottom_mlp": [13, 512, 256, 64],
        "data.indices_per_lookup": 1,
    },
    "small MLPs": {"model.bottom_mlp": [64, 64], "model.top_mlp": [128, 1]},
    "large MLPs": {"model.top_mlp": [2048, 2048, 1024, 1]},
    "row-wise": {"training.sharding": "row_wise"},
    "column-wise": {"training.sharding": "column_wise"},
    "replicated": {"model.table_rows": 5_000, "training.sharding": "replicated"},
}
"""What differs from ``BASE``, configuration by configuration."""

RANKS = (1, 2, 4)


def main() -> int:
    """Measure, predict, and write what both amount to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--folder", type=Path, default=Path("outputs/scaling"), metavar="DIR")
    parser.add_argument("--cases", default=",".join(CHANGES), metavar="NAME,...")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=4, help="of a round")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a run, at most")
    given = parser.parse_args()
    names = given.cases.split(",")
    unknown = [name for name in names if name not in CHANGES]
    if unknown:
        parser.error(f"unknown configuration {unknown[0]!r}; known: {', '.join(CHANGES)}")
    result = read_json(given.json) if given.json.exists() else {"cases": {}}
    effort = Effort(given.rounds, 1, given.iterations, given.seconds, timeout_s=900.0)
    base = parameters_from_sections(BASE)
    for name in names:
        parameters = apply_change(base, CHANGES[name])
        folder = given.folder / name.replace(" ", "-")
        record = measure_scaling(
            *(parameters, RANKS, folder, ("strong",), effort), on_progress=_say_of(name)
        )
        result |= {
            "command": shlex.join(["python", "benchmarks/scaling.py", "--json", str(given.json)]),
            "machine": record["machine"],
            "versions": versions() | {"torchrec": importlib.metadata.version("torchrec")},
            "base": base.to_sections(),
            "ranks": list(RANKS),
        }
        runs = _compared(record, parameters)
        result["cases"][name] = {"change": CHANGES[name], "runs": runs}
        write_json(given.json, plain(_summed(result)))
    for name, case in result["cases"].items():
        for row in case["runs"]:
            print(
                f"{name:20} {row['ranks']} ranks  measured {row['measured_ms']:8.1f} ms  "
                f"predicted {row['predicted_ms']:8.1f} ms  {100 * row['error']:+6.1f} %"
            )
    runs = sum(len(case["runs"]) for case in result["cases"].values())
    print(
        f"{runs} runs of {result['configurations']} configurations: "
        f"{100 * result['typical_error']:.1f} % (geometric mean)"
    )
    return 0


def _summed(result: dict[str, Any]) -> dict[str, Any]:
    """The result with how far off all its predictions are together."""
    errors = [row["error"] for case in result["cases"].values() for row in case["runs"]]
    result["typical_error"] = typical_error(pd.DataFrame({"error": errors}, dtype=float))
    result["configurations"] = len(result["cases"])
    return result


def _compared(record: dict[str, Any], parameters: Parameters) -> list[dict[str, Any]]:
    """Runs of two ranks or more: measured, predicted, exposed, imbalance."""
    read = record_of(record)
    table = predicted_and_measured(read, parameters)
    exposed = exposed_shares(read).set_index("run")["share"]
    uneven = imbalance(read).set_index("run")["share"]
    found = []
    for row in table.to_dict("records"):
        run = row.pop("run")
        row |= {"exposed_share": exposed.get(run), "imbalance": uneven.get(run)}
        found.append({name: _number(value) for name, value in row.items()})
    return found


def _number(value: Any) -> Any:
    """numpy's numbers as Python's, times to a tenth of a microsecond."""
    value = value.item() if hasattr(value, "item") else value
    return round(value, 4) if isinstance(value, float) else value


def _say_of(name: str) -> Callable[[str], None]:
    def say(text: str) -> None:
        print(f"{name}: {text}", file=sys.stderr, flush=True)

    return say


if __name__ == "__main__":
    sys.exit(main())
