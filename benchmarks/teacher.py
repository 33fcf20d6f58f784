"""How near a training comes to the best AUC there is, in three precisions, over ten seeds.

Makes a data set whose labels a planted teacher drew, trains ``parameters/teacher.yaml`` on it
by ``dlrm stability`` once a seed and precision, and holds every AUC on the test set against
the teacher's own AUC on the same test set. Given again it goes on where it ended.

    python benchmarks/teacher.py --work /tmp/teacher --json benchmarks/results/teacher.json
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import write_json
from dlrm_core.data.files.spec import read_spec
from dlrm_studies.stability.measure import Stability, read_stability
from dlrm_workbook.ground.machine import machine_facts, versions

PRESET = "parameters/teacher.yaml"
TABLES = "20000,10000,5000,2000,1000,500,200,50"
DATA = f"--variant custom --table-rows {TABLES} --labels teacher --samples 1.6e7/2e6"
AT_THE_END = 10**6
"""``training.eval_every``: one evaluation, since each takes as long as 300 iterations."""
GOALS = {"gap": 0.002, "precisions": 0.001, "seeds": 0.002}


def run(command: str) -> None:
    """Run a ``dlrm`` command.

    Raises:
        InputError: it failed.
    """
    print("dlrm", command, flush=True)
    code = subprocess.run([sys.executable, "-m", "dlrm_workbook", *shlex.split(command)]).returncode
    if code:
        raise InputError(f"dlrm {command}: exit code {code}")


def commands(work: Path, seeds: dict[str, int]) -> list[str]:
    """What is run, in order; ``seeds`` of each precision."""
    trained = f"-p data.path={work}/data -p training.eval_every={AT_THE_END}"
    return [
        f"data generate {DATA} --output {work}/data",
        *(
            f"stability -f {PRESET} {trained} -p training.precision={precision} "
            f"--seeds {count} --output {work}/{precision}"
            for precision, count in seeds.items()
        ),
    ]


def series(found: Stability, best: float) -> dict[str, Any]:
    """AUC of every seed and how far it is from the best; spread as largest minus least."""
    aucs = {str(run["seed"]): run["auc"] for run in found.finished if run["auc"] is not None}
    values = list(aucs.values())
    seconds = [run["elapsed_s"] for run in found.finished if run["elapsed_s"] is not None]
    return {
        "auc": aucs,
        "failed": len(found.runs) - len(aucs),
        "mean": statistics.fmean(values),
        "standard_deviation": statistics.stdev(values) if len(values) > 1 else None,
        "most_less_least": max(values) - min(values),
        "largest_gap_to_teacher": max(best - value for value in values),
        "seconds_a_run": statistics.median(seconds),
        "samples_per_second": found.spreads["samples_per_second"]["mean"],
    }


def precision_differences(all_series: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Largest difference of any seed's AUC from that of fp32 with the same seed."""
    reference = all_series["fp32"]["auc"]
    return {
        name: max(abs(auc - reference[seed]) for seed, auc in found["auc"].items())
        for name, found in all_series.items()
        if name != "fp32"
    }


def summary(work: Path, seeds: dict[str, int]) -> dict[str, Any]:
    """The record: what was reached, beside the goals."""
    metadata = read_spec(work / "data").metadata
    best = float(metadata["teacher_auc_on_test"])
    found = {name: series(read_stability(work / name), best) for name in seeds}
    differences = precision_differences(found)
    reached = {
        "gap": max(one["largest_gap_to_teacher"] for one in found.values()),
        "precisions": max(differences.values(), default=None),
        "seeds": max(one["most_less_least"] for one in found.values()),
    }
    return {
        "command": " ".join(["python", *sys.argv]),
        "commands": [f"dlrm {c}" for c in commands(Path("WORK"), seeds)],
        "teacher_auc_on_test": best,
        "bayes_auc": metadata["bayes_auc"],
        "bayes_auc_standard_error": metadata["bayes_auc_standard_error"],
        "test_samples": metadata["samples"]["test"],
        "train_samples": metadata["samples"]["train"],
        "series": found,
        "largest_difference_from_fp32_of_the_same_seed": differences,
        "reached": reached,
        "goals": GOALS,
        "machine": machine_facts(),
        "versions": versions(),
    }


def main() -> int:
    """Exit code 0 if all goals are reached."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of data and runs")
    parser.add_argument("--seeds", default="fp32=10,bf16=10,fp16=10", help="default: %(default)s")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/teacher.json"))
    given = parser.parse_args()
    seeds = {name: int(n) for name, n in (word.split("=") for word in given.seeds.split(","))}
    work = given.work.absolute()
    started = time.perf_counter()
    for command in commands(work, seeds):
        if not (command.startswith("data") and (work / "data").exists()):
            run(command)
    record = summary(work, seeds)
    write_json(given.json, record)
    for name, goal in GOALS.items():
        print(f"{name}: {record['reached'][name]:.5f}, goal {goal}")
    print(f"{time.perf_counter() - started:.0f} s")
    return 0 if all(record["reached"][name] <= goal for name, goal in GOALS.items()) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(str(error))
