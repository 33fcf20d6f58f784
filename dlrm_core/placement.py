"""Which embedding tables lie on the GPU, in host memory, or on a disk: a plan, no memory.

Imports nothing heavy: pages and ``dlrm capacity`` say where tables will lie before
anything is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlrm_core.config import Parameters
from dlrm_core.errors import InputError

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Placement:
    """Numbers of the tables on each side, both rising.

    Attributes:
        on_gpu: tables looked up where the dense part runs.
        on_host: tables in host memory (or mapped from a disk), looked up by the CPU.
        disk: folder that the tables on the host are mapped from; empty: host memory.
        split: whether pooled vectors cross from the host's side to the GPU's.
    """

    on_gpu: tuple[int, ...]
    on_host: tuple[int, ...]
    disk: str
    split: bool


def plan_placement(parameters: Parameters, gpu: bool) -> Placement:
    """Where each table lies when the dense part runs on a GPU, or on the CPU.

    The smallest tables go to the GPU first, until the next would exceed
    ``training.embeddings_on_gpu_bytes``: small tables are looked up as often as large ones
    (NVIDIA's DLRM for TensorFlow places them so as well). On a CPU the same split is made
    where the parameter is given, as a rehearsal: both sides are then the CPU.

    Raises:
        InputError: tables are to lie on a disk, but all of them go to the GPU.
    """
    model, training = parameters.model, parameters.training
    every = tuple(range(len(model.table_rows)))
    limit, disk = training.embeddings_on_gpu_bytes, training.tables_on_disk
    if limit is None:
        if gpu and disk:
            raise InputError(
                f"training.tables_on_disk is {disk!r}, but all tables go to the GPU: give "
                "training.embeddings_on_gpu_bytes, beyond which tables stay on the host (0: all)"
            )
        return Placement(every, (), "", False) if gpu else Placement((), every, disk, False)
    chosen = smallest_first(model.table_rows, model.embedding_dim, limit)
    return Placement(chosen, tuple(t for t in every if t not in set(chosen)), disk, True)


def smallest_first(rows: Sequence[int], dim: int, limit: int) -> tuple[int, ...]:
    """Numbers of the tables (R, dim) float32 that fit into ``limit`` bytes, rising.

    Smallest first, the lower number first of equal ones; the first that does not fit ends it.
    """
    chosen, left = [], limit
    for table in sorted(range(len(rows)), key=lambda t: (rows[t], t)):
        left -= rows[table] * dim * FLOAT_BYTES
        if left < 0:
            break
        chosen.append(table)
    return tuple(sorted(chosen))
