"""Iterations on 2 and 4 ranks of this machine against their predictions, for many configurations.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json
    python benchmarks/scaling.py --json benchmarks/results/scaling.json --one-process FILE

Each configuration is predicted from the link probe and from its parts without other ranks,
and measured on 1, 2 and 4 gloo ranks, all in turns, round by round. ``--cases a,b`` measures
some of them and keeps the others' results; what was measured lies in ``--folder`` and is not
measured again. Of what is repeated the faster half counts, in runs and in what they are
predicted from alike (:mod:`dlrm_workbook.ground.intervals`), as on the scaling page.

With ``--one-process`` a parameters file is trained by one process and by two ranks in turns,
one thread each, by ``dlrm_core train``.
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

from dlrm_core.base.files import plain, read_json, write_json
from dlrm_core.config import Parameters, load_parameters, parameters_from_sections
from dlrm_studies.scaling.launch import run_ranks
from dlrm_studies.scaling.measure import Effort, measure_scaling
from dlrm_studies.scaling.model.record import (
    exposed_shares,
    imbalance,
    predicted_and_measured,
    record_of,
    typical_error,
)
from dlrm_workbook.analysis.changes import apply_change
from dlrm_workbook.ground.intervals import median_interval
from dlrm_workbook.ground.machine import machine_facts, versions
from dlrm_workbook.ground.processes import python_module, run_child
from dlrm_workbook.ground.turns import rotated, round_ratios, take_turns

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
    "fast options": {
        "training.embedding_backend": "fused",
        "training.dense_backend": "fused",
        "training.fp32_matmul": "bf16x2",
        "training.fused_optimizer": True,
    },
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
    parser.add_argument("--one-process", metavar="FILE", help="parameters for one and two ranks")
    parser.add_argument("--batches", type=int, default=30, help="of a run for --one-process")
    given = parser.parse_args()
    if given.one_process:
        return compare_with_one_process(given)
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
            "base": base.to_sections(),
            "ranks": list(RANKS),
        }
        runs = _compared(record, parameters)
        result["cases"][name] = {"change": CHANGES[name], "runs": runs} | _where()
        write_json(given.json, plain(_summed(result)))
    for name, case in result["cases"].items():
        for row in case["runs"]:
            print(
                f"{name:20} {row['ranks']} ranks  measured {row['measured_ms']:8.1f} ms  "
                f"predicted {row['predicted_ms']:8.1f} ms  {100 * row['error']:+6.1f} %"
            )
    count = sum(len(case["runs"]) for case in result["cases"].values())
    print(
        f"{count} runs of {result['configurations']} configurations: "
        f"{100 * result['typical_error']:.1f} % (geometric mean)"
    )
    return 0


def compare_with_one_process(given: argparse.Namespace) -> int:
    """Train with one process and with two ranks in turns; samples/s and losses of each round."""
    parameters = load_parameters(given.one_process)
    module = python_module("dlrm_core", "train", "-f", given.one_process)
    module += ["-p", "training.threads=1", "-p", f"training.batches={given.batches}"]
    rates: dict[str, dict[int, float]] = {"one process": {}, "2 ranks": {}}
    losses: dict[str, list[float]] = {}
    for number, names in take_turns(list(rates), given.rounds, order=rotated):
        for name in names:
            folder = given.folder / "one-process" / name.replace(" ", "-")
            command = [*module, "--output", str(folder)]
            if name == "2 ranks":
                run_ranks(command, 2, timeout_s=300.0)
            else:
                run_child(command, stage=name, timeout_s=300.0).require_success(name)
            made = read_json(folder / "result.json")
            # the median iteration's: what else runs here disturbs some of them
            rates[name][number] = 1e3 * parameters.training.batch_size / made["ms_per_iteration"]
            losses[name] = made["losses"]
            _say_of(f"round {number + 1}, {name}")(f"{rates[name][number]:,.0f} samples/s")
    ratios = round_ratios(rates["2 ranks"], rates["one process"])
    pairs = zip(*losses.values(), strict=True)
    result = read_json(given.json) if given.json.exists() else {"cases": {}}
    result["one_process"] = {
        "command": shlex.join(["python", "benchmarks/scaling.py", *sys.argv[1:]]),
        "parameters": parameters.to_sections(),
        "samples_per_second": {name: list(each.values()) for name, each in rates.items()},
        "ranks_over_one": {"rounds": ratios} | median_interval(ratios).to_dict(),
        "largest_loss_difference": max(abs(a - b) for a, b in pairs),
        "load": Path("/proc/loadavg").read_text().split()[:3],
    } | _where()
    write_json(given.json, plain(result))
    print(result["one_process"]["ranks_over_one"], result["one_process"]["largest_loss_difference"])
    return 0


def _where() -> dict[str, Any]:
    """Describe machine and versions; cases may be measured one by one, on several machines."""
    found = versions() | {"torchrec": importlib.metadata.version("torchrec")}
    return {"machine": machine_facts(), "versions": found}


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
        found.append({str(name): _number(value) for name, value in row.items()})
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
