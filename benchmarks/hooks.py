"""What the training loop's reports, evaluations and checkpoints cost an iteration.

Three loops over the same small model, in turns: ``bare`` calls the iteration and nothing
else; ``plain`` is ``dlrm train``; ``hooked`` is the same with evaluations and checkpoints
asked for, but due only after the last iteration. The model is so small that an iteration
takes less than a millisecond, where anything in the loop would show most.

    python benchmarks/hooks.py --json benchmarks/results/hooks.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dlrm_core.base.files import write_json
from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.train import Trainer
from dlrm_workbook.ground.machine import machine_facts, versions
from dlrm_workbook.ground.turns import elapsed_ms, rotated, take_turns

ITERATIONS, WARM_UP, FAR = 1500, 100, 10**6


def small() -> Parameters:
    """A model of a few thousand weights on uniform data."""
    return parameters_from_sections(
        {
            "model": {
                "bottom_mlp": "8-16-8",
                "top_mlp": "16-1",
                "embedding_dim": 8,
                "table_rows": [1000, 1000],
                "loss": "bce",
            },
            "data": {"generator": "uniform", "indices_per_lookup": 2, "round_targets": True},
            "training": {
                "batch_size": 32,
                "batches": ITERATIONS,
                "log_every": 100,
                "threads": 1,
                "device": "cpu",
                "embedding_backend": "fused",
                "fused_optimizer": True,
            },
        }
    )


def bare() -> float:
    """Median milliseconds of an iteration that nothing else is done for."""
    trainer = Trainer(small())
    times = [elapsed_ms(trainer.iterate) for _ in range(ITERATIONS)]
    trainer.close()
    return statistics.median(times[WARM_UP:])


def plain() -> float:
    """The same of a training without evaluations and checkpoints."""
    trainer = Trainer(small())
    times = trainer.train().iteration_ms
    trainer.close()
    return statistics.median(times[WARM_UP:])


def hooked() -> float:
    """The same of a training with both."""
    parameters = small()
    asked = replace(parameters.training, eval_every=FAR, checkpoint_every=FAR, auc_target=1.0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(replace(parameters, training=asked), place=Path(folder))
        times = trainer.train().iteration_ms
        trainer.close()
    return statistics.median(times[WARM_UP:])


LOOPS: dict[str, Callable[[], float]] = {"bare": bare, "plain": plain, "hooked": hooked}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/hooks.json"))
    given = parser.parse_args()
    turns = take_turns(list(LOOPS), given.rounds, rotated)
    rounds = [{name: LOOPS[name]() for name in names} for _, names in turns]
    ratios = {
        f"{one} over {other}": sorted(found[one] / found[other] for found in rounds)
        for one, other in (("plain", "bare"), ("hooked", "plain"), ("hooked", "bare"))
    }
    record = {
        "command": " ".join(["python", *sys.argv]),
        "ms": {name: statistics.median(found[name] for found in rounds) for name in LOOPS},
        "ratios": {
            name: {"median": statistics.median(values), "least": values[0], "most": values[-1]}
            for name, values in ratios.items()
        },
        "rounds": rounds,
        "iterations_a_round": ITERATIONS,
        "machine": machine_facts(),
        "versions": versions(),
    }
    write_json(given.json, record)
    print(record["ms"])
    print(record["ratios"])


if __name__ == "__main__":
    main()
