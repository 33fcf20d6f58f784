"""Bare matrix products and bare random rows, timed in every round in turn with the contestants.

A step can hardly be faster than the products of its layers and the accesses to its rows. What
a shared machine gives to either differs from minute to minute, and a ratio does not show it:
beside each round's times stand the times of this bare work, so that the results of two
machines can be compared by the share of it that each contestant reached.

    python -m dlrm_studies.bench.bare JOB RESULT

is the process that measures a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dlrm_core.base.machine import keep_freed_memory
from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.data.loader import make_generator
from dlrm_core.precision import DTYPES
from dlrm_kernels.dense import parts_of, why_not_fused
from dlrm_kernels.products import MAX_RELATIVE_ERROR
from dlrm_studies.bench.cases import FP32
from dlrm_studies.bench.rows import cache_flush, row_access_ms, why_no_accesses
from dlrm_workbook.evidence import ceilings
from dlrm_workbook.evidence.contestants import environment_of
from dlrm_workbook.evidence.probes import model_for, reduced
from dlrm_workbook.ground import turns
from dlrm_workbook.ground.intervals import median_interval
from dlrm_workbook.ground.processes import do_job, run_job
from dlrm_workbook.ground.units import milliseconds, percent

ROWS = "rows"
"""Name of the bare accesses to rows beside the precisions of products."""

LEAST_PASSES, SECONDS = 3, 2.5
"""Passes over all products and rows in a round: at least so many, until so many seconds."""

ERROR_SECONDS = 1.0
"""Time in which products are compared with float64's and the faster fp32 library is chosen."""

SLOW_UNIT = 0.75
"""Share of its best below which the matrix unit was slow while a benchmark ran."""

BUSY = 0.05
"""Share of the time waited for a core above which a machine was not quiet."""

TRUE_FP32 = 3e-7
"""||C - C64|| / ||C64|| of products whose results are true fp32's."""

OTHER_ORDER = 2.0
"""The bound is this many times the default library's own error, where that is larger (MKL on an AMD
processor adds up 2048 numbers to 8e-7): other fp32 libraries add up in another order."""


# One round, in a process of its own.


def product_kind(parameters: Parameters) -> str:
    """Name of the products that a contestant's dense part is made of, as ceilings have it."""
    config, interaction = parameters.training, parameters.model.interaction_kind
    if config.precision != "fp32":
        return config.precision
    names = {parts: name for name, parts in ceilings.TILE_PARTS.items()}
    tiles = parts_of(config)
    if (
        tiles
        and config.dense_backend == "fused"
        and not why_not_fused(config, turns.CPU, interaction)
    ):
        return names[tiles]
    return "fp32" if config.fp32_matmul == "default" else "fp32_onednn"


def time_round(parameters: Parameters, kinds: Sequence[str], threads: int) -> dict[str, Any]:
    """One round's bare work in a process of its own, with the contestants' settings.

    Args:
        kinds: of products (:func:`product_kind`); all of them get their error, those of a
            library also their time.

    Returns:
        what :func:`bare_times` does.

    Raises:
        InputError: the process fails; with what it said last.
    """
    job = {"parameters": parameters.to_sections(), "kinds": list(kinds), "threads": threads}
    times: dict[str, Any] = run_job(
        __name__, job, stage="bare products and rows", environment=environment_of(threads)
    )
    return times


