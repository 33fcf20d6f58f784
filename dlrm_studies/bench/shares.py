"""How near a step comes to this machine's limits: each share measured in a fresh process.

The dense part is held against the matrix products it needs, the embeddings against bare accesses
to the rows of their batch (:mod:`dlrm_studies.bench.rows`). Part and ceiling are timed
in turns in one process, since a ceiling of another minute is another machine's.

    python -m dlrm_studies.bench.shares JOB RESULT

is that process.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dlrm_core.base.errors import InputError
from dlrm_core.base.machine import keep_freed_memory
from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_kernels.products import MAX_RELATIVE_ERROR
from dlrm_studies.bench.rows import row_access_ms, why_no_accesses
from dlrm_workbook.evidence.ceilings import (
    PRECISIONS,
    Product,
    model_products,
    native_precisions,
    product_calls,
    time_products,
)
from dlrm_workbook.evidence.contestants import environment_of
from dlrm_workbook.evidence.probes import StepLoop, Times, apply_settings, medians
from dlrm_workbook.ground.processes import do_job, run_job
from dlrm_workbook.ground.turns import CPU, elapsed_ms, least_and_seconds, take_turns, threads_of

CEILINGS = {
    "dense": "the time of its matrix products",
    "embedding": "bare accesses to the same rows",
}
"""Kinds of shares, and what the limit of each is."""

GATHERED = "as many random rows gathered by torch's embedding_bag"
"""What the embeddings were held against before: an older file has the rate (gather_gb_per_s)."""

SECONDS = 6.0
"""Of each share."""

LEAST_ROUNDS = 5

OUTSIDE = ("embedding", "data", "transfer")
"""Components of a step that are not in its dense part."""

DETAILS = ("threads", "products", "ceiling_best_ms")
"""Of a dense share, what a benchmark's JSON does without."""

SETTLE_S = 1.0
"""Time for choosing the faster library of fp32 products, before anything is compared."""


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
    found: dict[str, Any] = run_job(
        __name__,
        {"what": kind, "parameters": parameters.to_sections(), "seconds": seconds}
        | {"threads": threads},
        stage=f"share of the {kind} part's limit",
        environment=environment_of(threads),
    )
    return found


def embedding_share(parameters: Parameters, threads: int, seconds: float) -> dict[str, Any]:
    """Time the embeddings' forward, backward and update, and bare accesses to rows, in turns.

    The ceiling is the time in which every looked-up row is read, and read and written, with
    nothing else done; both begin with caches that hold something else.

    Raises:
        InputError: the rows are of a size that cannot be accessed line by line.
    """
    if why := why_no_accesses(parameters):
        raise InputError(f"bare accesses to rows are not measured: {why}")
    with threads_of(threads):
        loop = StepLoop(parameters, "sparse")
        loop.run()
        parts: list[float] = []
        ceilings: list[float] = []
        for _ in take_turns((), 40, enough=least_and_seconds(LEAST_ROUNDS, seconds)):
            parts.append(sum(loop.run()["embedding"].values()))
            batch = loop.generator.next_batch()
            with torch.no_grad():
                ceilings.append(sum(row_access_ms(loop.model.embeddings, batch, loop.flush)))
    return {
        "ms": statistics.median(parts),
        "ceiling_ms": statistics.median(ceilings),
        **_share(ceilings, parts),
        "notices": loop.notices,
    }


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
        ``ms`` (of the dense part, median), ``ceiling_ms`` (sum over the MLPs' products,
        median), ``share``, ``low``, ``high``, ``rounds`` as :func:`measure_share`,
        ``precision``, ``threads``, ``parts`` (component to phase to ms), ``ceiling_best_ms`` and
        ``share_of_best`` (every product at its least time, as the roofline draws it,
        against ``ms``), ``products`` (rows ``part``, ``layer``, ``phase``, ``m``, ``n``,
        ``k``, ``library``, ``ms``, ``best_ms``, ``gflops``), ``notices`` of the step.
    """
    keep_freed_memory()
    with threads_of(threads or parameters.training.threads):
        count = torch.get_num_threads()
        training = dataclasses.replace(parameters.training, threads=count)
        parameters = dataclasses.replace(parameters, training=training)
        loop = StepLoop(parameters, "dense")
        products = layer_products(parameters)
        calls = library_calls(products, parameters.training.precision)
        apply_settings(loop.parameters)
        loop.run()
        steps: list[Times] = []
        singles: list[dict[tuple[Any, ...], float]] = []
        for _ in take_turns((), 60, enough=least_and_seconds(LEAST_ROUNDS, seconds)):
            steps.append(loop.run())
            singles.append({shape: second_call_ms(call) for shape, (_, call) in calls.items()})
    dense = [
        sum(ms for part, phases in step.items() if part not in OUTSIDE for ms in phases.values())
        for step in steps
    ]
    gemm = [sum(times[product.shape] for product in products) for times in singles]
    rows = _product_rows(products, calls, singles)
    best = sum(row["best_ms"] for row in rows)
    return {
        "ms": statistics.median(dense),
        "ceiling_ms": statistics.median(gemm),
        **_share(gemm, dense),
        "precision": parameters.training.precision,
        "threads": count,
        "parts": {part: ms for part, ms in medians(steps).items() if part not in OUTSIDE},
        "ceiling_best_ms": best,
        "share_of_best": best / statistics.median(dense),
        "products": rows,
        "notices": loop.notices,
    }


def _share(ceilings: Sequence[float], parts: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of the rounds' own shares."""
    shares = [ceiling / part for ceiling, part in zip(ceilings, parts, strict=True)]
    # within what was measured: of five rounds the usual estimate goes beyond it
    low, _, high = statistics.quantiles(shares, n=4, method="inclusive")
    return {"share": statistics.median(shares), "low": low, "high": high, "rounds": len(shares)}


