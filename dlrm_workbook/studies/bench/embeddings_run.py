"""What ``dlrm bench --embeddings`` measures: Kalamkar's Small tables, and the contention study.

``python -m dlrm_workbook.studies.bench.embeddings_run SPECIFICATION OUTPUT`` is the process of one
contestant.

Kalamkar et al. 2020 (arXiv:2005.04680): Small has 8 tables of 1,000,000 rows of 64 floats,
minibatch 2048, 50 lookups a bag; section III compares updates under the uniform indices of
random data and under the skewed ones of Criteo's Terabyte set, where threads fight for rows.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dlrm_core.config import TrainingConfig
from dlrm_core.data.batch import Batch
from dlrm_core.data.synthetic import SyntheticBatches
from dlrm_core.embeddings import EPSILON, EmbeddingTables, attach, torch_optimizer
from dlrm_core.errors import InputError
from dlrm_core.files import write_json
from dlrm_core.machine import end_with_starter
from dlrm_workbook.evidence.ceilings import last_level_cache
from dlrm_workbook.turns import CPU, CacheFlush, elapsed_ms

TABLES, ROWS, DIM = 8, 1_000_000, 64
"""Kalamkar's Small. The bench's row kernel is written for this width."""

SKEW = 1.45
"""Exponent of the power law that NVIDIA's synthetic Terabyte-like data follows."""

FACEBOOK, TORCH, FBGEMM, FUSED, MEMORY = "facebook", "torch", "fbgemm", "fused", "memory"
BACK_ENDS = (FACEBOOK, TORCH, FBGEMM, FUSED, MEMORY)
UPDATES = ("naive", "atomic", "locked", "race_free")
PHASES = ("forward", "backward", "update")


@dataclass(frozen=True)
class EmbeddingCase:
    """Forward, backward and update of all tables under one law of indices.

    Attributes:
        pooling: lookups of every bag.
        skew: exponent of the power law of rows, row 0 hottest; None: uniform.
        contestants: back ends, or updates of ``fused``.
        targets: contestant against whom to how many times as fast ``fused`` is to be.
    """

    name: str
    optimizer: str
    pooling: int
    batch: int = 2048
    skew: float | None = None
    contestants: tuple[str, ...] = BACK_ENDS
    targets: tuple[tuple[str, float], ...] = ()

    @property
    def meaning(self) -> str:
        """One line for readers."""
        law = "uniform rows" if self.skew is None else f"rows by a power law ({self.skew})"
        lookups = f"{self.pooling} lookup{'s' if self.pooling > 1 else ''} a bag"
        return f"{self.optimizer}, batch {self.batch}, {lookups}, {law}"


_SGD = ((FACEBOOK, 5.0), (FBGEMM, 2.7))

GROUPS: dict[str, tuple[EmbeddingCase, ...]] = {
    "sgd": (
        EmbeddingCase("sgd-50", "sgd", 50, targets=_SGD),
        EmbeddingCase("sgd-1", "sgd", 1),
        EmbeddingCase("sgd-100", "sgd", 100),
        EmbeddingCase("sgd-50-skewed", "sgd", 50, skew=SKEW),
    ),
    "rowwise": (
        EmbeddingCase("rowwise-50", "rowwise_adagrad", 50, targets=((FACEBOOK, 6.0),)),
        EmbeddingCase("rowwise-1", "rowwise_adagrad", 1),
        EmbeddingCase("rowwise-50-skewed", "rowwise_adagrad", 50, skew=SKEW),
    ),
    "adagrad": (EmbeddingCase("adagrad-50", "adagrad", 50),),
    "contention": (
        EmbeddingCase("contention-uniform", "sgd", 1, 16384, contestants=UPDATES),
        EmbeddingCase("contention-skewed", "sgd", 1, 16384, SKEW, UPDATES),
        EmbeddingCase("contention-50-uniform", "sgd", 50, contestants=UPDATES),
        EmbeddingCase("contention-50-skewed", "sgd", 50, skew=SKEW, contestants=UPDATES),
    ),
}
"""Cases that share a process of each contestant."""


def groups_of(names: str) -> dict[str, tuple[EmbeddingCase, ...]]:
    """Groups by their names, comma-separated; ``all`` for every one.

    Raises:
        InputError: a name is unknown.
    """
    if names == "all":
        return GROUPS
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in GROUPS:
            raise InputError(f"--embeddings is '{name}', expected all or {', '.join(GROUPS)}")
    return {name: GROUPS[name] for name in chosen}


# One contestant, in a process of its own.

RATE = 0.1
WARMUP = 2
FLUSH_BYTES = (64 << 20, 512 << 20)
"""Least and most that is streamed over to empty the caches."""

