"""What the machine can do at best, measured on the spot: the roofline's ceilings.

On the run's device, with the run's threads, at the model's own shapes: matrix products in
every precision, bandwidth of streaming and of random rows, the cost of starting an
operator or a kernel, of copying to and from a GPU. Each figure is the best of several
tries in turns with the others, since what disturbs a measurement only ever slows it.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch

from dlrm_core.capacity import available_memory, format_bytes, mean_bag_size
from dlrm_core.config import Parameters
from dlrm_core.products import (
    MEMORY_SHARE,
    model_products,
    native_precisions,
    tile_precision,
    time_products,
)
from dlrm_core.timing import Action, best_times_ms, threads_of

GEMM_BUDGET_S = 2.5
MEMORY_BUDGET_S = 1.2
"""Of timing; making the arrays comes on top, about half a second."""

STREAM_BYTES = (32 << 20, 256 << 20)
"""Least and most of each of the three arrays that are to lie in memory."""

TABLE_BYTES = {"cpu": 1 << 30, "cuda": 64 << 30}
"""Largest table that is gathered from: a larger one takes long to fill and is no slower."""

GATHER_LOOKUPS = 1 << 16
"""Least number of rows gathered in a call, so that its start does not count."""

INDEX_SETS = 4
"""Random rows are drawn anew for successive calls, or the last call's would be in cache."""

COPY_BYTES = 64 << 20


def measure_ceilings(
    parameters: Parameters, device: torch.device
) -> tuple[dict[str, Any], dict[str, str]]:
    """Measure everything; about six seconds at the experiment's shape, less for small ones.

    Returns:
        ``device``, ``threads``, ``seconds`` (that measuring took), ``run_queue_share`` (of
        that time in which the measuring thread waited for a core: above a few percent the
        machine was busy and the ceilings are low), ``gemm`` (rows of
        :func:`dlrm_core.products.time_products`), ``stream``, ``gather``, ``dispatch_us``,
        ``last_level_cache_bytes``; on a GPU ``launch_us``, ``kernel_us`` and ``copy``;
        and what could not be measured, name to reason.
    """
    missing: dict[str, str] = {}
    found: dict[str, Any] = {"device": str(device)}
    with threads_of(parameters.training.threads), torch.no_grad():
        began, waited = time.perf_counter(), _run_queue_s()
        found["threads"] = torch.get_num_threads()
        precisions, emulated = native_precisions(device)
        missing |= {f"ceilings.gemm.{name}": why for name, why in emulated.items()}
        if (own := tile_precision(parameters, device)) is not None:
            precisions.append(own)
        found["gemm"], late = time_products(
            model_products(parameters), precisions, device, GEMM_BUDGET_S
        )
        missing |= {f"ceilings.gemm.{name}": why for name, why in late.items()}
        found["last_level_cache_bytes"] = last_level_cache(device)
        if found["last_level_cache_bytes"] is None:
            missing["ceilings.last_level_cache_bytes"] = "the system does not say"
        found["stream"], found["gather"], late = _memory(parameters, device)
        missing |= {f"ceilings.{name}": why for name, why in late.items()}
        found["dispatch_us"] = dispatch_us()
        if device.type == "cuda":
            found |= _launches(device)
            found["copy"] = _copies(device)
            torch.cuda.empty_cache()
        found["seconds"] = time.perf_counter() - began
        now = _run_queue_s()
        if waited is not None and now is not None:
            found["run_queue_share"] = (now - waited) / found["seconds"]
    return found, missing


