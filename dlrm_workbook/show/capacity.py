"""Whether a run fits, as a reader of a notebook wants it: tables of text."""

from __future__ import annotations

from dlrm_core.config import Parameters
from dlrm_core.units import NOTHING, format_bytes
from dlrm_workbook.analysis.capacity import Capacity, Verdict, capacity_of
from dlrm_workbook.show.tables import Table


def capacity(parameters: Parameters) -> Capacity:
    """The forecast for this machine, with its GPU if the run would use it."""
    return capacity_of(parameters, free_gpu_bytes(parameters))


def free_gpu_bytes(parameters: Parameters) -> int | None:
    """What is free on the GPU that the run would use; None: it would run on the CPU."""
    import torch

    from dlrm_core.machine import resolve_device

    device = resolve_device(parameters.training)
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def model_table(found: Capacity) -> Table:
    """How many weights the model has, and what they take with everything else."""
    counts = found.parameters
    needed = ", ".join(
        f"{format_bytes(size)} of {'GPU memory' if place == 'gpu' else place}"
        for place, size in found.needed_bytes.items()
        if size
    )
    return Table(
        ["", "value"],
        [
            ("weights in tables", f"{counts['tables']:,}"),
            ("weights in MLPs", f"{counts['mlps']:,}"),
            ("a run needs at most", needed),
        ],
    )


def fits_table(found: Capacity) -> Table:
    """Whether the run fits here and on GPUs by their data sheets, and what would fit."""
    columns = ("memory of", "there is", "needed", "fits", "largest batch", "largest tables (rows)")
    return Table(
        [*columns, "tables it can hold", "on the host then"],
        [_row(verdict) for verdict in found.verdicts],
    )


def verdict_cells(verdict: Verdict) -> dict[str, str]:
    """The words for one memory, for the page and for the command line."""
    limit, on_gpu = verdict.limit_bytes, verdict.largest_on_gpu_bytes
    known = limit is not None
    if verdict.fits is None:
        fits = "unknown"
    elif verdict.fits:
        fits = "yes"
    else:
        fits = f"no, {format_bytes(verdict.exceeded_by_bytes)} too much"
    batch = "not even 1" if verdict.largest_batch is None else f"{verdict.largest_batch:,}"
    rows = (
        "none"
        if verdict.largest_rows is None or verdict.rows_factor is None
        else f"{verdict.largest_rows:,} ({_times(verdict.rows_factor)})"
    )
    return {
        "target": verdict.target,
        "limit": f"{format_bytes(limit)} ({verdict.memory})" if limit is not None else "unknown",
        "needed": format_bytes(verdict.needed_bytes),
        "fits": fits,
        "batch": batch if known else NOTHING,
        "rows": rows if known else NOTHING,
        "on_gpu": NOTHING if on_gpu is None else format_bytes(on_gpu),
        "host": format_bytes(verdict.host_bytes),
    }


def _row(verdict: Verdict) -> tuple[str, ...]:
    return tuple(verdict_cells(verdict).values())


def _times(factor: float) -> str:
    """``1.11×``, ``11,100×``: three digits that count, never an exponent."""
    if factor < 1000:
        return f"{factor:.3g}×"
    return f"{float(f'{factor:.3g}'):,.0f}×"
