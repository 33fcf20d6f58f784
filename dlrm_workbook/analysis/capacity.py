"""Does a model fit: here, and on GPUs of which only the data sheet is known.

What is needed comes from :func:`dlrm_core.memory.forecast_memory`; nothing is allocated.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dlrm_core.config import Parameters
from dlrm_core.machine import available_host_memory
from dlrm_core.memory import (
    FLOAT_BYTES,
    PLACES,
    MemoryItem,
    forecast_memory,
    total_bytes,
)
from dlrm_core.units import format_bytes
from dlrm_workbook.analysis.devices import Device, device

SHEETS = ("A100-40GB", "A100-80GB", "H100-SXM", "H200")
"""GPUs that every report answers for; their memory is the data sheet's."""

CUDA_CONTEXT_BYTES = 600 << 20
"""Of a GPU's memory, taken by the CUDA context and torch's kernels; assumed, not measured:
about what nvidia-smi shows of a process that has made one small tensor on an A100 or H100."""

MOST_SAMPLES = 1 << 28
"""A batch beyond which no search for the largest goes."""


@dataclass(frozen=True)
class Verdict:
    """Whether a run fits in one memory.

    Attributes:
        target: 'this host', 'this GPU', or a GPU's short name.
        memory: 'free now', or 'data sheet'.
        source: the data sheet's address; empty for what was asked of the system.
        needed_bytes, limit_bytes: None where nobody says.
        exceeded_by_bytes: 0 where it fits.
        largest_batch: the largest ``training.batch_size`` that fits; None: not even 1.
        largest_rows: rows of all tables together that fit, all scaled alike; None: none do.
        rows_factor: by which all tables' rows would be scaled for that.
        largest_on_gpu_bytes: on a GPU, the most of ``training.embeddings_on_gpu_bytes`` that
            fits; None where not even 0 does, or on a host.
        host_bytes: what the host needs then beside a GPU.
    """

    target: str
    memory: str
    source: str
    needed_bytes: int
    limit_bytes: int | None
    fits: bool | None
    exceeded_by_bytes: int
    largest_batch: int | None
    largest_rows: int | None
    rows_factor: float | None
    largest_on_gpu_bytes: int | None
    host_bytes: int