def last_level_cache(device: torch.device) -> int | None:
    """Bytes of the largest cache that the system reports; virtual machines share theirs."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    levels = _cpu_caches()
    return levels[max(levels)] if levels else None


def dispatch_us() -> float:
    """Microseconds of the host for one tiny torch operator, called from Python."""
    cpu = torch.device("cpu")
    one = torch.ones(1)
    best, _ = best_times_ms({"add": Action(lambda: one.add_(1.0))}, cpu, 0.1)
    return 1e3 * best["add"]


# ---- bandwidth ----------------------------------------------------------------------


def stream_actions(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> dict[str, Action]:
    """Read, copy and triad (McCalpin's STREAM) over float32 arrays (n,)."""
    return {
        "read": Action(lambda: torch.dot(a, a)),
        "copy": Action(lambda: b.copy_(a)),
        "triad": Action(lambda: torch.add(b, c, alpha=3.0, out=a)),
    }


STREAM_ARRAYS = {"read": 1, "copy": 2, "triad": 3}
"""Arrays that cross the memory bus, by STREAM's count (no write-allocate)."""


def gather_action(table: torch.Tensor, bags: int, bag: int) -> Action:
    """Sum ``bag`` random rows of a table (rows, d) into each of ``bags`` results.

    The access of a pooled embedding: embedding_bag, other rows at every call.
    """
    device = table.device
    random = torch.Generator(device).manual_seed(0)
    sets = [
        torch.randint(table.shape[0], (bags * bag,), generator=random, device=device)
        for _ in range(INDEX_SETS)
    ]
    offsets = torch.arange(bags, device=device) * bag
    calls = 0

    def call() -> torch.Tensor:
        nonlocal calls
        calls += 1
        return torch.nn.functional.embedding_bag(
            sets[calls % INDEX_SETS], table, offsets, mode="sum"
        )

    return Action(call)


def _memory(
    parameters: Parameters, device: torch.device
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, str]]:
    """Rows of ``stream`` and of ``gather``, in cache and in memory, and what is missing."""
    missing: dict[str, str] = {}
    row_values = parameters.model.embedding_dim
    row_bytes = 4 * row_values
    cached = _cached_bytes(device)
    low, high = STREAM_BYTES
    outer = min(max(4 * (last_level_cache(device) or 0) // 3, low), high)
    limit = TABLE_BYTES[device.type]
    table = min(max(parameters.model.table_rows) * row_bytes, limit)
    bag = max(1, round(mean_bag_size(parameters, max(parameters.model.table_rows))))
    bags = max(parameters.training.batch_size, -(-GATHER_LOOKUPS // bag))
    room = available_memory(device)
    lookups = 8 * INDEX_SETS * bags * bag + bags * row_bytes
    need = max(3 * outer, table) + 3 * cached + lookups
    if room is not None and need > MEMORY_SHARE * room:
        why = f"needs {format_bytes(need)}, of {format_bytes(room)} available"
        return [], [], {"stream": why, "gather": why}
    # one block for the streams and the table: a page's first touch costs more than reading it
    block = torch.empty(max(3 * outer, table) // 4, device=device).fill_(1.0)
    inner = torch.ones(3 * cached // 4, device=device)
    actions: dict[tuple[str, int], Action] = {}
    for size, memory in ((cached, inner), (outer, block)):
        count = size // 4
        thirds = (memory[i * count : (i + 1) * count] for i in range(3))
        actions |= {(kind, size): made for kind, made in stream_actions(*thirds).items()}
    # after the streams, which have driven the table out of the caches
    sizes = sorted({min(table, max(cached, row_bytes)) // row_bytes, table // row_bytes})
    for rows in sizes:
        view = block[: rows * row_values].view(rows, row_values)
        actions["gather", rows] = gather_action(view, bags, bag)
    times, late = best_times_ms(actions, device, MEMORY_BUDGET_S)
    for (kind, size), why in late.items():
        missing[f"{kind} of {size}"] = why
    stream = [
        {"level": level, "bytes": size}
        | {
            f"{kind}_gb_per_s": arrays * size / times[kind, size] / 1e6
            for kind, arrays in STREAM_ARRAYS.items()
            if (kind, size) in times
        }
        for level, size in (("cache", cached), ("memory", outer))
    ]
    gather = [
        {
            "row_bytes": row_bytes,
            "table_bytes": rows * row_bytes,
            "gb_per_s": bags * bag * row_bytes / times["gather", rows] / 1e6,
        }
        for rows in sizes
        if ("gather", rows) in times
    ]
    return stream, gather, missing


def _cached_bytes(device: torch.device) -> int:
    """Bytes of an array of which three fit well into the caches next to the cores."""
    if device.type == "cuda":
        near = (last_level_cache(device) or (4 << 20)) // 2
    else:
        near = _cpu_caches().get(2, 1 << 20) * torch.get_num_threads() // 2
    return near // 3 // 4096 * 4096


def _cpu_caches() -> dict[int, int]:
    """Bytes of the first core's caches by level, instructions' aside."""
    levels: dict[int, int] = {}
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level, kind, size = (
                (folder / name).read_text().strip() for name in ("level", "type", "size")
            )
        except OSError:
            continue
        units = {"K": 10, "M": 20, "G": 30}
        if kind != "Instruction" and size[:-1].isdigit() and size[-1] in units:
            levels[int(level)] = int(size[:-1]) << units[size[-1]]
    return levels


def _run_queue_s() -> float | None:
    """Seconds that the calling thread has waited for a core so far."""
    try:
        path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        return int(path.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


# ---- GPU ------------------------------------------------------------------------------


def _launches(device: torch.device) -> dict[str, float]:
    """Cost of small kernels, in microseconds.

    ``launch_us``: of the host, for one operator that is one kernel; ``kernel_us``: of the
    device, from one queued kernel to the next, the least that any kernel takes.
    """
    one = torch.ones(1, device=device)
    large = torch.ones(4096, 4096, device=device)
    count, host, kernel = 200, [], []
    for _ in range(10):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # work that keeps the device busy while the small kernels queue up behind it
        for _ in range(4):
            large @ large
        first.record()
        began = time.perf_counter()
        for _ in range(count):
            one.add_(1.0)
        host.append(1e6 * (time.perf_counter() - began) / count)
        last.record()
        last.synchronize()
        kernel.append(1e3 * first.elapsed_time(last) / count)
    return {"launch_us": min(host), "kernel_us": min(kernel)}


def _copies(device: torch.device) -> list[dict[str, Any]]:
    """Bandwidth between host and device, both ways, from pageable and from pinned memory."""
    there = torch.ones(COPY_BYTES // 4, device=device)
    actions: dict[tuple[str, str], Action] = {}
    for kind in ("pageable", "pinned"):
        here = torch.ones(COPY_BYTES // 4)
        if kind == "pinned":
            here = here.pin_memory()
        actions[kind, "h2d"] = _copy(there, here)
        actions[kind, "d2h"] = _copy(here, there)
    times, _ = best_times_ms(actions, device, 1.0)
    return [
        {
            "kind": kind,
            "direction": direction,
            "bytes": COPY_BYTES,
            "gb_per_s": COPY_BYTES / ms / 1e6,
        }
        for (kind, direction), ms in times.items()
    ]


def _copy(target: torch.Tensor, source: torch.Tensor) -> Action:
    return Action(lambda: target.copy_(source, non_blocking=True))
