"""``training.embedding_backend: auto``: the back end that is fastest on the run's own tables.

Each candidate does forward, backward and update of the run's first batches, in turns,
with a learning rate of 0 and positive gradients: w - 0 g is w to the last bit, so the
weights stay what they were. The batches come from a generator of their own with the
run's seed; the run's own streams are not touched.

``python -m dlrm_kernels.embeddings.choose FILE OUTPUT`` chooses for a parameters file, the
dense part's back end too, for runs that other tools measure: all of them then get the same.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from dlrm_core.base.errors import InputError
from dlrm_core.base.machine import available_memory
from dlrm_core.base.text import counted, format_bytes
from dlrm_core.config import Parameters, TrainingConfig
from dlrm_core.data.batch import Batch
from dlrm_core.data.loader import batches
from dlrm_core.dense import DENSE_CHOICE, resolve_dense
from dlrm_core.embeddings import EmbeddingTables, Update, attach
from dlrm_core.optimizers import OPTIMIZERS
from dlrm_kernels.choices import Choice, choice_of, time_in_turns
from dlrm_kernels.embeddings.host_tables import PlacedTables, divide, places_of
from dlrm_kernels.embeddings.pages import tables_on_huge_pages
from dlrm_kernels.memory import forecast_memory

CANDIDATES = ("fused", "fbgemm", "torch")
"""In the order in which equally fast ones are preferred: fused gives the same bits whatever
the number of threads, fbgemm makes no sparse gradient."""

BUDGET_S = 1.5
"""Seconds for making batches and for rounds, beyond one warm-up and one round of each."""

MAX_BATCHES = 4

FLUSH_BYTES = 64 << 20
"""Streamed over before each timing, so that nobody finds in the cache what another loaded."""

LEAST_RATE = 1e-300
"""Learning rate for torch's SparseAdam, which refuses 0: it is 0 in float32."""

BACKEND_ITEMS = ("optimiser state", "sparse embedding gradients", "sorted lookups")
"""Items of the memory forecast that depend on the back end."""


def resolve(
    parameters: Parameters, device: torch.device, tables: EmbeddingTables | None = None
) -> tuple[Parameters, list[str]]:
    """The parameters with a back end in place of ``auto``, and the notice that says why.

    Args:
        tables: on the device; left out, tables of the same shapes are made for a while.
    """
    if parameters.training.embedding_backend != "auto":
        return parameters, []
    if tables is None:
        model = parameters.model
        with torch.device(device), torch.no_grad():
            if parameters.training.embeddings_on_gpu_bytes is not None:
                tables = places_of(parameters, device).make_tables()
            else:
                tables = tables_on_huge_pages(
                    model.table_rows, model.embedding_dim, model.embedding_precision
                )
            for weight in tables.weights:
                # written: pages that were never written are all one page
                weight.fill_(0.01)
    made = first_batches(parameters, device)
    refused = _too_large(parameters, device)
    if isinstance(tables, PlacedTables) and tables.placement.split:
        return _resolve_sides(parameters, tables, made, refused)
    choice = choose(tables, parameters.training, made, refused)
    return parameters.with_training(embedding_backend=choice.chosen), [choice.notice]


def resolve_all(parameters: Parameters, device: torch.device) -> tuple[Parameters, list[str]]:
    """The parameters without any ``auto`` back end, for runs in other processes; notices."""
    parameters, dense = resolve_dense(parameters, device)
    parameters, embeddings = resolve(parameters, device)
    return parameters, dense + embeddings


def _resolve_sides(
    parameters: Parameters, tables: PlacedTables, made: Sequence[Batch], refused: dict[str, str]
) -> tuple[Parameters, list[str]]:
    """A choice for each side of tables in two places; the host's is noted in the tables."""
    parts = [divide(batch, tables.placement) for batch in made]
    host_parts = [part.host for part in parts if part.host is not None]
    notices, backend, config = [], "", parameters.training
    if tables.placement.on_host:
        choice = choose(tables.side(tables.placement.on_host), config, host_parts, refused)
        tables.host_backend = backend = choice.chosen
        notices.append(f"on the host: {choice.notice}")
    if tables.placement.on_gpu:
        choice = choose(tables.side(tables.placement.on_gpu), config, parts, refused)
        backend = choice.chosen
        notices.append(f"beside the dense part: {choice.notice}")
    return parameters.with_training(embedding_backend=backend), notices