def layer_products(parameters: Parameters) -> list[Product]:
    """The products of layers: a dot interaction's are batched, and not of one library alone."""
    return [product for product in model_products(parameters) if product.batch == 1]


def library_calls(
    products: list[Product], precision: str, timed: Sequence[Mapping[str, Any]] = ()
) -> dict[tuple[Any, ...], tuple[str, Callable[[], object]]]:
    """Shape of a product to the library's name and the call to time, on the CPU.

    Args:
        timed: rows of :func:`.time_products` by which the faster library of fp32 products is
            chosen; without any they are timed now.
    """
    if precision != "fp32":
        calls = product_calls(products, precision, CPU)
        return {shape: (precision, call) for shape, call in calls.items()}
    names = fp32_libraries()
    rows = timed or time_products(products, names, CPU, SETTLE_S)[0]
    every = {name: product_calls(products, name, CPU) for name in names}
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
            and row["precision"] in names
            and (row["precision"] == "fp32" or worst[row["precision"]] <= MAX_RELATIVE_ERROR)
        ]
        name = min(same, key=lambda row: row["ms"])["precision"] if same else "fp32"
        chosen[product.shape] = (name, every[name][product.shape])
    return chosen


def fp32_libraries() -> list[str]:
    """Names of the libraries' fp32 products on this CPU (tf32 is a GPU's)."""
    have, _ = native_precisions(CPU)
    return [name for name in PRECISIONS if name.startswith("fp32") and name in have]


def second_call_ms(call: Callable[[], object]) -> float:
    """Milliseconds of a call whose operands the one before has brought near."""
    call()
    return elapsed_ms(call)


def _product_rows(
    products: Sequence[Product],
    calls: Mapping[tuple[Any, ...], tuple[str, Callable[[], object]]],
    singles: Sequence[Mapping[tuple[Any, ...], float]],
) -> list[dict[str, Any]]:
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
    return rows


def measure_part(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the share that :func:`measure_share` asks for."""
    kind, parameters = job["what"], parameters_from_sections(job["parameters"])
    measure = {"dense": dense_share, "embedding": embedding_share}[kind]
    found = measure(parameters, job["threads"], job["seconds"])
    kept = {name: value for name, value in found.items() if name not in DETAILS}
    return kept | {"what": kind, "precision": parameters.training.precision}


if __name__ == "__main__":
    do_job(measure_part)
