"""What the link can do: collectives of several sizes alone, in turns, each timed on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dlrm_core.distributed.world import World

SIZES = tuple(1 << power for power in (10, 13, 16, 18, 20, 21, 22, 23, 24))
"""Payloads in bytes, 1 KiB to 16 MiB."""


def probe_link(
    world: World, repetitions: int, sizes: Sequence[int] = SIZES
) -> list[dict[str, Any]]:
    """Rows of ``link_probe``: the time of the slowest rank, from a barrier to its own end.

    Sizes and collectives take turns, so that what disturbs for a while disturbs all of them.
    Before the ``repetitions`` comes one that is not counted. Buffers are float32, of a multiple
    of the ranks. Every rank returns the same rows.
    """
    cases: list[tuple[str, int, Callable[[], Any]]] = []
    for size in sizes:
        numbers = max(world.size, size // 4 // world.size * world.size)
        for name, call in _collectives(numbers, world):
            cases.append((name, 4 * numbers, call))
    rows: list[dict[str, Any]] = []
    measured: list[float] = []
    for repetition in range(repetitions + 1):
        for name, size, call in cases:
            dist.barrier()
            started = time.perf_counter()
            call()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            spent = time.perf_counter() - started
            if repetition:
                measured.append(1e3 * spent)
                rows.append(
                    {
                        "collective": name,
                        "ranks": world.size,
                        "bytes": size,
                        "repetition": repetition,
                        "backend": world.backend,
                    }
                )
    slowest = torch.tensor(measured, dtype=torch.float64, device=world.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [row | {"time_ms": time_ms} for row, time_ms in zip(rows, slowest.tolist(), strict=True)]


def _collectives(numbers: int, world: World) -> list[tuple[str, Callable[[], Any]]]:
    whole = torch.ones(numbers, device=world.device)
    other = torch.empty_like(whole)
    share = torch.ones(numbers // world.size, device=world.device)
    return [
        ("allreduce", lambda: dist.all_reduce(other)),
        ("alltoall", lambda: dist.all_to_all_single(other, whole)),
        ("allgather", lambda: dist.all_gather_into_tensor(other, share)),
        ("reduce_scatter", lambda: dist.reduce_scatter_tensor(share, whole)),
        ("broadcast", lambda: dist.broadcast(other, 0)),
    ]
