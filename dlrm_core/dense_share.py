"""Which share of the machine's matrix products the dense part of a step reaches.

The dense part is all of a step but embeddings and data: both MLPs, interaction, loss,
update. Its ceiling is the time of the MLPs' products alone, a layer and phase at a time,
at the model's own shapes, by the library that torch calls (the roofline's ceiling,
:mod:`dlrm_core.products`). Both are timed here in turns in one process, so that a
machine whose speed drifts does not favour one of them.

The interaction's products, which are small and batched, count as the dense part's time but
not in its ceiling: the share can only be lower for it.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dlrm_core.allocator import settle_allocator
from dlrm_core.config import Parameters
from dlrm_core.precision import MAX_RELATIVE_ERROR
from dlrm_core.probe_loops import StepLoop, Times, apply_settings
from dlrm_core.products import (
    PRECISIONS,
    Product,
    model_products,
    native_precisions,
    product_calls,
    time_products,
)
from dlrm_core.timing import threads_of

LEAST_ROUNDS, MAX_ROUNDS = 5, 60

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
        while len(steps) < LEAST_ROUNDS or (
            len(steps) < MAX_ROUNDS and time.perf_counter() < deadline
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