@dataclass(frozen=True)
class Capacity:
    """Everything ``dlrm capacity`` says."""

    parameters: dict[str, int]
    """Number of weights: ``tables``, ``mlps``, ``all``."""
    items: tuple[MemoryItem, ...]
    """For a run on this machine: on its GPU if there is one and it is asked for."""
    needed_bytes: dict[str, int]
    """At the highest point: ``gpu``, ``host``."""
    verdicts: tuple[Verdict, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""
        return asdict(self)


def capacity_of(parameters: Parameters, gpu_bytes: int | None = None) -> Capacity:
    """The forecast for this machine, and whether the run fits here and elsewhere.

    Args:
        gpu_bytes: free memory of this machine's GPU, where the run would use it; None: it
            would run on the CPU.
    """
    model = parameters.model
    here = gpu_bytes is not None
    items = forecast_memory(parameters, here)
    tables = sum(model.table_rows) * model.embedding_dim
    mlps = sum(
        n * m + m
        for widths in (model.bottom_widths, model.top_widths)
        for n, m in itertools.pairwise(widths)
    )
    verdicts = [_verdict(parameters, "host", "this host", available_host_memory(), here)]
    if here:
        verdicts.append(_verdict(parameters, "gpu", "this GPU", gpu_bytes, True))
    verdicts += [sheet_verdict(parameters, device(name)) for name in SHEETS]
    return Capacity(
        {"tables": tables, "mlps": mlps, "all": tables + mlps},
        tuple(items),
        {place: total_bytes(items, place) for place in PLACES},
        tuple(verdicts),
    )


def sheet_verdict(parameters: Parameters, sheet: Device) -> Verdict:
    """Whether a run would fit on a GPU, by its data sheet."""
    limit = int(1e9 * sheet.memory_gb) - CUDA_CONTEXT_BYTES
    return _verdict(parameters, "gpu", sheet.name, limit, True, sheet.source)


def _verdict(
    parameters: Parameters,
    place: str,
    target: str,
    limit: int | None,
    gpu: bool,
    source: str = "",
) -> Verdict:
    items = forecast_memory(parameters, gpu)
    needed = total_bytes(items, place)
    rows = None if limit is None else largest_rows(parameters, place, limit, gpu)
    every = sum(parameters.model.table_rows)
    return Verdict(
        target=target,
        memory="data sheet" if source else "free now",
        source=source,
        needed_bytes=needed,
        limit_bytes=limit,
        fits=None if limit is None else needed <= limit,
        exceeded_by_bytes=0 if limit is None else max(0, needed - limit),
        largest_batch=None if limit is None else largest_batch(parameters, place, limit, gpu),
        largest_rows=rows,
        rows_factor=None if rows is None else rows / every,
        largest_on_gpu_bytes=(
            largest_on_gpu(parameters, limit) if place == "gpu" and limit is not None else None
        ),
        host_bytes=total_bytes(items, "host"),
    )


def largest_batch(parameters: Parameters, place: str, limit: int, gpu: bool) -> int | None:
    """The largest ``training.batch_size`` that fits; None if not even one sample does."""

    def needed(size: int) -> int:
        changed = _with_training(parameters, batch_size=size)
        return total_bytes(forecast_memory(changed, gpu), place)

    return _largest(needed, limit, MOST_SAMPLES)


def largest_rows(parameters: Parameters, place: str, limit: int, gpu: bool) -> int | None:
    """Rows of all tables together that fit when all are scaled alike; None if none do."""
    every = sum(parameters.model.table_rows)

    def needed(total: int) -> int:
        changed = _scaled(parameters, total / every)
        return total_bytes(forecast_memory(changed, gpu), place)

    dim = parameters.model.embedding_dim
    most = max(every, limit // (dim * FLOAT_BYTES) + len(parameters.model.table_rows))
    found = _largest(needed, limit, most)
    return None if found is None else sum(_scaled(parameters, found / every).model.table_rows)


def largest_on_gpu(parameters: Parameters, limit: int) -> int | None:
    """The most of ``training.embeddings_on_gpu_bytes`` that fits on a GPU of ``limit`` bytes."""
    dim, sums = parameters.model.embedding_dim, [0]
    for rows in sorted(parameters.model.table_rows):
        sums.append(sums[-1] + rows * dim * FLOAT_BYTES)

    def needed(count: int) -> int:
        changed = _with_training(parameters, embeddings_on_gpu_bytes=sums[count - 1])
        return total_bytes(forecast_memory(changed, True), "gpu")

    found = _largest(needed, limit, len(sums))
    return None if found is None else sums[found - 1]


def _largest(needed: Callable[[int], int], limit: int, most: int) -> int | None:
    """The largest number from 1 to ``most`` whose need, which grows with it, is within limit."""
    if needed(1) > limit:
        return None
    fits, too_large = 1, most + 1
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if needed(middle) <= limit:
            fits = middle
        else:
            too_large = middle
    return fits


def advice(parameters: Parameters, place: str, limit: int, gpu: bool) -> str:
    """What would fit, for a run that does not: a clause without a stop."""
    batch = largest_batch(parameters, place, limit, gpu)
    rows = largest_rows(parameters, place, limit, gpu)
    every = sum(parameters.model.table_rows)
    said = [
        f"training.batch_size: {batch} would fit" if batch else "no training.batch_size would fit",
        f"tables of {rows:,} rows in all would fit ({rows / every:.3g} of these {every:,})"
        if rows
        else "no table would fit beside this batch",
    ]
    if place == "gpu":
        most = largest_on_gpu(parameters, limit)
        if most is not None:
            said.append(
                f"training.embeddings_on_gpu_bytes: {most} would fit, with "
                f"{format_bytes(_host_beside(parameters, most))} in host memory"
            )
    return "; ".join(said)


def _host_beside(parameters: Parameters, on_gpu_bytes: int) -> int:
    changed = _with_training(parameters, embeddings_on_gpu_bytes=on_gpu_bytes)
    return total_bytes(forecast_memory(changed, True), "host")


def _with_training(parameters: Parameters, **changes: Any) -> Parameters:
    training = dataclasses.replace(parameters.training, **changes)
    return dataclasses.replace(parameters, training=training)


def _scaled(parameters: Parameters, factor: float) -> Parameters:
    rows = tuple(max(1, int(count * factor)) for count in parameters.model.table_rows)
    model = dataclasses.replace(parameters.model, table_rows=rows)
    return dataclasses.replace(parameters, model=model)