SAMPLED_ROWS, SAMPLED_BAGS = 300, 32
Phases = tuple[Callable[[], None], Callable[[], None], Callable[[], None]]


class Contestant:
    """Tables with the same initial weights for everyone, and who works on them."""

    def __init__(self, name: str, peer: str | None, rows: int) -> None:
        self.name = name
        self.peer = Path(peer) if peer else None
        self.rows = rows
        self.tables = EmbeddingTables([rows] * TABLES, DIM, name not in (FACEBOOK, "torch"))
        self.update: Any = None

    def reset(self, optimizer: str) -> None:
        """Initial weights, and an optimiser without state."""
        weights = self.tables.weights
        with torch.no_grad():
            random = torch.Generator().manual_seed(0)
            weights[0].uniform_(-1e-3, 1e-3, generator=random)
            for weight in weights[1:]:
                weight.copy_(weights[0])
        self.update = None  # frees its state before the next is made
        self.tables.backend = None
        if self.name == FACEBOOK:
            self.update = self._facebook_optimizer(optimizer)
        elif self.name != MEMORY:
            own_update = self.name in UPDATES
            config = TrainingConfig(
                optimizer=optimizer,
                learning_rate=RATE,
                embedding_backend="fused" if own_update else self.name,
                embedding_update=self.name if own_update else "race_free",
            )
            self.update = attach(self.tables, config)

    def _facebook_optimizer(self, optimizer: str) -> Any:
        """As dlrm_s_pytorch.py makes it: torch's defaults, RWSAdagrad from the checkout."""
        weights = self.tables.weights
        if optimizer == "sgd":
            return torch.optim.SGD(weights, lr=RATE)
        if optimizer == "adagrad":
            return torch.optim.Adagrad(weights, lr=RATE, eps=EPSILON)
        if self.peer is None:
            return torch_optimizer(self.tables, optimizer, RATE)
        return _rws_adagrad(self.peer)(weights, lr=RATE)

    def phases(self, batch: Batch, gradients: list[torch.Tensor], pooled: list[Any]) -> Phases:
        """Forward, backward and update of a batch; the vectors go to ``pooled``."""
        if self.name == FACEBOOK:
            modules = [table for table in self.tables.tables if isinstance(table, nn.EmbeddingBag)]
            inputs = [(batch.table_indices(t), batch.offsets[t]) for t in range(TABLES)]

            def lookup() -> list[torch.Tensor]:
                return [
                    module(indices, offsets, per_sample_weights=None)
                    for module, (indices, offsets) in zip(modules, inputs, strict=True)
                ]
        else:

            def lookup() -> list[torch.Tensor]:
                return self.tables(batch)

        def forward() -> None:
            self.update.zero_grad()
            pooled[:] = lookup()

        def backward() -> None:
            with torch.autograd.set_multithreading_enabled(False):
                torch.autograd.backward(pooled, gradients)

        return forward, backward, lambda: self.update.step()


def _rws_adagrad(peer: Path) -> Any:
    place = importlib.util.spec_from_file_location("rwsadagrad", peer / "optim" / "rwsadagrad.py")
    assert place is not None and place.loader is not None
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module.RWSAdagrad


def run_case(
    contestant: Contestant, case: dict[str, Any], iterations: int, samples: Path
) -> dict[str, list[float]]:
    """Milliseconds of forward, backward and update of each counted iteration."""
    made = batches_of(case, contestant.rows, iterations + WARMUP)
    contestant.reset(case["optimizer"])
    random = torch.Generator().manual_seed(1)
    # positive: sums without cancellation, so that results can be compared closely
    gradients = [
        (torch.rand(case["batch"], DIM, generator=random) + 0.5) * 1e-2 for _ in range(TABLES)
    ]
    flush = cache_flush(sum(weight.nbytes for weight in contestant.tables.weights))
    times: dict[str, list[float]] = {phase: [] for phase in PHASES}
    pooled: list[torch.Tensor] = []
    for number, batch in enumerate(made):
        if contestant.name == MEMORY:
            taken = [*_row_access_ms(contestant.tables, batch, flush), 0.0]
        else:
            phases = contestant.phases(batch, gradients, pooled)
            flush()
            taken = [elapsed_ms(phase) for phase in phases]
        if number >= WARMUP:
            for phase, time_ms in zip(times, taken, strict=True):
                times[phase].append(time_ms)
    if contestant.name != MEMORY:
        rows, vectors = _samples(contestant, made[0], pooled)
        np.savez(samples / f"{case['name']}.npz", rows=rows, pooled=vectors)
    return times


