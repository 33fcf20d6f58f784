"""How near a step comes to this machine's limits: each share measured in a fresh process.

The dense part against the matrix products it needs (:mod:`dlrm_core.dense_share`), the
embeddings against gathering as many random rows (the roofline's ceiling,
:func:`dlrm_core.ceilings.gather_action`). Part and ceiling are timed in turns in one
process, since a ceiling of another minute is another machine's.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from dlrm_core.analysis.embedding_work import lookups
from dlrm_core.bench_runs import environment_of
from dlrm_core.capacity import mean_bag_size
from dlrm_core.ceilings import GATHER_LOOKUPS, TABLE_BYTES, gather_action
from dlrm_core.config import Parameters, load_parameters
from dlrm_core.errors import InputError
from dlrm_core.files import plain
from dlrm_core.parent_process import end_with_starter
from dlrm_core.probe_loops import StepLoop
from dlrm_core.timing import threads_of

KINDS = ("dense", "embedding")
LEAST_ROUNDS, MAX_ROUNDS = 5, 40
SECONDS = 6.0


def measure_share(
    kind: str, parameters: Parameters, threads: int, seconds: float = SECONDS
) -> dict[str, Any]:
    """One share in its own process, with the contestants' settings.

    Returns:
        ``what`` (``dense`` or ``embedding``), ``ms`` of the part, ``ceiling_ms``, ``share``
        (median of the rounds' ceiling over part), ``low``, ``high`` (its quartiles),
        ``rounds``, ``precision``, ``notices``.

    Raises:
        InputError: the process fails; with what it said last.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "share.yaml"
        file.write_text(yaml.safe_dump(parameters.to_sections()))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "dlrm_core.bench_shares"),
                *(kind, str(file), str(threads), f"{seconds:g}"),
            ],
            env=environment_of(threads),
            capture_output=True,
            text=True,
        )
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode != 0 or not lines:
        last = lines[-1] if lines else f"exit code {done.returncode}"
        raise InputError(f"the {kind} part's share could not be measured: {last}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def embedding_share(parameters: Parameters, threads: int, seconds: float) -> dict[str, Any]:
    """Time the embeddings' forward, backward and update, and a gather of random rows, in turns.

    The ceiling is the time in which the machine gathers the bytes that any back end must
    touch at random: a row (d x 4 bytes) a lookup forward, and each different row read
    and written once for its update. A back end that prefetches better than the gather
    (torch's embedding_bag) can exceed it.
    """
    with threads_of(threads), torch.no_grad():
        row_values = parameters.model.embedding_dim
        rows = max(parameters.model.table_rows)
        rows = min(rows, TABLE_BYTES["cpu"] // (4 * row_values))
        bag = max(1, round(mean_bag_size(parameters, max(parameters.model.table_rows))))
        bags = max(parameters.training.batch_size, -(-GATHER_LOOKUPS // bag))
        gather = gather_action(torch.ones(rows, row_values), bags, bag)
        row_bytes = 4 * row_values
        needed = sum(
            (table.scattered + 2 * table.unique) * row_bytes for table in lookups(parameters)
        )
        with torch.enable_grad():
            loop = StepLoop(parameters, "sparse")
            loop.run()
        parts: list[float] = []
        ceilings: list[float] = []
        deadline = time.perf_counter() + seconds
        while len(parts) < LEAST_ROUNDS or (
            len(parts) < MAX_ROUNDS and time.perf_counter() < deadline
        ):
            with torch.enable_grad():
                parts.append(sum(loop.run()["embedding"].values()))
            started = time.perf_counter()
            gather.call()
            took_ms = 1e3 * (time.perf_counter() - started)
            ceilings.append(took_ms * needed / (bags * bag * row_bytes))
    return {
        "ms": statistics.median(parts),
        "ceiling_ms": statistics.median(ceilings),
        "gather_gb_per_s": needed / statistics.median(ceilings) / 1e6,
        **_shares([a / b for a, b in zip(ceilings, parts, strict=True)]),
        "notices": loop.notices,
    }


def dense_part_share(parameters: Parameters, threads: int, seconds: float) -> dict[str, Any]:
    """:func:`dlrm_core.dense_share.dense_share` in the form that both shares have."""
    from dlrm_core.dense_share import dense_share

    found = dense_share(parameters, threads, seconds)
    low, high = found["share_quartiles"]
    return {
        "ms": found["dense_ms"],
        "ceiling_ms": found["gemm_ms"],
        "share": found["share"],
        "low": low,
        "high": high,
        "rounds": found["rounds"],
        "share_of_best": found["share_of_best"],
        "parts": found["parts"],
        "notices": found["notices"],
    }


def _shares(shares: Sequence[float]) -> dict[str, Any]:
    low, _, high = statistics.quantiles(shares, n=4)
    return {"share": statistics.median(shares), "low": low, "high": high, "rounds": len(shares)}


def main(arguments: Sequence[str]) -> int:
    """``python -m dlrm_core.bench_shares KIND FILE THREADS SECONDS``: one line of JSON."""
    end_with_starter()
    kind, file, threads, seconds = arguments
    parameters = load_parameters(file)
    measure = {"dense": dense_part_share, "embedding": embedding_share}[kind]
    found = measure(parameters, int(threads), float(seconds))
    found |= {"what": kind, "precision": parameters.training.precision}
    print(json.dumps(plain(found)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        sys.exit(f"InputError: {error}")
