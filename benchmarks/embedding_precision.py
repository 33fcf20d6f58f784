"""What storing embedding rows in 2 bytes does to the AUC, over ten seeds.

Trains a small model on the samples of a planted teacher once a seed, optimiser and
``model.embedding_precision``, and tests the differences from fp32 seed by seed: the same seed
has the same samples and the same initial weights before they are rounded.

    python benchmarks/embedding_precision.py --json benchmarks/results/embedding_precision.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from dlrm_core.base.files import write_json
from dlrm_core.config import parameters_from_sections
from dlrm_core.train import Trainer
from dlrm_workbook.ground.intervals import p_value, t_interval
from dlrm_workbook.ground.machine import machine_facts, versions

MODEL = {
    "dense_features": 13,
    "mlp_sizes": "nvidia",
    "bottom_mlp": [32, 8],
    "top_mlp": [32, 1],
    "embedding_dim": 8,
    "tables": 4,
    "table_rows": [20000, 5000, 1000, 50],
    "loss": "bce",
    "init": "torch",
}
TRAINING: dict[str, Any] = {
    "batch_size": 512,
    "embedding_backend": "fused",
    "device": "cpu",
    "threads": 1,
}
RATES = {"sgd": 1.0, "rowwise_adagrad": 0.05}
"""Optimiser to its learning rate."""

PRECISIONS = ("fp32", "bf16", "fp16")
TEST_BATCHES = 64


def auc(optimizer: str, precision: str, seed: int, batches: int) -> float:
    """The AUC on held-out samples after training; rows of one table type."""
    training = {
        "optimizer": optimizer,
        "learning_rate": RATES[optimizer],
        "batches": batches,
        "lr_decay_start": batches // 2,
        "lr_decay_steps": batches - batches // 2,
        "seed": seed,
        "eval_batches": TEST_BATCHES,
        "log_every": batches,
    }
    sections = {
        "model": MODEL | {"embedding_precision": precision},
        "data": {"generator": "teacher"},
        "training": TRAINING | training,
    }
    trainer = Trainer(parameters_from_sections(sections))
    for _ in range(batches):
        trainer.iterate()
    found = trainer.evaluate().auc
    trainer.close()
    assert found is not None
    return found


def compared(base: dict[int, float], other: dict[int, float]) -> dict[str, Any]:
    """Mean difference of seeds' AUC from fp32's, with 95 % interval, and Student's p-value."""
    gaps = [other[seed] - base[seed] for seed in base]
    mean = statistics.fmean(gaps)
    error = statistics.stdev(gaps) / len(gaps) ** 0.5
    interval = t_interval(mean, error, len(gaps) - 1)
    return {
        "difference": mean,
        "low": interval.low,
        "high": interval.high,
        "p_value": p_value(mean, error, len(gaps) - 1),
    }


def main() -> int:
    """Train all, print a line each, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--batches", type=int, default=800, help="default: %(default)s")
    default = Path("benchmarks/results/embedding_precision.json")
    parser.add_argument("--json", type=Path, default=default)
    arguments = parser.parse_args()
    started, series = time.time(), []
    for optimizer in RATES:
        found: dict[str, dict[int, float]] = {}
        for precision in PRECISIONS:
            seeds = range(arguments.seeds)
            found[precision] = {s: auc(optimizer, precision, s, arguments.batches) for s in seeds}
            values = list(found[precision].values())
            row = {
                "optimizer": optimizer,
                "precision": precision,
                "auc": found[precision],
                "mean": statistics.fmean(values),
                "standard_deviation": statistics.stdev(values),
            }
            if precision != "fp32":
                row |= compared(found["fp32"], found[precision])
            print({name: value for name, value in row.items() if name != "auc"}, flush=True)
            series.append(row)
    document = {
        "command": " ".join(["python", *sys.argv]),
        "model": MODEL,
        "training": TRAINING | {"batches": arguments.batches, "rates": RATES},
        "test_samples": TEST_BATCHES * TRAINING["batch_size"],
        "series": series,
        "seconds": time.time() - started,
        "machine": machine_facts(),
        "versions": versions(),
    }
    write_json(arguments.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