def batches_of(case: dict[str, Any], rows: int, count: int) -> list[Batch]:
    """The batches of a case: the same for every contestant."""
    stream = SyntheticBatches(
        *(1, (rows,) * TABLES, case["batch"], case["pooling"], True, False, 7),
        zipf_exponent=case["skew"],
        device=CPU,
    )
    return [stream.next_batch() for _ in range(count)]


def cache_flush(table_bytes: int) -> CacheFlush:
    """What pushes the tables out of the caches, as far as a program can."""
    least, most = FLUSH_BYTES
    size = min(max(last_level_cache(CPU) or least, least), most)
    return CacheFlush(min(size, table_bytes))


def _samples(
    contestant: Contestant, batch: Batch, pooled: list[torch.Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    """Some rows that were updated, and some pooled vectors of the last iteration."""
    rows = [
        weight.detach()[batch.table_indices(t)[:SAMPLED_ROWS].unique()]
        for t, weight in enumerate(contestant.tables.weights)
    ]
    vectors = [vector.detach()[:SAMPLED_BAGS] for vector in pooled]
    return torch.cat(rows).numpy(), torch.cat(vectors).numpy()


def _row_access_ms(tables: EmbeddingTables, batch: Batch, flush: CacheFlush) -> tuple[float, float]:
    """Milliseconds of reading every looked-up row, and of reading and writing it.

    Nothing but the accesses, with prefetches and without, whichever is faster: what the
    machine's memory allows a forward pass and an SGD update at best.
    """
    best = []
    for kernel in _row_kernels():
        times = []
        for ahead in (0, 16, 32):
            flush()
            times.append(elapsed_ms(functools.partial(_over_tables, kernel, tables, batch, ahead)))
        best.append(min(times))
    return best[0], best[1]


def _over_tables(kernel: Any, tables: EmbeddingTables, batch: Batch, ahead: int) -> None:
    threads = torch.get_num_threads()

    def work(table: int) -> None:
        indices = batch.table_indices(table)
        kernel(tables.weights[table].data_ptr(), indices.data_ptr(), indices.numel(), ahead)

    if threads == 1:
        for table in range(TABLES):
            work(table)
    else:
        list(_pool(threads).map(work, range(TABLES)))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


@functools.cache
def _row_kernels() -> tuple[Any, Any]:
    from numba import njit

    from dlrm_kernels import vectors as v

    size = 4 * DIM

    @njit(nogil=True, error_model="numpy")
    def read(table, indices, count, ahead):  # type: ignore[no-untyped-def]
        a, b, c, d = v.zeros(), v.zeros(), v.zeros(), v.zeros()
        for i in range(count):
            if ahead > 0:
                soon = table + v.load_int(indices + 8 * min(i + ahead, count - 1)) * size
                v.prefetch(soon)
                v.prefetch(soon + 128)
            p = table + v.load_int(indices + 8 * i) * size
            a = v.add(a, v.load_vector(p))
            b = v.add(b, v.load_vector(p + 64))
            c = v.add(c, v.load_vector(p + 128))
            d = v.add(d, v.load_vector(p + 192))
        return v.lane_sum(v.add(v.add(a, b), v.add(c, d)))

    @njit(nogil=True, error_model="numpy")
    def change(table, indices, count, ahead):  # type: ignore[no-untyped-def]
        one = v.splat(np.float32(1e-6))
        for i in range(count):
            if ahead > 0:
                soon = table + v.load_int(indices + 8 * min(i + ahead, count - 1)) * size
                v.prefetch(soon)
                v.prefetch(soon + 128)
            p = table + v.load_int(indices + 8 * i) * size
            v.store_vector(p, v.subtract(v.load_vector(p), one))
            v.store_vector(p + 64, v.subtract(v.load_vector(p + 64), one))
            v.store_vector(p + 128, v.subtract(v.load_vector(p + 128), one))
            v.store_vector(p + 192, v.subtract(v.load_vector(p + 192), one))
        return np.float32(0)

    return read, change


def main(arguments: Sequence[str]) -> int:
    """Run the cases of a specification."""
    end_with_starter()
    specification, output = arguments
    spec = json.loads(Path(specification).read_text())
    torch.set_num_threads(spec["threads"])
    contestant = Contestant(spec["contestant"], spec["peer"], spec.get("rows", ROWS))
    samples = Path(spec["samples"])
    times = {
        case["name"]: run_case(contestant, case, spec["iterations"], samples)
        for case in spec["cases"]
    }
    write_json(Path(output), {"times": times, "notices": getattr(contestant.update, "notices", [])})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