def bare_times(parameters: Parameters, kinds: Sequence[str], threads: int) -> dict[str, Any]:
    """Time the products of the model's layers and the accesses to its rows, in turns, on the CPU.

    Returns:
        ``ms`` (precision, or ``rows``, to the median of all passes: the sum over the
        layers' products, forward and backward; every row read, and read and written),
        ``best_ms`` (the same with every product or access at its least time), ``errors`` (kind to
        the largest relative error of a product), ``waited_share`` (of the time, for a core),
        ``passes``, and ``reasons`` (name to why it was not measured).
    """
    keep_freed_memory()
    reasons: dict[str, str] = {}
    with turns.threads_of(threads), torch.no_grad():
        products = layer_products(parameters)
        native, emulated = ceilings.native_precisions(turns.CPU)
        measurable = [name for name in kinds if name in native or name in ceilings.TILE_PARTS]
        names = list(dict.fromkeys([*measurable, *fp32_libraries()]))
        rows, _ = ceilings.time_products(products, names, turns.CPU, ERROR_SECONDS)
        precisions = [name for name in DTYPES if name in {"fp32", "bf16", *kinds}]
        reasons |= {name: emulated[name] for name in precisions if name not in native}
        calls = {n: library_calls(products, n, rows) for n in precisions if n not in reasons}
        if why := why_no_accesses(parameters):
            reasons[ROWS] = why
        else:
            sparse = reduced(parameters, "sparse")
            tables = model_for(sparse.model, None, huge_pages=True).embeddings
            generator = make_generator(sparse, turns.CPU)
            flush = cache_flush(sum(weight.nbytes for weight in tables.weights))
        began, waited = time.perf_counter(), turns.waited_ns()
        passes: dict[str, list[dict[Any, float]]] = {name: [] for name in (*calls, ROWS)}
        for _ in turns.take_turns((), 20, enough=turns.least_and_seconds(LEAST_PASSES, SECONDS)):
            for name, chosen in calls.items():
                times = {shape: second_call_ms(call) for shape, call in chosen.items()}
                passes[name].append({p: times[p.shape] for p in products})
            if ROWS not in reasons:
                read, changed = row_access_ms(tables, generator.next_batch(), flush)
                passes[ROWS].append({"read": read, "change": changed})
        now, seconds = turns.waited_ns(), time.perf_counter() - began
    taken = {name: rounds for name, rounds in passes.items() if rounds}
    return {
        "ms": {
            name: statistics.median(sum(one.values()) for one in rounds)
            for name, rounds in taken.items()
        },
        "best_ms": {
            name: sum(min(one[key] for one in rounds) for key in rounds[0])
            for name, rounds in taken.items()
        },
        "errors": largest_errors(rows),
        "waited_share": (now - waited) / 1e9 / seconds if waited and now else None,
        "passes": len(passes["fp32"]),
        "reasons": reasons,
    }


