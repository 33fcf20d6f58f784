"""Does a model fit: here, and on GPUs of which only the data sheet is known.

What is needed comes from :func:`dlrm_kernels.memory.forecast_memory`; nothing is allocated.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd
import torch

from dlrm_core.base.machine import available_host_memory, resolve_device
from dlrm_core.config import Parameters
from dlrm_kernels.memory import (
    PLACES,
    MemoryItem,
    forecast_memory,
    largest_batch,
    largest_on_gpu,
    largest_rows,
    total_bytes,
)
from dlrm_workbook.analysis.devices import DEVICES, Device

MOST_GPUS = 1024
"""More GPUs of one kind than so many are not tried."""

CUDA_CONTEXT_BYTES = 600 << 20
"""Of a GPU's memory, taken by the CUDA context and torch's kernels; assumed, not measured:
about what nvidia-smi shows of a process that has made one small tensor on an A100 or H100."""


@dataclass(frozen=True)
class Verdict:
    """Whether a run fits in one memory: a row of :meth:`Capacity.table`.

    ``source`` is the data sheet's address, empty for what was asked of the system. None is what
    nobody says, or where not even the smallest fits.
    """

    target: str
    memory: str
    source: str
    needed_bytes: int
    limit_bytes: int | None
    fits: bool | None = None
    exceeded_by_bytes: int = 0
    largest_batch: int | None = None
    largest_rows: int | None = None
    rows_factor: float | None = None
    largest_on_gpu_bytes: int | None = None
    host_bytes: int = 0
    gpus: int | None = None
    each_bytes: int | None = None
    each_host_bytes: int | None = None


@dataclass(frozen=True)
class Capacity:
    """Everything ``dlrm capacity`` says."""

    parameters: dict[str, int]
    """Number of weights: ``tables``, ``mlps``, the interaction's own layers by what they are called
    (``cross_layers``), ``all``."""
    items: tuple[MemoryItem, ...]
    """For a run on this machine: on its GPU if there is one and it is asked for."""
    needed_bytes: dict[str, int]
    """At the highest point: ``gpu``, ``host``."""
    verdicts: tuple[Verdict, ...]

    def table(self) -> pd.DataFrame:
        """A row for each memory: what there is, whether the run fits, and what would fit."""
        shown = ["target", "limit_bytes", "memory", "needed_bytes", "fits", "exceeded_by_bytes"]
        shown += ["largest_batch", "largest_rows", "rows_factor", "largest_on_gpu_bytes"]
        table = pd.DataFrame([vars(verdict) for verdict in self.verdicts])
        table["exceeded_by_bytes"] = table["exceeded_by_bytes"].where(lambda size: size > 0)
        return table[[*shown, "host_bytes", "gpus", "each_bytes", "each_host_bytes"]]

    def weights(self) -> pd.DataFrame:
        """``what``, ``value``, ``unit``: how many weights the model has, what a run needs."""
        rows: list[tuple[str, int, str]] = []
        for name, count in self.parameters.items():
            if name != "all":
                called = "MLPs" if name == "mlps" else name.replace("_", " ")
                rows.append((f"weights in {called}", count, ""))
        places = {"gpu": "GPU memory", "host": "host memory"}
        rows += [
            (f"{places.get(place, place)} that a run needs at most", size, "bytes")
            for place, size in self.needed_bytes.items()
            if size
        ]
        return pd.DataFrame(rows, columns=["what", "value", "unit"])

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""
        return asdict(self)


def capacity_here(parameters: Parameters) -> Capacity:
    """The forecast for this machine, with its GPU if the run would use it."""
    chosen = resolve_device(parameters.training)
    is_gpu = chosen.type == "cuda"
    return capacity_of(parameters, torch.cuda.mem_get_info(chosen)[0] if is_gpu else None)


def capacity_of(parameters: Parameters, gpu_bytes: int | None = None) -> Capacity:
    """The forecast for this machine, and whether the run fits here and elsewhere. ``gpu_bytes`` is
    the free memory of this machine's GPU, where the run would use it; None: it would run on the
    CPU."""
    model = parameters.model
    here = gpu_bytes is not None
    items = forecast_memory(parameters, here)
    tables = sum(model.table_rows) * model.embedding_dim
    dense = model.dense_weights
    counts = {"tables": tables, "mlps": dense["bottom_mlp"] + dense["top_mlp"]}
    if layers := model.interaction_kind.layers:
        counts[layers.replace(" ", "_")] = dense["interaction"]
    verdicts = [_verdict(parameters, "host", "this host", available_host_memory(), here)]
    if here:
        verdicts.append(_verdict(parameters, "gpu", "this GPU", gpu_bytes, True))
    verdicts += [sheet_verdict(parameters, sheet) for sheet in DEVICES]
    return Capacity(
        counts | {"all": sum(counts.values())},
        tuple(items),
        {place: total_bytes(items, place) for place in PLACES},
        tuple(verdicts),
    )


def sheet_verdict(parameters: Parameters, sheet: Device) -> Verdict:
    """Whether a run would fit on a GPU, by its data sheet."""
    limit = int(1e9 * sheet.memory_gb) - CUDA_CONTEXT_BYTES
    verdict = _verdict(parameters, "gpu", sheet.name, limit, True, sheet.source)
    for gpus in (1 << power for power in range(MOST_GPUS.bit_length())):
        items = forecast_memory(parameters, True, gpus)
        if (each := total_bytes(items, "gpu")) <= limit:
            host = total_bytes(items, "host")
            return replace(verdict, gpus=gpus, each_bytes=each, each_host_bytes=host)
    return verdict


def _verdict(
    parameters: Parameters, place: str, target: str, limit: int | None, gpu: bool, source: str = ""
) -> Verdict:
    items = forecast_memory(parameters, gpu)
    needed = total_bytes(items, place)
    memory = "data sheet" if source else "free now"
    host_bytes = total_bytes(items, "host")
    verdict = Verdict(target, memory, source, needed, limit, host_bytes=host_bytes)
    if limit is None:
        return verdict
    rows = largest_rows(parameters, place, limit, gpu)
    return replace(
        verdict,
        fits=needed <= limit,
        exceeded_by_bytes=max(0, needed - limit),
        largest_batch=largest_batch(parameters, place, limit, gpu),
        largest_rows=rows,
        rows_factor=None if rows is None else rows / sum(parameters.model.table_rows),
        largest_on_gpu_bytes=largest_on_gpu(parameters, limit) if place == "gpu" else None,
    )
