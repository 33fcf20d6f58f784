"""Which embedding tables lie on the GPU, and which in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlrm_core.config import Parameters


@dataclass(frozen=True)
class Placement:
    """Numbers of the tables on each side, both rising.

    Attributes:
        on_gpu: tables looked up where the dense part runs.
        on_host: tables in host memory, looked up by the CPU.
        split: whether pooled vectors cross from the host's side to the GPU's.
    """

    on_gpu: tuple[int, ...]
    on_host: tuple[int, ...]
    split: bool


def plan_placement(parameters: Parameters, gpu: bool) -> Placement:
    """Where each table lies when the dense part runs on a GPU, or on the CPU.

    The smallest tables go to the GPU first, until the next would exceed
    ``training.embeddings_on_gpu_bytes``: small tables are looked up as often as large ones
    (NVIDIA's DLRM for TensorFlow places them so as well). On a CPU the same split is made
    where the parameter is given, as a rehearsal: both sides are then the CPU.
    """
    model, limit = parameters.model, parameters.training.embeddings_on_gpu_bytes
    every = tuple(range(len(model.table_rows)))
    if limit is None:
        return Placement(every, (), False) if gpu else Placement((), every, False)
    chosen = smallest_first(model.table_rows, model.row_bytes, limit)
    return Placement(chosen, tuple(t for t in every if t not in set(chosen)), True)


def smallest_first(rows: Sequence[int], row_bytes: int, limit: int) -> tuple[int, ...]:
    """Numbers of the tables of R rows each that fit into ``limit`` bytes, rising.

    Smallest first, the lower number first of equal ones; the first that does not fit ends it.
    """
    chosen, left = [], limit
    for table in sorted(range(len(rows)), key=lambda t: (rows[t], t)):
        left -= rows[table] * row_bytes
        if left < 0:
            break
        chosen.append(table)
    return tuple(sorted(chosen))
