"""The speed-up of our generators of facebook's batches over its own loop.

    python benchmarks/generators.py --rounds 7 --json benchmarks/results/generators.json

One thread, in turns in one process: the experiment's batch (2048 samples, 8 tables of
1,000,000 rows, up to 100 indices) by ``facebook_loop`` (the loop over samples that
facebookresearch/dlrm runs, bit for bit), by ``facebook`` (the same bits in machine code, and by
numpy, as where numba is missing) and by
``uniform`` (the law without sorting and deduplication). Ratios are of each round; medians,
lowest and highest are written.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from dlrm_core.base.files import write_json
from dlrm_core.base.machine import keep_freed_memory
from dlrm_core.config import load_parameters
from dlrm_core.data.loader import make_generator
from dlrm_workbook.ground.machine import REPOSITORY, machine_facts
from dlrm_workbook.ground.turns import CPU, elapsed_ms, rotated, take_turns

LOOP = "facebook_loop"
FAST = "facebook"
NUMPY = "facebook by numpy"
GENERATORS = (LOOP, NUMPY, FAST, "uniform")
PARAMETERS = REPOSITORY / "parameters" / "seed.yaml"


def measure(rounds: int, batches: int) -> dict[str, Any]:
    """Time every generator in every round.

    Returns:
        ``ms`` (generator to a batch's time, median), ``times_as_fast`` (generator to
        ``low``, ``mid``, ``high`` over the rounds, against the loop), ``rounds``.
    """
    sources = {name: _source(FAST if name == NUMPY else name) for name in GENERATORS}
    sources[NUMPY]._code = None
    for source in sources.values():
        source.next_batch()
    ms: dict[str, list[float]] = {name: [] for name in GENERATORS}
    for _, names in take_turns(GENERATORS, rounds, rotated):
        for name in names:
            count = 1 if name == LOOP else batches
            ms[name].append(elapsed_ms(sources[name].next_batch, count))
    ratios = {
        name: [loop / other for loop, other in zip(ms[LOOP], ms[name], strict=True)]
        for name in GENERATORS
        if name != LOOP
    }
    return {
        "rounds": rounds,
        "ms": {name: statistics.median(times) for name, times in ms.items()},
        "times_as_fast": {
            name: {"low": min(r), "mid": statistics.median(r), "high": max(r)}
            for name, r in ratios.items()
        },
    }


def _source(generator: str) -> Any:
    return make_generator(load_parameters(PARAMETERS, [f"data.generator={generator}"]), CPU)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=10, help="of the fast ones, a round")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    found = measure(arguments.rounds, arguments.batches)
    for name, ratio in found["times_as_fast"].items():
        print(
            f"{name}: {found['ms'][name]:.1f} ms a batch, {ratio['mid']:.1f}x "
            f"({ratio['low']:.1f} to {ratio['high']:.1f}) as fast as {LOOP}'s "
            f"{found['ms'][LOOP]:.1f} ms"
        )
    if arguments.json:
        about = {
            "command": " ".join(["python", "benchmarks/generators.py", *sys.argv[1:]]),
            "machine": machine_facts(),
            "torch": torch.__version__,
        }
        write_json(arguments.json, about | found)


if __name__ == "__main__":
    main()