def choose(
    tables: EmbeddingTables,
    config: TrainingConfig,
    made: Sequence[Batch],
    refused: dict[str, str] | None = None,
) -> Choice[str]:
    """Measure every back end on the tables and choose the fastest.

    The tables end without a back end, with the weights they had; optimiser state is made
    anew by the :func:`~dlrm_core.embeddings.attach` that follows.

    Args:
        made: batches on the tables' device, used in turns.
        refused: candidates that are not to be tried, with the reason.
    """
    started = time.perf_counter()
    refused = dict(refused or {})
    failures: list[Exception] = []
    timed: dict[str, list[float]] = {}
    ready: dict[str, _Contestant] = {}
    kind = OPTIMIZERS[config.optimizer]
    for place, name in enumerate(CANDIDATES):
        if name in refused:
            continue
        try:
            contestant = _Contestant(name, tables, config, made)
            contestant.time_ms(place)  # compiles, loads libraries, touches memory
            timed[name] = [contestant.time_ms(place + 1)]
            # state as large as the tables: one candidate's at a time
            if kind.row_state(tables.weights[0].shape[1]) >= tables.weights[0].shape[1]:
                timed[name] += [contestant.time_ms(place + number) for number in (2, 3)]
            else:
                ready[name] = contestant
        except Exception as error:  # a library's own failure must not end a run that others can do
            failures.append(error)
            refused[name] = _reason(error)
        finally:
            tables.backend = None
    if not timed:
        first = next((e for e in failures if isinstance(e, InputError)), None)
        raise first or InputError(
            "training.embedding_backend is 'auto', but none works here: "
            + "; ".join(f"{name}: {why}" for name, why in refused.items())
        )
    # each time with another batch than the one before, whose rows are in the cache
    timings = {name: contestant.time_ms for name, contestant in ready.items()}
    times_ms = time_in_turns(timings, timed, started + BUDGET_S)
    tables.backend = None
    device = tables.weights[0].device
    where = counted(torch.get_num_threads(), "thread") if device.type == "cpu" else str(device)
    timed_work = (
        f"forward, backward and update, batch of {made[0].offsets.shape[1]:,}, "
        f"{counted(len(tables.weights), 'table')}, {where}"
    )
    return choice_of("training.embedding_backend auto", times_ms, refused, timed_work)


class _Contestant:
    """One back end on the tables, with state of its own and a learning rate of 0."""

    def __init__(
        self, name: str, tables: EmbeddingTables, config: TrainingConfig, made: Sequence[Batch]
    ) -> None:
        rate = 0.0 if OPTIMIZERS[config.optimizer].takes_zero_rate else LEAST_RATE
        still = dataclasses.replace(config, embedding_backend=name, learning_rate=rate, lr_end=0.0)
        self.tables, self.made = tables, made
        self.update: Update = attach(tables, still)
        self.backend = tables.backend
        self.device = made[0].indices.device
        self.gradients: list[torch.Tensor] = []

    def time_ms(self, number: int) -> float:
        """Milliseconds of forward, backward and update of a batch."""
        self.tables.backend = self.backend
        batch = self.made[number % len(self.made)]
        _flush_caches(self.device)
        _wait(self.device)
        started = time.perf_counter()
        pooled = self.tables(batch)
        if not self.gradients:  # the first time, which does not count
            self.gradients = [torch.full_like(vector, 1e-3) for vector in pooled]
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(pooled, self.gradients)
        self.update.step()
        self.update.zero_grad(set_to_none=True)
        _wait(self.device)
        return 1e3 * (time.perf_counter() - started)


def first_batches(parameters: Parameters, device: torch.device) -> list[Batch]:
    """The run's first batches, at least one, from a stream of their own."""
    data = dataclasses.replace(parameters.data, loader="synchronous")
    stream = batches(dataclasses.replace(parameters, data=data), device)
    started = time.perf_counter()
    made: list[Batch] = []
    while len(made) < MAX_BATCHES and (not made or time.perf_counter() - started < BUDGET_S / 3):
        made.append(next(stream).to(device))
    return made


def _too_large(parameters: Parameters, device: torch.device) -> dict[str, str]:
    """Candidates whose own memory is not there any more, and what they need."""
    available = available_memory(device)
    if available is None:
        return {}
    refused = {}
    for name in CANDIDATES:
        try:
            tried = parameters.with_training(embedding_backend=name)
            items = forecast_memory(tried, device.type == "cuda")
        except InputError as error:
            refused[name] = _reason(error)
            continue
        needed = sum(item.bytes for item in items if item.name in BACKEND_ITEMS)
        if needed > available:
            refused[name] = f"needs {format_bytes(needed)}, {format_bytes(available)} are available"
    return refused


def _reason(error: Exception) -> str:
    """An error in one line, without the name of the parameter that its reader did not set."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    for name in CANDIDATES:
        text = text.removeprefix(f"training.embedding_backend is '{name}', but ")
    return text if isinstance(error, InputError) else f"{type(error).__name__}: {text}"


def _flush_caches(device: torch.device) -> None:
    """Stream over a buffer, so that what another contestant looked up is no longer cached."""
    if device.type == "cpu":
        torch.ones(FLUSH_BYTES // 4).add_(1.0)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: Sequence[str]) -> int:
    """Choose for a parameters file; leaves of ``training`` and notices as a JSON object."""
    from dlrm_core.base.files import write_json
    from dlrm_core.base.machine import resolve_device
    from dlrm_core.config import load_parameters

    file, output = arguments
    parameters = load_parameters(file)
    if parameters.training.threads is not None:
        torch.set_num_threads(parameters.training.threads)
    resolved, notices = resolve_all(parameters, resolve_device(parameters.training))
    leaves = {
        leaf: getattr(resolved.training, leaf) for leaf in ("embedding_backend", *DENSE_CHOICE)
    }
    write_json(Path(output), {"training": leaves, "notices": notices})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
