"""What a training gains by keeping the memory that a step frees (``keep_freed_memory``).

    python benchmarks/allocator.py --rounds 5 --json benchmarks/results/allocator.json

One thread, a fresh process for each run, in turns: with it, and with glibc's own thresholds,
which any setting of the user's brings back (here one that says what is the default anyway).
Ratios are of each round; medians, lowest and highest are written, and the losses compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import write_json
from dlrm_core.base.machine import ALLOCATOR_SETTINGS
from dlrm_workbook.ground.machine import REPOSITORY, machine_facts
from dlrm_workbook.ground.turns import rotated, take_turns

SEED, TUNED = (REPOSITORY / "parameters" / f"{name}.yaml" for name in ("seed", "tuned"))
MANY_TABLES = ("model.tables=26", "model.table_rows=100000", "data.indices_per_lookup=10")
CASES: dict[str, tuple[Path, tuple[str, ...]]] = {
    "tuned, fp32": (TUNED, ()),
    "tuned, bf16": (TUNED, ("training.precision=bf16",)),
    "tuned, 26 tables, fp32": (TUNED, MANY_TABLES),
    "tuned, 26 tables, bf16": (TUNED, (*MANY_TABLES, "training.precision=bf16")),
    "seed": (SEED, ()),
}
KEPT, RETURNED = "kept", "returned"
WAYS = {KEPT: {}, RETURNED: {"GLIBC_TUNABLES": "glibc.malloc.check=0"}}


def train(case: str, way: str, batches: int) -> dict[str, Any]:
    """Train one case in a process of its own; what its last line says.

    Raises:
        InputError: the training fails.
    """
    file, overrides = CASES[case]
    words = ["-f", os.fspath(file), "-p", f"training.batches={batches}", "-p", "training.threads=1"]
    words += [word for override in overrides for word in ("-p", override)]
    kept = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_SETTINGS}
    done = subprocess.run(
        [sys.executable, "-m", "dlrm_core", "train", *words],
        cwd=REPOSITORY,
        env=kept | WAYS[way],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise InputError(f"{case}: the training ended with {done.returncode}: {done.stderr[-500:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(case: str, rounds: int, batches: int) -> dict[str, Any]:
    """Train one case both ways in every round.

    Returns:
        ``ms_per_iteration`` and ``peak_memory_bytes`` by way (median, largest),
        ``times_as_fast`` (``low``, ``mid``, ``high`` of the rounds), ``same_loss``.
    """
    ms: dict[str, list[float]] = {way: [] for way in WAYS}
    memory = dict.fromkeys(WAYS, 0)
    losses = set()
    for _, ways in take_turns(tuple(WAYS), rounds, rotated):
        for way in ways:
            result = train(case, way, batches)
            ms[way].append(result["ms_per_iteration"])
            memory[way] = max(memory[way], result["peak_memory_bytes"])
            losses.add(result["loss"])
    ratios = [other / own for own, other in zip(ms[KEPT], ms[RETURNED], strict=True)]
    return {
        "ms_per_iteration": {way: statistics.median(times) for way, times in ms.items()},
        "peak_memory_bytes": memory,
        "times_as_fast": {
            "low": min(ratios),
            "mid": statistics.median(ratios),
            "high": max(ratios),
        },
        "same_loss": len(losses) == 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cases = {}
    for case in CASES:
        found = cases[case] = measure(case, arguments.rounds, arguments.batches)
        ratio, ms = found["times_as_fast"], found["ms_per_iteration"]
        print(
            f"{case}: {ms[KEPT]:.1f} ms instead of {ms[RETURNED]:.1f}, {ratio['mid']:.3f}x "
            f"({ratio['low']:.3f} to {ratio['high']:.3f}) as fast, same loss: {found['same_loss']}",
            flush=True,
        )
    if arguments.json:
        about = {
            "command": " ".join(["python", "benchmarks/allocator.py", *sys.argv[1:]]),
            "machine": machine_facts(),
            "rounds": arguments.rounds,
            "batches": arguments.batches,
        }
        write_json(arguments.json, about | {"cases": cases})


if __name__ == "__main__":
    main()
