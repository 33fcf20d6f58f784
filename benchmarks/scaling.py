"""Iterations on 2 and 4 ranks of this machine against their predictions, for many configurations.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json

Each configuration is predicted from the link probe and from its parts without other ranks,
and measured on 1, 2 and 4 gloo ranks. ``--cases a,b`` measures some of them and keeps the
others' results; what was measured lies in ``--folder`` and is not measured again. Of what is
repeated the faster half counts, in runs and in what they are predicted from alike
(:mod:`dlrm_core.distributed.disturbance`).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from dlrm_core.analysis.scaling_check import predicted_and_measured, typical_error
from dlrm_core.analysis.scaling_record import exposed_shares, imbalance, record_of
from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.distributed.disturbance import faster_half
from dlrm_core.distributed.scaling import Case, Effort, measure_cases
from dlrm_core.files import plain, read_json, write_json

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

LIKE = {"row-wise": "base", "column-wise": "base"}
"""Only divided otherwise: the parts without other ranks are those of another one."""

RANKS = (1, 2, 4)


def main() -> int:
    """Measure, predict, and write what both amount to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--folder", type=Path, default=Path("outputs/scaling"), metavar="DIR")
    parser.add_argument("--cases", default=",".join(CHANGES), metavar="NAME,...")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=5, help="of a round")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a run, at most")
    given = parser.parse_args()
    names = given.cases.split(",")
    unknown = [name for name in names if name not in CHANGES]
    if unknown:
        parser.error(f"unknown configuration {unknown[0]!r}; known: {', '.join(CHANGES)}")
    result = read_json(given.json) if given.json.exists() else {"cases": {}}
    effort = Effort(given.rounds, 1, given.iterations, given.seconds, timeout_s=300.0)
    # a configuration whose parts stand for another's comes along
    wanted = list(dict.fromkeys(LIKE[name] for name in names if name in LIKE)) + names
    wanted = list(dict.fromkeys(wanted))
    folder = given.folder / "+".join(name.replace(" ", "-") for name in wanted)
    base = parameters_from_sections(BASE)
    record = measure_cases([_case(name) for name in wanted], RANKS, folder, effort, _say)
    result |= {
        "command": shlex.join(["python", "benchmarks/scaling.py", "--json", str(given.json)]),
        "machine": record["machine"],
        "base": base.to_sections(),
        "ranks": list(RANKS),
    }
    for name, rows in _compared(faster_half(record), base).items():
        if name in names or name not in result["cases"]:
            result["cases"][name] = {"change": CHANGES[name], "runs": rows}
    errors = [row["error"] for case in result["cases"].values() for row in case["runs"]]
    import pandas as pd

    result["typical_error"] = typical_error(pd.DataFrame({"error": errors}, dtype=float))
    result["configurations"] = len(result["cases"])
    write_json(given.json, plain(result))
    for name, case in result["cases"].items():
        for row in case["runs"]:
            print(
                f"{name:20} {row['ranks']} ranks  measured {row['measured_ms']:8.1f} ms  "
                f"predicted {row['predicted_ms']:8.1f} ms  {100 * row['error']:+6.1f} %"
            )
    print(
        f"{len(errors)} runs of {len(result['cases'])} configurations: "
        f"{100 * result['typical_error']:.1f} % (geometric mean)"
    )
    return 0


def _case(name: str) -> Case:
    sections = {part: dict(leaves) if part != "title" else leaves for part, leaves in BASE.items()}
    for leaf, value in CHANGES[name].items():
        section, _, key = leaf.partition(".")
        sections[section][key] = value
    parameters = parameters_from_sections(sections)
    return Case(name, parameters, ("strong",), CHANGES[name], LIKE.get(name, ""))


def _compared(record: dict[str, Any], base: Parameters) -> dict[str, list[dict[str, Any]]]:
    """Runs of two ranks or more by their case: measured, predicted, exposed, imbalance."""
    read = record_of(record)
    table = predicted_and_measured(read, base)
    names = {run["run"]: run["case"] for run in record["runs"]}
    exposed = exposed_shares(read).set_index("run")
    uneven = imbalance(read).set_index("run")
    found: dict[str, list[dict[str, Any]]] = {}
    for row in table.to_dict("records"):
        run = row.pop("run")
        extra = {"imbalance": uneven.iloc[:, -1].to_dict().get(run)}
        extra |= {f"exposed_{k}": v for k, v in exposed.loc[run].to_dict().items() if k == "share"}
        found.setdefault(names[run], []).append({k: _number(v) for k, v in (row | extra).items()})
    return found


def _number(value: Any) -> Any:
    """numpy's numbers as Python's, times to a tenth of a microsecond."""
    value = value.item() if hasattr(value, "item") else value
    return round(value, 4) if isinstance(value, float) else value


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