def measure_round(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the round that :func:`time_round` asks for."""
    return bare_times(parameters_from_sections(job["parameters"]), job["kinds"], job["threads"])


def layer_products(parameters: Parameters) -> list[ceilings.Product]:
    """The products of layers: a dot interaction's are batched, and not of one library alone."""
    return [product for product in ceilings.model_products(parameters) if product.batch == 1]


def library_calls(
    products: list[ceilings.Product], precision: str, timed: Sequence[Mapping[str, Any]]
) -> dict[tuple[Any, ...], Callable[[], object]]:
    """Shape of a product to the library's call to time, on the CPU.

    Args:
        timed: rows of :func:`.time_products`, by which the fastest library of fp32 products is
            chosen among those that round no more than fp32's own products may.
    """
    if precision != "fp32":
        return ceilings.product_calls(products, precision, turns.CPU)
    worst = largest_errors(timed)
    exact = [
        name
        for name in fp32_libraries()
        if name == "fp32" or worst.get(name, 1.0) <= MAX_RELATIVE_ERROR
    ]
    every = {name: ceilings.product_calls(products, name, turns.CPU) for name in exact}
    chosen = {}
    for product in products:
        place = [getattr(product, key) for key in ("part", "layer", "phase")]
        same = [
            row
            for row in timed
            if row["precision"] in exact
            and place == [row[key] for key in ("part", "layer", "phase")]
        ]
        name = min(same, key=lambda row: row["ms"])["precision"] if same else "fp32"
        chosen[product.shape] = every[name][product.shape]
    return chosen


def largest_errors(timed: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Precision to the largest relative error of its products in rows of :func:`.time_products`."""
    errors: dict[str, float] = {}
    for row in timed:
        name = row["precision"]
        errors[name] = max(row["relative_error"], errors.get(name, 0.0))
    return errors


def fp32_libraries() -> list[str]:
    """Names of the libraries' fp32 products on this CPU (tf32 is a GPU's)."""
    have, _ = ceilings.native_precisions(turns.CPU)
    return [name for name in ceilings.PRECISIONS if name.startswith("fp32") and name in have]


def second_call_ms(call: Callable[[], object]) -> float:
    """Milliseconds of a call whose operands the one before has brought near."""
    call()
    return turns.elapsed_ms(call)


# What all rounds say.


def judge_bare(
    rounds: Sequence[Mapping[str, Any]],
    runs: Sequence[Mapping[str, Any]],
    kinds: Mapping[str, str],
) -> dict[str, Any]:
    """Bare work over all rounds, and each contestant's share of it.

    Args:
        rounds: what :func:`time_round` found, each with its ``round``.
        runs: the contestants' runs of the same case.
        kinds: contestant to its kind of products.

    Returns:
        ``bare`` (precision or ``rows`` to ``low``, ``mid``, ``high``, ``confidence`` of the
        rounds' times in ms, ``best_ms`` over all rounds and ``of_best``, the best over the
        middle), ``contestants`` (name to ``kind``, ``precision``, ``products_ms``, ``rows_ms``,
        ``share``: bare products and rows over its step, an interval of the rounds' own),
        ``errors`` (kind to the largest), ``waited_share`` (largest of a round), ``reasons``.
    """
    bare: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in rounds for name in one.get("ms") or {}):
        with_it = [one for one in rounds if name in (one.get("ms") or {})]
        middle = median_interval([one["ms"][name] for one in with_it])
        best = min(one["best_ms"][name] for one in with_it)
        bare[name] = middle.to_dict() | {"best_ms": best, "of_best": best / middle.mid}
    contestants = {}
    for name, kind in kinds.items():
        precision = "fp32" if kind.startswith("fp32") else kind
        steps = {row["round"]: row["step_ms"] for row in runs if row["contestant"] == name}
        shares = [
            (one["ms"][precision] + one["ms"][ROWS]) / steps[one["round"]]
            for one in rounds
            if one["round"] in steps and {precision, ROWS} <= set(one.get("ms") or {})
        ]
        if shares:
            contestants[name] = {
                "kind": kind,
                "precision": precision,
                "products_ms": bare[precision]["mid"],
                "rows_ms": bare[ROWS]["mid"],
                "share": median_interval(shares).to_dict(),
            }
    errors: dict[str, float] = {}
    for one in rounds:
        for kind, error in (one.get("errors") or {}).items():
            errors[kind] = max(error, errors.get(kind, 0.0))
    waited = [one["waited_share"] for one in rounds if one.get("waited_share") is not None]
    return {
        "bare": bare,
        "contestants": contestants,
        "errors": errors,
        "waited_share": max(waited, default=None),
        "reasons": {name: why for one in rounds for name, why in one.get("reasons", {}).items()},
    }


def describe_bare(judged: Mapping[str, Any]) -> str:
    """What :func:`judge_bare` found, as lines of text."""
    lines = [
        f"bare {work_label(name)}: {milliseconds(one['mid'])}, "
        f"{milliseconds(one['best_ms'])} at best"
        for name, one in judged["bare"].items()
    ]
    lines += [
        f"bare {one['precision']} products and rows take {percent(one['share']['mid'])} of the "
        f"step of {name}"
        for name, one in judged["contestants"].items()
    ]
    lines += [f"relative error of {kind} products: {e:.1e}" for kind, e in judged["errors"].items()]
    lines += [
        f"bare {work_label(name)}: not measured: {why}" for name, why in judged["reasons"].items()
    ]
    return "\n".join([*lines, *cautions(judged)])


def work_label(name: str) -> str:
    """Bare work as a reader calls it."""
    return "random rows" if name == ROWS else f"{name} products"


def rounded_fp32(judged: Mapping[str, Any]) -> str:
    """Why the contestant ``fp32`` is not true fp32; empty if it is, or nobody measured it."""
    kind = judged["contestants"].get(FP32, {"kind": ""})["kind"]
    error = judged["errors"].get(kind, 0.0)
    limit = max(TRUE_FP32, OTHER_ORDER * judged["errors"].get("fp32", 0.0))
    if error <= limit:
        return ""
    return (
        f"The products of {FP32} have a relative error of {error:.1e}, more than true fp32's "
        f"{limit:.1e}"
    )


def cautions(judged: Mapping[str, Any]) -> list[str]:
    """Sentences on a matrix unit that was slow, a machine that was busy, and errors too large."""
    sentences = []
    busy = (judged["waited_share"] or 0.0) > BUSY
    unit = judged["bare"].get("bf16")
    # on a busy machine every product is slow, whatever its unit gives
    if unit is not None and unit["of_best"] < SLOW_UNIT and not busy:
        sentences.append(
            f"The matrix unit gave {percent(unit['of_best'])} of its best: the bare bf16 products "
            f"took {milliseconds(unit['mid'])}, {milliseconds(unit['best_ms'])} at best, so "
            "contestants that multiply bf16 numbers are faster on a unit that is not shared"
        )
    if rounded := rounded_fp32(judged):
        sentences.append(rounded)
    if busy:
        sentences.append(
            f"The machine was not quiet: the bare work waited for a core "
            f"{percent(judged['waited_share'])} of its time, so times and ratios are of a "
            "disturbed machine"
        )
    return sentences


if __name__ == "__main__":
    do_job(measure_round)
