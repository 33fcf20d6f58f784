"""How near a step comes to this machine's limits: each share measured in a fresh process.

The dense part against the matrix products it needs (:mod:`dlrm_workbook.studies.bench.shares`), the
embeddings against gathering as many random rows (the roofline's ceiling,
:func:`dlrm_workbook.evidence.ceilings.gather_action`). Part and ceiling are timed in turns in one
process, since a ceiling of another minute is another machine's.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from dlrm_core.config import Parameters, load_parameters
from dlrm_core.errors import InputError
from dlrm_core.files import plain
from dlrm_core.machine import end_with_starter
from dlrm_core.memory import mean_bag_size
from dlrm_core.precision import MAX_RELATIVE_ERROR
from dlrm_workbook.analysis.work import lookups
from dlrm_workbook.evidence.ceilings import (
    GATHER_LOOKUPS,
    PRECISIONS,
    TABLE_BYTES,
    Product,
    gather_action,
    model_products,
    native_precisions,
    product_calls,
    time_products,
)
from dlrm_workbook.evidence.probes import StepLoop, Times, apply_settings
from dlrm_workbook.processes import settle_allocator
from dlrm_workbook.studies.bench.runs import environment_of
from dlrm_workbook.turns import threads_of

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
                *(sys.executable, "-m", "dlrm_workbook.studies.bench.shares"),
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
    """:func:`dlrm_workbook.studies.bench.shares.dense_share` in the form that both shares have."""

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
    """``python -m dlrm_workbook.studies.bench.shares KIND FILE THREADS SECONDS``: one line of
    JSON.
    """
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


# Which share of the machine's matrix products the dense part of a step reaches.

DENSE_SHARE_LEAST_ROUNDS, DENSE_SHARE_MAX_ROUNDS = 5, 60

OUTSIDE = ("embedding", "data", "transfer")
"""Components of a step that are not in its dense part."""

SETTLE_S = 1.0
"""Time for choosing the faster library of fp32 products, before anything is compared."""


def dense_share(
    parameters: Parameters, threads: int | None = None, seconds: float = 12.0
) -> dict[str, Any]:
    """Time the dense part and the products it needs, in turns, on the CPU.

    The dense part is that of the real step, with tables of one row and behind a stream
    over memory that stands for the embeddings' traffic (:class:`StepLoop`). A product is
    called once before it is timed. In fp32 the ceiling is the faster library for each
    product among those whose error is accepted (``training.fp32_matmul``), whichever the
    step uses.

    Args:
        parameters: of the run; its tables' sizes do not matter.
        threads: of torch; None leaves ``training.threads``.
        seconds: about so long altogether.

    Returns:
        ``precision``, ``threads``, ``batch_size``, ``rounds``, ``parts`` (component to
        phase to ms), ``dense_ms`` (their sum, median), ``gemm_ms`` (sum over the MLPs'
        products, median), ``share`` (median of the rounds' gemm / dense),
        ``share_quartiles`` (two), ``gemm_best_ms`` and ``share_of_best`` (every product at
        its least time, as the roofline draws it, against ``dense_ms``), ``products`` (rows
        ``part``, ``layer``, ``phase``, ``m``, ``n``, ``k``, ``library``, ``ms``,
        ``best_ms``, ``gflops``), ``notices`` of the step.
    """
    device = torch.device("cpu")
    settle_allocator()
    with threads_of(threads or parameters.training.threads):
        count = torch.get_num_threads()
        training = dataclasses.replace(parameters.training, threads=count)
        parameters = dataclasses.replace(parameters, training=training)
        loop = StepLoop(parameters, "dense")
        products = [p for p in model_products(parameters) if p.part != "interaction"]
        calls = _product_calls(parameters, products, device)
        apply_settings(loop.parameters)
        loop.run()
        steps: list[Times] = []
        singles: list[dict[tuple[Any, ...], float]] = []
        deadline = time.perf_counter() + seconds
        while len(steps) < DENSE_SHARE_LEAST_ROUNDS or (
            len(steps) < DENSE_SHARE_MAX_ROUNDS and time.perf_counter() < deadline
        ):
            steps.append(loop.run())
            singles.append({shape: _second_call_ms(call) for shape, (_, call) in calls.items()})
    return _summary(parameters, count, products, calls, steps, singles) | {"notices": loop.notices}


def _product_calls(
    parameters: Parameters, products: list[Product], device: torch.device
) -> dict[tuple[Any, ...], tuple[str, Callable[[], object]]]:
    """Shape of a product to the library's name and the call to time."""
    precision = parameters.training.precision
    if precision != "fp32":
        calls = product_calls(products, precision, device)
        return {shape: (precision, call) for shape, call in calls.items()}
    # tf32 is a GPU's
    have, _ = native_precisions(device)
    names = [name for name in PRECISIONS if name.startswith("fp32") and name in have]
    rows, _ = time_products(products, names, device, SETTLE_S)
    every = {name: product_calls(products, name, device) for name in names}
    chosen: dict[tuple[Any, ...], tuple[str, Callable[[], object]]] = {}
    worst = {
        name: max((r["relative_error"] for r in rows if r["precision"] == name), default=1.0)
        for name in names
    }
    for product in products:
        same = [
            row
            for row in rows
            if all(row[key] == getattr(product, key) for key in ("part", "layer", "phase"))
            and (row["precision"] == "fp32" or worst[row["precision"]] <= MAX_RELATIVE_ERROR)
        ]
        name = min(same, key=lambda row: row["ms"])["precision"] if same else "fp32"
        chosen[product.shape] = (name, every[name][product.shape])
    return chosen


def _second_call_ms(call: Callable[[], object]) -> float:
    call()
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


def _summary(
    parameters: Parameters,
    threads: int,
    products: list[Product],
    calls: Mapping[tuple[Any, ...], tuple[str, Callable[[], object]]],
    steps: list[Times],
    singles: list[dict[tuple[Any, ...], float]],
) -> dict[str, Any]:
    parts = {
        component: {
            phase: statistics.median([step.get(component, {}).get(phase, 0.0) for step in steps])
            for phase in phases
        }
        for component, phases in steps[-1].items()
        if component not in OUTSIDE
    }
    dense = [
        sum(ms for part, phases in step.items() if part not in OUTSIDE for ms in phases.values())
        for step in steps
    ]
    gemm = [sum(found[product.shape] for product in products) for found in singles]
    shares = [a / b for a, b in zip(gemm, dense, strict=True)]
    rows = []
    for product in products:
        times = [found[product.shape] for found in singles]
        rows.append(
            {name: getattr(product, name) for name in ("part", "layer", "phase", "m", "n", "k")}
            | {
                "library": calls[product.shape][0],
                "ms": statistics.median(times),
                "best_ms": min(times),
                "gflops": product.flops / statistics.median(times) / 1e6,
            }
        )
    best = sum(row["best_ms"] for row in rows)
    low, _, high = statistics.quantiles(shares, n=4)
    return {
        "precision": parameters.training.precision,
        "threads": threads,
        "batch_size": parameters.training.batch_size,
        "rounds": len(steps),
        "parts": parts,
        "dense_ms": statistics.median(dense),
        "gemm_ms": statistics.median(gemm),
        "share": statistics.median(shares),
        "share_quartiles": [low, high],
        "gemm_best_ms": best,
        "share_of_best": best / statistics.median(dense),
        "products": rows,
    }
